"""ONNX's own operator, RMSNormalization: opset 23 on.

Its definition casts X to stash_type, normalises over `axis` and all axes after it, casts back to X's type and
multiplies by the scale: the rounding before the gain is to X's type. X and the scale are of one type. (torch's exporter
writes mixed ones, which the full check and onnxruntime refuse.) So the type of the node decides where it rounds: x's
own for norms that round before the gain, float32 between Casts for those that round once.
"""

from __future__ import annotations

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.body import cast, scale, shift
from rmsnorm_onnx.forms import native
from rmsnorm_onnx.forms.reading import (
    Reading,
    TypeView,
    Unreadable,
    attribute,
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

NAME = "onnx"
OPERATOR = "RMSNormalization"
SINCE = 23
DEFAULT_EPSILON = 1e-5


def refusal(match: Match, opset: int) -> str | None:
    """Why RMSNormalization and the operators around it cannot say what the site's spec says; None when they can."""
    if opset < SINCE:
        return f"{OPERATOR} exists from opset {SINCE} on, and this site is at opset {opset}"
    return native.refusal(match, opset, OPERATOR)


def rounding_change(match: Match) -> None:
    """None: the definition's own rounding, and Casts around it, hold every rounding of the spec."""


def write(match: Match, writer: Writer) -> ir.Value:
    """Writes the node, and outside it what it cannot say: an offset, a bias, Casts."""
    body = body_of(match, writer.opset)
    spec, op = body.spec, writer.ops
    gain = gain_input(match)
    dtype = dtypes.wider(spec.normalized_type, match.x_type)
    if spec.statistic_type == "float64":
        dtype = "float64"  # no runtime heeds stash_type: the statistic is as wide as X
    attributes = native.attributes(match)
    x = cast(op, norm_input(match, writer), match.x_type, dtype)
    if gain is not None and body.product_type == spec.normalized_type == dtype:
        gain = native.scale_input(match, writer, body, gain, dtype)
        return result(match, shift(op, body, writer.op(OPERATOR, x, gain, **attributes), match.bias))
    value = writer.op(OPERATOR, x, writer.constant(1.0, dtype), **attributes)
    value = cast(op, value, dtype, spec.normalized_type)
    return result(match, scale(op, body, value, gain, match.bias))


def read(node: ir.Node, types: TypeView) -> Reading | Declined | None:
    """The meaning of an RMSNormalization node; None for another operator."""
    if node.op_type != OPERATOR or node.domain not in ("", "ai.onnx"):
        return None
    try:
        return _read(node, types)
    except Unreadable as problem:
        return problem.declined(node)


def _read(node: ir.Node, types: TypeView) -> Reading:
    x, gain = value_input(node, 0, "X"), value_input(node, 1, "scale")
    x_type, gain_type = float_type(x, types, "X"), float_type(gain, types, "scale")
    axes = native.read_axes(node, types.shape(x))
    native.check_scale(types.shape(gain), types.shape(x), len(axes), "scale")
    notes: list[str] = []
    statistic = native.read_stash_type(node)
    if x_type == "float64" and statistic != "float64":
        stated = "default" if attribute(node, "stash_type", ir.AttributeType.INT, 0) == 0 else "stated"
        notes.append(f"read with a float64 statistic: runtimes compute so, whatever the {stated} stash_type says")
        statistic = "float64"
    elif not dtypes.holds(statistic, "float32"):
        notes.append(f"stash_type says {statistic}, where squares overflow or vanish; every form takes float32 for it")
    spec = RMSNormSpec(
        axes=axes,
        epsilon=native.read_epsilon(node, DEFAULT_EPSILON),
        statistic_type=statistic,
        factor_type=statistic,
    )
    if gain_type != x_type:
        notes.append(
            f"X is {x_type} and the scale {gain_type}, which runtimes refuse; read as torch's exporter means it: "
            f"multiplied without a rounding before, into {gain_type}"
        )
        wide = dtypes.wider(dtypes.wider(x_type, gain_type), "float32")
        spec = spec.replace(normalized_type=wide, gain_type=wide, result_type=gain_type)
    if native.is_one(gain):
        return Reading(spec=spec.replace(has_gain=False), x=x, notes=tuple(notes))
    return Reading(spec=spec, x=x, gain=gain, notes=tuple(notes))
