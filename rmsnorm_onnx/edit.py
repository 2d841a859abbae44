"""One node of a graph while it is rewritten: what is known of its values, and the new nodes that go before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import cleanup, relabel
from rmsnorm_onnx.constants import stored
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.valuetypes import ValueTypes
from rmsnorm_onnx.view import onnx_op
from rmsnorm_onnx.writer import Names

_SMALL = 4096  # elements of a constant that an operator's definition may ask for; weights are larger, and are not read


class Edit:
    """One node, to be replaced or changed.

    Args:
        node: The node, in its graph.
        names: The names of the model.
        types: The types of the model.

    Attributes:
        node: The node.
        nodes: New nodes, in order, each in the graph already.
        gone: Whether the node was replaced.
    """

    def __init__(self, node: ir.Node, names: Names, types: ValueTypes) -> None:
        """Holds what edits need; changes nothing yet."""
        self.node = node
        self.nodes: list[ir.Node] = []
        self.gone = False
        self.names = names
        self.types = types

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """A value's element type; None where it is unknown."""
        return self.types.dtype(value)

    def dims(self, value: ir.Value | None) -> Dims | None:
        """A value's dimensions; None where its rank is unknown."""
        return None if value is None else self.types.dims(value)

    def input(self, index: int) -> ir.Value | None:
        """An input of the node; None where it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def value_of(self, name: str, otherwise: Any) -> Any:
        """The value of an attribute; None where it refers to the attributes of the function around the node."""
        held = self.node.attributes.get(name)
        return otherwise if held is None else None if held.is_ref() else held.value

    def constant(self, value: ir.Value | None) -> np.ndarray[Any, Any] | None:
        """The numbers of a small constant that nothing can override; None for any other value.

        Exporters also write axes as an operator or two on constants.
        """
        if value is None or value.is_graph_input():
            return None
        if value.const_value is not None:
            return value.const_value.numpy() if value.const_value.size <= _SMALL else None
        node = value.producer()
        if node is None:
            return None
        if onnx_op(node) != "Constant":
            return self._folded(node)
        tensor = stored(node)
        return None if tensor is None or tensor.size > _SMALL else tensor.numpy()

    def _folded(self, node: ir.Node) -> np.ndarray[Any, Any] | None:
        kind = onnx_op(node)
        if kind not in ("Identity", "Reshape", "Concat"):
            return None
        arrays = [self.constant(v) for v in node.inputs]
        known = [a for a in arrays if a is not None]
        if len(known) < len(arrays):
            return None
        if kind == "Identity":
            return known[0]
        if kind == "Concat":
            axis = node.attributes.get("axis")
            flat = axis is not None and not axis.is_ref() and all(a.ndim == 1 for a in known)
            return np.concatenate(known) if flat else None
        return known[0].reshape(known[1]) if np.all(known[1] != 0) else None

    def op(
        self, op_type: str, *inputs: ir.Value | None, dtype: ir.DataType | None, dims: Dims | None = None, **attrs: Any
    ) -> ir.Value:
        """Puts a new node before the node, and returns its output."""
        node = ir.node(op_type, inputs, attrs)
        self.insert([node])
        self.types.note(node.outputs[0], (dtype, dims))
        return node.outputs[0]

    def integers(self, values: list[int] | int) -> ir.Value:
        """A Constant of int64 values; a number gives a scalar."""
        array = np.array(values, dtype=np.int64)
        return self.op("Constant", dtype=ir.DataType.INT64, dims=array.shape, value=ir.tensor(array))

    def number(self, value: float) -> ir.Value:
        """A scalar Constant of float32."""
        array = np.array(value, dtype=np.float32)
        return self.op("Constant", dtype=ir.DataType.FLOAT, dims=(), value=ir.tensor(array))

    def insert(self, nodes: list[ir.Node]) -> None:
        """Puts nodes before the node, with names of their own and its trace."""
        stem = self.node.name or self.node.outputs[0].name or self.node.op_type
        for node in nodes:
            node.name = self.names.fresh(f"{stem}/{node.op_type}")
            for key, text in self.node.metadata_props.items():
                node.metadata_props.setdefault(key, text)
            for value in node.outputs:
                if value.name != "":
                    value.name = self.names.fresh(f"{stem}/{node.op_type}_output")
        graph = self.node.graph
        assert graph is not None
        graph.insert_before(self.node, nodes)
        self.nodes += nodes

    def become(self, *values: ir.Value | None) -> None:
        """Lets new values take the places of the node's outputs, under their names, and removes the node."""
        for old, new in zip(self.node.outputs, values, strict=True):
            if new is None or not old.name:
                continue
            name, info = old.name, (self.types.dtype(old), self.types.dims(old))
            old.name = self.names.fresh(f"{name}_replaced")
            new.name, new.type, new.shape = name, old.type, old.shape
            new.doc_string = old.doc_string
            new.metadata_props.update(old.metadata_props)
            self.types.note(new, info)
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self._remove()

    def drop_input(self, index: int) -> None:
        """Takes the last input off the node, and what computes it where nobody else reads it."""
        value = self.node.inputs[index]
        self.node.resize_inputs(index)
        if value is None or value.uses() or value.is_graph_output():
            return
        producer, owner = value.producer(), value.graph
        if producer is not None:
            cleanup.remove_dead(producer)
        elif isinstance(owner, ir.Graph) and value.is_initializer() and not value.is_graph_input():
            assert value.name is not None
            del owner.initializers[value.name]

    def keep(self, name: str, value: Any) -> None:
        """Sets an attribute of the node from an int or a string."""
        self.node.attributes[name] = relabel.attr(name, value)

    def _remove(self) -> None:
        graph = self.node.graph
        assert graph is not None
        graph.remove(self.node, safe=True)
        self.gone = True
