"""Reductions of a square: where every RMSNorm starts, and which value it may be a norm of."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.algebra import takes_all
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.product import MeanSquare, Product, Reduction, Shifted, X
from rmsnorm_onnx.shapes import Shapes, reduction_axes, same_shape
from rmsnorm_onnx.site import DeclineCode, node_name
from rmsnorm_onnx.view import Ref, View

_MEANS = ("ReduceMean", "ReduceSum")
_NORMS = ("ReduceSumSquare", "ReduceL2", "LpNormalization")
REDUCTIONS = frozenset((*_MEANS, *_NORMS))

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


class Squares:
    """Reads reductions of a view."""

    def __init__(self, view: View, shapes: Shapes) -> None:
        self._view = view
        self._shapes = shapes

    def candidates(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> list[Candidate] | Refusal | None:
        """What a reduction may be the mean square of, nearest value first; None if it reduces no square."""
        data = self._view.input(node, calls, 0)
        if data is None:
            return None
        square: _Square | Refusal | None
        if node.op_type in _NORMS:
            if node.op_type == "LpNormalization" and _integer(self._view, node, calls, "p", 2) != 2:
                return None
            square = _Square(data, 1.0, self._types(data))
        else:
            square = self._square(data)
        if square is None or isinstance(square, Refusal):
            return square
        return self._candidates(node, calls, square)

    def _candidates(self, node: ir.Node, calls: tuple[ir.Node, ...], square: _Square) -> list[Candidate] | Refusal:
        shape = self._shapes.shape(square.base)
        if shape is None:
            return Refusal(
                DeclineCode.SHAPE_UNKNOWN,
                f"the rank of the value that {node_name(node)} reduces is unknown; run shape inference, or export with "
                "shapes",
                node,
            )
        axes = self._axes(node, calls, len(shape))
        if isinstance(axes, Refusal):
            return axes
        centred = self._centred(square.base, axes)
        if centred is not None:
            return Refusal(
                DeclineCode.LAYER_NORM,
                f"{node_name(centred)} subtracts the mean first: this is LayerNorm (or a variance), not RMSNorm",
                centred,
            )
        found: list[Candidate] = []
        for x, leading in self._sources(square, axes):
            reduction = self._reduction(node, calls, square, axes, shape, leading)
            if isinstance(reduction, Refusal):
                return reduction
            found.append(Candidate(reduction, x, leading, square.types))
        return found

    def _axes(self, node: ir.Node, calls: tuple[ir.Node, ...], rank: int) -> tuple[int, ...] | Refusal:
        """The reduced axes, negative and ascending."""
        if node.op_type == "LpNormalization":
            axis = _integer(self._view, node, calls, "axis", -1)
            axes: tuple[int, ...] | None = (axis % rank,) if -rank <= axis < rank else None
        else:
            axes = reduction_axes(self._shapes, node, calls, rank)
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
            keep = _integer(self._view, node, calls, "keepdims", 1)
            product = Product(coefficient=coefficient, powers={MeanSquare(): exponent}, squeezed=not keep)
        return Reduction(node, calls, output, product, axes, rank)

    def _types(self, ref: Ref) -> tuple[str, ...]:
        name = self._shapes.float_type(ref)
        return () if name is None else (name,)

    def _square(self, ref: Ref) -> _Square | Refusal | None:
        """ref as coefficient * base * base, looking through casts, scalar factors and a leading part."""
        coefficient, types, leading = 1.0, self._types(ref), None
        for _ in range(16):
            node = ref.value.producer()
            if node is None or node.domain not in ("", "ai.onnx"):
                return None
            base = self._squared(node, ref)
            if base is not None:
                if isinstance(base, Refusal):
                    return base
                return _Square(base, coefficient, (*types, *self._types(ref), *self._types(base)), leading)
            part = self._leading_part(ref)
            scaled = self._scaled(node, ref)
            if part is not None and leading is None:
                ref, leading = part
            elif scaled is not None:
                ref, coefficient = scaled[0], coefficient * scaled[1]
            else:
                passed = self.passed(node, ref)
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
            return first if self._peel(first) == self._peel(second) and self._keeps_shape(ref, first) else None
        if node.op_type != "Pow" or not self._keeps_shape(ref, first):
            return None
        exponent = self._shapes.constants.uniform(second)
        if exponent is None or not proves_exponent(exponent.value):
            what = "known only at run time" if exponent is None else f"{exponent.value:g}"
            return Refusal(DeclineCode.EXPONENT, f"the exponent of {node_name(node)} is {what}, not 2", node)
        return first

    def _keeps_shape(self, result: Ref, source: Ref) -> bool:
        a, b = self._shapes.shape(result), self._shapes.shape(source)
        if a is None or b is None:
            return a is b
        return len(a) == len(b) and all(p == q for p, q in zip(a, b, strict=True))

    def _scaled(self, node: ir.Node, ref: Ref) -> tuple[Ref, float] | None:
        """(value, factor) of a Mul or Div by a scalar constant."""
        if node.op_type not in ("Mul", "Div"):
            return None
        first, second = self._view.input(node, ref.calls, 0), self._view.input(node, ref.calls, 1)
        if first is None or second is None:
            return None
        number = self._shapes.constants.scalar(second)
        if number is not None and number.value and self._keeps_shape(ref, first):
            return first, number.value if node.op_type == "Mul" else 1.0 / number.value
        number = self._shapes.constants.scalar(first)
        if node.op_type == "Mul" and number is not None and self._keeps_shape(ref, second):
            return second, number.value
        return None

    def passed(self, node: ir.Node, ref: Ref) -> Ref | None:
        """The input of an operator that changes no number: Identity, a float Cast, a no-op Reshape, Slice, Expand."""
        source = self._view.input(node, ref.calls, 0)
        if source is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type in ("Cast", "CastLike"):
            floats = self._shapes.float_type(source) is not None and self._shapes.float_type(ref) is not None
            return source if floats else None
        if node.op_type == "Identity":
            return source
        if node.op_type == "Slice":
            return source if takes_all(self._view, self._shapes, node, ref) else None
        if node.op_type in ("Reshape", "Expand"):
            same = same_shape(self._shapes.shape(source), self._shapes.shape(ref))
            return source if same else None
        return None

    def _peel(self, ref: Ref, *, even: bool = False) -> Ref:
        """The value before every operator that loses nothing (and before Abs and Neg, under an even power)."""
        for _ in range(16):
            node = ref.value.producer()
            if node is None:
                return ref
            source = self.passed(node, ref)
            if source is None and even and node.op_type in ("Abs", "Neg") and node.domain == "":
                source = self._view.input(node, ref.calls, 0)
            if source is None or not self._lossless(source, ref):
                return ref
            ref = source
        return ref

    def _lossless(self, source: Ref, result: Ref) -> bool:
        before, after = self._shapes.float_type(source), self._shapes.float_type(result)
        return before == after or (before is not None and after is not None and dtypes.holds(after, before))

    def _sources(self, square: _Square, axes: tuple[int, ...]) -> list[tuple[Ref, int | None]]:
        """The values that may be x: the one squared, what it was rounded from, what it is the leading part of."""
        whole, leading = self._peel(square.base), square.leading
        ref = self._peel(whole, even=True)
        found = [(whole, leading)] if ref == whole else [(whole, leading), (ref, leading)]
        for _ in range(4):
            node = ref.value.producer()
            if node is None:
                break
            part = self._leading_part(ref) if leading is None and axes == (-1,) else None
            source = self.passed(node, ref) if part is None else part[0]
            if source is None:
                break
            leading = part[1] if part is not None else leading
            ref = self._peel(source, even=True)
            found.append((ref, leading))
        return found

    def _leading_part(self, ref: Ref) -> tuple[Ref, int] | None:
        """(whole value, count) where ref is the first `count` elements of its last axis, by Slice or Split."""
        node = ref.value.producer()
        shape = self._shapes.shape(ref)
        if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in ("Slice", "Split"):
            return None
        source = self._view.input(node, ref.calls, 0)
        whole = None if source is None else self._shapes.shape(source)
        if source is None or whole is None:
            return None
        if node.op_type == "Split":
            axis = _integer(self._view, node, ref.calls, "axis", 0) % len(whole)
            count = None if shape is None else shape[-1]
            first = axis == len(whole) - 1 and ref.value.index() == 0
            return (source, count) if first and isinstance(count, int) and count > 0 else None
        window = self._shapes.slice_window(node, ref.calls, len(whole))
        if window is None or set(window) != {len(whole) - 1}:
            return None
        start, end = window[len(whole) - 1]
        size = whole[-1]
        if start != 0 or (end < 0 and not isinstance(size, int)):
            return None
        if isinstance(size, int):
            end = len(range(*slice(start, end).indices(size)))
        return (source, end) if 0 < end < 2**31 - 1 and size != end else None

    def _centred(self, base: Ref, axes: tuple[int, ...]) -> ir.Node | None:
        """The Sub that takes the mean over the same axes away from the value that is squared, if there is one."""
        ref = self._peel(base, even=True)
        node = ref.value.producer()
        return node if node is not None and is_centring(self._view, self._shapes, node, ref.calls, axes) else None


def is_centring(
    view: View, shapes: Shapes, node: ir.Node, calls: tuple[ir.Node, ...], axes: tuple[int, ...] | None = None
) -> bool:
    """Whether a node subtracts from a value its own mean (over the given axes, if any are given)."""
    if node.op_type != "Sub" or node.domain not in ("", "ai.onnx"):
        return False
    squares = Squares(view, shapes)
    whole, mean = view.input(node, calls, 0), view.input(node, calls, 1)
    if whole is None or mean is None:
        return False
    mean = squares._peel(mean)
    reducer = mean.value.producer()
    if reducer is None or reducer.op_type != "ReduceMean":
        return False
    source, shape = view.input(reducer, mean.calls, 0), shapes.shape(whole)
    if source is None or squares._peel(source) != squares._peel(whole):
        return False
    if axes is None or shape is None:
        return True
    reduced = reduction_axes(shapes, reducer, mean.calls, len(shape))
    return reduced is not None and tuple(a - len(shape) for a in reduced) == axes


def proves_axes(axes: tuple[int, ...]) -> bool:
    """PROOF CLAUSE (axis): one statistic is shared over trailing axes, or over one inner axis."""
    if not axes:
        return False
    return len(axes) == 1 or axes == tuple(range(-len(axes), 0))


def proves_exponent(value: float) -> bool:
    """PROOF CLAUSE (exponent): a mean square is the mean of a second power."""
    return value == 2.0


def _integer(view: View, node: ir.Node, calls: tuple[ir.Node, ...], name: str, default: int) -> int:
    attr = view.attribute(node, calls, name)
    return default if attr is None else attr.as_int()
