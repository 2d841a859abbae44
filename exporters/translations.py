"""How torch's RMSNorm operators are written in ONNX: plain operators that say exactly what torch computes.

torch's own translation rounds epsilon to an attribute's float32, gives double inputs float32's default epsilon, mixes
types in half precision, and exists from opset 23 on only; its TorchScript exporter has none. This one, from
`aten/src/ATen/native/layer_norm.cpp` (`rms_norm_composite`), for normalized_shape of k dimensions and C = float32 for
halves, x's own type otherwise::

    s = x as C
    f = 1 / sqrt(mean(s * s over the last k axes) + epsilon)       in C
    y = (s * f) as P, times weight as P, rounded once to x's type  P: the wider of C and the weight's type

Epsilon absent means C's machine epsilon: 2**-23 for halves too, 2**-52 for double. The operator of registered modules
(`rmsnorm_onnx.exporters.kept`) is written by its spec, as the package's own functions are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.body import Body, constant, emit
from rmsnorm_onnx.exporters import splits
from rmsnorm_onnx.exporters.writing import SymbolicOps, TypedOps
from rmsnorm_onnx.spec import RMSNormSpec

_EPSILON = {ir.DataType.FLOAT: 2.0**-23, ir.DataType.DOUBLE: 2.0**-52}
_OPERATOR = "rmsnorm_onnx::rms_norm"


def translations(opset: int, *, kept: bool = False) -> dict[Any, Callable[..., Any]]:
    """The `custom_translation_table` of torch.onnx.export for the RMSNorm operators and split, written for one opset.

    A translation written for another opset than the graph's would give an invalid file without any message.

    Args:
        opset: The opset to write.
        kept: Whether modules are registered, so that their operator is there too.
    """
    import onnxscript
    import torch

    op = TypedOps(onnxscript.values.Opset("", opset))

    def rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
        return fused_rms_norm(input, normalized_shape, weight, eps)[0]

    def fused_rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None) -> Any:
        if all(isinstance(size, int) for size in normalized_shape):
            # torch leaves these dimensions symbolic in a dynamic trace, though the operator allows no other sizes.
            input.shape = ir.Shape([*input.shape[: -len(normalized_shape)], *normalized_shape])
        dtype = None if weight is None else weight.dtype
        return _torch_norm(op, input, input.dtype, len(normalized_shape), weight, dtype, eps, opset)

    def kept_norm(x: Any, gain: Any, bias: Any, spec: str) -> Any:
        return _kept_norm(op, (x, gain, bias), [None if v is None else v.dtype for v in (x, gain, bias)], spec, opset)

    aten = torch.ops.aten
    table = {
        aten.rms_norm.default: rms_norm,
        aten._fused_rms_norm.default: fused_rms_norm,
        **splits.translations(opset),
    }
    return {**table, torch.ops.rmsnorm_onnx.rms_norm.default: kept_norm} if kept else table


def symbolics(opset: int) -> dict[str, Callable[..., Any]]:
    """The same for the TorchScript exporter: symbolic functions by the operator's name."""
    from torch.onnx import symbolic_helper as helper

    def is_none(value: Any) -> bool:
        return value is None or bool(value.node().mustBeNone())

    def rms_norm(g: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
        count = len(helper._get_const(normalized_shape, "is", "normalized_shape"))
        epsilon = None if is_none(eps) else helper._get_const(eps, "f", "eps")
        gain = None if is_none(weight) else weight
        dtype = None if gain is None else _dtype(gain)
        return _torch_norm(SymbolicOps(g), input, _dtype(input), count, gain, dtype, epsilon, opset)[0]

    def kept_norm(g: Any, x: Any, gain: Any, bias: Any, spec: Any) -> Any:
        values = [None if is_none(value) else value for value in (x, gain, bias)]
        kinds = [None if value is None else _dtype(value) for value in values]
        return _kept_norm(SymbolicOps(g), values, kinds, helper._get_const(spec, "s", "spec"), opset)

    return {"aten::rms_norm": rms_norm, _OPERATOR: kept_norm}


def _torch_norm(
    op: Any,
    x: Any,
    x_type: ir.DataType,
    count: int,
    weight: Any,
    weight_type: ir.DataType | None,
    eps: float | None,
    opset: int,
) -> tuple[Any, Any]:
    """The norm of x over `count` axes, and its factor 1 / rms, which `_fused_rms_norm` returns too."""
    compute = ir.DataType.DOUBLE if x_type == ir.DataType.DOUBLE else ir.DataType.FLOAT
    wide = _cast(op, x, x_type, compute)
    square = op.Pow(wide, _constant(op, 2.0, compute))
    axes = np.arange(-count, 0, dtype=np.int64)
    if opset >= 18:
        mean = op.ReduceMean(square, op.Constant(value=ir.tensor(axes)), keepdims=1)
    else:
        mean = op.ReduceMean(square, axes=axes.tolist(), keepdims=1)
    root = op.Sqrt(op.Add(mean, _constant(op, _EPSILON[compute] if eps is None else float(eps), compute)))
    y, product = op.Div(wide, root), compute
    if weight is not None:
        product = ir.DataType.DOUBLE if ir.DataType.DOUBLE in (compute, weight_type) else ir.DataType.FLOAT
        y = op.Mul(_cast(op, y, compute, product), _cast(op, weight, weight_type, product))
    return _cast(op, y, product, x_type), op.Reciprocal(root)


def _kept_norm(op: Any, values: Sequence[Any], kinds: Sequence[ir.DataType | None], text: str, opset: int) -> Any:
    """A registered module's norm: x, gain and bias by a spec in JSON."""
    spec = RMSNormSpec.from_json(json.loads(text))
    x_type, gain_type, bias_type = (None if kind is None else dtypes.float_name(kind) for kind in kinds)
    assert x_type is not None
    body = Body.of(spec, x_type=x_type, gain_type=gain_type, bias_type=bias_type, opset=opset)
    x, gain, bias = values
    return emit(op, body, x, gain, bias, constant(op, spec.epsilon, body.spec.statistic_type))


def _dtype(value: Any) -> ir.DataType:
    """The element type of a value of a TorchScript graph."""
    return ir.DataType[_SCALARS[value.type().scalarType()]]


_SCALARS = {"Half": "FLOAT16", "BFloat16": "BFLOAT16", "Float": "FLOAT", "Double": "DOUBLE"}


def _constant(op: Any, value: float, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(np.array(value, dtype=dtype.numpy())))


def _cast(op: Any, value: Any, old: ir.DataType | None, new: ir.DataType) -> Any:
    return value if old == new else op.Cast(value, to=new)
