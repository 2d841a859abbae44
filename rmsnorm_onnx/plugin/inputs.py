"""The inputs and the output of a node of this package's plugin: how many, of which types, of which shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.inference import Dim, Dims
from rmsnorm_onnx.plugin.faults import Fault
from rmsnorm_onnx.plugin.fields import spec_of, x_name
from rmsnorm_onnx.plugin.nodes import RESULTS as _TYPES
from rmsnorm_onnx.plugin.nodes import PluginNode

_MAX_RANK = 8  # of any tensor of TensorRT, nvinfer1::Dims::MAX_DIMS


def check_inputs(node: PluginNode) -> Iterator[Fault]:
    """Count, types and shapes of x, the gain and the bias, and the type and shape of the result."""
    names = input_names(node)
    if names is None:
        return  # the fields that say it are at fault already
    given = node.node.inputs
    if len(given) != len(names):
        what = f"there are {len(given)}, and the fields has_gain and has_bias ask for {', '.join(names)}"
        yield node.fault("inputs", what, "pass what the fields say, or let the fields say what is passed")
        return
    named: dict[str, ir.Value] = {}
    for name, value in zip(names, given, strict=True):
        if value is None or value in node.absent:
            yield missing_input(node, name, value)
        else:
            named[name] = value
            yield from _check_element(node, name, node.types.get(value))
    yield from _check_gain_attribute(node)
    if "x" in named:
        yield from _check_shapes(node, named)
    yield from _check_output(node, named.get("x"))


def missing_input(node: PluginNode, name: str, value: ir.Value | None) -> Fault:
    """The fault of an input that the node leaves empty, or that a call of the function around it leaves out."""
    if value is None:
        return node.fault(name, "the input is empty, and a plugin's inputs cannot be left out", f"connect {name}")
    what = f"it is the function's input {value.name!r}, which a call leaves out, and a plugin's inputs cannot be"
    return node.fault(name, what, f"pass {value.name!r} in every call")


def unknowns(node: PluginNode) -> list[str]:
    """The inputs whose type or rank is not known, so that they were not checked."""
    names = input_names(node) or ()
    pairs = list(zip(names, node.node.inputs, strict=False))
    known = [(name, value) for name, value in pairs if value is not None and value not in node.absent]
    return [name for name, value in known if node.types.get(value) is None or node.shapes.get(value) is None]


def input_names(node: PluginNode) -> tuple[str, ...] | None:
    """The inputs that a node's fields ask for; None where the fields do not say it."""
    has_gain, has_bias = node.number("has_gain"), node.number("has_bias")
    if has_gain not in (0, 1) or has_bias not in (0, 1):
        return None
    gain = has_gain and "gain" not in node.attributes
    return ("x", *(["gain"] if gain else []), *(["bias"] if has_bias else []))


def _check_element(node: PluginNode, name: str, dtype: ir.DataType | None) -> Iterator[Fault]:
    if dtype is None:
        return
    said, x = dtypes.float_name(dtype), x_name(node)
    if said not in _TYPES:
        what = f"it is {dtype.name}, and the plugin takes {', '.join(_TYPES)}"
        yield node.fault(name, what, "cast it first, or use the function form for this norm")
    elif name != "x" and x is not None and said not in (x, "float32"):
        what = f"it is {said}, and x is {x}"
        yield node.fault(name, what, "store it as x's type or as float32" if x != "float32" else "store it as float32")


def _check_gain_attribute(node: PluginNode) -> Iterator[Fault]:
    held = node.attributes.get("gain")
    if held is None or held.type != ir.AttributeType.TENSOR:
        return
    if not node.number("has_gain"):
        yield node.fault("gain", "the node holds a gain, and has_gain is 0", "remove it, or write has_gain = 1")
        return
    tensor = held.as_tensor()
    yield from _check_element(node, "gain", tensor.dtype)
    x = node.node.inputs[0] if node.node.inputs else None
    known = None if x is None else node.shapes.get(x)
    axes = node.number("axes")
    if known is not None and axes:
        sizes = [known[a] for a in axes if -len(known) <= a < 0]
        wanted = math.prod(size for size in sizes if isinstance(size, int))
        if all(isinstance(size, int) for size in sizes) and tensor.size != wanted:
            what = f"it has {tensor.size} elements, and x is {_shown(known)}, normalised over {list(axes)}"
            yield node.fault("gain", what, f"give it {wanted}, one for each normalised element")


def _check_shapes(node: PluginNode, named: Mapping[str, ir.Value]) -> Iterator[Fault]:
    shape, axes = node.shapes.get(named["x"]), node.number("axes")
    if shape is not None and len(shape) > _MAX_RANK:
        what = f"its rank is {len(shape)}, and TensorRT's tensors have at most {_MAX_RANK} dimensions"
        yield node.fault("x", what, "reshape it before the norm, and back after it")
    if shape is None or not axes or any(a >= 0 for a in axes):
        return
    if -min(axes) > len(shape):
        what = f"it is {list(axes)}, and x has rank {len(shape)}"
        yield node.fault("axes", what, "normalise over axes that x has")
        return
    leading, size = node.number("leading"), shape[-1]
    if leading and isinstance(size, int) and leading > size:
        yield node.fault("leading", f"it is {leading}, and the last axis has {size}", f"write at most {size}, or 0")
    for name in named.keys() & {"gain", "bias"}:
        known = node.shapes.get(named[name])
        if known is not None:
            yield from _check_vector(node, name, known, shape, axes)


def _check_vector(node: PluginNode, name: str, given: Dims, shape: Dims, axes: Sequence[int]) -> Iterator[Fault]:
    """A gain and a bias have x's sizes along the normalised axes, and 1 along every other: nothing is broadcast."""
    places = range(-len(given), 0)
    wanted = {place: shape[place] if place in axes else 1 for place in places if place >= -len(shape)}
    fits = -min(axes) <= len(given) <= len(shape)
    if not fits or any(_differ(given[place], wanted[place]) for place in places):
        what = f"its shape is {_shown(given)}, and x is {_shown(shape)}, normalised over {list(axes)}"
        yield node.fault(name, what, "give it x's sizes along the normalised axes, and 1 along any other")


def _check_output(node: PluginNode, x: ir.Value | None) -> Iterator[Fault]:
    outputs = node.node.outputs
    if len(outputs) != 1:
        yield node.fault("outputs", f"there are {len(outputs)}, and the plugin gives one", "keep the first alone")
        return
    spec, x_type = spec_of(node), x_name(node)
    if spec is None or x_type is None or x is None:
        return
    said, result = dtypes.float_name(node.types.get(outputs[0])), spec.resolve(x_type).result_type
    if node.types.get(outputs[0]) is not None and said != result:
        what = f"the plugin gives {result}, and the file says that {outputs[0].name!r} is {said or 'no float'}"
        yield node.fault("result_type", what, "let result_type be the type that the graph goes on with")
    shapes = node.shapes.get(x), node.shapes.get(outputs[0])
    if shapes[0] is not None and shapes[1] is not None and not _agree(shapes[0], shapes[1]):
        what = f"its shape is {_shown(shapes[1])}, and x is {_shown(shapes[0])}"
        yield node.fault("y", what, "declare x's shape, or none")


def _agree(first: Dims, second: Dims) -> bool:
    pairs = list(zip(first, second, strict=False))
    return len(first) == len(second) and not any(_differ(a, b) for a, b in pairs)


def _differ(first: Dim, second: Dim) -> bool:
    """Whether two sizes are known to be different."""
    return isinstance(first, int) and isinstance(second, int) and first != second


def _shown(shape: Dims) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in shape)}]"
