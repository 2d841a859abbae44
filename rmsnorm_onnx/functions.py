"""The operator as a model-local function, authored with onnxscript, and the library of the functions of one file.

A function stands in the domain `rmsnorm_onnx`, version 1. Its node carries for readers:

    epsilon  float  the body refers to it (`Body.bakes_epsilon` names the two exceptions)
    axis     int    the first normalised axis, negative, as in RMSNormalization: it and all axes after it
    trailing int    0 when the statistic is over `axis` alone (channel-first); absent otherwise
    gain     tensor the gain, where it was asked for as an attribute; otherwise input 1, where there is one

The body decides what is computed; `disagreement` finds a node whose attributes say something else.

TensorRT's parser looks functions up by name alone, ignoring domain and overload, and silently runs the first. So there
are no overloads here, and no name that any other function or custom operator of the file bears: the first body is
`RMSNorm`, further ones have a suffix from a digest of what the body depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx.body import Body, constant, emit
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.view import graph_nodes

DOMAIN = "rmsnorm_onnx"
VERSION = 1
NAME = "RMSNorm"
SPEC_KEY = "rmsnorm_onnx.spec"  # the spec as JSON, in a new node's metadata_props: a hint, never evidence
_ATTRIBUTE_TYPES = {
    "epsilon": ir.AttributeType.FLOAT,
    "axis": ir.AttributeType.INT,
    "trailing": ir.AttributeType.INT,
    "gain": ir.AttributeType.TENSOR,
}
IR_VERSION = 8  # the first that has model-local functions


def build_function(body: Body, name: str = NAME) -> ir.Function:
    """The body as a model-local function, authored with onnxscript.

    Args:
        body: What the function computes; its formula is `rmsnorm_onnx.spec`'s.
        name: The function's name.

    Returns:
        A function of the domain `rmsnorm_onnx` with the inputs `body.inputs` and one output `y`.
    """
    import onnxscript

    def trace(op: Any, *inputs: ir.Value) -> ir.Value:
        named = dict(zip(body.inputs, inputs, strict=True))
        gain = named.get("gain")
        if body.gain_attribute:
            gain = op.Constant(value=ir.RefAttr("value", "gain", ir.AttributeType.TENSOR))
        return emit(op, body, named["x"], gain, named.get("bias"), _epsilon(op, body))

    attributes = [ir.Attr("epsilon", ir.AttributeType.FLOAT, None), ir.Attr("axis", ir.AttributeType.INT, None)]
    if body.inner_axis:
        attributes.append(ir.Attr("trailing", ir.AttributeType.INT, None))
    if body.gain_attribute:
        attributes.append(ir.Attr("gain", ir.AttributeType.TENSOR, None))
    function = onnxscript.build_function(
        trace,
        [ir.Value(name=n) for n in body.inputs],
        domain=DOMAIN,
        name=name,
        attributes=attributes,
        opset_imports={"": body.opset},
    )
    return _tidied(function)


def node_attributes(spec: RMSNormSpec) -> dict[str, int | float]:
    """What the function's node says of its spec, for readers."""
    attributes: dict[str, int | float] = {"epsilon": spec.epsilon, "axis": spec.axes[0]}
    if spec.axes[-1] != -1:
        attributes["trailing"] = 0
    return attributes


def disagreement(node: ir.Node, spec: RMSNormSpec, rank: int | None = None) -> str | None:
    """One sentence when a node's attributes deny the spec that was read from its function's body, else None.

    Args:
        node: A node of the domain `rmsnorm_onnx` with a function.
        spec: What the function's body computes for this node.
        rank: x's rank, which a positive `axis` is counted with.
    """
    for name, kind in _ATTRIBUTE_TYPES.items():
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.type != kind:
            return f"the node's attribute {name} is of type {attribute.type.name}, not {kind.name}"
    epsilon, axis = node.attributes.get("epsilon"), node.attributes.get("axis")
    if epsilon is not None and np.float32(epsilon.as_float()) != np.float32(spec.epsilon):
        return f"the node says epsilon {epsilon.as_float()!r}, its function's body computes with {spec.epsilon!r}"
    if axis is not None:
        first = axis.as_int()
        if first >= 0 and rank is not None:
            first -= rank
        if first != spec.axes[0]:
            return f"the node says axis {axis.as_int()}, its function's body normalises over {spec.axes}"
    trailing = node.attributes.get("trailing")
    if trailing is not None and bool(trailing.as_int()) != (spec.axes[-1] == -1):
        return f"the node says trailing {trailing.as_int()}, its function's body normalises over {spec.axes}"
    return None


