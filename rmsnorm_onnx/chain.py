"""The values between x and a norm's result, and what their types round: the spec's rounding points."""

from __future__ import annotations

import dataclasses
import functools

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.algebra import Algebra
from rmsnorm_onnx.claims import Claim
from rmsnorm_onnx.product import Atom, Product, X
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.squares import Candidate
from rmsnorm_onnx.view import Ref, View

_DATA_INPUTS = {"CastLike": 1, "Reshape": 1, "Expand": 1, "Unsqueeze": 1, "Slice": 1, "Pow": 1, "Clip": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Roundings:
    """The spec's types as the graph has them, and the roundings that they cannot say.

    Attributes:
        statistic: The narrowest type up to the mean square and epsilon.
        factor: The narrowest type of 1 / rms.
        normalized: The narrowest type of x / rms before the gain.
        product: The type of the node that multiplies by the gain.
        changes: Roundings to a narrower type that no field says, each one sentence.
        notes: Orders of steps that differ from the spec's but round to nothing narrower, each one sentence.
    """

    statistic: str
    factor: str
    normalized: str
    product: str
    changes: tuple[str, ...]
    notes: tuple[str, ...]


def chain(view: View, algebra: Algebra, candidate: Candidate, root: Ref) -> list[Ref]:
    """Every value from x and the reduction's output to root, root first."""
    found: list[Ref] = []
    pending, seen = [root], {root}
    while pending:
        ref = pending.pop()
        found.append(ref)
        node = ref.value.producer()
        if ref == candidate.x or ref == candidate.reduction.output or node is None:
            continue
        count = _DATA_INPUTS.get(node.op_type, len(node.inputs))
        for source in view.inputs(node, ref.calls)[:count]:
            if source is not None and source not in seen and algebra.product(source).of_norm:
                seen.add(source)
                pending.append(source)
    return found


def _narrowest(names: list[str], default: str) -> str:
    result = default
    for name in names:
        if dtypes.holds(result, name):
            result = name
    return result


def _statistic(squares: list[str], later: list[str]) -> tuple[str, list[str]]:
    """The type of the statistic, and what it cannot say: a mean that is rounded on its own and widened again.

    Where all that follows a rounded mean stays in the half type, epsilon and the root too, the statistic is in half.

    Args:
        squares: The types up to the sum of the squares.
        later: The types from the mean to where epsilon is added, the last one first.
    """
    changes = _both_halves([*squares, *later], "the mean square")
    summed = _narrowest(squares, "float64")
    narrow = _narrowest(later, summed)
    if dtypes.holds(summed, "float32") and not dtypes.holds(narrow, "float32") and later[0] != narrow:
        return summed, [*changes, f"the mean square is rounded to {narrow}, and neither its squares nor its root are"]
    return narrow, changes


def _both_halves(names: list[str], what: str) -> list[str]:
    """The change where a value is rounded to both half types, of which neither holds the other."""
    both = {"float16", "bfloat16"} <= set(names)
    return [f"{what} is rounded to float16 and to bfloat16, one after the other"] if both else []


class _Events:
    """Types by the kind of value that was rounded to them."""

    def __init__(self, shapes: Shapes, algebra: Algebra, claim: Claim, values: list[Ref]) -> None:
        self.types: dict[str, list[str]] = {}
        self.structural: dict[str, list[str]] = {}
        self.scaled: dict[str, list[str]] = {}
        atom, exponent = claim.statistic
        for ref in values:
            name = shapes.float_type(ref)
            if name is None:
                continue
            product = algebra.product(ref)
            kind = _kind(product, atom, exponent, claim)
            self.types.setdefault(kind, []).append(name)
            node = ref.value.producer()
            if node is not None and node.op_type in ("Mul", "Div"):
                self.structural.setdefault(kind, []).append(name)
            expected = _expected(kind, claim)
            if expected is not None and abs(product.value - expected) > 1e-6 * abs(expected):
                self.scaled.setdefault(kind, []).append(name)


def _expected(kind: str, claim: Claim) -> float | None:
    """The coefficient that a value of a kind has where no constant factor is left for later."""
    if kind == "x":
        return 1.0
    if kind not in ("normalized", "factor", "result"):
        return None
    scalar = 1.0
    if claim.gain is not None and kind != "result":
        scalar = next((c.value for c, _ in claim.product.constants if c.ref == claim.gain.factor), 1.0)
    return claim.product.value / scalar


def _kind(product: Product, atom: Atom, exponent: object, claim: Claim) -> str:
    """Which of the spec's intermediate values a product is."""
    has_x, gained = X() in product.powers, bool(product.opaques)
    scalar = claim.gain is not None and any(c.ref == claim.gain.factor for c, _ in product.constants)
    gained = gained or scalar
    statistics = product.statistics
    if not statistics:
        return "gained x" if gained else "x"
    power = next(iter(statistics.values()))
    if statistics.get(atom) == exponent:
        if has_x:
            return "result" if gained else "normalized"
        return "gained factor" if gained else "factor"
    return "statistic" if power == 1 and not has_x and not gained else "root"


def _orders(algebra: Algebra, values: list[Ref], dtype: str) -> tuple[str, ...]:
    """Orders of steps that differ from the spec's, where everything is of one type that nothing is narrower than."""
    notes = []
    for ref in values:
        product = algebra.product(ref)
        if product.opaques and not (product.has_statistic and X() in product.powers):
            notes.append(_order("the gain times 1/rms" if product.has_statistic else "x times the gain", dtype))
    return tuple(dict.fromkeys(notes))


def _order(what: str, dtype: str) -> str:
    return f"{what} is formed first: the same number but for the order of {dtype} roundings"


def read_roundings(
    shapes: Shapes, algebra: Algebra, candidate: Candidate, claim: Claim, values: list[Ref], x_type: str
) -> Roundings:
    """What the types of the values between x and the root say of the spec."""
    types = {shapes.float_type(ref) for ref in values}
    if types == {x_type} == {*candidate.types} and dtypes.holds(x_type, "float32"):
        return Roundings(x_type, x_type, x_type, x_type, (), _orders(algebra, values, x_type))
    events = _Events(shapes, algebra, claim, values)
    wide = functools.reduce(dtypes.wider, (t for types in events.types.values() for t in types), "float32")

    def narrow(kind: str) -> list[str]:
        return [t for t in events.types.get(kind, []) if not dtypes.holds(t, wide)]

    changes: list[str] = []
    notes: list[str] = []
    statistic, changed = _statistic(list(candidate.types), events.types.get("statistic", []))
    changes += changed
    factor = _narrowest(events.types.get("factor", []), statistic)
    roots = narrow("root")
    if roots and not dtypes.holds(roots[0], statistic) and dtypes.holds(statistic, "float32"):
        changes.append(f"the root is rounded to {roots[0]} before it divides")
    normalized = _narrowest(events.types.get("normalized", []), wide)
    for kind, what in (("factor", "1 / rms"), ("normalized", "x / rms")):
        changes += _both_halves(events.types.get(kind, []), what)
    for kind, what in (("x", "x"), ("factor", "1 / rms"), ("normalized", "x / rms")):
        rounded = [t for t in events.scaled.get(kind, []) if not dtypes.holds(t, wide)]
        if rounded:
            changes.append(f"{what} is rounded to {rounded[0]} with a constant factor still to come")
    lost = [t for t in events.types.get("x", []) if not dtypes.holds(t, x_type)]
    if lost:
        changes.append(f"x is rounded to {lost[0]} before it is normalised")
    for kind, what in (("gained x", "x times the gain"), ("gained factor", "the gain times 1/rms")):
        rounded = narrow(kind)
        if rounded:
            changes.append(f"{what} is rounded to {rounded[0]} before the rest is multiplied in")
        elif events.types.get(kind):
            notes.append(_order(what, wide))
    product = events.structural.get("result", events.types.get("result", [normalized]))[-1]
    return Roundings(statistic, factor, normalized, product, tuple(changes), tuple(notes))
