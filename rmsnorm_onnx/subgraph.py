"""One site of a model as a model of its own: the nodes between the norm's inputs and its result, and what they need.

The slice goes backwards from the result and stops at the site's values. It leaves branches and loop bodies (captured
values come along), and a function's body (its arguments and attributes are those of one call). Functions that the
nodes call are carried whole. Initializers are read only where the slice needs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.site import node_name
from rmsnorm_onnx.view import Ref, View

_NODE_LIMIT = 200  # a norm takes about twenty; beyond this the slice has missed its x


class UncutError(Exception):
    """A site cannot stand alone; the message says why, in a few words."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """Where a slice ends: a value of the site, and what stands for it in the model that is cut out.

    Attributes:
        name: Its name there.
        type: Its float type.
        shape: Its shape there.
        data: Its value, where it is known: it becomes an initializer, otherwise an input.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray | None = None

    def value(self) -> ir.Value:
        """A new value of this name, type and shape."""
        tensor = None if self.data is None else ir.tensor(self.data, name=self.name)
        type_ = ir.TensorType(dtypes.ir_dtype(self.type))
        return ir.Value(name=self.name, type=type_, shape=ir.Shape(self.shape), const_value=tensor)


class Places:
    """Where the values of a model are: by their scope and name, each with a chain of calls that leads to it."""

    def __init__(self, model: ir.Model) -> None:
        """Walks all nodes once."""
        self.view = View(model)
        self._at: dict[tuple[str, str], Ref] = {}
        self._named: dict[str, list[Ref]] = {}
        self._calls: dict[ir.Value, tuple[ir.Node, ...]] = {}
        scopes: dict[object, str] = {}
        for node, calls in self.view.nodes():
            if node.graph not in scopes:
                scopes[node.graph] = self.view.scope(node)
            for value in node.outputs:
                if value in self._calls:
                    continue
                self._calls[value] = calls
                if value.name:
                    self._at.setdefault((scopes[node.graph], value.name), Ref(value, calls))
                    self._named.setdefault(value.name, []).append(Ref(value, calls))

    def of(self, value: ir.Value) -> Ref:
        """A node's output with a chain of calls that leads to it."""
        return Ref(value, self._calls.get(value, ()))

    def find(self, scope: str, name: str | None) -> Ref | None:
        """The value of a name in a scope, else the only one of that name anywhere."""
        if not name:
            return None
        named = self._named.get(name, [])
        return self._at.get((scope, name)) or (named[0] if len(named) == 1 else None)


def cut(model: ir.Model, view: View, output: Ref, stops: Mapping[ir.Value, Stop], result: Stop) -> ir.Model:
    """The part of a model that computes `output` from the values at which it stops, as a model.

    Args:
        model: The model that holds it; only read.
        view: Its view.
        output: The result, with the calls that lead to it.
        stops: Values in the same calls. Any value of the same name is taken for them too, so that a site can be cut
            out of a model in which another pass has replaced the values and kept the names.
        result: What the result is called, and its type and shape.

    Returns:
        A model with the stops that were met as its inputs or initializers.

    Raises:
        UncutError: the result depends on something else that is known only at run time, or on nothing that is given.
    """
    slicer = _Slicer(view, output.calls, stops)
    value = slicer.value(output)
    if value is None or value.producer() is None:
        raise UncutError("its result is no node's output")
    value.name, value.type, value.shape = (
        result.name,
        ir.TensorType(dtypes.ir_dtype(result.type)),
        ir.Shape(result.shape),
    )
    function = view.function_of(output.calls[-1]) if output.calls else None
    functions = list(_called(slicer.nodes, model))
    imports = {**model.opset_imports, **(function.opset_imports if function else {})}
    graph = ir.Graph(
        [v for v in slicer.met.values() if v.const_value is None],
        [value],
        nodes=slicer.nodes,
        initializers=[*slicer.initializers, *(v for v in slicer.met.values() if v.const_value is not None)],
        opset_imports=imports,
        name="site",
    )
    return ir.Model(graph, ir_version=max(model.ir_version, 8 if functions else 4), functions=functions)


