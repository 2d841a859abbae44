"""Reductions of a square: where every RMSNorm starts, and which value it may be a norm of."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.algebra import proves_fit
from rmsnorm_onnx.constants import Scalar
from rmsnorm_onnx.copies import Copies, integer
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.product import MeanSquare, Product, Reduction, Shifted, X
from rmsnorm_onnx.shapes import Shapes, reduction_axes
from rmsnorm_onnx.site import DeclineCode, node_name
from rmsnorm_onnx.view import Ref, View, onnx_op

_MEANS = ("ReduceMean", "ReduceSum")
_NORMS = ("ReduceSumSquare", "ReduceL2", "LpNormalization")
_MEAN_PATH = frozenset({*_MEANS, "Neg", "Unsqueeze", "Reshape", "Expand", "Cast", "Identity", "Div", "Mul"})
_ABOUT = 1e-2  # a factor of 1 in any type, half types too
REDUCTIONS = frozenset((*_MEANS, *_NORMS, "Einsum"))

_SMALLEST_NORMAL = {name: float(dtypes.finfo(name).tiny) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is not claimed: a code, a sentence, and the node at fault."""

    code: DeclineCode
    reason: str
    node: ir.Node


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A reduction together with one value that it may be the mean square of.

    Attributes:
        reduction: The reduction, in terms of this x's mean square.
        x: The value squared, before the casts that lose nothing.
        leading: How many elements of the last axis the statistic covers, if not all.
        types: The float types of the square and of its input: what the statistic is rounded to so far.
    """

    reduction: Reduction
    x: Ref
    leading: int | None
    types: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Square:
    """base * base * coefficient, with the float types on the way."""

    base: Ref
    coefficient: float
    types: tuple[str, ...]
    leading: int | None = None
    precision: float = 0.0


class Squares:
    """Reads reductions of a view."""

    def __init__(self, view: View, shapes: Shapes) -> None:
        self._view = view
        self._shapes = shapes
        self._copies = Copies(view, shapes)

    def candidates(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> list[Candidate] | Refusal | None:
        """What a reduction may be the mean square of, nearest value first; None if it reduces no square."""
        data = self._view.input(node, calls, 0)
        if data is None:
            return None
        square: _Square | Refusal | None
        if node.op_type == "Einsum":
            second = self._view.input(node, calls, 1)
            same = len(node.inputs) == 2 and second is not None and self._copies.peel(second) == self._copies.peel(data)
            square = _Square(data, 1.0, self._types(data)) if same else None
        elif node.op_type in _NORMS:
            if node.op_type == "LpNormalization" and integer(self._view, node, calls, "p", 2) != 2:
                return None
            square = _Square(data, 1.0, self._types(data))
        else:
            square = self._square(data)
        if square is None or isinstance(square, Refusal):
            return square
        return self._candidates(node, calls, square)

    def _candidates(
        self, node: ir.Node, calls: tuple[ir.Node, ...], square: _Square
    ) -> list[Candidate] | Refusal | None:
        shape = self._shapes.shape(square.base)
        if shape is None:
            return Refusal(
                DeclineCode.SHAPE_UNKNOWN,
                f"the rank of the value that {node_name(node)} reduces is unknown; run shape inference, or export with "
                "shapes",
                node,
            )
        axes = self._axes(node, calls, len(shape))
        if axes is None or isinstance(axes, Refusal):
            return axes
        centred = self._centred(square.base, axes)
        if centred is not None:
            return Refusal(
                DeclineCode.LAYER_NORM,
                f"{node_name(centred)} subtracts the mean first: this is LayerNorm (or a variance), not RMSNorm",
                centred,
            )
        found: list[Candidate] = []
        for x, leading, rounded in self._sources(square, axes):
            reduction = self._reduction(node, calls, square, axes, shape, leading)
            if isinstance(reduction, Refusal):
                return reduction
            found.append(Candidate(reduction, x, leading, (*square.types, *rounded)))
        return found

    def _axes(self, node: ir.Node, calls: tuple[ir.Node, ...], rank: int) -> tuple[int, ...] | Refusal | None:
        """The reduced axes, negative and ascending; None for an Einsum that sums no squares."""
        axes: tuple[int, ...] | None
        if node.op_type == "LpNormalization":
            axis = integer(self._view, node, calls, "axis", -1)
            axes = (axis % rank,) if -rank <= axis < rank else None
        elif node.op_type == "Einsum":
            equation = self._view.attribute(node, calls, "equation")
            axes = None if equation is None else squared_axes(equation.as_string(), rank)
            if not axes:
                return None
        else:
            axes = reduction_axes(self._shapes, node, calls, rank)
        if axes is None and self._reduces_nothing(node, calls):
            return None
        if axes is None:
            return Refusal(DeclineCode.AXES, f"the axes of {node_name(node)} are known only at run time", node)
        negative = tuple(a - rank for a in axes)
        if not proves_axes(negative):
            return Refusal(
                DeclineCode.AXES,
                f"{node_name(node)} reduces axes {list(negative)}: neither trailing axes nor one inner axis",
                node,
            )
        return negative

    def _reduces_nothing(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> bool:
        noop = integer(self._view, node, calls, "noop_with_empty_axes", 0)
        return bool(noop) and not self._shapes.axes_of(node, calls) and self._view.input(node, calls, 1) is None

    def _reduction(
        self,
        node: ir.Node,
        calls: tuple[ir.Node, ...],
        square: _Square,
        axes: tuple[int, ...],
        shape: Dims,
        leading: int | None,
    ) -> Reduction | Refusal:
        rank, kind = len(shape), node.op_type
        coefficient, exponent = square.coefficient, 1.0
        if kind != "ReduceMean":
            sizes = [leading] if leading is not None else [shape[a] for a in axes]
            if not all(isinstance(s, int) for s in sizes):
                return Refusal(
                    DeclineCode.SHAPE_UNKNOWN,
                    f"{node_name(node)} sums over an axis of unknown size, so whether it becomes a mean is not known; "
                    "export with that size fixed, or run shape inference",
                    node,
                )
            coefficient *= math.prod(s for s in sizes if isinstance(s, int))
        if kind in ("ReduceL2", "LpNormalization"):
            coefficient, exponent = math.sqrt(coefficient), 0.5
        output = Ref(node.outputs[0], calls)
        if kind == "LpNormalization":
            tiny = _SMALLEST_NORMAL.get(self._shapes.float_type(square.base) or "", 0.0)
            divisor = Shifted(coefficient, exponent, tiny, clamp=True)  # a zero row gives 0, not 0/0
            product = Product(powers={X(): 1.0, divisor: -1.0})
        else:
            keep = kind != "Einsum" and integer(self._view, node, calls, "keepdims", 1)
            product = Product(
                coefficient=coefficient,
                powers={MeanSquare(): exponent},
                squeezed=not keep,
                precision=square.precision,
            )
        return Reduction(node, calls, output, product, axes, rank)

    def _types(self, ref: Ref) -> tuple[str, ...]:
        name = self._shapes.float_type(ref)
        return () if name is None else (name,)

    def _square(self, ref: Ref) -> _Square | Refusal | None:
        """ref as coefficient * base * base, looking through casts, scalar factors and a leading part."""
        coefficient, precision, types, leading = 1.0, 0.0, self._types(ref), None
        for _ in range(16):
            node = ref.value.producer()
            if node is None or node.domain not in ("", "ai.onnx"):
                return None
            base = self._squared(node, ref)
            if base is not None:
                if isinstance(base, Refusal):
                    return base
                types += (*self._types(ref), *self._types(base))
                return _Square(base, coefficient, types, leading, precision)
            part = self._copies.leading_part(ref)
            scaled = self._scaled(node, ref)
            if part is not None and leading is None:
                ref, leading = part
            elif scaled is not None:
                ref, coefficient = scaled[0], coefficient * scaled[1]
                precision = max(precision, scaled[2])
            else:
                passed = self._copies.passed(node, ref)
                if passed is None:
                    return None
                ref = passed
            types += self._types(ref)
        return None

    def _squared(self, node: ir.Node, ref: Ref) -> Ref | Refusal | None:
        """The value that Pow or Mul squares; a refusal for another power."""
        first, second = self._view.input(node, ref.calls, 0), self._view.input(node, ref.calls, 1)
        if first is None or second is None:
            return None
        if node.op_type == "Mul":
            return first if self._copies.peel(first) == self._copies.peel(second) else None
        if node.op_type != "Pow" or not self._keeps_shape(first, second):
            return None
        exponent = self._shapes.constants.uniform(second)
        if exponent is None or not proves_exponent(exponent.value):
            what = "known only at run time" if exponent is None else f"{exponent.value:g}"
            return Refusal(DeclineCode.EXPONENT, f"the exponent of {node_name(node)} is {what}, not 2", node)
        return first

    def _keeps_shape(self, value: Ref, constant: Ref) -> bool:
        """Whether broadcasting against a constant leaves a value's shape alone."""
        shape, other = self._shapes.shape(value), self._shapes.shape(constant)
        return other == () or (shape is not None and proves_fit(other, shape))

    def _scaled(self, node: ir.Node, ref: Ref) -> tuple[Ref, float, float] | None:
        """(value, factor, the spacing at 1 of the factor's type) of a Mul or Div by a scalar constant."""
        if node.op_type not in ("Mul", "Div"):
            return None
        first, second = self._view.input(node, ref.calls, 0), self._view.input(node, ref.calls, 1)
        if first is None or second is None:
            return None
        number = self._shapes.constants.scalar(second)
        if number is not None and number.value and self._keeps_shape(first, second):
            factor = number.value if node.op_type == "Mul" else 1.0 / number.value
            return first, factor, _spacing(number)
        number = self._shapes.constants.scalar(first)
        if node.op_type == "Mul" and number is not None and self._keeps_shape(second, first):
            return second, number.value, _spacing(number)
        return None

    def _sources(self, square: _Square, axes: tuple[int, ...]) -> list[tuple[Ref, int | None, tuple[str, ...]]]:
        """The values that may be x: the one squared, what it was rounded from, what it is the leading part of.

        Each with its count, and with the types that the statistic was rounded to on the way from it.
        """
        whole, leading = self._copies.peel(square.base), square.leading
        ref = self._copies.peel(whole, even=True)
        rounded: tuple[str, ...] = ()
        found = [(r, leading, rounded) for r in dict.fromkeys((whole, ref))]
        for _ in range(4):
            node = ref.value.producer()
            if node is None:
                break
            part = self._copies.leading_part(ref) if leading is None and axes == (-1,) else None
            source = self._copies.passed(node, ref) if part is None else part[0]
            if source is None:
                break
            leading = part[1] if part is not None else leading
            rounded += self._types(ref)
            ref = self._copies.peel(source, even=True)
            found.append((ref, leading, rounded))
        return found

    def _centred(self, base: Ref, axes: tuple[int, ...]) -> ir.Node | None:
        """The Sub that takes the mean over the same axes away from the value that is squared, if there is one."""
        ref = self._copies.peel(base, even=True)
        node = ref.value.producer()
        return node if node is not None and is_centring(self._view, self._shapes, node, ref.calls, axes) else None


