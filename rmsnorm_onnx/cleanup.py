"""What a rewrite leaves behind: dead nodes, functions that nobody calls, and the names of operator sets."""

from __future__ import annotations

from collections.abc import Set

import onnx_ir as ir

from rmsnorm_onnx.functions import DOMAIN
from rmsnorm_onnx.view import graph_nodes


def settle_domain(model: ir.Model) -> None:
    """Imports ONNX's own operators under their short name, which new nodes use."""
    for imports in (model.graph.opset_imports, *(f.opset_imports for f in model.functions.values())):
        if "ai.onnx" in imports:
            imports.setdefault("", imports.pop("ai.onnx"))


def set_opset(model: ir.Model, opset: int) -> None:
    """Lets a model and its functions say that they are of an opset; their nodes are the caller's."""
    for imports in (model.graph.opset_imports, *(f.opset_imports for f in model.functions.values())):
        if "" in imports:
            imports[""] = opset


def detach_dead(root: ir.Node, needed: Set[ir.Value] = frozenset()) -> list[ir.Node]:
    """Takes the inputs from a node that nobody reads any more, and from what only it read; initializers go at once.

    Args:
        root: The node.
        needed: Values that stay although nobody reads them yet.

    Returns:
        The nodes, to be removed together: one by one costs more than finding them.
    """
    pending, dead = [root], []
    while pending:
        node = pending.pop()
        if any(o.uses() or o.is_graph_output() or (o in needed and node is not root) for o in node.outputs):
            continue
        dead.append(node)
        sources = [v for v in node.inputs if v is not None]
        node.resize_inputs(0)
        for value in sources:
            producer = value.producer()
            if producer is not None:
                pending.append(producer)
            elif value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                owner = value.graph
                if isinstance(owner, ir.Graph) and value.name is not None:
                    del owner.initializers[value.name]
    return list(dict.fromkeys(dead))


def bypass_idle_casts(value: ir.Value) -> list[ir.Node]:
    """Lets who reads a Cast of a value to the type that it has already read the value itself.

    Exporters write one behind a norm (`type_as`). onnxruntime leaves it there behind its fused kernel, as a copy that
    costs up to the kernel's own time.

    Returns:
        The Casts, to be removed.
    """
    idle = []
    for node, index in tuple(value.uses()):
        if index != 0 or value.dtype is None or not is_idle_cast(node, value.dtype):
            continue
        old = node.outputs[0]
        producer = value.producer()
        if old.is_graph_output():
            if value.is_graph_output() or producer is None or producer.graph is not node.graph:
                continue
            value.name, old.name = old.name, f"{old.name}_idle"
            value.type, value.shape = old.type, old.shape  # as the file declares its output
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        node.resize_inputs(0)
        idle.append(node)
    return idle


def is_idle_cast(node: ir.Node, dtype: ir.DataType) -> bool:
    """Whether a reader of a value of a type only casts it to that type."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "CastLike":
        like = node.inputs[1]
        return like is not None and like.dtype == dtype
    to = node.attributes.get("to") if node.op_type == "Cast" else None
    return to is not None and not to.is_ref() and to.as_int() == dtype


def remove_dead(node: ir.Node) -> None:
    """Removes a node that nobody reads, and what only it read, from a graph or a function."""
    for dead in detach_dead(node):
        if dead.graph is not None:
            dead.graph.remove(dead)


def remove(nodes: list[ir.Node]) -> None:
    """Removes detached nodes from their graphs."""
    by_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in dict.fromkeys(nodes):
        if isinstance(node.graph, ir.Graph):
            by_graph.setdefault(node.graph, []).append(node)
    for graph, members in by_graph.items():
        graph.remove(members)


def drop_orphaned(model: ir.Model, name: str, before: Set[ir.OperatorIdentifier]) -> None:
    """Removes functions of a name, others' too, whose last call a rewrite took away.

    TensorRT looks functions up by name alone: one that bears the name of a plugin's node is in its way, called or not.
    """
    called = _called(model)
    for key in [k for k in model.functions if k[1] == name and k in before and k not in called]:
        del model.functions[key]


def _called(model: ir.Model) -> set[ir.OperatorIdentifier]:
    graphs = (model.graph, *(f.graph for f in model.functions.values()))
    return {node.op_identifier() for graph in graphs for node in graph_nodes(graph)}


def drop_own_uncalled(model: ir.Model) -> None:
    """Removes functions of our domain that no node calls any more; others are the user's."""
    called = _called(model)
    for key in [k for k in model.functions if k[0] == DOMAIN and k not in called]:
        del model.functions[key]
