"""A read-only view of a model in which calls of model-local functions are transparent.

A value inside a function body means something else in every call, so the unit here is a `Ref`: a value and the chain
of calls that leads to it. Two Refs that are the same number at run time resolve to one Ref, the one of the node that
computes it; the recogniser therefore never meets a function boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import onnx_ir as ir

MAX_CALL_DEPTH = 16  # deeper calls are opaque
MAX_CALLS = 20_000  # chains of calls that are followed: nested functions can multiply without end


def graph_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph and of its branches, in order: each node before what is in it."""
    for node in graph:
        yield node
        for attr in node.attributes.data.values():  # the dict in the UserDict: most nodes have nothing to look at
            if attr.type == ir.AttributeType.GRAPH and not attr.is_ref():
                yield from graph_nodes(attr.as_graph())
            elif attr.type == ir.AttributeType.GRAPHS and not attr.is_ref():
                for inner in attr.as_graphs():
                    yield from graph_nodes(inner)


def onnx_op(node: ir.Node | None) -> str:
    """The name of an operator of ONNX's own domain; "" for another domain's, whatever its name, and for no node."""
    return node.op_type if node is not None and node.domain in ("", "ai.onnx") else ""


def default_opset(imports: Mapping[str, int], otherwise: int = 1) -> int:
    """The version of ONNX's own operator set, by either of its names."""
    return imports.get("", imports.get("ai.onnx", otherwise))


class Ref(NamedTuple):
    """A value as seen through a chain of function calls, outermost first."""

    value: ir.Value
    calls: tuple[ir.Node, ...] = ()