def is_centring(
    view: View, shapes: Shapes, node: ir.Node, calls: tuple[ir.Node, ...], axes: tuple[int, ...] | None = None
) -> bool:
    """Whether a node subtracts from a value its own mean (over the given axes, if any are given)."""
    kind = onnx_op(node)
    if kind not in ("Sub", "Add"):
        return False
    first, second = view.input(node, calls, 0), view.input(node, calls, 1)
    for whole, mean in ((first, second), (second, first)) if kind == "Add" else ((first, second),):
        found = None if mean is None else _reduced(view, shapes, mean)
        source = None if found is None else view.input(found[0], found[1], 0)
        copies = Copies(view, shapes)
        if whole is None or found is None or source is None or copies.peel(source) != copies.peel(whole):
            continue
        reducer, at, factor = found
        shape = shapes.shape(whole)
        reduced = None if shape is None else reduction_axes(shapes, reducer, at, len(shape))
        if axes is not None and reduced and shape is not None and tuple(a - len(shape) for a in reduced) != axes:
            continue
        count = math.prod(_size(shape, a) for a in reduced or ()) if onnx_op(reducer) == "ReduceSum" else 1.0
        if math.isnan(count) or abs(factor * count - (1.0 if kind == "Sub" else -1.0)) < _ABOUT:
            return True
    return False


