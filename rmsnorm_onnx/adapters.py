"""Steps of single operators that are ours to write: exact, each for one operator and two of its versions.

An adapter changes the node or puts others in its place, and returns None; or it returns why not, in a few words, and
leaves the node as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import relabel
from rmsnorm_onnx.edit import Edit

Adapter: TypeAlias = Callable[[Edit], "str | None"]

_INT64, _BOOL = ir.DataType.INT64, ir.DataType.BOOL
_END = 2**63 - 1
_EPSILON = 1e-5  # of RMSNormalization, where the node does not say
_MODES = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")


def _axes_to_input(edit: Edit, name: str = "axes") -> str | None:
    """An attribute of integers becomes the second input."""
    held = edit.node.attributes.get(name)
    if held is None:
        return None
    if held.is_ref():
        return f"its {name} are set by the callers of the function around it"
    axes = edit.integers(list(held.as_ints()))
    edit.node.attributes.pop(name)
    edit.node.resize_inputs(2)
    edit.node.replace_input_with(1, axes)
    return None


def _split_to_input(edit: Edit) -> str | None:
    return _axes_to_input(edit, "split")


def _axes_to_attribute(edit: Edit) -> str | None:
    """The second input of a reduction becomes an attribute, where it is a constant."""
    node, schema = edit.node, onnx.defs.get_schema(edit.node.op_type, 13)
    problem = relabel.new_type(node, schema, edit.dtype, inputs=1)
    if problem is not None:
        return problem
    value, noop = edit.input(1), edit.value_of("noop_with_empty_axes", 0)
    axes = None if value is None else edit.constant(value)
    if value is not None and axes is None:
        return f"its axes {value.name} are known only at run time"
    if noop is None or (noop and (axes is None or axes.size == 0)):
        return "it reduces nothing, which its older version cannot say"
    if axes is not None and axes.size:
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(axis) for axis in axes.reshape(-1)])
    node.attributes.pop("noop_with_empty_axes", None)
    if len(node.inputs) > 1:
        edit.drop_input(1)
    return None


def _count_splits(edit: Edit) -> str | None:
    """Equal parts, whose number the newer version wants to be told."""
    if edit.input(1) is None:
        edit.keep("num_outputs", len(edit.node.outputs))
    return None


def _sized_splits(edit: Edit) -> str | None:
    """A number of parts becomes their sizes, unless the older version would make the same of none."""
    node = edit.node
    count = edit.value_of("num_outputs", 0)
    if count is None:
        return "its num_outputs is set by the callers of the function around it"
    if count == 0:
        return None
    source, axis = edit.input(0), edit.value_of("axis", 0)
    assert source is not None
    dims = edit.dims(source)
    if axis is None:
        return "its axis is set by the callers of the function around it"
    size = None if dims is None else dims[axis]
    node.attributes.pop("num_outputs")
    if isinstance(size, int) and size % count == 0:
        return None
    if isinstance(size, int):
        part = -(-size // count)
        sizes = edit.integers([part] * (count - 1) + [size - part * (count - 1)])
    else:
        sizes = _dynamic_sizes(edit, source, axis, count)
    node.resize_inputs(2)
    node.replace_input_with(1, sizes)
    return None


def _dynamic_sizes(edit: Edit, source: ir.Value, axis: int, count: int) -> ir.Value:
    """Sizes of parts of which the last takes what is left, computed from the size at run time."""

    def op(op_type: str, *inputs: ir.Value) -> ir.Value:
        return edit.op(op_type, *inputs, dtype=_INT64)

    size = edit.op("Gather", op("Shape", source), edit.integers([axis]), dtype=_INT64, axis=0)
    part = op("Div", op("Add", size, edit.integers([count - 1])), edit.integers([count]))
    last = op("Sub", size, op("Mul", part, edit.integers([count - 1])))
    return edit.op("Concat", *[part] * (count - 1), last, dtype=_INT64, axis=0)


def _sliced_shape(edit: Edit) -> str | None:
    """A part of a shape is a Slice of the whole; both clamp and count from the end alike."""
    start, end = edit.value_of("start", 0), edit.value_of("end", _END)
    source = edit.input(0)
    assert source is not None
    if start is None or end is None:
        return "its start or end is set by the callers of the function around it"
    problem = relabel.new_type(edit.node, onnx.defs.get_schema("Shape", 13), edit.dtype)
    if problem is not None:
        return problem
    whole = edit.op("Shape", source, dtype=_INT64)
    edit.become(edit.op("Slice", whole, edit.integers([start]), edit.integers([end]), dtype=_INT64))
    return None


def _copying_reshape(edit: Edit) -> str | None:
    """allowzero=1, where a 0 in the new shape is a size, and not a dimension to be copied.

    Where no 0 can occur but one that would be copied from an equal dimension, nothing has to be done. Elsewhere a 0
    becomes -1, which is inferred to be 0: an empty tensor has no elements to share out. A shape with two of them fails
    in the runtime, aloud.
    """
    problem = relabel.new_type(edit.node, onnx.defs.get_schema("Reshape", 13), edit.dtype)
    if problem is not None:
        return problem
    if edit.value_of("allowzero", 0) != 1:
        return "its allowzero is set by the callers of the function around it"
    shape = edit.input(1)
    known = edit.constant(shape)
    if known is not None and np.count_nonzero(known == 0) > 1:
        return "its shape has two dimensions of size 0"
    edit.node.attributes.pop("allowzero")
    if (known is not None and np.all(known != 0)) or _copies_only_equals(edit):
        return None
    zero = edit.op("Equal", shape, edit.integers([0]), dtype=_BOOL)
    edit.node.replace_input_with(1, edit.op("Where", zero, edit.integers([-1]), shape, dtype=_INT64))
    return None


def _copies_only_equals(edit: Edit) -> bool:
    """Whether each dimension of the result is a number above 0, or the same symbol as the input's at its place."""
    old, new = edit.dims(edit.input(0)), edit.dims(edit.node.outputs[0])
    if old is None or new is None:
        return False
    before = [*old, *[None] * len(new)]
    return all(
        (isinstance(n, int) and n > 0) or (isinstance(n, str) and n == o) for o, n in zip(before, new, strict=False)
    )


