"""From a power product to a claim: is this value x / rms(x), times a gain?

Every condition under which a value is claimed to be a norm is a proof clause here or in the modules it starts from.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.algebra import proves_fit
from rmsnorm_onnx.copies import Copies
from rmsnorm_onnx.dims import same_dim
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.product import Atom, Constant, MeanSquare, Product, Shifted, X
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import DeclineCode, node_name
from rmsnorm_onnx.spec import Placement
from rmsnorm_onnx.squares import Candidate, Refusal
from rmsnorm_onnx.view import Ref, View, onnx_op

_FLOAT64 = 2.0**-45  # the roundings of our own arithmetic
_HALF = 0.5

# What a weight may pass through on its way to the norm; anything else makes it an activation.
_WEIGHT_OPERATORS = frozenset(
    {"Cast", "CastLike", "Identity", "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Exp"}
    | {"Reshape", "Unsqueeze", "Squeeze", "Expand", "Transpose", "Slice", "Concat", "Gather", "Flatten"}
    | {"DequantizeLinear", "QuantizeLinear"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Gain:
    """A gain factor: the raw value, what is added to it, the type it is formed in, and the value that is multiplied."""

    value: Ref
    offset: float
    formed_in: str | None
    factor: Ref


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """A value that is proven to be x / rms(x) * gain, roundings aside."""

    root: Ref
    product: Product
    placement: Placement
    epsilon: float
    has_epsilon: bool
    gain: Gain | None
    statistic: tuple[Atom, float]
    rounded_coefficient: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Statistic:
    """A root of the mean square: where epsilon stands, and what its own coefficient contributes to the product's."""

    placement: Placement
    epsilon: float
    scale: float
    atom: Atom
    exponent: float
    rounded: str | None = None


