"""A node for this project's TensorRT plugin: `RMSNorm`, version "1", namespace `rmsnorm_onnx`.

Every field of the spec is written as an attribute of one type, since TensorRT takes a field's type from the attribute
and not from the plugin's declaration, and passes absent ones over. The domain is `rmsnorm_onnx`, or `trt.plugins` for
onnxruntime's TensorRT provider. Inputs are x, the gain where has_gain is 1 (or the tensor attribute `gain`), and the
bias where has_bias is 1. In the domain `rmsnorm_onnx`, a file that needs only one body carries it as a function, so
that it also runs without the plugin.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from rmsnorm_onnx import functions
from rmsnorm_onnx.body import refusal as body_refusal
from rmsnorm_onnx.errors import SpecError
from rmsnorm_onnx.forms.reading import (
    Reading,
    TypeView,
    Unreadable,
    attribute,
    body_of,
    constant_gain,
    gain_input,
    known_dims,
    norm_input,
    result,
    value_input,
)
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.site import Declined, Match
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.writer import Writer

NAME = "plugin"
OPERATOR = functions.NAME
NAMESPACE = "rmsnorm_onnx"
VERSION = "1"
ONNXRUNTIME_DOMAIN = "trt.plugins"

FIELDS: dict[str, ir.AttributeType] = {
    "axes": ir.AttributeType.INTS,
    "epsilon": ir.AttributeType.FLOAT,
    "epsilon_placement": ir.AttributeType.STRING,
    "leading": ir.AttributeType.INT,  # 0: all elements
    "has_gain": ir.AttributeType.INT,
    "gain_offset": ir.AttributeType.FLOAT,
    "has_bias": ir.AttributeType.INT,
    "statistic_type": ir.AttributeType.STRING,
    "factor_type": ir.AttributeType.STRING,
    "normalized_type": ir.AttributeType.STRING,
    "gain_type": ir.AttributeType.STRING,
    "result_type": ir.AttributeType.STRING,
}
"""The plugin's fields and the one ONNX type of each; plugin_version and plugin_namespace are strings beside them."""


def refusal(match: Match, opset: int) -> str | None:
    """Why the plugin does not compute the site's spec; None when it does."""
    types = {match.x_type, *(getattr(match.spec.resolve(match.x_type), f) for f in FIELDS if f.endswith("_type"))}
    if "float64" in types or "float64" in (match.gain_type,):
        return "TensorRT has no float64 plugins, and this norm uses float64"
    vectors = (
        ("gain", gain_input(match), match.gain_type, match.gain_dims),
        ("bias", match.bias, match.bias_type, match.bias_dims),
    )
    reasons = (
        _vector_refusal(match, name, dtype, known_dims(value, dims))
        for name, value, dtype, dims in vectors
        if value is not None
    )
    return next((reason for reason in reasons if reason), None) or body_refusal(match.spec, match.x_type, opset)


def _vector_refusal(match: Match, name: str, dtype: str | None, dims: Dims | None) -> str | None:
    """Why the plugin does not take a gain or a bias: it wants x's type or float32, and a value for each element."""
    if dtype not in (None, match.x_type, "float32"):
        return f"the plugin takes a {name} of x's type or float32, and this one is {dtype} for x in {match.x_type}"
    if dims is None:
        return f"the plugin takes a {name} with a value for each normalised element, and this one's shape is unknown"
    x = known_dims(match.x, match.x_dims)
    axes = match.spec.axes
    spread = len(dims) < -axes[0] or any(
        dims[axis] == 1 and (x is None or len(x) < -axis or x[axis] != 1) for axis in axes
    )
    shape = ", ".join(str(d) for d in dims)
    return f"the plugin takes a {name} with a value for each normalised element, not of [{shape}]" if spread else None


def rounding_change(match: Match) -> None:
    """None: the plugin holds every rounding of its spec."""


