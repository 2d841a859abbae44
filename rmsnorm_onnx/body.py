"""The body of the operator: one generator, from a spec and its types to plain ONNX operators.

`Body` says what a body depends on, `emit` writes it through any onnxscript builder: `functions` wraps the result as a
model-local function, the `primitive` form writes it into the graph. The spelling is the one that runtimes fuse::

    Cast, Pow, ReduceMean, Add, Sqrt, Div, [Cast], Mul, [Add], [Cast]

Rules that each cost somebody wrong numbers or speed:

- x is cast to the statistic's type first even where that changes nothing: a function whose file is converted to float16
  afterwards then still squares in float32, and its float32 result makes runtimes refuse the file until `fuse` gives the
  node a body for float16. onnxruntime removes the Cast.
- No Cast that changes nothing stands at the end, nor CastLike anywhere: onnxruntime leaves both behind.
- bfloat16 products are float32 products between a cast down and a cast up: the product of two bfloat16 values is exact
  in float32, so it rounds to the same bfloat16, and a bfloat16 Mul has no kernel in onnxruntime.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.spec import RMSNormSpec

OLDEST_OPSET = 11

_WRITABLE = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """What a body depends on: two norms whose bodies are equal share one. Build it with `Body.of`.

    Attributes:
        spec: The canonical spec; its epsilon is 0 where the body takes epsilon from the node.
        x_type: x's float type.
        gain_type: The gain's own type; None without one.
        bias_type: The bias's own type; None without one.
        opset: The version of the default domain that the body is written for.
        gain_attribute: The gain is the tensor attribute `gain`, not an input.
        scalar_gain: The gain has rank 0.
    """

    spec: RMSNormSpec
    x_type: str
    gain_type: str | None
    bias_type: str | None
    opset: int
    gain_attribute: bool = False
    scalar_gain: bool = False

    @classmethod
    def of(
        cls,
        spec: RMSNormSpec,
        *,
        x_type: str,
        gain_type: str | None,
        bias_type: str | None = None,
        opset: int,
        gain_attribute: bool = False,
        scalar_gain: bool = False,
    ) -> Body:
        """The body of a spec for given types.

        Args:
            spec: Any spec that `refusal` has no objection to.
            x_type: x's float type.
            gain_type: The gain's own type, needed when the spec has a gain.
            bias_type: The bias's own type, by default x's when the spec has a bias.
            opset: The version of the default domain.
            gain_attribute: Whether the gain is an attribute.
            scalar_gain: Whether the gain has rank 0.

        >>> a = Body.of(RMSNormSpec(epsilon=1e-5), x_type="float32", gain_type="float32", opset=18)
        >>> a == Body.of(RMSNormSpec(epsilon=1e-6), x_type="float32", gain_type="float32", opset=18)
        True
        """
        spec = spec.canonical(x_type)
        body = cls(
            spec=spec,
            x_type=x_type,
            gain_type=(gain_type or x_type) if spec.has_gain else None,
            bias_type=(bias_type or x_type) if spec.has_bias else None,
            opset=opset,
            gain_attribute=gain_attribute and spec.has_gain,
            scalar_gain=scalar_gain and spec.has_gain,
        )
        return body if body.bakes_epsilon else dataclasses.replace(body, spec=spec.replace(epsilon=0.0))

    @property
    def bakes_epsilon(self) -> bool:
        """Whether epsilon is a Constant of the body, not a reference to the node's attribute.

        A float attribute is float32, which is wrong for a double statistic; and no operator of opset 11 turns a float
        attribute into a tensor.
        """
        return self.spec.statistic_type == "float64" or self.opset < 12

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order; a node has as many."""
        gain = self.spec.has_gain and not self.gain_attribute
        return ("x", *(("gain",) if gain else ()), *(("bias",) if self.spec.has_bias else ()))

    @property
    def product_type(self) -> str:
        """The type of the product with the gain."""
        return self.spec.product_type(self.x_type)

    @property
    def inner_axis(self) -> bool:
        """Whether the statistic is over one axis that is not the last (channel-first)."""
        return self.spec.axes[-1] != -1

    def digest(self, length: int = 8) -> str:
        """Hexadecimal digits that differ when the bodies differ."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:length]


def refusal(spec: RMSNormSpec, x_type: str, opset: int) -> str | None:
    """Why no body computes this spec exactly in one sentence, or None when one does.

    >>> refusal(RMSNormSpec(statistic_type="float16"), "float16", 18)
    'a statistic in float16 is not written: raise statistic_type to float32 first'
    """
    if not OLDEST_OPSET <= opset <= onnx.defs.onnx_opset_version():
        return f"opset {opset} is outside {OLDEST_OPSET} to {onnx.defs.onnx_opset_version()}, the opsets bodies know"
    r = spec.resolve(x_type)
    types = {"x": x_type, **{f: getattr(r, f) for f in ("statistic_type", "factor_type", "normalized_type")}}
    types |= {"gain_type": r.gain_type, "result_type": r.result_type}
    for field, name in types.items():
        if name not in _WRITABLE:
            return f"{field} is {name}, and the norms of this package are written in {', '.join(_WRITABLE)} only"
        if name == "bfloat16" and opset < 13:
            return f"{field} is bfloat16, which opset {opset} cannot cast; it takes opset 13"
    if r.statistic_type not in ("float32", "float64"):
        return f"a statistic in {r.statistic_type} is not written: raise statistic_type to float32 first"
    return None


def emit(
    op: Any,
    body: Body,
    x: ir.Value,
    gain: ir.Value | None,
    bias: ir.Value | None,
    epsilon: ir.Value,
    clamp: str = "Max",
) -> ir.Value:
    """Writes the body's operators and returns the result.

    Args:
        op: An onnxscript builder: `op.Mul(a, b)` adds a node and returns its output.
        body: What to write.
        x: The value to normalise, of `body.x_type`.
        gain: The gain as it is stored, of `body.gain_type`.
        bias: The bias as it is stored, of `body.bias_type`.
        epsilon: A scalar of the statistic's type.
        clamp: The operator that clamps by epsilon: Max or Clip.
    """
    return scale(op, body, normalize(op, body, x, epsilon, clamp), gain, bias)


def scale(op: Any, body: Body, normalized: ir.Value, gain: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """Multiplies by the gain: from x / rms, of normalized_type, to the result.

    The arguments are those of `emit`.
    """
    spec = body.spec
    if gain is None:
        return shift(op, body, normalized, bias)
    held = arithmetic(body.product_type)
    value = cast(op, normalized, spec.normalized_type, held)
    value = op.Mul(value, cast(op, weight(op, body, gain), spec.gain_type, held))
    return _shift(op, body, value, held, bias)


def shift(op: Any, body: Body, product: ir.Value, bias: ir.Value | None) -> ir.Value:
    """Adds the bias: from the product with the gain, of the product's type, to the result."""
    return _shift(op, body, product, body.product_type, bias)