def _called(nodes: Iterable[ir.Node], model: ir.Model) -> Iterable[ir.Function]:
    """The functions that nodes call, directly or through others."""
    found: dict[ir.OperatorIdentifier, ir.Function] = {}
    pending = list(nodes)
    while pending:
        key = pending.pop().op_identifier()
        function = model.functions.get(key)
        if function is not None and key not in found:
            found[key] = function
            body = list(function.graph.all_nodes())
            if any(node.op_type == "SimplifiedLayerNormalization" for node in body):
                # Loading such a model ends the process.
                raise UncutError(
                    f"onnxruntime cannot load SimplifiedLayerNormalization inside function {function.name}"
                )
            pending += body
    return found.values()


class _Slicer:
    """Copies nodes backwards from a result; nodes are in topological order."""

    def __init__(self, view: View, calls: tuple[ir.Node, ...], stops: Mapping[ir.Value, Stop]) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.met: dict[str, ir.Value] = {}
        self._view = view
        self._calls = calls
        self._stops = stops
        self._by_name = {value.name: stop for value, stop in stops.items() if value.name}
        self._copies: dict[Ref, ir.Value | None] = {}
        self._count = 0

    def value(self, ref: Ref) -> ir.Value | None:
        """The copy of a value; None for an absent input."""
        if ref not in self._copies:
            self._copies[ref] = self._copy(ref)
        return self._copies[ref]

    def _stop(self, ref: Ref) -> Stop | None:
        if ref.calls != self._calls:
            return None
        return self._stops.get(ref.value) or self._by_name.get(ref.value.name or "")

    def _copy(self, ref: Ref) -> ir.Value | None:
        stop = self._stop(ref)
        if stop is not None:
            return self.met.setdefault(stop.name, stop.value())
        node = ref.value.producer()
        if node is not None:
            outputs = self._node(node, ref.calls)
            return outputs[ref.value.index() or 0]
        if ref.value.const_value is not None:
            tensor = ir.tensor(ref.value.const_value.numpy(), dtype=ref.value.const_value.dtype)
            copy = ir.Value(
                name=self._fresh(),
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                const_value=tensor,
            )
            self.initializers.append(copy)
            return copy
        return self._argument(ref)

    def _argument(self, ref: Ref) -> ir.Value | None:
        """What the call passes for an input of the function."""
        function = self._view.function_of(ref.calls[-1]) if ref.calls else None
        index = next((i for i, v in enumerate(function.inputs) if v is ref.value), None) if function else None
        if index is None:
            raise UncutError(f"its result also depends on {ref.value.name}, which lies beyond the norm's input")
        passed = ref.calls[-1].inputs
        argument = passed[index] if index < len(passed) else None
        return None if argument is None else self.value(Ref(argument, ref.calls[:-1]))

    def _node(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> tuple[ir.Value, ...]:
        if len(self.nodes) >= _NODE_LIMIT:
            raise UncutError(f"more than {_NODE_LIMIT} nodes lie between its result and its input")
        inputs = [None if v is None else self.value(Ref(v, calls)) for v in node.inputs]
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            self._attributes(node, calls),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=node.name,
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = self._fresh() if old.name else ""
            self._copies[Ref(old, calls)] = new
        self.nodes.append(copy)
        return tuple(copy.outputs)

    def _attributes(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> list[ir.Attr]:
        """The node's attributes; those that refer to the function's are what the call gives."""
        attributes = []
        for name, attribute in node.attributes.items():
            if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
                raise UncutError(f"{node_name(node)} holds a branch or a loop")
            given = self._view.attribute(node, calls, name)
            if given is not None:
                attributes.append(ir.Attr(name, given.type, given.value))
        return attributes

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"
