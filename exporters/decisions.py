"""What Python reads from tensors in a trace: sizes, which other traces show, or values, which none can promise."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

_READS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "__array__")
_SIZES = ("aten::size", "aten::_shape_as_tensor", "aten::numel", "aten::dim", "prim::shape")
_INSIDE = (f"{os.sep}torch{os.sep}", f"{os.sep}exporters{os.sep}")


@dataclasses.dataclass(frozen=True)
class Reads:
    """Where Python read a number from a traced tensor, each as file:line.

    Attributes:
        values: The values of the inputs decide it.
        sizes: Sizes or weights alone decide it.
    """

    values: list[str] = dataclasses.field(default_factory=list)
    sizes: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def reads_watched(inputs: int) -> Iterator[Reads]:
    """Note what Python reads while a trace runs in the block.

    The graph that is being traced tells: what it computes from an input other than by its size is a value.

    Args:
        inputs: How many of the graph's first inputs are the module's; the others are weights, which do not change.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    found = Reads()
    reading = {getattr(torch.Tensor, name) for name in _READS}

    class Watch(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            places = _places(found, args[0], inputs) if func in reading else None
            if places is not None and (place := _caller()) not in places:
                places.append(place)
            return func(*args, **(kwargs or {}))

    with Watch():
        yield found


def _places(found: Reads, tensor: Any, inputs: int) -> list[str] | None:
    """The list that a read of this tensor belongs to; None where the running trace does not compute it."""
    import torch

    state = torch._C._get_tracing_state()
    if state is None:
        return None
    try:
        value = torch._C._get_value_trace(tensor)
    except RuntimeError:  # made outside of the trace: a constant
        return None
    names = {value.debugName() for value in list(state.graph().inputs())[:inputs]}
    pending, seen, sizes = [value], set(), False
    while pending:
        current = pending.pop()
        name, kind = current.debugName(), current.node().kind()
        if name in names:
            return found.values
        if name in seen:
            continue
        seen.add(name)
        if kind in _SIZES or kind == "prim::Param":
            sizes = True
        else:
            pending.extend(current.node().inputs())
    return found.sizes if sizes else None


def _caller() -> str:
    """The innermost frame outside of torch and of this package's exporters."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _INSIDE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
