"""Values as power products: c * prod(atom ** exponent), relative to one reduction and one x.

Mul and Div add and subtract exponents; Sqrt, Reciprocal and Pow with a constant scale them; a scalar constant is part
of the coefficient; Identity and a Cast between float types are seen through. The mean square of x is an atom, so is
the sum of a power of it and a constant, and everything else (a weight, an activation, x itself) is opaque. No
distributivity, no solver: what the ten equations do not say is not claimed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.dims import same_dim, same_shape
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.product import Constant, MeanSquare, Opaque, Product, Reduction, Shifted, X
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.view import Ref, View

_DEPTH = 48  # operators between x and a value of its norm; more is no norm


class Algebra:
    """Power products of values, relative to a reduction and to the x that it squares.

    Args:
        view: The model.
        shapes: Its types and shapes.
        reduction: Where the mean square comes from.
        x: The value taken as one atom, even if it is itself a product.
    """

    def __init__(self, view: View, shapes: Shapes, reduction: Reduction, x: Ref) -> None:
        self._view = view
        self._shapes = shapes
        self._reduction = reduction
        self.x = x
        self._memo: dict[Ref, Product] = {}
        self._depth = 0

    def product(self, ref: Ref) -> Product:
        """The power product of a resolved Ref."""
        if ref not in self._memo:
            self._memo[ref] = Product(powers={Opaque(ref): 1.0})  # also what a cycle or a deep chain gives
            if self._depth < _DEPTH:
                self._depth += 1
                self._memo[ref] = self._evaluate(ref)
                self._depth -= 1
        return self._memo[ref]

    def _evaluate(self, ref: Ref) -> Product:
        if ref == self.x:
            return Product(powers={X(): 1.0})
        if ref == self._reduction.output:
            return self._reduction.product
        node = ref.value.producer()
        rule = None if node is None or node.domain not in ("", "ai.onnx") else _RULES.get(node.op_type)
        if node is not None and rule is not None:
            found = rule(self, node, ref)
            if found is not None and found.of_norm:
                return found  # a product of weights and activations alone is one value
        return self._constant(ref) or Product(powers={Opaque(ref): 1.0})

    def _constant(self, ref: Ref) -> Product | None:
        """A scalar constant as a factor; None for what is none, or what nothing can be divided by."""
        scalar = self._shapes.constants.scalar(ref)
        if scalar is None or scalar.dtype.name not in dtypes.FLOAT_TYPES:
            return None
        if scalar.value == 0 or not math.isfinite(scalar.value):
            return None
        half = not dtypes.holds(scalar.dtype.name, "float32")
        precision = 0.0 if half else float(dtypes.finfo(scalar.dtype.name).eps)
        constant = Constant(ref, scalar.value, half)
        return Product(constants=((constant, 1.0),), spread=(ref,), precision=precision)

    def _input(self, node: ir.Node, ref: Ref, index: int) -> Product | None:
        source = self._view.input(node, ref.calls, index)
        return None if source is None else self.product(source)

    def _mul(self, node: ir.Node, ref: Ref) -> Product | None:
        return self._combine(node, ref, 1)

    def _div(self, node: ir.Node, ref: Ref) -> Product | None:
        return self._combine(node, ref, -1)

    def _combine(self, node: ir.Node, ref: Ref, sign: int) -> Product | None:
        a, b = self._input(node, ref, 0), self._input(node, ref, 1)
        if a is None or b is None:
            return None
        if not proves_alignment(a, b, self._reduction) or not proves_no_cancelling(a, b, sign):
            return None
        product = a.times(b, sign)
        if product.squeezed and a.squeezed != b.squeezed and not (a.is_constant or b.is_constant):
            return dataclasses.replace(product, squeezed=False)
        return product

    def _power_by(self, node: ir.Node, ref: Ref, exponent: float) -> Product | None:
        base = self._input(node, ref, 0)
        return None if base is None else base.power(exponent)

    def _pow(self, node: ir.Node, ref: Ref) -> Product | None:
        exponent = self._shapes.constants.scalar(self._view.input(node, ref.calls, 1))
        if exponent is None or not math.isfinite(exponent.value):
            return None
        if exponent.value % 0.25 or abs(exponent.value) > 4:
            return None  # quarters are exact in floats, however they are combined here
        result, given = self._power_by(node, ref, exponent.value), self._view.input(node, ref.calls, 1)
        return None if result is None or given is None else self._spread_by(result, given)

    def _neg(self, node: ir.Node, ref: Ref) -> Product | None:
        base = self._input(node, ref, 0)
        return None if base is None else dataclasses.replace(base, coefficient=-base.coefficient)

    def _cast(self, node: ir.Node, ref: Ref) -> Product | None:
        """A Cast between float types is seen through: its rounding is looked at once the norm is found."""
        source = self._view.input(node, ref.calls, 0)
        if source is None or not proves_type(self._shapes, source, ref):
            return None
        return self.product(source)

    def _same(self, node: ir.Node, ref: Ref) -> Product | None:
        return self._input(node, ref, 0)

    def _abs(self, node: ir.Node, ref: Ref) -> Product | None:
        base = self._input(node, ref, 0)
        return base if base is not None and base._positive else None

    def _add(self, node: ir.Node, ref: Ref) -> Product | None:
        a, b = self._view.input(node, ref.calls, 0), self._view.input(node, ref.calls, 1)
        return self._shifted(a, b, 1) or self._shifted(b, a, 1)

    def _sub(self, node: ir.Node, ref: Ref) -> Product | None:
        a, b = self._view.input(node, ref.calls, 0), self._view.input(node, ref.calls, 1)
        return self._shifted(a, b, -1)

    def _shifted(self, base: Ref | None, constant: Ref | None, sign: int, *, clamp: bool = False) -> Product | None:
        """base + sign * constant, or max(base, constant), where base is a power of the mean square."""
        if base is None or constant is None:
            return None
        product = self.product(base)
        if len(product.powers) != 1 or not isinstance(next(iter(product.powers)), MeanSquare) or product.value <= 0:
            return None
        number = self._shapes.constants.uniform(constant)
        if number is None or not math.isfinite(number.value):
            return None
        exponent = product.powers[MeanSquare()]
        atom = Shifted(product.value, exponent, sign * number.value, clamp, product.constants)
        result = Product(
            powers={atom: 1.0}, squeezed=product.squeezed, spread=product.spread, precision=product.precision
        )
        return self._spread_by(result, constant)

    def _spread_by(self, product: Product, constant: Ref) -> Product | None:
        """A product that a constant was broadcast with; None where that gives a squeezed one another shape."""
        if product.squeezed and not self._reduction.over_first_axes:
            x_shape = self._shapes.shape(self.x) or ()
            rest = tuple(d for i, d in enumerate(x_shape) if i - len(x_shape) not in self._reduction.axes)
            return product if proves_fit(self._shapes.shape(constant), rest) else None
        return product.spread_with(constant)

    def _max(self, node: ir.Node, ref: Ref) -> Product | None:
        if len(node.inputs) != 2:
            return None
        a, b = self._view.input(node, ref.calls, 0), self._view.input(node, ref.calls, 1)
        return self._shifted(a, b, 1, clamp=True) or self._shifted(b, a, 1, clamp=True)

    def _clip(self, node: ir.Node, ref: Ref) -> Product | None:
        base, low, high = (self._view.input(node, ref.calls, i) for i in range(3))
        if high is not None:
            limit = self._shapes.constants.scalar(high)
            if limit is None or limit.value < float(dtypes.finfo(limit.dtype.name).max):
                return None
        return self._shifted(base, low, 1, clamp=True)

    def _unsqueeze(self, node: ir.Node, ref: Ref) -> Product | None:
        base = self._input(node, ref, 0)
        axes = self._shapes.axes_of(node, ref.calls)
        source = self._view.input(node, ref.calls, 0)
        shape = None if source is None else self._shapes.shape(source)
        if base is None or not base.squeezed or axes is None or shape is None:
            return None
        rank = self._reduction.rank
        if len(shape) + len(axes) != rank or {a - rank if a >= 0 else a for a in axes} != set(self._reduction.axes):
            return None
        return dataclasses.replace(base, squeezed=False)

    def _reshape(self, node: ir.Node, ref: Ref) -> Product | None:
        base, source = self._input(node, ref, 0), self._view.input(node, ref.calls, 0)
        if base is None or source is None or not base.of_norm:
            return None
        before, after = self._shapes.shape(source), self._shapes.shape(ref)
        if same_shape(before, after):
            return base
        x_shape = self._shapes.shape(self.x)
        if base.squeezed and x_shape is not None and before is not None:
            axes = {a + self._reduction.rank for a in self._reduction.axes}
            kept = tuple(1 if i in axes else d for i, d in enumerate(x_shape))
            flat = tuple(d for i, d in enumerate(x_shape) if i not in axes)
            if same_shape(before, flat) and same_shape(after, kept):
                return dataclasses.replace(base, squeezed=False)
        return None

    def _expand(self, node: ir.Node, ref: Ref) -> Product | None:
        base = self._input(node, ref, 0)
        if base is None or base.squeezed:
            return None
        source = self._view.input(node, ref.calls, 1)
        if source is not None and self._is_shape_of_x(source):
            return base
        return base.spread_with(ref)

    def _is_shape_of_x(self, target: Ref) -> bool:
        node = target.value.producer()
        if node is None or node.op_type != "Shape" or node.domain != "" or node.attributes:
            return False
        source = self._view.input(node, target.calls, 0)
        product = None if source is None else self.product(source)
        return product is not None and product.powers == {X(): 1.0} and not product.spread

    def _slice(self, node: ir.Node, ref: Ref) -> Product | None:
        """A Slice that takes everything."""
        return self._input(node, ref, 0) if takes_all(self._view, self._shapes, node, ref) else None

    def _transpose(self, node: ir.Node, ref: Ref) -> Product | None:
        perm = self._view.attribute(node, ref.calls, "perm")
        identity = perm is not None and list(perm.as_ints()) == sorted(perm.as_ints())
        return self._input(node, ref, 0) if identity else None


def proves_alignment(a: Product, b: Product, reduction: Reduction) -> bool:
    """PROOF CLAUSE (shape): a statistic whose reduced axes are absent broadcasts along other axes than x's own.

    Unless it was taken over the first axes: what is left then stands where it would with them.
    """
    return a.squeezed == b.squeezed or a.is_constant or b.is_constant or reduction.over_first_axes


def proves_no_cancelling(a: Product, b: Product, sign: int) -> bool:
    """PROOF CLAUSE (exponent): x, a gain and an activation may be 0, so that none of them cancels against itself."""
    if X() in b.powers and (sign < 0 or X() in a.powers):
        return False
    return not any(isinstance(atom, Opaque) and atom in a.powers for atom in b.powers)


def proves_fit(shape: Dims | None, x_shape: Dims) -> bool:
    """PROOF CLAUSE (shape): broadcasting against this shape does not widen x."""
    if shape is None or len(shape) > len(x_shape):
        return False
    return all(s == 1 or same_dim(s, d) for s, d in zip(reversed(shape), reversed(x_shape), strict=False))


def proves_type(shapes: Shapes, source: Ref, result: Ref) -> bool:
    """PROOF CLAUSE (type): only a Cast between float types is a rounding; one to an integer truncates."""
    return shapes.float_type(source) is not None and shapes.float_type(result) is not None


def takes_all(view: View, shapes: Shapes, node: ir.Node, ref: Ref) -> bool:
    """Whether a Slice gives its whole input: from 0 to at least the end of each axis, in steps of 1."""
    source = view.input(node, ref.calls, 0)
    shape = None if source is None else shapes.shape(source)
    window = None if shape is None else shapes.slice_window(node, ref.calls, len(shape))
    if window is None or shape is None:
        return False
    for axis, (start, end) in window.items():
        size = shape[axis]
        if isinstance(size, int):
            if len(range(*slice(start, end).indices(size))) != size:
                return False
        elif start != 0 or end < 2**31 - 1:
            return False
    return True


_Rule = Callable[[Algebra, ir.Node, Ref], Product | None]

_RULES: Mapping[str, _Rule] = {
    "Mul": Algebra._mul,
    "Div": Algebra._div,
    "Sqrt": lambda a, n, r: a._power_by(n, r, 0.5),
    "Reciprocal": lambda a, n, r: a._power_by(n, r, -1.0),
    "Pow": Algebra._pow,
    "Neg": Algebra._neg,
    "Cast": Algebra._cast,
    "CastLike": Algebra._cast,
    "Identity": Algebra._same,
    "Abs": Algebra._abs,
    "Add": Algebra._add,
    "Sub": Algebra._sub,
    "Max": Algebra._max,
    "Clip": Algebra._clip,
    "Unsqueeze": Algebra._unsqueeze,
    "Reshape": Algebra._reshape,
    "Expand": Algebra._expand,
    "Slice": Algebra._slice,
    "Transpose": Algebra._transpose,
}