class Claims:
    """Decides whether power products are norms of one candidate.

    Args:
        view: The model.
        shapes: Its types and shapes.
        candidate: The reduction and the x that the products are relative to.
    """

    def __init__(self, view: View, shapes: Shapes, candidate: Candidate) -> None:
        self._view = view
        self._shapes = shapes
        self._candidate = candidate
        self._copies = Copies(view, shapes)
        self._x_shape: Dims = shapes.shape(candidate.x) or ()

    def claim(self, product: Product, root: Ref) -> Claim | Refusal:
        """The claim that `root`, whose power product is given, is a norm; or why it is none."""
        node = root.value.producer()
        assert node is not None
        statistic = self._statistic(product, node)
        if isinstance(statistic, Refusal):
            return statistic
        gain = self._gain(product, statistic.scale, node)
        if isinstance(gain, Refusal):
            return gain
        factor, rounded = gain
        spread = self._spread(product, node)
        if spread is not None:
            return spread
        return Claim(
            root=root,
            product=product,
            placement=statistic.placement,
            epsilon=statistic.epsilon,
            has_epsilon=isinstance(statistic.atom, Shifted),
            gain=factor,
            statistic=(statistic.atom, statistic.exponent),
            rounded_coefficient=statistic.rounded or rounded,
        )

    def _statistic(self, product: Product, node: ir.Node) -> _Statistic | Refusal:
        """The one root of the mean square that a product divides by."""
        name = node_name(node)
        if product.squeezed:
            return Refusal(
                DeclineCode.SHAPE,
                f"{name} broadcasts the statistic along another axis than it was taken over (keepdims=0)",
                node,
            )
        if product.powers.get(X()) != 1:
            return Refusal(DeclineCode.NUMERATOR, f"what {name} divides is not the value that was squared", node)
        statistics = product.statistics
        if len(statistics) != 1:
            return Refusal(DeclineCode.EXPONENT, f"{name} combines more than one power of the mean square", node)
        atom, exponent = next(iter(statistics.items()))
        if isinstance(atom, MeanSquare):
            if exponent != -_HALF:
                return _not_a_root(node)
            return _Statistic("inside", 0.0, 1.0, atom, exponent)
        assert isinstance(atom, Shifted)
        k, inner = atom.coefficient, atom.exponent
        rounded = None if proves_coefficient(k, product.precision) else self._half_constant(k, atom.factors)
        if rounded is not None or proves_coefficient(k, product.precision):
            k = 1.0  # 1/d and d cancel up to a rounding: epsilon stays as it is stored
        epsilon = atom.constant / k
        if epsilon < 0:
            return Refusal(DeclineCode.EPSILON, f"epsilon is {epsilon:g}, and must not be negative", node)
        if inner == 1 and exponent == -_HALF:
            placement: Placement = "clamp" if atom.clamp else "inside"
            epsilon = math.sqrt(epsilon) if atom.clamp else epsilon  # the limit of the mean square, as one of its root
            return _Statistic(placement, epsilon, k**-0.5, atom, exponent, rounded)
        if inner == _HALF and exponent == -1:
            return _Statistic("clamp" if atom.clamp else "outside", epsilon, 1.0 / k, atom, exponent, rounded)
        return _not_a_root(node)

    def _gain(self, product: Product, scale: float, node: ir.Node) -> tuple[Gain | None, str | None] | Refusal:
        """The gain, if any, once everything else is proven to multiply to 1."""
        opaques = product.opaques
        coefficient = product.value * scale
        if not opaques:
            rounded = self._explains(product, scale)
            if rounded is not None:
                return None, rounded or None
            scalar = self._scalar_gain(product, coefficient)
            if scalar is not None:
                return scalar
        if len(opaques) > 1 or any(e != 1 for e in opaques.values()):
            return Refusal(DeclineCode.NUMERATOR, f"{node_name(node)} multiplies the norm by more than a gain", node)
        rounded = self._explains(product, scale)
        if rounded is None:
            return Refusal(
                DeclineCode.COEFFICIENT,
                f"what is left over at {node_name(node)} is {coefficient:.9g}, not 1 (a sum in place of a mean, an L2 "
                "norm without sqrt(d), or a factor)",
                node,
            )
        if not opaques:
            return None, rounded or None
        factor = next(iter(opaques)).ref
        refusal = self._proves_gain(factor, node)
        return refusal if refusal is not None else (self.read_gain(factor), rounded or None)

    def _explains(self, product: Product, scale: float) -> str | None:
        """How it is explained that nothing but 1 is left over; None where something is.

        An empty string says that the coefficient is proven to be 1, a sentence that only the rounding of a half
        constant parts it from 1.
        """
        coefficient = product.value * scale
        if len(product.constants) == 1 and abs(product.coefficient * scale - 1.0) < _FLOAT64:
            # Nothing that it was meant to cancel against: the constant is 1, or it is a factor of its own.
            return "" if coefficient == 1.0 else None
        if proves_coefficient(coefficient, product.precision):
            return ""
        return self._half_constant(coefficient, product.constants)

    def _half_constant(self, coefficient: float, constants: tuple[tuple[Constant, float], ...]) -> str | None:
        """What parts a coefficient from 1, where that is the one half constant in it, rounded to its type."""
        halves = [(c, e) for c, e in constants if c.half]
        if len(halves) == 1 and coefficient > 0:
            constant, exponent = halves[0]
            ideal = constant.value / coefficient ** (1 / exponent)
            dtype = self._shapes.constants.scalar(constant.ref)
            if dtype is not None and float(np.asarray(ideal).astype(dtype.dtype)) == constant.value:
                return (
                    f"the constant {ideal:.6g} stands in the graph rounded to {dtype.dtype.name}, "
                    f"as {constant.value:.6g}"
                )
        return None

    def _scalar_gain(self, product: Product, coefficient: float) -> tuple[Gain, str | None] | None:
        """A scalar constant that leaves 1 when it is taken out is a gain; with what parts the rest from 1."""
        for constant, exponent in product.constants:
            if exponent != 1:
                continue
            left = coefficient / constant.value
            others = tuple((c, e) for c, e in product.constants if c is not constant)
            rounded = None if proves_coefficient(left, product.precision) else self._half_constant(left, others)
            if rounded is not None or proves_coefficient(left, product.precision):
                return self.read_gain(constant.ref), rounded
        return None

    def _proves_gain(self, factor: Ref, node: ir.Node) -> Refusal | None:
        """A gain has x's extents on the normalised axes only, and comes from weights."""
        name = node_name(node)
        refusal = proves_extent(self._shapes.shape(factor), self._x_shape, self._candidate.reduction.axes, node)
        if refusal is not None:
            return refusal
        if not self.is_weight(factor):
            return Refusal(
                DeclineCode.NUMERATOR, f"{name} multiplies the norm by an activation, which is no gain", node
            )
        return None

    def _spread(self, product: Product, node: ir.Node) -> Refusal | None:
        """Nothing that takes part may have a larger shape than x."""
        for ref in product.spread:
            if not proves_fit(self._shapes.shape(ref), self._x_shape):
                return Refusal(
                    DeclineCode.SHAPE,
                    f"{ref.value.name} {_text(self._shapes.shape(ref))} is not proven to fit into x "
                    f"{_text(self._x_shape)} at {node_name(node)}",
                    node,
                )
        return None

    def read_gain(self, factor: Ref) -> Gain:
        """Splits offset + g off a factor, where both the addition and the casts around it are exact to restate."""
        bare = self.widened(factor)
        formed_in = self._shapes.float_type(bare)
        if formed_in is not None:
            gain = self._offset(bare, factor, formed_in) or self._rounded_offset(bare, factor, formed_in)
            if gain is not None:
                return gain
        return Gain(bare, 0.0, formed_in, factor)

    def _offset(self, total: Ref, factor: Ref, formed_in: str) -> Gain | None:
        """The gain of an Add of a weight and a scalar constant."""
        node = total.value.producer()
        if node is None or node.op_type != "Add" or node.domain not in ("", "ai.onnx"):
            return None
        first, second = self._view.input(node, total.calls, 0), self._view.input(node, total.calls, 1)
        for weight, constant in ((first, second), (second, first)):
            number = self._shapes.constants.scalar(constant)
            if weight is None or number is None or not math.isfinite(number.value):
                continue
            if self._shapes.shape(weight) == self._shapes.shape(total):
                return Gain(self.widened(weight), number.value, formed_in, factor)
        return None

    def _rounded_offset(self, bare: Ref, factor: Ref, formed_in: str) -> Gain | None:
        """The gain of a half sum that is formed in float32 and cast down: it rounds as one formed in the half type."""
        node = bare.value.producer()
        if node is None or onnx_op(node) != "Cast" or dtypes.holds(formed_in, "float32"):
            return None
        source = self._view.input(node, bare.calls, 0)
        gain = None if source is None else self._offset(source, factor, formed_in)
        own = None if gain is None else self._shapes.float_type(gain.value)
        if gain is None or own is None or not dtypes.holds(formed_in, own):
            return None
        held = float(np.asarray(gain.offset).astype(dtypes.numpy_dtype(formed_in)))
        return gain if held == gain.offset else None

    def widened(self, ref: Ref) -> Ref:
        """The value before casts that lose nothing, and before a multiplication by 1 (torchlib's alpha)."""
        for _ in range(8):
            node = ref.value.producer()
            if node is None or node.domain not in ("", "ai.onnx"):
                return ref
            if node.op_type == "Mul":
                source = self._copies.times_one(node, ref)
            elif node.op_type in ("Cast", "Identity"):
                source = self._view.input(node, ref.calls, 0)
            else:
                return ref
            before = None if source is None else self._shapes.float_type(source)
            after = self._shapes.float_type(ref)
            if source is None or before is None or after is None or not dtypes.holds(after, before):
                return ref
            ref = source
        return ref

    def is_weight(self, ref: Ref, depth: int = 12) -> bool:
        """Whether a value is a weight: stored, given as a graph input, or formed from such by operators on weights."""
        node = ref.value.producer()
        if node is None:
            return ref != self._candidate.x
        if onnx_op(node) == "Constant":
            return True
        if depth == 0 or onnx_op(node) not in _WEIGHT_OPERATORS or ref == self._candidate.x:
            return False
        return all(r is None or self.is_weight(r, depth - 1) for r in self._view.inputs(node, ref.calls))

    def proves_bias(self, ref: Ref, node: ir.Node) -> bool:
        """Whether an added value is a bias: a weight with extents on the normalised axes only."""
        axes = self._candidate.reduction.axes
        if proves_extent(self._shapes.shape(ref), self._x_shape, axes, node) is not None or not self.is_weight(ref):
            return False
        shape = self._shapes.shape(ref) or ()
        stored = self._shapes.constants.tensor(self.widened(ref)) is not None
        return bool(shape) and (stored or len(shape) <= len(axes) < len(self._x_shape))


