"""A whole model at another opset, its norms kept apart: they are written anew there, the rest is moved node by node.

For each version that lies between the two, a node is, in this order:

1. read as one of the other version, where nothing but types was added (`rmsnorm_onnx.relabel`);
2. rewritten by an exact adapter of ours (`rmsnorm_onnx.adapters`), or by onnx's converter in steps that it makes right;
3. expanded into the body by which ONNX defines it (`rmsnorm_onnx.single`), and the body is moved on;
4. or named in the error, and the model stays where it was.

Branches, loop bodies and model-local functions are moved alike; operators of other domains stay as they are. Weights
are neither read nor copied.
"""

from __future__ import annotations

import collections
import functools

import onnx
import onnx_ir as ir

from rmsnorm_onnx import adapters, cleanup, fullcheck, functions, modelio, passes, relabel, runtimes, single
from rmsnorm_onnx.edit import Edit
from rmsnorm_onnx.errors import ConversionError, UsageError
from rmsnorm_onnx.inference import NATIVE_NORMS
from rmsnorm_onnx.report import FusionReport, SiteReport
from rmsnorm_onnx.site import node_name
from rmsnorm_onnx.valuetypes import ValueTypes
from rmsnorm_onnx.view import default_opset, graph_nodes, onnx_op
from rmsnorm_onnx.writer import Names

OLDEST_OPSET = 13
"""The oldest opset that models are moved to."""

_NAMED = 3  # nodes that an error names for one operator


def convert(
    model: ir.Model,
    opset: int,
    *,
    consumer: str = "any",
    form: str | None = None,
    allow_rounding_change: bool = False,
) -> tuple[ir.Model, FusionReport]:
    """Moves a model to another opset of ONNX's own operators, each of its norms written anew there.

    Names, inputs, outputs, types, metadata and the order of nodes are kept; the IR version is raised where functions
    need it, and else kept. The result passes onnx's full check, unless the model or the form does not.

    Args:
        model: The model; it is left unchanged.
        opset: The opset to write, 13 to the newest that the installed onnx knows.
        consumer: Whom the forms are chosen for, as in `fuse`.
        form: One form for all sites, in place of the consumer's choice.
        allow_rounding_change: Rewrite sites even where a rounding to a narrower type moves.

    Returns:
        The model at that opset, and what became of its norms.

    Raises:
        ConversionError: an operator has no equal at that opset; the message names all of them.
        UsageError: there is no such opset, consumer or form.

    >>> x = ir.val("x", ir.DataType.FLOAT, [2])
    >>> node = ir.node("Relu", [x])
    >>> node.outputs[0].name, node.outputs[0].type = "y", x.type
    >>> graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18}, name="g")
    >>> convert(ir.Model(graph, ir_version=10), 13)[0].opset_imports
    {'': 13}
    """
    options = passes.Options(consumer=consumer, form=form, allow_rounding_change=allow_rounding_change)
    working, _ = modelio.to_ir(model)
    sites = move(working, opset, options)
    gaps = runtimes.kernel_gaps(working)
    return working, FusionReport(sites=tuple(sites), consumer=consumer, missing_kernels=gaps, opset=opset)


def move(model: ir.Model, opset: int, options: passes.Options) -> list[SiteReport]:
    """Moves a model in place; after an error it is of no use.

    Returns:
        What became of each site, in the order of the graph.

    Raises:
        ConversionError: an operator has no equal at that opset.
        UsageError: there is no such opset.
    """
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        raise UsageError(f"cannot move a model to opset {opset}; choose one of {OLDEST_OPSET} to {newest}")
    cleanup.settle_domain(model)
    if all(default_opset(i, opset) == opset for i in _imports(model)):
        return passes.rewrite(model, options)
    checked = fullcheck.objection(model) is None
    mover = _Mover(model, opset)
    sites = passes.rewrite(model, options, opset=opset)
    mover.run()
    if any(domain != functions.DOMAIN for domain, _, _ in model.functions):
        sites = passes.merged(sites, passes.rewrite(model, options))
    objection = fullcheck.objection(model) if checked and fullcheck.is_known(model) else None
    if objection is not None:
        raise ConversionError(f"the model at opset {opset} does not pass onnx's check: {objection}; a bug here")
    return sites


def _imports(model: ir.Model) -> list[dict[str, int]]:
    graphs = (model.graph, *(f.graph for f in model.functions.values()))
    return [graph.opset_imports for graph in graphs]


