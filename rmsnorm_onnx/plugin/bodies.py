"""Local functions that bear a plugin node's name: the body that runs without the plugin, and those that hide it.

TensorRT's parser looks functions up by name alone: domain and overload are ignored, and the first one wins, silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from rmsnorm_onnx import functions
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.plugin.faults import Fault
from rmsnorm_onnx.plugin.fields import spec_of, x_name
from rmsnorm_onnx.plugin.nodes import PluginNode
from rmsnorm_onnx.site import Declined, Match
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.view import graph_nodes


def check_name(node: PluginNode, names: Sequence[ir.OperatorIdentifier]) -> Iterator[Fault]:
    """No other function of the file may bear the node's name, nor that of a function on the calls that lead to it.

    Without the plugin the first could run in the node's place; the second runs with or without it, and the node never.

    Args:
        node: The node.
        names: Every function of the file, in its order; one that stands there twice is named twice.
    """
    own = node.node.op_identifier()
    for other in dict.fromkeys(n for n in names if n[1] == own[1] and (n != own or names.count(n) > 1)):
        yield _hidden(node, other, "too" if other != own else "twice")
    for called in dict.fromkeys(call.op_identifier() for call in node.calls if call.op_type != own[1]):
        for other in dict.fromkeys(n for n in names if n[1] == called[1] and (n != called or names.count(n) > 1)):
            beside = f"beside {_shown(called)}, through which the node is reached" if other != called else "twice"
            yield _hidden(node, other, beside)


def _hidden(node: PluginNode, other: ir.OperatorIdentifier, how: str) -> Fault:
    what = f"the file has a function {_shown(other)} {how}, and TensorRT's parser looks functions up by name alone"
    return node.fault("function", what, "rename that function and the nodes that call it")


def _shown(name: ir.OperatorIdentifier) -> str:
    domain, function, overload = name
    return f"{domain}::{function}" + (f", overload {overload!r}," if overload else "")


def check_body(node: PluginNode, model: ir.Model) -> Iterator[Fault]:
    """The function of the node's own name, where there is one, must compute what the fields say."""
    function = model.functions.get(node.node.op_identifier())
    spec, x_type = spec_of(node), x_name(node)
    if function is None or spec is None or x_type is None:
        return
    mend = f"remove the function, or let `rmsnorm-onnx fuse --form plugin` write both: {_call(node)}"
    if len(function.inputs) != len(node.node.inputs):
        what = (
            f"the function of the node's name has {len(function.inputs)} inputs, the node has {len(node.node.inputs)}"
        )
        yield node.fault("function", what, mend)
        return
    if any(v is None or node.shapes.get(v) is None or node.types.get(v) is None for v in node.node.inputs):
        return  # `unknowns` says it
    found = [s for s in find_rms_norms(_alone(node, function, model)) if s.scope == "" or isinstance(s, Match)]
    matches = [site for site in found if isinstance(site, Match)]
    if len(matches) != 1:
        reasons = [site.reason for site in found if isinstance(site, Declined)]
        why = f" ({reasons[0]})" if reasons else ""
        yield node.fault("function", f"the function of the node's name is not proven to be the same norm{why}", mend)
        return
    for field in _differences(spec, matches[0].spec, x_type):
        said, computed = getattr(spec.resolve(x_type), field), getattr(matches[0].spec.resolve(x_type), field)
        what = f"the node says {said!r}, and the body of the function of its name computes with {computed!r}"
        yield node.fault(field, what, mend)


def _call(node: PluginNode) -> str:
    return f"its body is what {node.op} runs as where the plugin is not loaded"


def _differences(said: RMSNormSpec, computed: RMSNormSpec, x_type: str) -> list[str]:
    """The fields in which two specs give other numbers on x's type."""
    first, second = said.canonical(x_type), computed.canonical(x_type)
    return [f.name for f in dataclasses.fields(first) if getattr(first, f.name) != getattr(second, f.name)]


def _alone(node: PluginNode, function: ir.Function, model: ir.Model) -> ir.Model:
    """A model of one call of the function, with the node's inputs and no plugin field."""
    inputs = []
    for index, value in enumerate(node.node.inputs):
        assert value is not None
        inputs.append(_input(f"input_{index}", node.types[value], node.shapes[value]))
    wanted = _referred(function)  # what only readers are told would be held to the body a second time
    attributes = [attribute for name, attribute in node.attributes.items() if name in wanted]
    call = ir.Node(function.domain, function.name, inputs, attributes, overload=function.overload, num_outputs=1)
    call.outputs[0].name = "y"
    graph = ir.Graph(inputs, call.outputs, nodes=[call], opset_imports=dict(model.graph.opset_imports), name="call")
    graph.opset_imports.setdefault(functions.DOMAIN, functions.VERSION)
    return ir.Model(graph, ir_version=max(model.ir_version, functions.IR_VERSION), functions=_copies(model))


def _copies(model: ir.Model) -> list[ir.Function]:
    """The model's functions again: a function belongs to one model."""
    return [
        ir.serde.deserialize_function(ir.serde.serialize_function(function)) for function in model.functions.values()
    ]


def _input(name: str, dtype: ir.DataType | None, shape: Dims | None) -> ir.Value:
    assert dtype is not None and shape is not None
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _referred(function: ir.Function) -> set[str]:
    """The attributes that a body refers to."""
    attributes = (a for node in graph_nodes(function.graph) for a in node.attributes.values())
    return {a.ref_attr_name for a in attributes if a.is_ref() and a.ref_attr_name}