class View:
    """Resolves values, users and attributes through function calls.

    Args:
        model: The model to look at; it is never changed.

    Attributes:
        truncated: Whether calls were left out by `nodes`, because there are too many.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._has_functions = bool(model.functions)
        self._input_index: dict[ir.Value, int] = {}
        self._output_index: dict[ir.Value, list[int]] = {}
        for function in model.functions.values():
            for i, value in enumerate(function.inputs):
                self._input_index[value] = i
            for i, value in enumerate(function.outputs):
                self._output_index.setdefault(value, []).append(i)
        self._resolved: dict[Ref, Ref | None] = {}
        self._followed = 0
        self.truncated = False

    def function_of(self, node: ir.Node) -> ir.Function | None:
        """The model-local function that a node calls, or None."""
        return self.model.functions.get(node.op_identifier()) if self._has_functions else None

    def resolve(self, ref: Ref) -> Ref | None:
        """The Ref of the node, graph input or initializer that truly gives this value; None for an absent input."""
        if not self._has_functions:
            return ref
        if ref in self._resolved:
            return self._resolved[ref]
        seen: set[Ref] = set()
        current: Ref | None = ref
        while current is not None and current not in seen:
            seen.add(current)
            following = self._step(current)
            if following == current:
                break
            current = following
        self._resolved[ref] = current
        return current

    def _step(self, ref: Ref) -> Ref | None:
        value, calls = ref
        node = value.producer()
        if node is not None:
            function = self.function_of(node)
            index = value.index()
            if function is None or index is None or index >= len(function.outputs) or len(calls) >= MAX_CALL_DEPTH:
                return ref
            return Ref(function.outputs[index], (*calls, node))
        if calls and value in self._input_index:
            index = self._input_index[value]
            arguments = calls[-1].inputs
            argument = arguments[index] if index < len(arguments) else None
            return None if argument is None else Ref(argument, calls[:-1])
        return ref

    def input(self, node: ir.Node, calls: tuple[ir.Node, ...], index: int) -> Ref | None:
        """The resolved Ref of a node's input; None when it is absent."""
        if index >= len(node.inputs):
            return None
        value = node.inputs[index]
        if value is None:
            return None
        return self.resolve(Ref(value, calls)) if self._has_functions else Ref(value)

    def inputs(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> list[Ref | None]:
        """All resolved inputs of a node."""
        if not self._has_functions:
            return [None if value is None else Ref(value) for value in node.inputs]
        return [self.input(node, calls, i) for i in range(len(node.inputs))]

    def producer(self, ref: Ref) -> ir.Node | None:
        """The node that computes a resolved Ref."""
        return ref.value.producer()

    def users(self, ref: Ref) -> Iterator[tuple[ir.Node, tuple[ir.Node, ...]]]:
        """Every node that reads a resolved Ref, with the calls that lead to the node."""
        if not self._has_functions:
            for node in {node: None for node, _ in ref.value.uses()}:
                yield node, ()
            return
        seen: set[tuple[ir.Node, tuple[ir.Node, ...]]] = set()
        for user in self._users(ref, set()):
            if user not in seen:
                seen.add(user)
                yield user

    def _users(self, ref: Ref, seen: set[Ref]) -> Iterator[tuple[ir.Node, tuple[ir.Node, ...]]]:
        if ref in seen:
            return
        seen.add(ref)
        value, calls = ref
        for node, index in value.uses():
            function = self.function_of(node)
            if function is None or len(calls) >= MAX_CALL_DEPTH:
                yield node, calls
            elif index < len(function.inputs):
                yield from self._users(Ref(function.inputs[index], (*calls, node)), seen)
        for index in self._output_index.get(value, ()) if calls else ():
            if index < len(calls[-1].outputs):
                yield from self._users(Ref(calls[-1].outputs[index], calls[:-1]), seen)

    def is_model_output(self, ref: Ref) -> bool:
        """Whether a resolved Ref leaves its graph: as an output of the model, of a branch or of a loop body."""
        if not self._has_functions:
            return ref.value.is_graph_output()
        pending, seen = [ref], set()
        while pending:
            value, calls = current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            indices = self._output_index.get(value, ()) if calls else ()
            if not indices and value.is_graph_output():
                return True
            pending += [Ref(calls[-1].outputs[i], calls[:-1]) for i in indices if i < len(calls[-1].outputs)]
            for node, index in value.uses():
                function = self.function_of(node)
                if function is not None and index < len(function.inputs) and len(calls) < MAX_CALL_DEPTH:
                    pending.append(Ref(function.inputs[index], (*calls, node)))
        return False

    def attribute(self, node: ir.Node, calls: tuple[ir.Node, ...], name: str) -> ir.Attr | None:
        """A node's attribute; one that refers to the enclosing function's attribute is looked up at the call."""
        attr = node.attributes.get(name)
        for depth in range(len(calls), -1, -1):
            if attr is None or not attr.is_ref():
                return attr
            if depth == 0:
                return None
            call, name = calls[depth - 1], attr.ref_attr_name or ""
            function = self.function_of(call)
            attr = call.attributes.get(name) or (function.attributes.get(name) if function else None)
            if attr is not None and not attr.is_ref() and attr.value is None:
                return None
        return attr

    def nodes(self) -> Iterator[tuple[ir.Node, tuple[ir.Node, ...]]]:
        """Every node that can run: of the main graph, of branches and of called functions, once per chain of calls."""
        self._followed = 0
        yield from self._nodes_in(self.model.graph, ())

    def _nodes_in(self, graph: ir.Graph, calls: tuple[ir.Node, ...]) -> Iterator[tuple[ir.Node, tuple[ir.Node, ...]]]:
        for node in graph_nodes(graph):
            yield node, calls
            if not self._has_functions:
                continue
            function = self.function_of(node)
            if (
                function is None
                or len(calls) >= MAX_CALL_DEPTH
                or any(c.op_identifier() == node.op_identifier() for c in calls)
            ):
                continue
            self._followed += 1
            if self._followed > MAX_CALLS:
                self.truncated = True
                continue
            yield from self._nodes_in(function.graph, (*calls, node))

    def opset(self, calls: tuple[ir.Node, ...]) -> int:
        """The version of the default operator set in force at the end of a chain of calls."""
        function = self.function_of(calls[-1]) if calls else None
        imports = function.opset_imports if function is not None else self.model.opset_imports
        return default_opset(imports, default_opset(self.model.opset_imports))

    @functools.cached_property
    def _owners(self) -> dict[ir.Graph, tuple[ir.Node, str]]:
        owners: dict[ir.Graph, tuple[ir.Node, str]] = {}
        graphs = [self.model.graph, *(f.graph for f in self.model.functions.values())]
        for graph in graphs:
            for node in graph_nodes(graph):
                for attr in node.attributes.values():
                    if attr.is_ref():
                        continue
                    if attr.type == ir.AttributeType.GRAPH:
                        owners[attr.as_graph()] = (node, attr.name)
                    elif attr.type == ir.AttributeType.GRAPHS:
                        owners.update({g: (node, attr.name) for g in attr.as_graphs()})
        return owners

    def container(self, node: ir.Node) -> ir.Graph | ir.Function:
        """The main graph or the function that a node belongs to, through any branches."""
        graph = node.graph
        if graph is self.model.graph:
            return self.model.graph
        while isinstance(graph, ir.Graph) and graph is not self.model.graph and graph in self._owners:
            graph = self._owners[graph][0].graph
        for function in self.model.functions.values():
            if graph is function.graph:
                return function
        return self.model.graph

    def scope(self, node: ir.Node) -> str:
        """Where a node stands: "" in the main graph, else its function and branches, outermost first."""
        parts: list[str] = []
        graph = node.graph
        if graph is self.model.graph:
            return ""
        while isinstance(graph, ir.Graph) and graph in self._owners:
            owner, name = self._owners[graph]
            parts.append(f"{owner.name or owner.op_type}/{name}")
            graph = owner.graph
        for function in self.model.functions.values():
            if graph is function.graph:
                parts.append(f"function {function.domain}::{function.name}")
        return "/".join(reversed(parts))