def _size(shape: Dims | None, axis: int) -> float:
    size = None if shape is None else shape[axis]
    return float(size) if isinstance(size, int) else math.nan


def _reduced(view: View, shapes: Shapes, ref: Ref) -> tuple[ir.Node, tuple[ir.Node, ...], float] | None:
    """(reduction, its calls, factor) of a scaled mean or sum, through what moves, casts and negates it."""
    factor = 1.0
    for _ in range(8):
        node = ref.value.producer()
        kind = onnx_op(node)
        if node is None or kind not in _MEAN_PATH:
            return None
        if kind in _MEANS:
            return node, ref.calls, factor
        source = view.input(node, ref.calls, 0)
        if kind in ("Mul", "Div"):
            number = shapes.constants.scalar(view.input(node, ref.calls, 1))
            if number is None and kind == "Mul":
                number, source = shapes.constants.scalar(source), view.input(node, ref.calls, 1)
            if number is None or not number.value:
                return None
            factor *= number.value if kind == "Mul" else 1.0 / number.value
        factor = -factor if kind == "Neg" else factor
        if source is None:
            return None
        ref = source
    return None


def squared_axes(equation: str, rank: int) -> tuple[int, ...] | None:
    """The axes over which an Einsum of a value with itself sums squares, not negative; None where it does not.

    >>> squared_axes("...d,...d->...", 3), squared_axes("bsd, bsd -> bs", 3), squared_axes("ij,jk->ik", 2)
    ((2,), (2,), None)
    """
    left, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = left.partition(",")
    letters = first.replace("...", "")
    plain = len(set(letters)) == len(letters) and (len(letters) == rank or first.startswith("..."))
    if not arrow or first != second or not plain or ("..." in first) != ("..." in result):
        return None
    kept = result.replace("...", "")
    if kept != "".join(letter for letter in letters if letter in kept):
        return None
    return tuple(rank - len(letters) + i for i, letter in enumerate(letters) if letter not in kept)


def proves_axes(axes: tuple[int, ...]) -> bool:
    """PROOF CLAUSE (axis): one statistic is shared over trailing axes, or over one inner axis."""
    if not axes:
        return False
    return len(axes) == 1 or axes == tuple(range(-len(axes), 0))


def proves_exponent(value: float) -> bool:
    """PROOF CLAUSE (exponent): a mean square is the mean of a second power."""
    return value == 2.0


def _spacing(number: Scalar) -> float:
    known = number.dtype.name in dtypes.FLOAT_TYPES
    return float(dtypes.finfo(number.dtype.name).eps) if known else 0.0