def _cast(edit: Edit) -> str | None:
    """CastLike is a Cast to a type that is known here."""
    like, source = edit.input(1), edit.input(0)
    dtype = None if like is None else edit.dtype(like)
    if dtype is None:
        return "the type that it casts to is unknown"
    cast = edit.op("Cast", source, dtype=dtype, to=int(dtype))
    edit.become(cast)
    return None


def _triangle(edit: Edit) -> str | None:
    """Trilu keeps the elements whose column is at or beyond their row, shifted by k; the others are 0."""
    source, shift = edit.input(0), edit.input(1)
    assert source is not None
    dtype, upper = edit.dtype(source), edit.value_of("upper", 1)
    if dtype is None or upper is None:
        return "its type, or its half, is unknown"
    if dtype == ir.DataType.BFLOAT16:
        return "it is of bfloat16, which Where takes from opset 16 on"
    shape = edit.op("Shape", source, dtype=_INT64)
    zero, one = edit.integers(0), edit.integers(1)

    def count(axis: int) -> ir.Value:
        size = edit.op("Gather", shape, edit.integers(axis), dtype=_INT64, axis=0)
        return edit.op("Range", zero, size, one, dtype=_INT64)

    rows = edit.op("Unsqueeze", count(-2), edit.integers([1]), dtype=_INT64)
    if shift is not None:
        rows = edit.op("Add", rows, shift, dtype=_INT64)
    pair = (count(-1), rows) if upper else (rows, count(-1))
    keep = edit.op("Not", edit.op("Less", *pair, dtype=_BOOL), dtype=_BOOL)
    if dtype == _BOOL:  # a causal mask; onnxruntime has no Where of bool
        edit.become(edit.op("And", keep, source, dtype=_BOOL))
        return None
    nothing = edit.op("Constant", dtype=dtype, value=ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype))
    edit.become(edit.op("Where", keep, source, nothing, dtype=dtype))
    return None


