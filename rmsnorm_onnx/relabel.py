"""Operators whose definition did not change in substance between two versions: a literal table, and how it is applied.

onnx's own converter has no adapter for many of these ("No Adapter From Version 15 for Pow"), and for others one that
changes the number alone where the meaning changed too. So each row here says between which versions of which operators
nothing but types was added, what else came with the newer version, and where the two agree all the same.

Every row was read against both definitions; a test holds it to onnx's schemas (same inputs, outputs, attributes and
defaults; the older types among the newer ones), another runs each operator at both versions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import onnx
import onnx_ir as ir

_MAKES_SEQUENCE = ("SplitToSequence", "SequenceConstruct")
_KEEPS_SEQUENCE = ("Identity", "SequenceInsert", "SequenceErase")
_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic

TypeOf = Callable[[ir.Value], ir.DataType | None]
"""A value's element type; None where it is unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One version step of some operators.

    Attributes:
        since: The newer version.
        operators: Names, each with its older version: "Relu:13 Add:13".
        why: Why the two definitions agree.
        was: Attributes that came with the newer version, each with the value at which it means what the older one does.
            Absent, it must be the default.
        never: Values of attributes for which the two definitions differ.
        inputs: The most inputs for which they agree; None when it does not matter.
        outputs: The most outputs for which they agree.
        down: Whether the newer may be read as the older; else only the older as the newer.
    """

    since: int
    operators: str
    why: str
    was: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    never: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    inputs: int | None = None
    outputs: int | None = None
    down: bool = True


_WIDER = "more types"
_TO_23 = (
    "Constant:21 ConstantOfShape:21 Flatten:21 Identity:21 If:21 Loop:21 Pad:21 Reshape:21 Scan:21 Shape:21 Size:21"
)
_TO_24 = (
    "Constant:23 ConstantOfShape:23 Flatten:23 Identity:23 If:23 Loop:23 Pad:23 Reshape:23 Scan:23 Shape:23 Size:23"
)
_TO_25 = (
    "Constant:24 ConstantOfShape:24 Flatten:24 Identity:24 If:24 Loop:24 Pad:24 Reshape:24 Scan:24 Shape:24 Size:24"
)

ROWS: tuple[Row, ...] = (
    Row(12, "Clip:11 Max:8 Min:8 MaxPool:11 ReduceMax:11 ReduceMin:11", _WIDER + " (integers)"),
    Row(12, "Pow:7", "integers, and an exponent of another type"),
    Row(12, "ArgMax:11 ArgMin:11", "select_last_index was added", was={"select_last_index": 0}),
    Row(12, "GatherND:11", "batch_dims was added", was={"batch_dims": 0}),
    Row(12, "Constant:11", "numbers and lists of numbers as attributes of their own were added"),
    Row(
        13,
        "Abs:6 Add:7 ArgMax:12 ArgMin:12 Cast:9 Ceil:6 Clip:12 Concat:11 Constant:12 DepthToSpace:11 Div:7 Dropout:12 "
        "Equal:11 Erf:9 Exp:6 Expand:8 Flatten:11 Floor:6 Gather:11 GatherElements:11 GatherND:12 Gemm:11 Greater:9 "
        "Identity:1 IsNaN:9 LRN:1 Less:9 Log:6 MatMul:9 Max:12 Mean:8 MeanVarianceNormalization:9 Min:12 Mod:10 Mul:7 "
        "Neg:6 NegativeLogLikelihoodLoss:12 NonZero:9 Pad:11 Pow:12 Reciprocal:6 ReduceL1:11 ReduceL2:11 "
        "ReduceLogSum:11 ReduceLogSumExp:11 ReduceMax:12 ReduceMean:11 ReduceMin:12 ReduceProd:11 ReduceSumSquare:11 "
        "Relu:6 Reshape:5 ScatterElements:11 ScatterND:11 Shape:1 Sigmoid:6 Sign:9 Size:1 Slice:11 "
        "SoftmaxCrossEntropyLoss:12 SpaceToDepth:1 Sqrt:6 Sub:7 Sum:8 Tanh:6 Tile:6 Transpose:1",
        _WIDER + " (bfloat16)",
    ),
    Row(13, "If:11 Loop:11", "branches and loops may carry sequences"),
    Row(13, "QuantizeLinear:10 DequantizeLinear:10", "axis was added, for scales that are vectors", was={"axis": 1}),
    Row(14, "Add:13 CumSum:11 Div:13 Mul:13 Relu:13 Sub:13", _WIDER + " (small integers, bfloat16)"),
    Row(14, "Identity:13", "sequences too"),
    Row(14, "Reshape:13", "allowzero was added", was={"allowzero": 0}),
    Row(14, "GRU:7 LSTM:7 RNN:7", "layout was added", was={"layout": 0}),
    Row(14, "BatchNormalization:9", "training became an attribute", was={"training_mode": 0}, outputs=1),
    Row(15, "Pow:13", _WIDER + " (bfloat16)"),
    Row(15, "BatchNormalization:14", "scale and statistics of types of their own", was={"training_mode": 0}, outputs=1),
    Row(15, "Shape:13", "start and end were added", was={"start": 0}),
    Row(16, "GreaterOrEqual:12 LeakyRelu:6 LessOrEqual:12 PRelu:9 Where:9", _WIDER + " (bfloat16)"),
    Row(16, "Identity:14 If:13 Loop:13", "optional values too"),
    Row(16, "Scan:11", _WIDER + " (bfloat16)"),
    Row(16, "ScatterElements:13 ScatterND:13", "reduction was added", was={"reduction": "none"}),
    Row(
        16,
        "RoiAlign:10",
        "the shift of coordinates became an attribute, and another one its default",
        was={"coordinate_transformation_mode": "output_half_pixel"},
    ),
    Row(18, "OptionalGetElement:15 OptionalHasElement:15", "plain values too"),
    Row(18, "ScatterElements:16 ScatterND:16", "two reductions were added", never={"reduction": ("max", "min")}),
    Row(18, "Pad:13", "axes were added", inputs=3),
    Row(18, "LpPool:11", "ceil_mode and dilations were added", was={"ceil_mode": 0}),
    Row(
        18,
        "Resize:13",
        "axes, antialiasing and a policy were added",
        was={"antialias": 0, "keep_aspect_ratio_policy": "stretch"},
    ),
    Row(19, "Cast:13 CastLike:15", "float8, with an attribute of its own", was={"saturate": 1}),
    Row(19, "QuantizeLinear:13", "float8, with an attribute of its own", was={"saturate": 1}),
    Row(19, "Constant:13 DequantizeLinear:13 Identity:16 If:16 Loop:16 Reshape:14 Scan:16 Shape:15 Size:13", _WIDER),
    Row(19, "Equal:13", _WIDER + " (strings)"),
    Row(19, "Pad:18", "a mode was added", never={"mode": ("wrap",)}),
    Row(
        19,
        "Resize:18",
        "a mode of coordinates was added",
        never={"coordinate_transformation_mode": ("half_pixel_symmetric",)},
    ),
    Row(19, "AveragePool:11", "dilations were added", never={"ceil_mode": (1,)}),
    Row(20, "ConstantOfShape:9 IsInf:10 IsNaN:13 ReduceMax:18 ReduceMin:18", _WIDER),
    Row(21, "Cast:19 CastLike:19 Constant:19 ConstantOfShape:20 Flatten:13 Identity:19 If:19 Loop:19 Pad:19", _WIDER),
    Row(21, "QLinearMatMul:10 Reshape:19 Scan:19 Shape:19 Size:19 Squeeze:13 Transpose:13 Unsqueeze:13", _WIDER),
    Row(21, "QuantizeLinear:19", "blocks were added", was={"block_size": 0, "output_dtype": 0}),
    Row(21, "DequantizeLinear:19", "blocks were added", was={"block_size": 0}),
    Row(
        22,
        "Acos:7 Acosh:9 Asin:7 Asinh:9 Atan:7 Atanh:9 Bernoulli:15 Conv:11 ConvTranspose:11 Cos:7 Cosh:9 DeformConv:19 "
        "Det:11 Dropout:13 Elu:6 EyeLike:9 GRU:14 GlobalAveragePool:1 GlobalLpPool:2 GlobalMaxPool:1 GridSample:20 "
        "HardSigmoid:6 HardSwish:14 InstanceNormalization:6 LSTM:14 LpNormalization:1 LpPool:18 MaxRoiPool:1 "
        "MaxUnpool:11 Mish:18 Multinomial:7 NegativeLogLikelihoodLoss:13 RNN:14 RandomNormal:1 RandomNormalLike:1 "
        "RandomUniform:1 RandomUniformLike:1 RoiAlign:16 Round:11 Selu:6 Sin:7 Sinh:9 Softplus:1 Softsign:1 Tan:7 "
        "ThresholdedRelu:10",
        _WIDER + " (bfloat16)",
    ),
    Row(22, "AveragePool:19 MaxPool:12", "the last window of ceil_mode was settled", never={"ceil_mode": (1,)}),
    Row(23, f"Cast:21 CastLike:21 Squeeze:21 Transpose:21 Unsqueeze:21 {_TO_23}", _WIDER + " (float4)"),
    Row(23, "QuantizeLinear:21", "the precision of the division was added", was={"precision": 0}),
    Row(23, "DequantizeLinear:21", "the type of the result was added", was={"output_dtype": 0}),
    Row(24, "Cast:23 CastLike:23", "float8e8m0, with an attribute of its own", was={"round_mode": "up"}),
    Row(24, f"DequantizeLinear:23 QuantizeLinear:23 Squeeze:23 Transpose:23 Unsqueeze:23 {_TO_24}", _WIDER),
    Row(24, "SplitToSequence:11 TopK:11", _WIDER + " (bfloat16)"),
    Row(24, "Attention:23", "the count of keys that are not padding was added", inputs=6, down=False),
    Row(25, "Cast:24 CastLike:24 DequantizeLinear:24 QuantizeLinear:24 Squeeze:24 Transpose:24 Unsqueeze:24", _WIDER),
    Row(25, _TO_25, _WIDER + " (integers of two bits)"),
    Row(
        25,
        "Attention:24",
        "windows were added",
        was={"left_window_size": -1, "right_window_size": -1},
        inputs=3,
        outputs=1,
    ),
    Row(27, "Range:11", "half types, with an attribute of their own", was={"stash_type": 1}),
    Row(28, "BitShift:11 Cast:25 Celu:12 Compress:11 DepthToSpace:13 DequantizeLinear:25 Einsum:12 OneHot:11", _WIDER),
    Row(28, "Optional:15 OptionalGetElement:18 OptionalHasElement:18 QuantizeLinear:25 ReduceLogSum:18", _WIDER),
    Row(28, "ReduceLogSumExp:18 ReverseSequence:10 Unique:11", _WIDER),
    Row(28, "Mod:13", "floats without fmod", down=False),
    Row(28, "SpaceToDepth:13", "mode was added", was={"mode": "DCR"}),
)
"""Every step that is no more than a label."""


NARROWER = frozenset({("Erf", 13), ("ReduceLogSum", 28), ("ReduceLogSumExp", 28)})
"""Operators and versions that take fewer types than the version before."""


@functools.cache
def steps() -> Mapping[tuple[str, int, int], Row]:
    """The rows by operator, older and newer version."""
    found: dict[tuple[str, int, int], Row] = {}
    for row in ROWS:
        for entry in row.operators.split():
            name, older = entry.split(":")
            assert (name, int(older), row.since) not in found, entry
            found[name, int(older), row.since] = row
    return MappingProxyType(found)


def lower(node: ir.Node, older: int, newer: int, type_of: TypeOf) -> str | None:
    """Reads a node of the newer version as one of the older, where both mean the same.

    Attributes that the older version does not know are taken off it.

    Returns:
        None when it was done, else why not, in a few words; then the node is unchanged.
    """
    row = steps().get((node.op_type, older, newer))
    if row is None or not row.down:
        return f"its definition changed at opset {newer}"
    old, new = onnx.defs.get_schema(node.op_type, older), onnx.defs.get_schema(node.op_type, newer)
    problem = _beyond(node, row) or _new_attribute(node, row, old, new) or new_type(node, old, type_of)
    if problem is None:
        for name in [n for n in node.attributes if n not in old.attributes]:
            node.attributes.pop(name)
        for name, value in row.was.items():
            if name in old.attributes and name not in node.attributes:
                node.attributes[name] = attr(name, value)
    return problem


def lift(node: ir.Node, older: int, newer: int, type_of: TypeOf) -> str | None:
    """Reads a node of the older version as one of the newer, where both mean the same.

    Returns:
        None when it was done, else why not, in a few words; then the node is unchanged.
    """
    row = steps().get((node.op_type, older, newer))
    if row is None:
        return f"its definition changed at opset {newer}"
    problem = _beyond(node, row)
    if problem is None and (node.op_type, newer) in NARROWER:
        problem = new_type(node, onnx.defs.get_schema(node.op_type, newer), type_of)
    if problem is None:
        schema = onnx.defs.get_schema(node.op_type, newer)
        for name, value in row.was.items():
            if name not in node.attributes and default(schema, name) != value:
                node.attributes[name] = attr(name, value)
    return problem


def default(schema: onnx.defs.OpSchema, name: str) -> Any:
    """The default of an attribute; None without one."""
    proto = schema.attributes[name].default_value if name in schema.attributes else None
    if proto is None or not proto.type:
        return None
    value = onnx.helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else value


def attr(name: str, value: Any) -> ir.Attr:
    """An attribute from a Python value."""
    kinds = {int: ir.AttributeType.INT, str: ir.AttributeType.STRING}
    return ir.Attr(name, kinds[type(value)], value)


def _beyond(node: ir.Node, row: Row) -> str | None:
    """Why the node is beyond what its row covers; None when it is not."""
    given = [i for i, v in enumerate(node.inputs) if v is not None]
    if row.inputs is not None and given and given[-1] >= row.inputs:
        return f"its input {given[-1]} is new at opset {row.since}"
    used = [i for i, v in enumerate(node.outputs) if v.name]
    if row.outputs is not None and used and used[-1] >= row.outputs:
        return f"its output {used[-1]} changed at opset {row.since}"
    for name, values in row.never.items():
        held = node.attributes.get(name)
        if held is not None and (held.is_ref() or held.value in values):
            return f"its {name} means something else before and from opset {row.since} on"
    return None


def _new_attribute(node: ir.Node, row: Row, old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> str | None:
    """Why an attribute keeps a node at the newer version; None when none does."""
    for name, value in row.was.items():
        held = node.attributes.get(name)
        if (default(new, name) if held is None else None if held.is_ref() else held.value) != value:
            return f"its {name} is not {value!r}, which all older versions mean"
    for name in node.attributes:
        if name not in old.attributes and name not in row.was:
            return f"its attribute {name} is new at opset {row.since}"
    return None


def new_type(node: ir.Node, old: onnx.defs.OpSchema, type_of: TypeOf, *, inputs: int | None = None) -> str | None:
    """Why a type keeps a node at its newer version, or may keep it, in a few words; None when none does.

    Args:
        node: The node.
        old: The definition that it is to have.
        type_of: What is known of types.
        inputs: How many of its inputs are looked at; all by default.
    """
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in old.type_constraints}
    bound: dict[str, str] = {}
    given = list(node.inputs)[:inputs]
    for values, formals, what in ((given, old.inputs, "input"), (node.outputs, old.outputs, "output")):
        for index, value in enumerate(values):
            if value is None or not value.name:
                continue
            if not formals or (index >= len(formals) and formals[-1].option != _VARIADIC):
                return f"its {what} {index} is new"
            formal = formals[min(index, len(formals) - 1)]
            name = type_name(value, type_of)
            if name is None:
                return f"the type of its {what} {value.name} is unknown"
            if name not in allowed.get(formal.type_str, {formal.type_str}):
                return f"its {what} {value.name} is {_plain(name)}"
            if formal.is_homogeneous and bound.setdefault(formal.type_str, name) != name:
                return f"its {what} {value.name} is {_plain(name)}, and another one {_plain(bound[formal.type_str])}"
    return None


def _plain(name: str) -> str:
    return name[len("tensor(") : -1] if name.startswith("tensor(") else name


def type_name(value: ir.Value, type_of: TypeOf) -> str | None:
    """A value's type as schemas write it: "tensor(float)", "seq(tensor(int64))"; None where it is unknown."""
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        proto = ir.to_proto(value).type
        return _proto_name(proto)
    dtype = type_of(value)
    return _sequence_name(value, type_of) if dtype is None else f"tensor({_element(int(dtype))})"


