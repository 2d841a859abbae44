"""What a PyTorch module computes on its example inputs: its outputs, and what goes into and comes out of its norms."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np

from rmsnorm_onnx import dtypes

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a norm.

    Attributes:
        x: The first tensor that it was given.
        y: The first tensor that it returned; None where it returned none.
        gain: The weight of a call of F.rms_norm; None without one, and for a module.
        functional: Whether it is a call of F.rms_norm.
    """

    x: np.ndarray
    y: np.ndarray | None
    gain: np.ndarray | None = None
    functional: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """One run of a module.

    Attributes:
        outputs: Its tensors, in the order of torch's pytree.
        modules: The calls of each module that was watched, in order.
        functions: The calls of F.rms_norm in the body of each, in order.
        idle: The watched modules whose forward did not run, in whatever way it may be called.
    """

    outputs: tuple[np.ndarray, ...]
    modules: Mapping[str, Sequence[Call]]
    functions: Mapping[str, Sequence[Call]]
    idle: frozenset[str] = frozenset()


def capture(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], watched: Mapping[str, str]
) -> Capture:
    """Run a module once, in the mode that it is in, and keep what its norms saw.

    Args:
        module: The module.
        args: Its inputs.
        kwargs: Its keyword inputs.
        watched: Names of submodules ("" is the module itself), and the name that each is kept under: the same one for
            two names of one module.

    Raises:
        Exception: whatever the module raises.
    """
    import torch
    from torch.utils import _pytree as pytree

    seen = _Recorder({id(module.get_submodule(name)): key for name, key in watched.items()})
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.enter_context(seen.functions_mode())
        for part in module.modules():
            before = part.register_forward_pre_hook(seen.enter, with_kwargs=True, prepend=True)
            after = part.register_forward_hook(seen.leave, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        for name, key in watched.items():
            stack.enter_context(seen.forward_of(module.get_submodule(name), key))
        result = module(*args, **kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    idle = frozenset(watched.values()) - seen.ran
    return Capture(tuple(map(to_numpy, leaves)), dict(seen.modules), dict(seen.functions), idle)


class _Recorder:
    """Hooks that keep copies: a residual that is added in place would change what they saw."""

    def __init__(self, keys: Mapping[int, str]) -> None:
        self.modules: dict[str, list[Call]] = defaultdict(list)
        self.functions: dict[str, list[Call]] = defaultdict(list)
        self.ran: set[str] = set()
        self._keys = keys
        self._inside: list[tuple[str | None, np.ndarray | None]] = []

    def enter(self, part: Any, args: Any, kwargs: Any) -> None:
        key = self._keys.get(id(part))
        x = None if key is None else _first(args, kwargs)
        self._inside.append((key, None if x is None else to_numpy(x)))

    def leave(self, part: Any, args: Any, kwargs: Any, result: Any) -> None:
        key, x = self._inside.pop()
        if key is not None and x is not None:
            y = _first(result, {})
            self.modules[key].append(Call(x, None if y is None else to_numpy(y)))

    @contextlib.contextmanager
    def forward_of(self, part: Any, key: str) -> Iterator[None]:
        """Notices runs of forward, which some models call by its name, past the hooks."""
        import torch

        if isinstance(part, torch.jit.ScriptModule):  # takes no other forward
            self.ran.add(key)
            yield
            return
        own, forward = vars(part).get("forward"), part.forward

        def noticed(*args: Any, **kwargs: Any) -> Any:
            self.ran.add(key)
            return forward(*args, **kwargs)

        part.forward = noticed
        try:
            yield
        finally:
            if own is None:
                del part.forward
            else:
                part.forward = own

    def functions_mode(self) -> Any:
        import torch
        from torch.overrides import TorchFunctionMode

        recorder = self

        class Functions(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if func not in (torch.nn.functional.rms_norm, torch.rms_norm):
                    return func(*args, **kwargs)
                x, gain = _first(args, kwargs), args[2] if len(args) > 2 else kwargs.get("weight")
                kept = None if x is None else to_numpy(x)
                y = func(*args, **kwargs)
                recorder.function(kept, y, gain)
                return y

        return Functions()

    def function(self, x: np.ndarray | None, y: Any, gain: Any) -> None:
        key = self._inside[-1][0] if self._inside else None
        if key is not None and x is not None:
            weight = None if gain is None else to_numpy(gain)
            self.functions[key].append(Call(x, to_numpy(y), weight, functional=True))


def _first(args: Any, kwargs: Any) -> Any:
    """The first floating-point tensor; None without one."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves((args, kwargs))
    return next((v for v in leaves if isinstance(v, torch.Tensor) and v.is_floating_point()), None)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor as an array of the same type, bfloat16 included."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return np.array(plain.view(torch.int16).numpy()).view(dtypes.numpy_dtype("bfloat16"))
    return np.array(plain.numpy())
