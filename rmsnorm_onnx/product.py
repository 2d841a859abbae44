"""Power products: c * prod(atom ** exponent), the terms that values are written in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import onnx_ir as ir

from rmsnorm_onnx.view import Ref


@dataclasses.dataclass(frozen=True, slots=True)
class X:
    """The value that was squared."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeanSquare:
    """mean(x * x) over the axes of the reduction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A scalar constant as a factor: its number, and whether its type is a half type (so that it was rounded to it)."""

    ref: Ref
    value: float
    half: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Shifted:
    """A power of the mean square plus a constant, or its maximum with a constant.

    Attributes:
        coefficient: What the power of the mean square is multiplied by.
        exponent: The power.
        constant: What is added, or the lower limit.
        clamp: Whether it is a limit.
        factors: The constants in the coefficient, with their exponents.
    """

    coefficient: float
    exponent: float
    constant: float
    clamp: bool
    factors: tuple[tuple[Constant, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A value that the algebra does not look into."""

    ref: Ref


Atom = X | MeanSquare | Shifted | Opaque


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: thousands are made, and freezing doubles their cost
class Product:
    """coefficient * prod(constant ** exponent) * prod(atom ** exponent); never changed once made.

    Attributes:
        coefficient: The factor that no single constant of the graph accounts for.
        constants: Scalar constants with their exponents.
        powers: Atoms with their exponents, none of them 0.
        of_norm: Whether x or its mean square takes part.
        has_statistic: Whether its mean square does.
        squeezed: The reduced axes are absent (keepdims=0), so that it does not broadcast against x.
        precision: The coarsest spacing at 1 of the types that constants in the coefficient were rounded to; half types
            are left out, their constants are looked at one by one.
        spread: Values whose shapes must fit into x's, because an Expand or a constant gave them their extent.
    """

    coefficient: float = 1.0
    constants: tuple[tuple[Constant, float], ...] = ()
    powers: Mapping[Atom, float] = dataclasses.field(default_factory=dict)
    squeezed: bool = False
    spread: tuple[Ref, ...] = ()
    precision: float = 0.0
    of_norm: bool = dataclasses.field(init=False, default=False)
    has_statistic: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        for atom in self.powers:
            kind = type(atom)
            if kind is X:
                self.of_norm = True
            elif kind is not Opaque:
                self.of_norm = self.has_statistic = True

    @property
    def value(self) -> float:
        """The whole coefficient, with the constants; not a number where it leaves the range of float64."""
        total = self.coefficient
        try:
            for constant, exponent in self.constants:
                total *= constant.value**exponent
        except OverflowError:
            return math.nan
        return total

    @property
    def statistics(self) -> dict[Atom, float]:
        """The atoms made of the mean square."""
        return {a: p for a, p in self.powers.items() if isinstance(a, MeanSquare | Shifted)}

    @property
    def opaques(self) -> dict[Opaque, float]:
        """The atoms that were not looked into."""
        return {a: p for a, p in self.powers.items() if isinstance(a, Opaque)}

    @property
    def is_constant(self) -> bool:
        """Whether it is a number known now."""
        return not self.powers

    def spread_with(self, ref: Ref) -> Product:
        """The same product, broadcast with one more value."""
        return Product(
            self.coefficient, self.constants, self.powers, self.squeezed, (*self.spread, ref), self.precision
        )

    def times(self, other: Product, sign: int = 1) -> Product:
        """self * other ** sign."""
        powers = dict(self.powers)
        for atom, exponent in other.powers.items():
            powers[atom] = powers.get(atom, 0.0) + sign * exponent
        return Product(
            coefficient=self.coefficient * other.coefficient**sign,
            constants=self.constants + tuple((c, sign * e) for c, e in other.constants),
            powers={a: p for a, p in powers.items() if p},
            squeezed=self.squeezed or other.squeezed,
            spread=self.spread + other.spread,
            precision=max(self.precision, other.precision),
        )

    def power(self, exponent: float) -> Product | None:
        """self ** exponent; None for a power of what may be 0 or negative."""
        if exponent != 1 and not self._positive:
            return None
        if not 1e-150 < abs(self.coefficient) < 1e150:
            return None
        return Product(
            coefficient=self.coefficient**exponent,
            constants=tuple((c, e * exponent) for c, e in self.constants),
            powers={a: p * exponent for a, p in self.powers.items() if p * exponent},
            squeezed=self.squeezed,
            spread=self.spread,
            precision=self.precision,
        )

    @property
    def _positive(self) -> bool:
        return (
            self.coefficient > 0
            and all(c.value > 0 for c, _ in self.constants)
            and all(isinstance(a, MeanSquare | Shifted) for a in self.powers)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """The sum or mean that a statistic starts from.

    Attributes:
        node: The reducing node.
        calls: The calls that lead to it.
        output: Its output.
        product: The output in terms of MeanSquare (and X, for an operator that also divides).
        axes: Negative and ascending.
        rank: The rank of the value that was squared.
    """

    node: ir.Node
    calls: tuple[ir.Node, ...]
    output: Ref
    product: Product
    axes: tuple[int, ...]
    rank: int

    @property
    def over_first_axes(self) -> bool:
        """Whether the reduced axes are the outermost ones."""
        return tuple(a + self.rank for a in self.axes) == tuple(range(len(self.axes)))
