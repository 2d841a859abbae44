"""Is what the recogniser says true? A `Match` is a claim about numbers, and it is measured on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from evaluate import Cell, Frame
from kit import NUMPY, formula

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.oracle import reference
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec

RELATIVE = 1e-6  # constants such as sqrt(d) are stored in float32; everything else is float64


def disagreement(
    value: np.ndarray, spec: object, x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None
) -> str | None:
    """Why a value is not this norm of x, or None. A zero row without epsilon is NaN in both."""
    with np.errstate(all="ignore"):
        plain = formula(spec, x, gain)
        want = formula(spec, x, gain, bias)
    if value.shape != want.shape or want.shape != x.shape:
        return f"the result has shape {value.shape}, the norm {want.shape}, x {x.shape}"
    allowed = RELATIVE * (np.abs(plain) + (0 if bias is None else np.abs(bias))) + 1e-300
    with np.errstate(all="ignore"):
        wrong = ~((np.abs(value - want) <= allowed) | (np.isnan(value) & np.isnan(want)) | (value == want))
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{wrong.sum()} of {wrong.size} elements differ: {value[index]!r} at {index}, the norm gives {want[index]!r}"


def falsehood(match: Match, frames: Sequence[Frame]) -> str | None:
    """Why a claim is false in some execution of its scope, or None; the reason names what differs."""
    executions = [frame for frame in frames if match.output in frame.maps[0]]
    if not executions:
        return f"no execution computes {match.output.name}"
    for frame in executions:
        wrong = _falsehood(match, frame)
        if wrong:
            return f"{match.output.name}: {wrong} (spec {match.spec})"
    return None


def _falsehood(match: Match, frame: Frame) -> str | None:
    x, y = frame[match.x], frame[match.output]
    spec = match.spec.replace(gain_offset=0.0)  # the operand holds it
    gain = operand(match.gain, frame, match.spec, match.x_type, offset=match.spec.gain_offset)
    bias = operand(match.bias, frame, match.spec, match.x_type)
    if match.spec.has_gain != (gain is not None) or match.spec.has_bias != (bias is not None):
        return "the spec and the operands disagree on gain or bias"
    if dtypes.float_name(x.dtype) != match.x_type:
        return f"x is {x.dtype}, claimed {match.x_type}"
    if match.gain is not None and dtypes.float_name(frame[match.gain].dtype) != match.gain_type:
        return f"the gain is {frame[match.gain].dtype}, claimed {match.gain_type}"
    result_type = match.spec.resolve(match.x_type).result_type
    if dtypes.float_name(y.dtype) != result_type:
        return f"the result is {y.dtype}, claimed {result_type}"
    wrong = disagreement(y.array, spec, x.array, gain, bias)
    if wrong is None and np.isfinite(y.array).all():
        exact = reference(spec, x.array, gain, bias)
        # both are float64, so they differ by the rounding of two orders of the same sums alone
        np.testing.assert_allclose(exact, formula(spec, x.array, gain, bias), rtol=1e-9, atol=1e-9)
    return wrong


def operand(value: ir.Value | None, frame: Frame, spec: RMSNormSpec, x_type: str, *, offset: float = 0.0) -> Any:
    """A gain or bias as it enters the norm: a constant is rounded to the type that the spec forms it in."""
    if value is None:
        return None
    cell: Cell = frame[value]
    if not cell.constant:
        return cell.array + offset
    dtype = NUMPY[spec.resolve(x_type).gain_type if offset else spec.product_type(x_type)]
    formed = cell.array.astype(dtype).astype(np.float64) + offset
    return formed.astype(dtype).astype(np.float64)