def write(match: Match, writer: Writer) -> ir.Value:
    """Writes the node, and asks for its function."""
    gain = constant_gain(match) if writer.gain_attribute else None
    body = body_of(match, writer.function_opset, gain_attribute=gain is not None)
    attributes = fields(match.spec)
    if gain is not None:
        attributes["gain"] = gain
    attributes |= {"plugin_version": VERSION, "plugin_namespace": NAMESPACE}
    if writer.plugin_domain == functions.DOMAIN:
        writer.functions.want_plugin_body(body)
    named = {"x": norm_input(match, writer), "gain": gain_input(match), "bias": match.bias}
    inputs = [named[name] for name in body.inputs]
    return result(match, writer.op(OPERATOR, *inputs, domain=writer.plugin_domain, **attributes))


def fields(spec: RMSNormSpec) -> dict[str, Any]:
    """The attributes that hold a spec: every field, and `axis` for readers of the function.

    >>> fields(RMSNormSpec())["epsilon_placement"]
    'inside'
    """
    values = {name: getattr(spec, name) for name in FIELDS}
    values["axes"] = list(spec.axes)
    values["leading"] = spec.leading or 0
    values["has_gain"], values["has_bias"] = int(spec.has_gain), int(spec.has_bias)
    values["gain_offset"] = float(spec.gain_offset)
    return {**values, **functions.node_attributes(spec)}


def read(node: ir.Node, types: TypeView) -> Reading | Declined | None:
    """The meaning of a node for the plugin; None for another operator, or a function's node.

    A node is the plugin's when it says so: with our plugin_namespace in `trt.plugins`, or with any plugin field in the
    domain `rmsnorm_onnx`.
    """
    if node.op_type != OPERATOR or not is_ours(node):
        return None
    try:
        return _read(node)
    except Unreadable as problem:
        return problem.declined(node)


def is_ours(node: ir.Node) -> bool:
    """Whether a node says that it is the plugin's, rightly or not."""
    if node.domain == functions.DOMAIN:
        return any(name in node.attributes for name in ("plugin_version", "plugin_namespace", "statistic_type"))
    namespace = node.attributes.get("plugin_namespace")
    return node.domain == ONNXRUNTIME_DOMAIN and namespace is not None and namespace.value == NAMESPACE


def _read(node: ir.Node) -> Reading:
    for name, expected in (("plugin_version", VERSION), ("plugin_namespace", NAMESPACE)):
        said = attribute(node, name, ir.AttributeType.STRING)
        if said != expected:
            raise Unreadable(f"the attribute {name} is {said!r}, and it must be {expected!r}")
    values = {name: attribute(node, name, kind) for name, kind in FIELDS.items()}
    values["axes"] = tuple(values["axes"])
    values["leading"] = values["leading"] or None
    values["has_gain"], values["has_bias"] = bool(values["has_gain"]), bool(values["has_bias"])
    try:
        spec = RMSNormSpec(**values)
    except SpecError as error:
        raise Unreadable(str(error)) from error
    loose = _gain_attribute(node) if spec.has_gain else None
    names = ["x", *(["gain"] if spec.has_gain and loose is None else []), *(["bias"] if spec.has_bias else [])]
    if len(node.inputs) != len(names):
        raise Unreadable(f"it has {len(node.inputs)} inputs, and its fields ask for {', '.join(names)}")
    named = {name: value_input(node, index, name) for index, name in enumerate(names)}
    return Reading(spec=spec, x=named["x"], gain=named.get("gain", loose), bias=named.get("bias"))


def _gain_attribute(node: ir.Node) -> ir.Value | None:
    """A gain that is the node's own tensor, as a loose value: `Writer.op` makes a Constant of it."""
    if "gain" not in node.attributes:
        return None
    tensor: ir.TensorProtocol = attribute(node, "gain", ir.AttributeType.TENSOR)
    return ir.val("gain", const_value=tensor)