def _on_a_matrix(edit: Edit) -> str | None:
    """Until opset 13, Softmax and its kin took x as a matrix, whose rows are all axes from `axis` on."""
    axis, source = edit.value_of("axis", 1), edit.input(0)
    assert source is not None
    if axis is None:
        return "its axis is set by the callers of the function around it"
    dtype, dims = edit.dtype(source), edit.dims(source)
    if axis == -1 or (dims is not None and axis == len(dims) - 1):
        edit.keep("axis", -1)
        return None
    rows = edit.op("Flatten", source, dtype=dtype, axis=axis)
    value = edit.op(edit.node.op_type, rows, dtype=dtype, axis=-1)
    edit.become(edit.op("Reshape", value, edit.op("Shape", source, dtype=_INT64), dtype=dtype))
    return None


def _padded_everywhere(edit: Edit) -> str | None:
    """Pads of some axes become pads of all."""
    node, source, pads, axes = edit.node, edit.input(0), edit.input(1), edit.constant(edit.input(3))
    dims = edit.dims(source)
    if axes is None or dims is None or pads is None:
        return "its axes, or the rank of what it pads, are known only at run time"
    problem = relabel.new_type(node, onnx.defs.get_schema("Pad", 13), edit.dtype, inputs=3)
    if problem is not None:
        return problem
    places = {int(axis) % len(dims): place for place, axis in enumerate(axes)}
    none = edit.integers([0])

    def pad(axis: int, end: int) -> ir.Value:
        if axis not in places:
            return none
        return edit.op("Gather", pads, edit.integers([places[axis] + end]), dtype=_INT64, axis=0)

    pieces = [pad(axis, end) for end in (0, len(axes)) for axis in range(len(dims))]
    node.replace_input_with(1, edit.op("Concat", *pieces, dtype=_INT64, axis=0))
    edit.drop_input(3)
    return None


def _root_mean_square(edit: Edit) -> str | None:
    """RMSNormalization by its definition, with axes that are constants: the definition's own computes them.

    It stands for the nodes that are no norm to us: a scale that widens x, a shape that is not proven.
    """
    source, scale = edit.input(0), edit.input(1)
    assert source is not None and scale is not None
    axis, epsilon, stash = (edit.value_of(n, d) for n, d in (("axis", -1), ("epsilon", _EPSILON), ("stash_type", 1)))
    dtype, dims = edit.dtype(source), edit.dims(source)
    if dtype is None or None in (axis, epsilon, stash) or (axis >= 0 and dims is None):
        return "its type, rank or attributes are unknown"
    axes = list(range(axis if axis < 0 else axis - len(dims or ()), 0))
    wide = ir.DataType(stash)
    small = edit.op("Cast", edit.number(epsilon), dtype=wide, to=stash)
    x = edit.op("Cast", source, dtype=wide, to=stash)
    square = edit.op("Mul", x, x, dtype=wide)
    mean = edit.op("ReduceMean", square, edit.integers(axes), dtype=wide, keepdims=1)
    root = edit.op("Sqrt", edit.op("Add", mean, small, dtype=wide), dtype=wide)
    normalized = edit.op("Cast", edit.op("Div", x, root, dtype=wide), dtype=dtype, to=int(dtype))
    edit.become(edit.op("Mul", normalized, scale, dtype=dtype))
    return None


