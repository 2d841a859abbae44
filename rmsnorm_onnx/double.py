"""A PyTorch module run in float64 throughout: the casts to narrower types that its code asks for are turned around.

Norms hold `.float()` and `.to(torch.float32)`, so that a module in double alone would still round. Here every operator
that asks for float16, bfloat16 or float32 is given float64, and so is every operator that makes a tensor of its own.
Constants stay as they are written; so does torch's default epsilon, float32's machine epsilon.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def in_double(module: torch.nn.Module, leaves: Any) -> tuple[torch.nn.Module, Any]:
    """A copy of a module, and a tree of its inputs, in double; weights are the same numbers."""
    import torch
    from torch.utils import _pytree as pytree

    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return copy.deepcopy(module).double(), pytree.tree_map(convert, leaves)


@contextlib.contextmanager
def everything_in_double() -> Iterator[None]:
    """Within it, torch's operators compute in float64, whatever type is asked for.

    Raises:
        TypeError: an operator reads the bits of a float, or changes in place a tensor that is not in double: its
            meaning would be another one.
    """
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # or torch.full(n, 0.1) and torch.tensor(0.1) would round 0.1 to float32
    try:
        with _epsilon_mode(), _type_mode():
            yield
    finally:
        torch.set_default_dtype(before)


def _type_mode() -> Any:
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    wide = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
    wide |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(wide[leaf.dtype]) if leaf.dtype in wide else leaf
        return wide.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    class Double(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            _check(func, args, kwargs, wide)
            if func is torch.ops.aten._softmax.default or func is torch.ops.aten._log_softmax.default:
                args = (*args[:2], False)  # "half to float" is meant for halves
            args, kwargs = pytree.tree_map(widened, (args, kwargs))
            return pytree.tree_map(widened, func(*args, **kwargs))

    return Double()


def _check(func: Any, args: Any, kwargs: Any, wide: Any) -> None:
    import torch

    if func is torch.ops.aten.view.dtype:
        raise TypeError("the module reads the bits of a float (view with a dtype)")
    for index, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if written and isinstance(value, torch.Tensor) and value.dtype in wide:
            raise TypeError(f"the module changes a {str(value.dtype)[6:]} tensor in place ({func})")


def _epsilon_mode() -> Any:
    """torch takes its default epsilon from the input's type, which here is another one than the module's."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Epsilon(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func in (torch.nn.functional.rms_norm, torch.rms_norm):
                given = args[3] if len(args) > 3 else kwargs.pop("eps", None)
                args, kwargs = args[:3], {**kwargs, "eps": torch.finfo(torch.float32).eps if given is None else given}
            return func(*args, **kwargs)

    return Epsilon()