def weight(op: Any, body: Body, gain: ir.Value) -> ir.Value:
    """offset + gain, in gain_type, from the gain as it is stored."""
    assert body.gain_type is not None
    spec = body.spec
    value = cast(op, gain, body.gain_type, spec.gain_type)
    if not spec.gain_offset:
        return value
    at = arithmetic(spec.gain_type)
    value = op.Add(cast(op, value, spec.gain_type, at), constant(op, spec.gain_offset, at))
    return cast(op, value, at, spec.gain_type)


def normalize(op: Any, body: Body, x: ir.Value, epsilon: ir.Value, clamp: str = "Max") -> ir.Value:
    """x / rms, rounded to normalized_type."""
    spec, stat = body.spec, body.spec.statistic_type
    s = op.Cast(x, to=dtypes.ir_dtype(stat))
    rms = _rms(op, body, s, epsilon, clamp)
    quotient = dtypes.wider(dtypes.wider(body.x_type, spec.factor_type), spec.normalized_type)
    quotient = dtypes.wider(quotient, "float32")
    if spec.factor_type == quotient == stat and spec.has_gain and not body.scalar_gain:
        value = op.Div(s, rms)
    else:
        # 1 / rms has a rounding of its own, or x is wider than the statistic. Or onnxruntime must not fuse it: without
        # a gain it would take whatever the result is multiplied by next for one, even where it widens x, and with a
        # gain of rank 0 and an x of rank 1 it writes a graph that does not load.
        factor = cast(op, op.Reciprocal(rms), stat, spec.factor_type)
        wide = s if stat == quotient else cast(op, x, body.x_type, quotient)
        value = op.Mul(wide, cast(op, factor, spec.factor_type, quotient))
    return cast(op, value, quotient, spec.normalized_type)


def arithmetic(dtype: str) -> str:
    """The type that products of a type are computed in."""
    return "float32" if dtype == "bfloat16" else dtype


def cast(op: Any, value: ir.Value, old: str, new: str) -> ir.Value:
    """A Cast where it changes the type, and none elsewhere."""
    return value if old == new else op.Cast(value, to=dtypes.ir_dtype(new))


def constant(op: Any, value: Any, dtype: str) -> ir.Value:
    """A Constant node; never an initializer, which function bodies cannot hold."""
    out: ir.Value = op.Constant(value=ir.tensor(np.asarray(value, dtype=dtypes.numpy_dtype(dtype))))
    return out


def _rms(op: Any, body: Body, s: ir.Value, epsilon: ir.Value, clamp: str) -> ir.Value:
    """The root of the mean square, with epsilon at its place, in statistic_type."""
    spec = body.spec
    if spec.leading is not None:
        ends = [np.array([v], dtype=np.int64) for v in (0, spec.leading, -1)]
        s = op.Slice(s, *(op.Constant(value=ir.tensor(v)) for v in ends))
    square = op.Pow(s, constant(op, 2.0, spec.statistic_type))
    if body.opset >= 18:
        axes = op.Constant(value=ir.tensor(np.array(spec.axes, dtype=np.int64)))
        mean = op.ReduceMean(square, axes, keepdims=1)
    else:
        mean = op.ReduceMean(square, axes=list(spec.axes), keepdims=1)
    if spec.epsilon_placement == "inside":
        return op.Sqrt(op.Add(mean, epsilon))  # type: ignore[no-any-return]
    root = op.Sqrt(mean)
    operator = "Add" if spec.epsilon_placement == "outside" else clamp
    out: ir.Value = getattr(op, operator)(root, epsilon)
    return out


def _shift(op: Any, body: Body, value: ir.Value, held: str, bias: ir.Value | None) -> ir.Value:
    """Adds the bias to a product that is held in another type than its own, and rounds to result_type."""
    product = body.product_type
    if bias is not None:
        assert body.bias_type is not None
        at = arithmetic(product)
        value = cast(op, cast(op, value, held, product), product, at)  # rounded first, as two operators round
        value = op.Add(value, cast(op, cast(op, bias, body.bias_type, product), product, at))
        held = at
    return cast(op, cast(op, value, held, product), product, body.spec.result_type)