class FunctionLibrary:
    """The functions of one model: equal bodies shared, names unique in the whole file.

    Args:
        model: The model whose functions it reads, and extends.
        operators: Names that TensorRT's parser could confuse with one of ours; read from the model by default.
    """

    def __init__(self, model: ir.Model, operators: Iterable[str] | None = None) -> None:
        """Reads the names and the functions that the model has."""
        self._model = model
        self._made: dict[Body, ir.Function] = {}
        self._taken = _operator_names(model) if operators is None else set(operators)
        self._signatures = {f.name: signature(f) for f in model.functions.values() if f.domain == DOMAIN}
        self._wanted: dict[Body, None] = {}
        self._plugin_nodes = 0

    def get(self, body: Body) -> ir.Function:
        """The function of a body: one that the model has already, or a new one, added to it."""
        if body not in self._made:
            function = build_function(body)
            sign = signature(function)
            same = next((n for n, s in self._signatures.items() if s == sign), None)
            if same is None:
                function.name = self._free_name(body)
                self._add(function, sign)
            else:
                function = self._model.functions[DOMAIN, same, ""]
            self._made[body] = function
        return self._made[body]

    def want_plugin_body(self, body: Body) -> None:
        """Notes the body that a plugin node would need to run without the plugin; `finish` may add it.

        From now on no function takes the name that the plugin's nodes bear.
        """
        self._wanted[body] = None
        self._plugin_nodes += 1
        self._taken.add(NAME)

    def finish(self) -> None:
        """Settles who bears the name `RMSNorm`, once all sites are written; call it once at the end.

        Plugin nodes must find their own body under it, or none: a function of another body gives way to a name with
        its digest, or goes where no node calls it. The body is added when all plugin nodes need the same one and no
        function of another domain bears the name. Of plugin nodes that stood in the file before, only a body that is
        there says what they need.
        """
        if not self._wanted:
            return
        bodies = {signature(build_function(body)): body for body in self._wanted}
        bearer = self._model.functions.get((DOMAIN, NAME, ""))
        if bearer is not None:
            if len(bodies) == 1 and signature(bearer) in bodies:
                return
            self._rename(bearer)
        older = sum(map(_is_plugin, _nodes(self._model))) > self._plugin_nodes
        if len(bodies) == 1 and not older and all(f.name != NAME for f in self._model.functions.values()):
            (sign,) = bodies
            self._add(build_function(bodies[sign]), sign)

    def _rename(self, function: ir.Function) -> None:
        """Gives a function, and the nodes that call it, a name that nobody bears; removes it when none calls it."""
        model, callers = self._model, list[ir.Node]()
        calls = (n for n in _nodes(model) if n.op_identifier() == function.identifier())
        callers += [n for n in calls if not _is_plugin(n)]
        del model.functions[function.identifier()]
        sign = signature(function)
        self._signatures.pop(function.name, None)
        if not callers:
            return
        function.name = f"{NAME}_{hashlib.sha256(sign).hexdigest()[:16]}"
        self._add(function, sign)
        for node in callers:
            node.op_type = function.name

    def _add(self, function: ir.Function, sign: bytes) -> None:
        model = self._model
        model.functions[function.identifier()] = function
        model.graph.opset_imports[DOMAIN] = VERSION
        model.ir_version = max(model.ir_version, IR_VERSION)
        self._taken.add(function.name)
        self._signatures[function.name] = sign

    def _free_name(self, body: Body) -> str:
        names = [NAME, *(f"{NAME}_{body.digest(length)}" for length in (8, 16, 64))]
        return next(n for n in names if n not in self._taken)


def signature(function: ir.Function) -> bytes:
    """The bytes that two functions share when they differ at most in name and annotations."""
    proto = ir.to_proto(function)
    proto.name = proto.doc_string = ""
    for field in ("metadata_props", "value_info"):
        proto.ClearField(field)
    for node in proto.node:
        for field in ("metadata_props", "doc_string", "name"):
            node.ClearField(field)
    return bytes(proto.SerializeToString(deterministic=True))


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *(f.graph for f in model.functions.values())):
        yield from graph_nodes(graph)


def _is_plugin(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type == NAME and "plugin_version" in node.attributes


def _operator_names(model: ir.Model) -> set[str]:
    """Names that TensorRT's parser could confuse with one of ours: functions of any domain, and custom operators."""
    names = {f.name for f in model.functions.values()}
    return names | {node.op_type for node in _nodes(model) if node.domain not in ("", "ai.onnx")}


def _epsilon(op: Any, body: Body) -> ir.Value:
    """Epsilon as a scalar: a reference to the node's attribute where that is exact."""
    if body.bakes_epsilon:
        return constant(op, body.spec.epsilon, body.spec.statistic_type)
    reference = ir.RefAttr("value_float", "epsilon", ir.AttributeType.FLOAT)
    out: ir.Value = op.Constant(value_float=reference)
    return out


def _tidied(function: ir.Function) -> ir.Function:
    """The function with names of our own and without the builder's annotations."""
    for index, node in enumerate(function):
        node.metadata_props.clear()
        node.name = f"{node.op_type}_{index}"
        for value in node.outputs:
            value.metadata_props.clear()
            value.name = f"{node.op_type.lower()}_{index}"
            value.type = value.shape = None  # or files of IR below 10 list them among the main graph's values
    function.outputs[0].name = "y"
    function.doc_string = "RMSNorm: x / sqrt(mean(x * x) + epsilon) * gain, with the roundings of its casts."
    return function
