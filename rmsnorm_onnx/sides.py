"""One side of a norm, PyTorch's or the runtime's, held to the file's spec."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.trial import worst

if TYPE_CHECKING:
    from rmsnorm_onnx.capture import Call


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One side's measurement of a norm."""

    ulp: float
    ratio: float
    x: np.ndarray | None
    y: np.ndarray
    notes: tuple[str, ...] = ()


def torch_side(match: Match, call: Call, parameters: tuple[np.ndarray | None, np.ndarray | None]) -> Side:
    """PyTorch's y on its own x, held to the file's spec.

    Raises:
        UsageError: x does not fit the norm.
    """
    if call.y is None or call.y.shape != call.x.shape:
        raise UsageError("its module returns nothing of its input's shape")
    declared = match.x.shape
    fits = declared is None or (
        len(declared) == call.x.ndim
        and all(not isinstance(d, int) or d == n for d, n in zip(declared, call.x.shape, strict=True))
    )
    if not fits:
        dims = ", ".join(map(str, declared or ()))
        raise UsageError(f"its module's input is {list(call.x.shape)}, and x is [{dims}] in the file")
    notes = []
    x, kind, spec = call.x, match.x_type, match.spec
    if x.dtype.name != kind:
        notes.append(f"x is {kind} in the file, and {x.dtype.name} in PyTorch")
        kind = kind if dtypes.holds(kind, x.dtype.name) else x.dtype.name
        x = x.astype(dtypes.numpy_dtype(kind))
    held = spec.resolve(kind)
    if held.result_type != call.y.dtype.name:
        notes.append(f"y is {held.result_type} in the file, and {call.y.dtype.name} in PyTorch")
        held = held.replace(result_type=call.y.dtype.name)
    return Side(*worst(call.y, held, x, *parameters), call.x, call.y, tuple(notes))


def row_size(match: Match, side: Side | None) -> int:
    """How many elements share a statistic; 1 where nobody knows."""
    shape: Any = match.x.shape if side is None else side.y.shape
    if shape is None or len(shape) < -match.spec.axes[0]:
        return 1
    dims = [shape[axis] for axis in match.spec.axes]
    return int(np.prod(dims)) if all(isinstance(d, int) and d for d in dims) else 1
