"""`find_rms_norms`: every RMSNorm of a model, and everything that looks like one, with the reason why it is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.algebra import Algebra
from rmsnorm_onnx.chain import chain, read_roundings
from rmsnorm_onnx.claims import Claim, Claims
from rmsnorm_onnx.functions import DOMAIN as OWN_DOMAIN
from rmsnorm_onnx.native import Native
from rmsnorm_onnx.placement import Found, Placer
from rmsnorm_onnx.product import X
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import DeclineCode, Declined, Match, node_name
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.squares import REDUCTIONS, Candidate, Refusal, Squares, is_centring
from rmsnorm_onnx.tail import Tails, leaves_own, reads_numbers, sole_user
from rmsnorm_onnx.view import Ref, View, onnx_op

_WALK_LIMIT = 4096  # values that one statistic may reach before it is given up


def find_rms_norms(model: Any) -> list[Match | Declined]:
    """Finds every RMSNorm of a model, whatever its spelling, and every look-alike.

    Pure: the model is not changed, and weights are not read. A site is a `Match` only if exponent, coefficient, axes,
    shapes and types are all proven; otherwise it is `Declined`, with a code, one sentence and the node at fault.

    Args:
        model: An onnx_ir.Model from opset 11 on; branches, loops and model-local functions are searched too. What
            `fuse` takes is taken here too, but then the values in the results belong to a model of their own.

    Returns:
        Matches and declined sites in the order of the graph.

    >>> find_rms_norms(ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=10))
    []
    """
    if not isinstance(model, ir.Model):
        from rmsnorm_onnx import modelio

        model = modelio.to_ir(model)[0]
    return Finder(model).run()


class Finder:
    """One search of one model."""

    def __init__(self, model: ir.Model) -> None:
        self._view = View(model)
        self._shapes = Shapes(self._view)
        self._squares = Squares(self._view, self._shapes)
        self._tails = Tails(self._view, self._shapes)
        self._native = Native(self._view, self._shapes)
        self._placer = Placer(self._view, self._shapes)
        self._centrings: set[ir.Node] = set()  # reported already, as the x of a statistic

    def run(self) -> list[Match | Declined]:
        """Visits every node once per chain of calls, and settles what functions' callers agree on."""
        subtractions = []
        for node, calls in self._view.nodes():
            if node.op_type in REDUCTIONS and node.domain in ("", "ai.onnx"):
                self._visit(node, calls)
            elif node.op_type in ("Sub", "Add"):
                subtractions.append((node, calls))
            else:
                native = self._native.read(node, calls)
                if native is not None:
                    self._placer.add_native(node, calls, native)
        for node, calls in subtractions:
            if node not in self._centrings and self._is_lone_centring(node, calls):
                reason = f"{node_name(node)} subtracts a mean; a centred value is LayerNorm's, not RMSNorm's"
                self._placer.decline(Refusal(DeclineCode.LAYER_NORM, reason, node), node, calls)
        return self._placer.settle()

    def _is_lone_centring(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> bool:
        return node.domain in ("", "ai.onnx") and is_centring(self._view, self._shapes, node, calls)

    def _visit(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> None:
        candidates = self._squares.candidates(node, calls)
        if candidates is None:
            return
        if isinstance(candidates, Refusal):
            self._centrings.add(candidates.node)
            self._placer.decline(candidates, node, calls)
            return
        refusals: list[Refusal] = []
        claimed: set[Ref] = set()
        for candidate in candidates:
            for item in self._roots(candidate, refusals):
                if item.root not in claimed:  # a value that is x as rounded was found as a norm of that
                    claimed.add(item.root)
                    self._placer.add(item, node, calls)
        if not claimed:
            self._placer.decline(_choose(refusals, node), node, calls)
        for refusal in refusals:
            if refusal.code is DeclineCode.LIMIT:
                self._placer.decline(refusal, node, calls)

    def _roots(self, candidate: Candidate, refusals: list[Refusal]) -> list[Found]:
        """The norms of one x: the last values that are claimed, each with what follows it."""
        algebra = Algebra(self._view, self._shapes, candidate.reduction, candidate.x)
        x_type = self._shapes.float_type(candidate.x)
        if x_type is None:
            node = candidate.reduction.node
            known = self._shapes.dtype(candidate.x)
            reason = f"x of {node_name(node)} is of type {known.name if known else 'unknown'}, not a float type"
            refusals.append(Refusal(DeclineCode.TYPE if known else DeclineCode.SHAPE_UNKNOWN, reason, node))
            return []
        claims = Claims(self._view, self._shapes, candidate)
        accepted: dict[Ref, Claim] = {}
        for root in self._walk(algebra, candidate, refusals):
            claim = claims.claim(algebra.product(root), root)
            if isinstance(claim, Refusal):
                refusals.append(claim)
            elif self._is_own(claim, accepted):
                accepted[root] = claim
        found = []
        for claim, values in self._last(algebra, candidate, accepted):
            item = self._found(algebra, claims, candidate, claim, values, x_type)
            if item is not None:
                found.append(item)
        return found

    def _walk(self, algebra: Algebra, candidate: Candidate, refusals: list[Refusal]) -> Iterator[Ref]:
        """Values that x and the mean square reach together through the algebra, in order."""
        pending, seen = [candidate.reduction.output], {candidate.reduction.output}
        if X() in candidate.reduction.product.powers:
            yield candidate.reduction.output
        reached_root = False
        while pending:
            ref = pending.pop(0)
            for node, calls in self._view.users(ref):
                if not node.outputs:
                    continue
                out = Ref(node.outputs[0], calls)
                if out in seen or leaves_own(candidate.reduction.calls, calls):
                    continue
                if len(seen) >= _WALK_LIMIT:
                    what = f"more than {_WALK_LIMIT} values are made of the mean square of"
                    source = candidate.reduction.node
                    reason = f"{what} {node_name(source)}; those from {node_name(node)} on were not looked at"
                    refusals.append(Refusal(DeclineCode.LIMIT, reason, source))
                    return
                product = algebra.product(out)
                if not product.has_statistic:
                    refusals.extend(self._obstacle(node, calls, ref, algebra))
                    continue
                if len(product.opaques) > 1:
                    continue  # more than a gain: nothing cancels, so that no norm follows
                seen.add(out)
                pending.append(out)
                if node.op_type in ("Mul", "Div") and node.domain in ("", "ai.onnx"):
                    reached_root = True
                    yield out
        if not reached_root and not refusals:
            node = candidate.reduction.node
            refusals.append(
                Refusal(DeclineCode.UNUSED, f"no division by a root follows the mean square of {node_name(node)}", node)
            )

    def _obstacle(self, node: ir.Node, calls: tuple[ir.Node, ...], ref: Ref, algebra: Algebra) -> Iterator[Refusal]:
        """Why the algebra ends at a node that reads the statistic."""
        name, kind, product = node_name(node), onnx_op(node), algebra.product(ref)
        if X() in product.powers or not reads_numbers(self._view, (node, calls), ref):
            return  # a consumer of the norm, or of its type alone
        if kind in ("Add", "Sub", "Max", "Clip"):
            others = [r for r in self._view.inputs(node, calls) if r is not None and r != ref]
            if kind == "Sub" and any(self._is_squared_mean(r) for r in others):
                yield Refusal(
                    DeclineCode.LAYER_NORM, f"{name} forms a variance, E[x^2] - E[x]^2: this is LayerNorm", node
                )
            elif len(product.powers) == 1:
                yield self._epsilon_refusal(node, others)
            return
        if kind in ("Cast", "CastLike", "Floor", "Ceil", "Round"):
            yield Refusal(DeclineCode.TYPE, f"{name} takes the statistic through integers", node)
        elif kind in ("Mul", "Div"):
            yield Refusal(
                DeclineCode.SHAPE,
                f"{name} broadcasts the statistic along another axis than it was taken over (keepdims=0)",
                node,
            )
        elif kind in ("Pow", "Sqrt", "Reciprocal"):
            yield Refusal(
                DeclineCode.EXPONENT, f"the power that {name} takes of the mean square is not known to be a root", node
            )
        elif kind in ("Unsqueeze", "Reshape", "Expand", "Transpose"):
            yield Refusal(DeclineCode.SHAPE, f"{name} moves the statistic to axes that are not proven to be x's", node)

    def _epsilon_refusal(self, node: ir.Node, others: list[Ref]) -> Refusal:
        name = node_name(node)
        for ref in others:
            number = self._shapes.constants.uniform(ref)
            if number is not None and not math.isfinite(number.value):
                return Refusal(DeclineCode.EPSILON, f"the epsilon of {name} is {number.value}", node)
            if self._shapes.constants.overridable(ref):
                return Refusal(
                    DeclineCode.EPSILON, f"the epsilon {ref.value.name} of {name} is a graph input with a default, "
                    "which a caller may override", node,
                )  # fmt: skip
            if number is not None:
                reason = f"the epsilon of {name} has a shape that would widen the statistic"
                return Refusal(DeclineCode.SHAPE, reason, node)
            if self._shapes.constants.tensor(ref) is not None:
                return Refusal(DeclineCode.EPSILON, f"the epsilon of {name} is a vector of different values", node)
        return Refusal(DeclineCode.EPSILON, f"what {name} adds to the statistic is known only at run time", node)

    def _is_squared_mean(self, ref: Ref) -> bool:
        node = ref.value.producer()
        if node is None or onnx_op(node) not in ("Mul", "Pow"):
            return False
        source = self._view.input(node, ref.calls, 0)
        return source is not None and onnx_op(source.value.producer()) == "ReduceMean"

    def _is_own(self, claim: Claim, accepted: dict[Ref, Claim]) -> bool:
        """Whether the last factor belongs to the norm.

        A factor of 1 on what is a norm already does not, unless it is the gain of a body of ours; and a scalar on a
        value that others read too is theirs to apply: the norm ends before it.
        """
        node = claim.root.value.producer()
        assert node is not None
        for source in self._view.inputs(node, claim.root.calls):
            before = None if source is None else accepted.get(source)
            if source is None or before is None or claim.product.opaques != before.product.opaques:
                continue
            if claim.product.value == before.product.value:
                return any(call.domain == OWN_DOMAIN for call in claim.root.calls)
            return sole_user(self._view, source) is not None
        return True

    def _last(
        self, algebra: Algebra, candidate: Candidate, accepted: dict[Ref, Claim]
    ) -> list[tuple[Claim, list[Ref]]]:
        """The claims that no other claim goes through, each with the values that it goes through itself."""
        inner: set[Ref] = set()
        chains: dict[Ref, list[Ref]] = {}
        for root in reversed(accepted):
            if root not in inner:
                chains[root] = chain(self._view, algebra, candidate, root)
                inner.update(chains[root][1:])
        return [(claim, chains[root]) for root, claim in accepted.items() if root not in inner]

    def _found(
        self, algebra: Algebra, claims: Claims, candidate: Candidate, claim: Claim, values: list[Ref], x_type: str
    ) -> Found | None:
        roundings = read_roundings(self._shapes, algebra, candidate, claim, values, x_type)
        tail = self._tails.follow(claims, claim, roundings.normalized, roundings.product)
        if tail is None:
            return None
        gain = tail.gain
        bare = gain is None and tail.bias is not None  # what is rounded before the bias is the normalised value itself
        normalized = tail.product_type if bare else roundings.normalized

        def relative(name: str) -> str:
            return "x" if name == x_type else name

        spec = RMSNormSpec(
            axes=candidate.reduction.axes,
            epsilon=claim.epsilon,
            epsilon_placement=claim.placement,
            leading=candidate.leading,
            has_gain=gain is not None,
            gain_offset=gain.offset if gain is not None else 0.0,
            has_bias=tail.bias is not None,
            statistic_type=roundings.statistic,
            factor_type=roundings.factor,
            normalized_type=relative(normalized),
            gain_type=relative(tail.gain_type(normalized)),
            result_type=relative(tail.result_type),
        )
        rounded = claim.rounded_coefficient
        changes = roundings.changes if rounded is None else (*roundings.changes, rounded)
        notes = (*roundings.notes, *_notes(claim, spec))
        return Found(spec, candidate.x, gain.value if gain else None, tail.bias, tail.root, x_type, changes, notes)


def _notes(claim: Claim, spec: RMSNormSpec) -> list[str]:
    notes = []
    if not dtypes.holds(spec.statistic_type, "float32"):
        notes.append(
            f"the graph computes the statistic in {spec.statistic_type}, where squares overflow or vanish; every form "
            "computes it in float32"
        )
    if claim.epsilon == 0:
        why = "its epsilon is 0" if claim.has_epsilon else "no epsilon is added"
        notes.append(f"{why}: a row of zeros gives NaN, in the graph and after a rewrite alike")
    return notes


_PRIORITY = (
    DeclineCode.LAYER_NORM,
    DeclineCode.EPSILON,
    DeclineCode.TYPE,
    DeclineCode.SHAPE_UNKNOWN,
    DeclineCode.SHAPE,
    DeclineCode.COEFFICIENT,
    DeclineCode.EXPONENT,
    DeclineCode.NUMERATOR,
)


def _choose(refusals: list[Refusal], node: ir.Node) -> Refusal:
    """The refusal that tells most: what is named, before what merely does not fit."""
    for code in _PRIORITY:
        for refusal in refusals:
            if refusal.code is code:
                return refusal
    if refusals:
        return refusals[0]
    return Refusal(DeclineCode.UNUSED, f"no division by a root follows the mean square of {node_name(node)}", node)
