"""Damages a legal spelling: one change on the way to the norm's result, or one that changes nothing.

Nothing here knows which changes matter: a damaged graph may still be a norm, another norm, or none. Whatever is claimed
of it is measured. What comes out passes the full check and runs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from changes import CHANGES, HARMLESS
from evaluate import evaluate
from kit import ONNX
from onnx import numpy_helper
from productions import Random
from spellings import Spelling

SHOTS = 60  # tries before a spelling is given up


@dataclasses.dataclass(frozen=True)
class Damaged:
    """A damaged model, the feeds it takes, and what was done to it."""

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    changes: tuple[str, ...]
    harmless: bool


@dataclasses.dataclass
class Site:
    """The scope that holds the norm, for a change to work on."""

    model: onnx.ModelProto
    nodes: Any  # the scope's repeated field of nodes
    initializers: list[Any]  # the repeated fields of initializers that the scope can see
    ancestors: list[onnx.NodeProto]  # nodes that the result depends on, the result's own included
    values: Mapping[str, Any]  # by name, what each value was before the damage
    root: str
    x: str
    outputs: set[str]  # the scope's own outputs
    main: bool
    random: Random
    feeds: dict[str, np.ndarray]

    def choose(self, options: Any) -> Any:
        return self.random.choice(list(options))

    def pick(self, *op_types: str) -> onnx.NodeProto | None:
        """Some ancestor of one of these operators."""
        fitting = [n for n in self.ancestors if not op_types or n.op_type in op_types]
        return self.choose(fitting) if fitting else None

    def constants(self, *, floats: bool) -> list[tuple[Any, np.ndarray]]:
        """The constants that ancestors read: something with a `CopyFrom` for a new tensor, and the array."""
        read = {name for n in self.ancestors for name in n.input}
        held = [t for field in self.initializers for t in field if t.name in read]
        for n in self.ancestors:
            held += [a.t for a in n.attribute if n.op_type == "Constant" and a.name == "value"]
        types = {ONNX[t] for t in (("float32", "float64", "float16", "bfloat16") if floats else ("int64", "int32"))}
        return [(t, numpy_helper.to_array(t)) for t in held if t.data_type in types]

    def insert(self, node: onnx.NodeProto, *new: onnx.NodeProto) -> None:
        """Puts nodes before a node of this scope."""
        at = next((i for i, n in enumerate(self.nodes) if n is node or n.output[:] == node.output[:]), 0)
        for offset, fresh in enumerate(new):
            self.nodes.insert(at + offset, fresh)

    def before(self, node: onnx.NodeProto) -> list[str]:
        """Names of the values that a node may read."""
        names = []
        for n in self.nodes:
            if n.output[:] == node.output[:]:
                break
            names += n.output
        inner = {o for n in self.nodes for o in n.output}
        return names + [name for name in self.values if name not in inner]


def scopes(model: onnx.ModelProto) -> Iterator[tuple[Any, list[Any], Any]]:
    """Every scope of a model: its nodes, the initializers it sees, and its graph or function."""

    def walk(graph: onnx.GraphProto, seen: list[Any]) -> Iterator[tuple[Any, list[Any], Any]]:
        visible = [*seen, graph.initializer]
        yield graph.node, visible, graph
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from walk(attribute.g, visible)

    yield from walk(model.graph, [])
    for function in model.functions:
        yield function.node, [], function


def ancestors(nodes: Any, root: str, functions: Any) -> list[onnx.NodeProto]:
    """The nodes that a value depends on, bodies of called single-operator functions included."""
    maker = {name: node for node in nodes for name in node.output}
    bodies = {(f.domain, f.name): f for f in functions}
    found: list[onnx.NodeProto] = []
    seen, stack = set(), [root]
    while stack:
        node = maker.get(stack.pop())
        if node is None or node.output[0] in seen:
            continue
        seen.add(node.output[0])
        body = bodies.get((node.domain, node.op_type))
        found.extend(body.node if body is not None else [node])
        stack.extend(node.input)
    return found


def damage(spelling: Spelling, random: Random, *, harmless: bool, kinds: Sequence[str] = ()) -> Damaged | None:
    """One damaged graph that passes the full check and runs, or None after too many tries; of `kinds`, if given."""
    values = {}
    for frame in evaluate(ir.from_proto(spelling.model), spelling.feeds):
        values.update({v.name: cell for v, cell in frame.items()})
    table = HARMLESS if harmless else CHANGES
    for _ in range(SHOTS):
        model = copy.deepcopy(spelling.model)
        names = [random.choice(list(kinds or table)) for _ in range(random.choice([1, 1, 1, 2]))]
        feeds = dict(spelling.feeds)
        if all(_apply(model, spelling, table[name], values, random, feeds) for name in names) and _runs(model, feeds):
            return Damaged(model, feeds, tuple(names), harmless)
    return None


def _apply(
    model: onnx.ModelProto,
    spelling: Spelling,
    change: Callable[[Site], bool],
    values: Mapping[str, Any],
    random: Random,
    feeds: dict[str, np.ndarray],
) -> bool:
    for i, (nodes, initializers, scope) in enumerate(scopes(model)):
        if any(spelling.y in node.output for node in nodes):
            found = ancestors(nodes, spelling.y, model.functions)
            outputs = {getattr(o, "name", o) for o in scope.output}
            site = Site(
                model, nodes, initializers, found, values, spelling.y, spelling.x, outputs, i == 0, random, feeds
            )
            return change(site)
    return False


def _runs(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> bool:
    """Whether the model is valid, runs, and keeps what it declares of shapes; its outputs are declared anew."""
    try:
        onnx.checker.check_model(model)
        frames = evaluate(ir.from_proto(model), feeds)
        ranks = {v.name: c.array.ndim for f in frames for v, c in f.items()}
        for _, _, scope in scopes(model):
            for output in scope.output if isinstance(scope, onnx.GraphProto) else ():
                output.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
                for _ in range(ranks[output.name]):
                    output.type.tensor_type.shape.dim.add()
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, LookupError, ValueError, TypeError):
        return False
    # A loop can outgrow the shape that its body declares for the state.
    return all(_fits(v.shape, c.array.shape) for f in frames for v, c in f.maps[0].items() if v.producer() is None)


def _fits(declared: ir.Shape | None, shape: tuple[int, ...]) -> bool:
    if declared is None:
        return True
    known = zip(declared, shape, strict=False)
    return len(declared) == len(shape) and all(not isinstance(n, int) or n == size for n, size in known)
