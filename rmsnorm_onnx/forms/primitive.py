"""Plain operators: the function's body, written in place. For consumers that know no other form.

A file that is converted to float16 afterwards is refused by runtimes, since epsilon stays float32 (from opset 12 on):
otherwise it would square in half. Convert another form, then expand it.
"""

from __future__ import annotations

import onnx_ir as ir

from rmsnorm_onnx.body import refusal as body_refusal
from rmsnorm_onnx.forms.reading import body_of, gain_input, norm_input, result
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.writer import Writer

NAME = "primitive"


def refusal(match: Match, opset: int) -> str | None:
    """Why no plain operators compute the site's spec exactly; None when some do."""
    return body_refusal(match.spec, match.x_type, opset)


def rounding_change(match: Match) -> None:
    """None: plain operators hold every rounding of the spec."""


def write(match: Match, writer: Writer) -> ir.Value:
    """Writes the operators of the body."""
    body = body_of(match, writer.opset)
    x = norm_input(match, writer)
    return result(match, writer.inline(body, x, gain_input(match), match.bias, match.spec.epsilon))
