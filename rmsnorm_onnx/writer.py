"""What a form writes with: new nodes with unique names, in order, and the functions of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes, functions
from rmsnorm_onnx.body import Body, constant, emit
from rmsnorm_onnx.functions import FunctionLibrary
from rmsnorm_onnx.view import default_opset, graph_nodes

_DOMAIN_VERSIONS = {functions.DOMAIN: functions.VERSION, "com.microsoft": 1, "trt.plugins": 1}


class Names:
    """The names of a model's values and nodes, in all its graphs and functions.

    Names are unique over the whole file, since a branch must not redefine a name of the graph around it.

    Args:
        model: The model whose names are taken.

    Attributes:
        operators: Names of functions, and of operators of other domains than ONNX's own.
        called: Identifiers of the nodes of other domains than ONNX's own.
    """

    def __init__(self, model: ir.Model) -> None:
        """Collects the names."""
        self._taken: set[str | None] = set()
        self.called: set[ir.OperatorIdentifier] = set()
        self.operators = {function.name for function in model.functions.values()}
        for graph in (model.graph, *(f.graph for f in model.functions.values())):
            self._collect(graph)

    def fresh(self, wish: str) -> str:
        """The wish, with a number behind it where it is taken; the answer is taken from then on."""
        name, number = wish, 1
        while name in self._taken:
            number += 1
            name = f"{wish}_{number}"
        self._taken.add(name)
        return name

    def _collect(self, graph: ir.Graph) -> None:
        taken = self._taken
        taken.update(v.name for v in graph.inputs)
        self._taken.update(graph.initializers)
        for node in graph_nodes(graph):
            taken.add(node.name)
            if node.domain:
                self.operators.add(node.op_type)
                self.called.add(node.op_identifier())
            for value in node.outputs:
                taken.add(value.name)
            for attribute in node.attributes.data.values():
                if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                    inner = attribute.as_graph()
                    taken.update(v.name for v in inner.inputs)
                    taken.update(inner.initializers)


class Writer:
    """Collects the nodes of one site; the pass inserts them before the root and replaces its uses.

    Args:
        model: The model that is rewritten.
        scope: The graph or function that holds the site: domains are imported here and on the model.
        opset: The version of the default domain that holds at the site.
        before: The root of the site; new names start with its name.
        names: The names of the model, shared by all sites.
        functions: The functions of the model, shared by all sites.
        plugin_domain: The domain of plugin nodes.
        gain_attribute: Whether a constant gain becomes a tensor attribute of function and plugin nodes.
        metadata: Written to the metadata_props of every new node.

    Attributes:
        nodes: The new nodes, in order.
        residual_sum: The sum of x and its residual, where the site had one; takes the place of the root's own sum.
    """

    def __init__(
        self,
        model: ir.Model,
        scope: ir.Graph | ir.Function,
        opset: int,
        *,
        before: ir.Node,
        names: Names,
        functions: FunctionLibrary,
        plugin_domain: str = functions.DOMAIN,
        gain_attribute: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Holds what the forms need; adds nothing to the model yet."""
        self.opset = opset
        self.functions = functions
        self.plugin_domain = plugin_domain
        self.gain_attribute = gain_attribute
        self.nodes: list[ir.Node] = []
        self.residual_sum: ir.Value | None = None
        self._model = model
        self._scope = scope
        self._root = before
        self._names = names
        self._metadata = dict(metadata or {})

    @property
    def function_opset(self) -> int:
        """The version that function bodies are written for: the model's own, with which the checker compares them."""
        return default_opset(self._model.graph.opset_imports, self.opset)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        n_outputs: int = 1,
        **attributes: Any,
    ) -> ir.Value:
        """Adds a node and returns its first output.

        Args:
            op_type: The operator.
            inputs: Its inputs; None leaves one out. A constant of no graph becomes a Constant node.
            domain: Its domain, imported where it is not yet.
            n_outputs: How many outputs it has.
            attributes: Its attributes, as Python values or `ir.Attr`.
        """
        if domain:
            self._import(domain)
        stem = self._root.name or self._root.outputs[0].name or self._root.op_type
        inputs = tuple(self._attached(value) for value in inputs)
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=n_outputs)
        node.name = self._names.fresh(f"{stem}/{op_type}")
        for value in node.outputs:
            value.name = self._names.fresh(f"{stem}/{op_type}_output")
        node.metadata_props.update(self._metadata)
        self.nodes.append(node)
        if op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            # Named as a reader would name it, so that reading the file and writing it again changes nothing.
            named = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=node.outputs[0].name)
            node.attributes["value"] = ir.AttrTensor("value", named)
            _describe(node.outputs[0], named)
        return node.outputs[0]

    def constant(self, value: float | np.ndarray, dtype: str) -> ir.Value:
        """A Constant node of a float type."""
        return constant(_Ops(self), value, dtype)

    @property
    def ops(self) -> Any:
        """This writer as onnxscript's builders look: `ops.Mul(a, b)`; `body.emit` writes through it."""
        return _Ops(self)

    def inline(self, body: Body, x: ir.Value, gain: ir.Value | None, bias: ir.Value | None, epsilon: float) -> ir.Value:
        """Writes a body's operators in place of a node, and returns the result.

        Epsilon is a float attribute where that is exact, as function bodies have it. Tools that convert a file to
        float16 turn its Casts to float32 into Casts to float16, so that plain operators then square in half, and they
        clamp tensors. They leave attributes alone: a float32 epsilon that meets a float16 mean square makes the checker
        and every runtime refuse the file. Only around Max they put Casts; so a clamp is a Clip.
        """
        if body.bakes_epsilon:
            held = self.constant(epsilon, body.spec.statistic_type)
            return emit(self.ops, body, x, gain, bias, held)
        held = self.op("Constant", value_float=epsilon)
        _describe(held, ir.tensor(np.float32(epsilon), name=held.name))
        return emit(self.ops, body, x, gain, bias, held, clamp="Clip")

    def _attached(self, value: ir.Value | None) -> ir.Value | None:
        if value is None or value.const_value is None or value.producer() is not None or value.graph is not None:
            return value
        return self.op("Constant", value=value.const_value)

    def _import(self, domain: str) -> None:
        for imports in (self._model.graph.opset_imports, self._scope.opset_imports):
            imports.setdefault(domain, _DOMAIN_VERSIONS[domain])


class _Ops:
    """A writer with one method per operator."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        def call(*inputs: ir.Value | None, **attributes: Any) -> ir.Value:
            return self._writer.op(op_type, *inputs, **attributes)

        return call


def _describe(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Gives a constant its type and shape, which readers of the new nodes ask for."""
    value.type, value.shape, value.const_value = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape), tensor  # type: ignore[arg-type]


def like(value: ir.Value, old: ir.Value, dtype: str) -> ir.Value:
    """The value with the type and the shape of the one whose place it takes."""
    value.type = old.type if old.type is not None else ir.TensorType(dtypes.ir_dtype(dtype))
    value.shape = old.shape
    return value
