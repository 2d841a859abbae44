"""How torch's RMSNorm operators are written in ONNX: plain operators that say exactly what torch computes.

torch's own translation rounds epsilon to an attribute's float32, gives double inputs float32's default epsilon, mixes
types in half precision, and exists from opset 23 on only. This one, from `aten/src/ATen/native/layer_norm.cpp`
(`rms_norm_composite`), for normalized_shape of k dimensions and C = float32 for halves, x's own type otherwise::

    s = x as C
    f = 1 / sqrt(mean(s * s over the last k axes) + epsilon)       in C
    y = (s * f) as P, times weight as P, rounded once to x's type  P: the wider of C and the weight's type

Epsilon absent means C's machine epsilon: 2**-23 for halves too, 2**-52 for double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

_EPSILON = {ir.DataType.FLOAT: 2.0**-23, ir.DataType.DOUBLE: 2.0**-52}


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """The `custom_translation_table` of torch.onnx.export for the RMSNorm operators, written for one opset.

    A translation written for another opset than the graph's would give an invalid file without any message.
    """
    import onnxscript
    import torch

    op = onnxscript.values.Opset("", opset)

    def rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
        return _write(op, input, normalized_shape, weight, eps)[0]

    def fused_rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Any:
        return _write(op, input, normalized_shape, weight, eps)

    aten = torch.ops.aten
    return {aten.rms_norm.default: rms_norm, aten._fused_rms_norm.default: fused_rms_norm}


def _write(op: Any, x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> tuple[Any, Any]:
    """The norm of x and its factor 1 / rms, which `_fused_rms_norm` returns too."""
    compute = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    count = len(normalized_shape)
    if all(isinstance(size, int) for size in normalized_shape):
        # torch leaves these dimensions symbolic in a dynamic trace, though the operator allows no other sizes.
        x.shape = ir.Shape([*x.shape[:-count], *normalized_shape])
    rows = ir.Shape([*x.shape[:-count], *[1] * count])

    wide = _cast(op, x, compute)
    square = _typed(op.Pow(wide, _constant(op, 2.0, compute)), x.shape, compute)
    axes = op.Constant(value=ir.tensor(np.arange(-count, 0, dtype=np.int64)))
    mean = _typed(op.ReduceMean(square, axes, keepdims=1), rows, compute)
    epsilon = _constant(op, _EPSILON[compute] if eps is None else float(eps), compute)
    root = _typed(op.Sqrt(_typed(op.Add(mean, epsilon), rows, compute)), rows, compute)
    y = _typed(op.Div(wide, root), x.shape, compute)
    if weight is not None:
        product = ir.DataType.DOUBLE if ir.DataType.DOUBLE in (compute, weight.dtype) else ir.DataType.FLOAT
        y = _typed(op.Mul(_cast(op, y, product), _cast(op, weight, product)), x.shape, product)
    return _cast(op, y, x.dtype), _typed(op.Reciprocal(root), rows, compute)


def _constant(op: Any, value: float, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(np.array(value, dtype=dtype.numpy())))


def _cast(op: Any, value: Any, dtype: ir.DataType) -> Any:
    return value if value.dtype == dtype else _typed(op.Cast(value, to=dtype), value.shape, dtype)


def _typed(value: Any, shape: ir.Shape, dtype: ir.DataType) -> Any:
    """Give a value its type and shape: torch sets them on a translation's results only, and proofs need them all."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(shape)
    return value
