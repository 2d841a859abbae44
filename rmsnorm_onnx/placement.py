"""Where a norm stands: in one graph, as values that a rewrite can use, agreed on by all callers of a function."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.claims import proves_extent
from rmsnorm_onnx.forms import Reading, plugin
from rmsnorm_onnx.functions import DOMAIN as OWN_DOMAIN
from rmsnorm_onnx.functions import disagreement
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import DeclineCode, Declined, Match, module_name, node_name
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.squares import Refusal
from rmsnorm_onnx.view import Ref, View, onnx_op

_STRANDED = (
    "the file declares {} for what the function's body gives in float32, which runtimes refuse: a tool converted the "
    "file around the body; a rewrite gives the node a body for it, with the statistic in float32, rounded once"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A norm in terms of Refs, before it has a place."""

    spec: RMSNormSpec
    x: Ref
    gain: Ref | None
    bias: Ref | None
    root: Ref
    x_type: str
    changes: tuple[str, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class _Entry:
    """One result, and the chains of calls in which it was seen."""

    result: Match | Declined
    contexts: set[tuple[ir.Node, ...]]
    disagrees: bool = False


class Placer:
    """Collects what a search found and settles it to one result a site."""

    def __init__(self, view: View, shapes: Shapes) -> None:
        self._view = view
        self._shapes = shapes
        self._entries: dict[object, _Entry] = {}

    def add(self, found: Found, node: ir.Node, calls: tuple[ir.Node, ...]) -> None:
        """Places a norm that starts at a reduction."""
        placed = self._place(found)
        if placed is None:
            reason = f"the norm at {node_name(node)} crosses function boundaries in a way that no one node can replace"
            self.decline(Refusal(DeclineCode.SHAPE, reason, node), node, calls)
            return
        match, level = placed
        problem = self._contradiction(match)
        if problem is not None:
            reason = f"{match.name}: {problem}"
            self._record(match.node, Declined(DeclineCode.MISMATCH, reason, match.node, match.scope), level)
            return
        self._record(match.output, dataclasses.replace(match, statistic_module=module_name(node)), level)

    def add_native(self, node: ir.Node, calls: tuple[ir.Node, ...], reading: Reading | Declined) -> None:
        """Places a norm that is one node already."""
        scope = self._view.scope(node)
        if isinstance(reading, Declined):
            named = f"{node_name(node)}: {reading.reason}" if node_name(node) not in reading.reason else reading.reason
            self._record(node, dataclasses.replace(reading, reason=named, scope=scope), calls)
            return
        x = self._view.resolve(Ref(reading.x, calls))
        x_type = None if x is None else self._shapes.float_type(x)
        if x is None or x_type is None:
            reason = f"the type of the input of {node_name(node)} is unknown; run shape inference"
            self._record(node, Declined(DeclineCode.SHAPE_UNKNOWN, reason, node, scope), calls)
            return
        match = Match(
            spec=reading.spec,
            form=self._form(node),
            node=node,
            x=reading.x,
            gain=reading.gain,
            bias=reading.bias,
            output=node.outputs[0],
            x_type=x_type,
            gain_type=self._type_at(reading.gain, calls),
            bias_type=self._type_at(reading.bias, calls),
            x_dims=self._dims_at(reading.x, calls),
            gain_dims=self._dims_at(reading.gain, calls),
            bias_dims=self._dims_at(reading.bias, calls),
            scope=scope,
            rounding_changes=reading.rounding_changes,
            notes=reading.notes,
            residual=reading.residual,
            wide_gain=self._is_wide(reading, node, calls),
        )
        self._record(node.outputs[0], match, calls)

    def _is_wide(self, reading: Reading, node: ir.Node, calls: tuple[ir.Node, ...]) -> bool:
        gain = None if reading.gain is None else self._view.resolve(Ref(reading.gain, calls))
        x = self._view.resolve(Ref(reading.x, calls))
        shapes = [None if ref is None else self._shapes.shape(ref) for ref in (gain, x)]
        if shapes[0] is None or shapes[1] is None:
            return False
        return proves_extent(shapes[0], shapes[1], reading.spec.axes, node) is not None

    def _type_at(self, value: ir.Value | None, calls: tuple[ir.Node, ...]) -> str | None:
        return self._type_of(None if value is None else self._view.resolve(Ref(value, calls)))

    def _dims_at(self, value: ir.Value | None, calls: tuple[ir.Node, ...]) -> Dims | None:
        if value is not None and value.graph is None and value.producer() is None and value.const_value is not None:
            return tuple(value.const_value.shape.numpy())  # a node's own tensor, as a loose value
        ref = None if value is None else self._view.resolve(Ref(value, calls))
        return None if ref is None else self._shapes.shape(ref)

    def decline(self, refusal: Refusal, node: ir.Node, calls: tuple[ir.Node, ...]) -> None:
        """Keeps the reason why a candidate is no norm."""
        if any(call.domain == OWN_DOMAIN for call in calls):
            own = next(call for call in calls if call.domain == OWN_DOMAIN)
            reason = f"the function body of {node_name(own)} is no RMSNorm: {refusal.reason}"
            self._record(own, Declined(DeclineCode.MISMATCH, reason, own, self._view.scope(own)), ())
            return
        declined = Declined(refusal.code, refusal.reason, refusal.node, self._view.scope(refusal.node))
        self._record((refusal.code, refusal.node, node), declined, calls)

    def settle(self) -> list[Match | Declined]:
        """One result a site, in the order of the search."""
        results: list[Match | Declined] = []
        refused = {e.result.node for e in self._entries.values() if isinstance(e.result, Declined)}
        for entry in self._entries.values():
            result = entry.result
            if isinstance(result, Match) and result.node in refused and result.node.domain == OWN_DOMAIN:
                continue  # what a node says of itself is invalid, whatever its body computes
            if isinstance(result, Match) and self._view.truncated and any(entry.contexts):
                reason = f"there are too many chains of calls to see in all of them what {result.name} computes"
                result = Declined(DeclineCode.LIMIT, reason, result.node, result.scope)
            elif isinstance(result, Match) and (entry.disagrees or not self._seen_by_all(entry)):
                reason = f"the callers of the function around {result.name} do not agree on what it computes"
                result = Declined(DeclineCode.SHAPE, reason, result.node, result.scope)
            results.append(result)
        return self._without_interiors(results)

    def _without_interiors(self, results: list[Match | Declined]) -> list[Match | Declined]:
        """Plain norms without a gain that stand beside an operator for the same norm: its interior, read elsewhere.

        An operator that adds a residual first divides another value.
        """
        written = {
            self._statistic(site): site
            for site in results
            if isinstance(site, Match) and site.form != "primitive" and site.residual is None
        }
        for index, site in enumerate(results):
            if not isinstance(site, Match) or site.form != "primitive" or site.spec.has_gain or site.spec.has_bias:
                continue
            operator = written.get(self._statistic(site))
            if operator is not None:
                reason = f"{site.name} is what {operator.name} computes too, kept for its other readers"
                results[index] = Declined(DeclineCode.INTERIOR, reason, site.node, site.scope)
        return results

    @staticmethod
    def _statistic(match: Match) -> tuple[object, ...]:
        """What two norms share that divide the same value by the same root."""
        x = match.x
        while onnx_op(x.producer()) == "Cast" and (source := _widened_from(x)) is not None:
            x = source
        spec = match.spec
        return x, spec.axes, float(np.float32(spec.epsilon)), spec.epsilon_placement, spec.leading

    def _record(self, key: object, result: Match | Declined, calls: tuple[ir.Node, ...]) -> None:
        entry = self._entries.setdefault(key, _Entry(result, set()))
        entry.contexts.add(calls)
        if entry.result is result:
            return
        if isinstance(entry.result, Match) and isinstance(result, Match) and entry.result.node is result.node:
            # A plugin node that has a body too is read twice: by its fields, and by its body.
            same = self._same_numbers if result.form == "plugin" else _agrees
            entry.disagrees = entry.disagrees or not same(entry.result, result)

    def _same_numbers(self, a: Match, b: Match) -> bool:
        """Whether two readings of one node say the same.

        Its fields speak of the gain that it is given. Its body is read together with what computes that gain: an offset
        that is added around the node stands in one of the two specs only.
        """
        if a.spec.canonical(a.x_type) == b.spec.canonical(b.x_type):
            return True
        fields, body = (a, b) if a.gain is None or a.gain in a.node.inputs else (b, a)
        if fields.gain is None or body.gain is None or body.gain is fields.gain:
            return False
        offset = self._offset_of(fields.gain, body.gain)
        as_body = {"gain_offset": body.spec.gain_offset, "gain_type": body.spec.gain_type}
        return (
            offset is not None
            and fields.spec.gain_offset + offset == body.spec.gain_offset
            and fields.spec.replace(**as_body).canonical(a.x_type) == body.spec.canonical(b.x_type)
        )

    def _offset_of(self, total: ir.Value, gain: ir.Value) -> float | None:
        """The number that is added to a gain, Casts aside, to make a total; None where that is not what it is."""
        node = _uncast(total).producer()
        if onnx_op(node) != "Add" or node is None:
            return None
        first, second = (None if v is None else _uncast(v) for v in node.inputs)
        if first is None or second is None or _uncast(gain) not in (first, second):
            return None
        number = self._shapes.constants.uniform(Ref(second if _uncast(gain) is first else first, ()))
        return None if number is None else number.value

    def _seen_by_all(self, entry: _Entry) -> bool:
        """Whether every chain of calls that reaches a site inside a function gave this result."""
        last = {calls[-1].op_identifier() for calls in entry.contexts if calls}
        if not last:
            return True
        return entry.contexts >= {c for c in self._all_contexts if c and c[-1].op_identifier() in last}

    @functools.cached_property
    def _all_contexts(self) -> set[tuple[ir.Node, ...]]:
        """Every chain of calls of the model."""
        return {calls for _, calls in self._view.nodes()}

    def _form(self, node: ir.Node) -> str:
        if node.domain == OWN_DOMAIN:
            return "plugin" if "plugin_namespace" in node.attributes else "function"
        return {"RMSNormalization": "onnx"}.get(node.op_type, "plugin" if "plugin_namespace" in node.attributes else
                                                "contrib")  # fmt: skip

    def _place(self, found: Found) -> tuple[Match, tuple[ir.Node, ...]] | None:
        """The outermost graph in which one node can stand for the norm; never a body of ours.

        A node of ours is a norm where it stands, whatever function is around it, unless that one's callers set what
        it computes.
        """
        calls = found.root.calls
        own_from = next((i for i, call in enumerate(calls) if call.domain == OWN_DOMAIN), len(calls))
        first = own_from if own_from < len(calls) and _is_settled(calls[own_from]) else 0
        for depth in range(first, own_from + 1):
            context = calls[:depth]
            output = self._lift(found.root, depth)
            if output is None or (depth < len(calls) and len(calls[depth].outputs) != 1):
                continue
            own = depth < len(calls) and calls[depth].domain == OWN_DOMAIN
            match = self._at(found, context, output, own)
            if match is not None:
                return match, context
        return None

    def _at(self, found: Found, context: tuple[ir.Node, ...], output: ir.Value, own: bool) -> Match | None:
        x = self._express(found.x, context)
        gain = None if found.gain is None else self._express(found.gain, context)
        bias = None if found.bias is None else self._express(found.bias, context)
        node = output.producer()
        assert node is not None
        spec = found.spec.resolve(found.x_type)
        if own and gain is None and found.gain is not None:
            gain = self._before_cast(found.gain, context, spec.gain_type)
        if own and bias is None and found.bias is not None:
            bias = self._before_cast(found.bias, context, spec.product_type(found.x_type))
        stored = own and gain is None and found.gain is not None and "gain" in node.attributes
        if x is None or (found.gain is not None and gain is None and not stored):
            return None
        if found.bias is not None and bias is None:
            return None
        notes = (*found.notes, *(("the gain is the node's tensor attribute",) if stored else ()))
        form = "primitive" if not own else "plugin" if "plugin_namespace" in node.attributes else "function"
        stranded = form == "function" and _is_stranded(found, output)
        if stranded:
            notes = (*notes, _STRANDED.format(found.x_type))
        return Match(
            spec=found.spec.replace(result_type="x") if stranded else found.spec,
            form=form,
            node=node,
            x=x,
            gain=gain,
            bias=bias,
            output=output,
            x_type=found.x_type,
            gain_type=self._type_at(gain, context) if not stored else _float_name(node.attributes["gain"]),
            bias_type=self._type_at(bias, context),
            x_dims=self._dims_at(x, context),
            gain_dims=self._dims_at(gain, context) if not stored else _attribute_dims(node.attributes["gain"]),
            bias_dims=self._dims_at(bias, context),
            scope=self._view.scope(node),
            rounding_changes=found.changes,
            notes=notes,
            stranded=stranded,
        )

    def _type_of(self, ref: Ref | None) -> str | None:
        return None if ref is None else self._shapes.float_type(ref)

    def _before_cast(self, ref: Ref, context: tuple[ir.Node, ...], dtype: str) -> ir.Value | None:
        """What a body of ours is given for a gain or a bias that it rounds first: to the type that the spec says."""
        node = ref.value.producer()
        if node is None or onnx_op(node) != "Cast" or self._shapes.float_type(ref) != dtype:
            return None
        source = self._view.input(node, ref.calls, 0)
        return None if source is None else self._express(source, context)

    def _lift(self, ref: Ref, depth: int) -> ir.Value | None:
        """A value of a function body as the output of the call at an outer level."""
        value, calls = ref
        while len(calls) > depth:
            function = self._view.function_of(calls[-1])
            index = next((i for i, o in enumerate(function.outputs) if o is value), None) if function else None
            if index is None or index >= len(calls[-1].outputs):
                return None
            value, calls = calls[-1].outputs[index], calls[:-1]
        return value

    def _express(self, ref: Ref, context: tuple[ir.Node, ...]) -> ir.Value | None:
        """The value of a graph that is the given Ref: lifted out of inner calls, then followed into outer ones."""
        common = 0
        while common < min(len(ref.calls), len(context)) and ref.calls[common] is context[common]:
            common += 1
        value = self._lift(ref, common)
        for depth in range(common, len(context)):
            call, function = context[depth], self._view.function_of(context[depth])
            found = None
            for index in range(min(len(call.inputs), len(function.inputs) if function else 0)):
                if self._view.input(call, context[:depth], index) == ref:
                    found = index
            if found is None or function is None:
                return None
            value = function.inputs[found]
        return value

    def _contradiction(self, match: Match) -> str | None:
        """What a function node's attributes say otherwise than its body."""
        if match.form not in ("function", "plugin"):
            return None
        rank = None if match.x.shape is None else len(match.x.shape)
        return disagreement(match.node, match.spec, rank)


def _float_name(attribute: ir.Attr) -> str | None:
    return None if attribute.is_ref() else dtypes.float_name(attribute.as_tensor().dtype)


def _attribute_dims(attribute: ir.Attr) -> Dims | None:
    return None if attribute.is_ref() else tuple(attribute.as_tensor().shape.numpy())


def _is_settled(own: ir.Node) -> bool:
    """Whether a node of ours says all by itself; a plugin's node is read by its fields, so that it always does."""
    return plugin.is_ours(own) or not any(attribute.is_ref() for attribute in own.attributes.values())


def _is_stranded(found: Found, output: ir.Value) -> bool:
    """Whether the file declares a half type, x's own, for what the body of a function of ours gives in float32.

    Tools that convert a file to float16 convert the graph and leave functions alone.
    """
    declared = dtypes.float_name(output.dtype)
    given = found.spec.resolve(found.x_type).result_type
    return declared in ("float16", "bfloat16") and declared == found.x_type and given == "float32"


def _widened_from(value: ir.Value) -> ir.Value | None:
    """What a Cast that loses nothing was given; None where a type is narrower or unknown."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.inputs else None
    before = None if source is None else dtypes.float_name(source.dtype)
    after = dtypes.float_name(value.dtype)
    return source if before is not None and after is not None and dtypes.holds(after, before) else None


def _uncast(value: ir.Value) -> ir.Value:
    """A value before its Casts."""
    while onnx_op(node := value.producer()) == "Cast" and node is not None and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _agrees(a: Match, b: Match) -> bool:
    return (a.spec, a.x_type, a.gain_type, a.x, a.gain, a.bias) == (b.spec, b.x_type, b.gain_type, b.x, b.gain, b.bias)