def _not_a_root(node: ir.Node) -> Refusal:
    return Refusal(
        DeclineCode.EXPONENT, f"{node_name(node)} does not divide by the one square root of the mean square", node
    )


def proves_coefficient(coefficient: float, precision: float) -> bool:
    """PROOF CLAUSE (coefficient): what multiplies x / rms(x), apart from the gain, is 1.

    Constants such as sqrt(d) and 1/d were each rounded to their type, by half its spacing at most: four such roundings
    are forgiven.
    """
    return abs(coefficient - 1.0) <= 2 * precision + _FLOAT64


def proves_extent(shape: Dims | None, x_shape: Dims, axes: tuple[int, ...], node: ir.Node) -> Refusal | None:
    """PROOF CLAUSE (shape): a gain or bias has x's extents on the normalised axes, and 1 on the others."""
    name = node_name(node)
    if shape is None or len(shape) > len(x_shape):
        code = DeclineCode.SHAPE_UNKNOWN if shape is None else DeclineCode.SHAPE
        return Refusal(code, f"the factor {_text(shape)} at {name} is not proven to fit into x {_text(x_shape)}", node)
    for offset in range(-len(shape), 0):
        size, x_size = shape[offset], x_shape[offset]
        if size == 1 or (offset in axes and same_dim(size, x_size)):
            continue
        unknown = size is None or not isinstance(x_size, int)
        return Refusal(
            DeclineCode.SHAPE_UNKNOWN if unknown and offset in axes else DeclineCode.SHAPE,
            f"the factor {_text(shape)} at {name} is not proven to lie on axes {list(axes)} of x {_text(x_shape)} only",
            node,
        )
    return None


def _text(shape: Dims | None) -> str:
    return "of unknown shape" if shape is None else "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"
