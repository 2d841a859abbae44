"""A node of the domain `rmsnorm_onnx` with its model-local function: runs everywhere.

onnxruntime inlines the function and fuses its body; TensorRT inlines it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from rmsnorm_onnx import functions
from rmsnorm_onnx.body import refusal as body_refusal
from rmsnorm_onnx.forms.reading import body_of, constant_gain, gain_input, norm_input, result
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.writer import Writer

NAME = "function"


def refusal(match: Match, opset: int) -> str | None:
    """Why no body computes the site's spec exactly; None when one does."""
    return body_refusal(match.spec, match.x_type, opset)


def rounding_change(match: Match) -> None:
    """None: a body holds every rounding of its spec."""


def write(match: Match, writer: Writer) -> ir.Value:
    """Writes the node, and its function where the file has none that is equal."""
    gain = constant_gain(match) if writer.gain_attribute else None
    body = body_of(match, writer.function_opset, gain_attribute=gain is not None)
    function = writer.functions.get(body)
    attributes: dict[str, Any] = dict(functions.node_attributes(match.spec))
    if gain is not None:
        attributes["gain"] = gain
    named = {"x": norm_input(match, writer), "gain": gain_input(match), "bias": match.bias}
    inputs = [named[name] for name in body.inputs]
    return result(match, writer.op(function.name, *inputs, domain=function.domain, **attributes))