def _sequence_name(value: ir.Value, type_of: TypeOf) -> str | None:
    """The type of a sequence that the file declares no type for, from the operator that makes it.

    Inference of element types passes sequences over, and inside a function's body no file declares any.
    """
    node = value.producer()
    branch = node.attributes.get("then_branch") if node is not None and node.op_type == "If" else None
    if node is not None and branch is not None and not branch.is_ref():
        return type_name(branch.as_graph().outputs[value.index() or 0], type_of)
    first = node.inputs[0] if node is not None and node.inputs else None
    if node is None or first is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in _MAKES_SEQUENCE:
        element = type_name(first, type_of)
        return None if element is None else f"seq({element})"
    return _sequence_name(first, type_of) if node.op_type in _KEEPS_SEQUENCE else None


def _proto_name(proto: onnx.TypeProto) -> str | None:
    for kind, field in (("seq", "sequence_type"), ("optional", "optional_type")):
        if proto.HasField(field):
            inner = _proto_name(getattr(proto, field).elem_type)
            return None if inner is None else f"{kind}({inner})"
    return f"tensor({_element(proto.tensor_type.elem_type)})" if proto.HasField("tensor_type") else None


def _element(number: int) -> str:
    return str(onnx.TensorProto.DataType.Name(number)).lower()
