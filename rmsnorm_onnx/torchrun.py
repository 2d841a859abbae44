"""PyTorch's side of a comparison: the module as it is, in float64, and there with its weights moved by one eps."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import ExportError, MissingDependencyError, UsageError
from rmsnorm_onnx.exporters.steps import words

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rmsnorm_onnx.capture import Capture

MOVES = 3
"""How many times the weights are moved: one draw may leave an output, or a tie, where it is."""


@dataclasses.dataclass(frozen=True)
class TorchRun:
    """A module and its example inputs, in the type that is compared.

    Attributes:
        module: The module, in inference mode.
        args: Its inputs.
        kwargs: Its keyword inputs.
        watched: The names of the submodules whose calls are kept, and the name that each is kept under.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    watched: Mapping[str, str]

    @functools.cached_property
    def plain(self) -> Capture:
        """The module as it is.

        Raises:
            ExportError: it raised; its words are kept.
        """
        return self._run(self.module, self.args, self.kwargs, self.watched)

    @functools.cached_property
    def exact(self) -> Capture | str:
        """The module in float64, or why there is no such run."""
        from rmsnorm_onnx.double import everything_in_double, in_double

        try:
            double, (args, kwargs) = in_double(self.module, (self.args, self.kwargs))
            with everything_in_double():
                return self._run(double, args, kwargs, self.watched)
        except Exception as error:  # an operator without a float64 kernel may raise anything; the report has its words
            return f"there is no float64 run of the module: {words(error)}"

    def moved(self, eps: float) -> Sequence[tuple[np.ndarray, ...]]:
        """The outputs of `MOVES` runs in which each weight, and each floating-point input, is off by one part in 1/eps.

        They are in float64 where `exact` is, else in the module's own type; none where the module cannot be copied.
        """
        from rmsnorm_onnx.double import everything_in_double, in_double

        runs = []
        try:
            for seed in range(MOVES):
                if isinstance(self.exact, str):
                    module, (args, kwargs) = _moved(copy.deepcopy(self.module), (self.args, self.kwargs), eps, seed)
                    runs.append(self._run(module, args, kwargs, {}).outputs)
                    continue
                double, leaves = in_double(self.module, (self.args, self.kwargs))
                module, (args, kwargs) = _moved(double, leaves, eps, seed)
                with everything_in_double():
                    runs.append(self._run(module, args, kwargs, {}).outputs)
        except Exception:  # the user's code and torch may raise anything; PyTorch's own error is the stricter measure
            return ()
        return runs

    @staticmethod
    def _run(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], watched: Mapping[str, str]) -> Capture:
        from rmsnorm_onnx.capture import capture

        try:
            return capture(module, args, kwargs, watched)
        except Exception as error:  # the user's own code may raise anything
            does = "cannot be watched" if _runs(module, args, kwargs) else "does not run"
            raise ExportError(f"the module {does} on its example inputs: {words(error)}") from error


def _runs(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a module runs without hooks: torch's scan takes none, nor does what torch.compile must see whole."""
    import torch

    try:
        with torch.no_grad():
            module(*args, **kwargs)
    except Exception:  # the user's own code may raise anything: then it is no fault of the hooks
        return False
    return True


def _moved(module: Any, leaves: Any, eps: float, seed: int) -> tuple[Any, Any]:
    """Each weight, buffer and floating-point input times 1 + eps or 1 - eps, at random."""
    import torch
    from torch.utils import _pytree as pytree

    generator = torch.Generator().manual_seed(seed)

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return tensor
        sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, torch.float64) * 2 - 1
        return (tensor.double() * (1 + eps * sign)).to(tensor.dtype)

    with torch.no_grad():
        for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
            if tensor.is_floating_point():
                tensor.copy_(move(tensor))
        return module, pytree.tree_map(move, leaves)


def prepared(
    module: Any, args: Any, kwargs: Mapping[str, Any] | None, dtype: str | None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The checked arguments of `verify_torch`, in the type asked for.

    Raises:
        UsageError: one of them cannot be used.
        MissingDependencyError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "verify --against torch", "rmsnorm_onnx[torch]") from error
    from rmsnorm_onnx.exporters.steps import converted

    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a {type(module).__name__} is no module to compare with; give a torch.nn.Module")
    args = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(args, tuple | list):
        raise UsageError(f"args must be a tuple of tensors, got a {type(args).__name__}; keyword inputs go into kwargs")
    if any(isinstance(arg, torch.Tensor) and not arg.numel() for arg in (*args, *(kwargs or {}).values())):
        raise UsageError("an example input is empty, and nothing can be measured on it; give one with rows")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise UsageError(f"cannot convert to {dtype!r}; use one of float32, float16, bfloat16")
    try:
        made: tuple[Any, tuple[Any, ...], dict[str, Any]] = converted(module, tuple(args), dict(kwargs or {}), dtype)
    except Exception as error:  # a module's own deepcopy may raise anything
        raise UsageError(f"the module cannot be converted to {dtype}: {words(error)}") from error
    return made