def _layer_norm(edit: Edit) -> str | None:
    """LayerNormalization by the equations of its definition, which broadcast scale and bias as any operand.

    The body that ONNX gives flattens both, which fails or is wrong where they have not exactly the normalised shape,
    and takes the variance as a difference of squares, which loses it beside a large mean. Of doubles the statistic is
    double, as runtimes have it whatever stash_type says.
    """
    axis, epsilon, stash = (edit.value_of(n, d) for n, d in (("axis", -1), ("epsilon", _EPSILON), ("stash_type", 1)))
    source, scale, bias = edit.input(0), edit.input(1), edit.input(2)
    assert source is not None and scale is not None
    dtype, dims = edit.dtype(source), edit.dims(source)
    if dtype is None or None in (axis, epsilon, stash):
        return "its type or attributes are unknown"
    if axis >= 0 and dims is None:
        return "the rank of what it normalises is unknown"
    kept = ir.DataType(stash)
    wide = dtype if dtype == ir.DataType.DOUBLE else kept
    axes = list(range(axis if axis < 0 else axis - len(dims or ()), 0))

    def op(op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return edit.op(op_type, *inputs, dtype=wide, **attributes)

    x = op("Cast", source, to=int(wide))
    mean = op("ReduceMean", x, axes=axes, keepdims=1)
    deviation = op("Sub", x, mean)
    variance = op("ReduceMean", op("Mul", deviation, deviation), axes=axes, keepdims=1)
    small = op("Cast", edit.number(epsilon), to=int(wide))
    factor = op("Reciprocal", op("Sqrt", op("Add", variance, small)))
    normalized = edit.op("Cast", op("Mul", deviation, factor), dtype=dtype, to=int(dtype))
    y = edit.op("Mul", normalized, scale, dtype=dtype)
    y = y if bias is None else edit.op("Add", y, bias, dtype=dtype)
    others = [
        edit.op("Cast", value, dtype=kept, to=int(kept)) if output.name else None
        for value, output in zip((mean, factor), edit.node.outputs[1:], strict=False)
    ]
    edit.become(y, *others)
    return None


def _mod(edit: Edit) -> str | None:
    """Mod of floats without fmod is new at opset 28."""
    dtype, fmod = edit.dtype(edit.node.inputs[0]) if edit.node.inputs[0] else None, edit.value_of("fmod", 0)
    if dtype is None or fmod is None or (dtype.is_floating_point() and not fmod):
        return "it takes the modulus of floats without fmod"
    return relabel.new_type(edit.node, onnx.defs.get_schema("Mod", 13), edit.dtype)


def _renamed_mode(edit: Edit) -> str | None:
    """GridSample's modes had the names that they have for images."""
    mode = edit.value_of("mode", "bilinear")
    if mode not in _MODES:
        return "its mode is set by the callers of the function around it"
    edit.keep("mode", _MODES[mode])
    return None


def _image_mode(edit: Edit) -> str | None:
    dims, mode = edit.dims(edit.input(0)), edit.value_of("mode", "linear")
    old = next((o for o, n in _MODES.items() if n == mode), None)
    if dims is None or len(dims) != 4 or old is None:
        return "it samples volumes, or may do so"
    problem = relabel.new_type(edit.node, onnx.defs.get_schema("GridSample", 16), edit.dtype)
    if problem is None:
        edit.keep("mode", old)
    return problem


ADAPTERS: Mapping[tuple[str, int, int | None], Adapter] = MappingProxyType(
    {
        ("ReduceSum", 11, 13): _axes_to_input,
        ("Squeeze", 11, 13): _axes_to_input,
        ("Unsqueeze", 11, 13): _axes_to_input,
        ("Split", 11, 13): _split_to_input,
        ("Split", 13, 18): _count_splits,
        ("Split", 18, 13): _sized_splits,
        **{(f"Reduce{name}", 13, 18): _axes_to_input for name in _REDUCTIONS},
        **{(f"Reduce{name}", 18, 13): _axes_to_attribute for name in _REDUCTIONS},
        ("Shape", 15, 13): _sliced_shape,
        ("Reshape", 14, 13): _copying_reshape,
        ("Pad", 18, 13): _padded_everywhere,
        **{(name, 11, 13): _on_a_matrix for name in ("Softmax", "LogSoftmax", "Hardmax")},
        ("LayerNormalization", 17, None): _layer_norm,
        ("RMSNormalization", 23, None): _root_mean_square,
        ("Mod", 28, 13): _mod,
        ("GridSample", 16, 20): _renamed_mode,
        ("GridSample", 20, 16): _image_mode,
        ("CastLike", 15, None): _cast,
        ("Trilu", 14, None): _triangle,
    }
)
"""Operator, the version that it has, the version that it gets: None where there is no older one."""

NOT_BY_ITS_BODY = frozenset({("LayerNormalization", 17)})
"""Operators whose body in ONNX is not what ONNX says of them: it is no way out where the adapter has none."""
