"""onnxruntime's own operator, SimplifiedLayerNormalization, and its skip form, which is read but not written.

It stands in the default domain, unknown to the ONNX checker, and loads in onnxruntime alone (under com.microsoft it
does not load there either). As measured on its CPU provider: the statistic is float32 (float64 for float64), whatever
stash_type says; x / rms is not rounded before the gain; the result is rounded once, to the scale's type. X and scale
are of one type, or float16 and float32. Inside a model-local function onnxruntime crashes on it.

The skip form (com.microsoft) normalises input + skip, last axis. In half types it normalises the sum before that is
rounded, and hands the rounded sum on as its fourth output.
"""

from __future__ import annotations

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.body import Body, cast, shift
from rmsnorm_onnx.forms import native
from rmsnorm_onnx.forms.reading import (
    Reading,
    TypeView,
    Unreadable,
    body_of,
    float_type,
    gain_input,
    norm_input,
    result,
    value_input,
)
from rmsnorm_onnx.site import Declined, Match
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.writer import Writer

NAME = "contrib"
OPERATOR = "SimplifiedLayerNormalization"
SKIP_OPERATOR = "SkipSimplifiedLayerNormalization"
DEFAULT_EPSILON = 1e-5
DEFAULT_SKIP_EPSILON = 1e-12


def refusal(match: Match, opset: int) -> str | None:
    """Why SimplifiedLayerNormalization cannot say what the site's spec says; None when it can."""
    if in_function(match.scope):
        return f"onnxruntime crashes when it loads a model-local function that contains {OPERATOR}"
    return native.refusal(match, opset, OPERATOR)


def in_function(scope: str) -> bool:
    """Whether a site's scope is a model-local function, or a branch in one."""
    return scope.startswith("function ")


def rounding_change(match: Match) -> str | None:
    """One sentence where the norm rounds x / rms to a half type before the gain: this operator does not."""
    spec = match.spec.canonical(match.x_type)
    if not spec.has_gain or dtypes.holds(spec.normalized_type, _internal_type(match)):
        return None
    return f"{OPERATOR} multiplies by the gain before it rounds, and this norm rounds to {spec.normalized_type} first"


def write(match: Match, writer: Writer) -> ir.Value:
    """Writes the node, and outside it what it cannot say: an offset, a bias, Casts."""
    body = body_of(match, writer.opset)
    op, gain = writer.ops, gain_input(match)
    x_type, scale_type = _node_types(match, body)
    attributes = native.attributes(match)
    x = cast(op, norm_input(match, writer), match.x_type, x_type)
    if gain is None:
        gain = writer.constant(1.0, scale_type)
    elif not _rounds_once(match, body):
        gain = native.scale_input(match, writer, body, gain, scale_type)
    value = writer.op(OPERATOR, x, gain, **attributes)
    if _rounds_once(match, body):
        return result(match, value)
    return result(match, shift(op, body, cast(op, value, scale_type, body.product_type), match.bias))


def _internal_type(match: Match) -> str:
    """The type that the operator computes in."""
    return dtypes.wider("float32", match.spec.resolve(match.x_type).statistic_type)


def _rounds_once(match: Match, body: Body) -> bool:
    """Whether the node's own rounding to x's type is the spec's only one, so that it needs nothing around it."""
    spec = body.spec
    return (
        spec.has_gain
        and match.bias is None
        and not spec.gain_offset
        and match.gain_type == match.x_type == spec.result_type
        and spec.statistic_type == _internal_type(match)
        and dtypes.holds(spec.normalized_type, _internal_type(match))
        and dtypes.holds(spec.gain_type, match.x_type)
        and match.x_type != "float64"
    )


def _node_types(match: Match, body: Body) -> tuple[str, str]:
    """The types of the node's X and of its scale and result: pairs that a kernel exists for."""
    if _rounds_once(match, body):
        return match.x_type, match.x_type
    product, wide = body.product_type, body.spec.statistic_type == "float64"
    if not wide and (match.x_type, product) == ("float16", "float32"):
        return match.x_type, product
    one = "float64" if wide else dtypes.wider(match.x_type, product)
    return one, one


def read(node: ir.Node, types: TypeView) -> Reading | Declined | None:
    """The meaning of a SimplifiedLayerNormalization or its skip form; None for another operator."""
    try:
        if node.op_type == OPERATOR and node.domain in ("", "ai.onnx", "com.microsoft"):
            return _read(node, types)
        if node.op_type == SKIP_OPERATOR and node.domain in ("", "ai.onnx", "com.microsoft"):
            return _read_skip(node, types)
    except Unreadable as problem:
        return problem.declined(node)
    return None


def _read(node: ir.Node, types: TypeView) -> Reading:
    x, gain = value_input(node, 0, "X"), value_input(node, 1, "scale")
    axes = native.read_axes(node, types.shape(x))
    native.check_scale(types.shape(gain), types.shape(x), len(axes), "scale")
    notes: tuple[str, ...] = ()
    if not loads(node):
        notes = (f"onnxruntime knows {OPERATOR} in the default domain only; this node does not load",)
    spec = _spec(axes, native.read_epsilon(node, DEFAULT_EPSILON), x, gain, types)
    if native.is_one(gain):
        return Reading(spec=spec.replace(has_gain=False), x=x, notes=notes)
    return Reading(spec=spec, x=x, gain=gain, notes=notes)


def _read_skip(node: ir.Node, types: TypeView) -> Reading:
    x, skip, gain = (value_input(node, i, name) for i, name in enumerate(("input", "skip", "gamma")))
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        raise Unreadable("it adds a bias to the sum before it normalises, which no form here writes")
    native.check_scale(types.shape(gain), types.shape(x), 1, "gamma")
    native.check_scale(types.shape(skip), types.shape(x), 1, "skip")
    spec = _spec((-1,), native.read_epsilon(node, DEFAULT_SKIP_EPSILON), x, gain, types)
    changes: tuple[str, ...] = ()
    if types.dtype(x) in ("float16", "bfloat16"):
        changes = (f"{SKIP_OPERATOR} normalises the sum before that is rounded to {types.dtype(x)}",)
    notes: tuple[str, ...] = ()
    if not loads(node):
        notes = (f"onnxruntime knows {SKIP_OPERATOR} in the domain com.microsoft only; this node does not load",)
    if native.is_one(gain):
        return Reading(spec=spec.replace(has_gain=False), x=x, residual=skip, notes=notes, rounding_changes=changes)
    return Reading(spec=spec, x=x, gain=gain, residual=skip, notes=notes, rounding_changes=changes)


def loads(node: ir.Node) -> bool:
    """Whether onnxruntime knows a node of these operators: each in one domain alone."""
    return (node.domain == "com.microsoft") == (node.op_type == SKIP_OPERATOR)


def _spec(axes: tuple[int, ...], epsilon: float, x: ir.Value, gain: ir.Value, types: TypeView) -> RMSNormSpec:
    x_type, gain_type = float_type(x, types, "X"), float_type(gain, types, "the scale")
    internal = dtypes.wider("float32", x_type)
    return RMSNormSpec(
        axes=axes,
        epsilon=epsilon,
        statistic_type=internal,
        factor_type=internal,
        normalized_type=internal,
        gain_type=internal,
        result_type=native.gain_type_name(x_type, gain_type),
    )