class _Mover:
    """One move of one model: what stands in it now is of the opsets that it says now, and all of it is moved."""

    def __init__(self, model: ir.Model, opset: int) -> None:
        self._model = model
        self._opset = opset
        self._types = ValueTypes(model)
        self._pending: list[tuple[ir.Node, int]] = []
        main = default_opset(model.opset_imports)
        for graph in (model.graph, *(f.graph for f in model.functions.values())):
            at = default_opset(graph.opset_imports, main)
            self._pending += [(node, at) for node in graph_nodes(graph)]
        self._problems: dict[tuple[str, int, str], list[str]] = collections.defaultdict(list)
        self._origins: dict[ir.Node, tuple[str, int, str]] = {}  # of new nodes: what of the file they stand for

    def run(self) -> None:
        """Moves every node that is left of those that stood there.

        Raises:
            ConversionError: some have no equal; all are named.
        """
        self._names = Names(self._model)
        self._types.adopt()
        graphs = (self._model.graph, *(f.graph for f in self._model.functions.values()))
        still = {node for graph in graphs for node in graph_nodes(graph)}
        pending = [(node, at) for node, at in reversed(self._pending) if node in still]
        while pending:
            node, at = pending.pop()
            if node.graph is not None and onnx_op(node) and node.op_identifier() not in self._model.functions:
                pending += reversed(self._move(node, at))
        if self._problems:
            raise ConversionError(self._said())

    def _move(self, node: ir.Node, at: int) -> list[tuple[ir.Node, int]]:
        """Moves a node as far as it goes; what came in its place is still to be moved."""
        if node.op_type in NATIVE_NORMS:
            return []  # unknown to onnx, and the same to onnxruntime at every opset
        edit = Edit(node, self._names, self._types)
        origin = self._origins.get(node, (node.op_type, _version(node.op_type, at) or at, _place(node)))
        added: list[tuple[ir.Node, int]] = []
        while not edit.gone:
            version = _version(node.op_type, at)
            if version is None:
                self._note(node, at, "it is no operator of that opset")
                break
            goal = _version(node.op_type, self._opset)
            if version == goal:
                break
            edit.nodes = []
            at, problem = self._raise(edit, version) if self._opset > at else self._lower(edit, version)
            if problem is not None:
                self._note(node, version, problem)
                break
            added += [(new, at) for new in edit.nodes]
            self._origins.update((new, origin) for new in edit.nodes)
        return added

    def _note(self, node: ir.Node, version: int, problem: str) -> None:
        """Keeps a problem under the node of the file that it is of, once for each; users know no node of a body."""
        if node not in self._origins:
            self._problems[node.op_type, version, problem].append(_place(node))
            return
        name, at, place = self._origins[node]
        if not any(key[:2] == (name, at) and place in places for key, places in self._problems.items()):
            self._problems[name, at, f"in its body {node.op_type} (version {version}) has no equal: {problem}"].append(
                place
            )

    def _raise(self, edit: Edit, version: int) -> tuple[int, str | None]:
        """One version up; returns the opset that the result is of, or why there is none."""
        name = edit.node.op_type
        newer = min(v for v in _versions(name) if v > version)
        if onnx.defs.get_schema(name, newer).deprecated:
            return version, f"opset {newer} took it away"
        problem = relabel.lift(edit.node, version, newer, edit.dtype)
        if problem is not None and (name, version, newer) in adapters.ADAPTERS:
            problem = adapters.ADAPTERS[name, version, newer](edit)
        if problem is not None and (name, version, newer) in single.CONVERTED:
            problem = single.convert(edit, version, newer)
        if problem is None:
            return newer, None
        return version, problem if single.expand(edit, version) is not None else None

    def _lower(self, edit: Edit, version: int) -> tuple[int, str | None]:
        """The same, one version down."""
        name = edit.node.op_type
        older = max((v for v in _versions(name) if v < version), default=None)
        problem = "" if older is None else relabel.lower(edit.node, older, version, edit.dtype)
        step = (name, version, older)
        if problem is not None and step in adapters.ADAPTERS:
            problem = adapters.ADAPTERS[step](edit)
        if problem is not None and older is not None and step in single.CONVERTED:
            problem = single.convert(edit, version, older)
        if problem is None:
            return version - 1, None
        if (name, version) in adapters.NOT_BY_ITS_BODY:
            return version, f"it exists from opset {version} on, and {problem}"
        unexpanded = single.expand(edit, version)
        if unexpanded is None:
            return version, None
        reason = f"it exists from opset {version} on" if older is None else problem
        return version, f"{reason}, and {problem or unexpanded}" if older is None else problem

    def _said(self) -> str:
        """All problems in one line."""
        parts = []
        for (name, version, problem), places in self._problems.items():
            more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
            parts.append(f"{name} (version {version}) at {', '.join(places[:_NAMED])}{more}: {problem}")
        return f"the model cannot be moved to opset {self._opset}: {'; '.join(parts)}"


def _place(node: ir.Node) -> str:
    return node_name(node)


@functools.cache
def _all_versions() -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = collections.defaultdict(list)
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            found[schema.name].append(schema.since_version)
    return {name: tuple(sorted(versions)) for name, versions in found.items()}


def _versions(name: str) -> tuple[int, ...]:
    return _all_versions().get(name, ())


def _version(name: str, opset: int) -> int | None:
    """The version that an operator has at an opset; None where it does not exist yet."""
    return max((v for v in _versions(name) if v <= opset), default=None)
