"""onnx's full check of a model, its weights kept out of it."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from rmsnorm_onnx import weights
from rmsnorm_onnx.inference import NATIVE_NORMS
from rmsnorm_onnx.view import graph_nodes

_CHECKED_SIZE = 1024  # bytes of a tensor that shape inference may read


def objection(model: ir.Model) -> str | None:
    """What onnx's full check has against a model, in one line; None where it has nothing."""
    proto = weights.to_proto(_without_weights(model))
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the checker and shape inference raise several kinds
        return " ".join(str(error).split())[:300]
    return None


def is_known(model: ir.Model) -> bool:
    """Whether onnx knows every operator that its domain is to know: onnxruntime's norms stand there unknown."""
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    return not any(
        node.op_type in NATIVE_NORMS and node.domain in ("", "ai.onnx") for g in graphs for node in graph_nodes(g)
    )


def _without_weights(model: ir.Model) -> ir.Model:
    """The model with large initializers as inputs, which the check takes alike."""
    light = model.clone()
    for graph in (light.graph, *_inner_graphs(light)):
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if tensor is None or (tensor.nbytes <= _CHECKED_SIZE and not isinstance(tensor, ir.ExternalTensor)):
                continue
            stand_in = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
            del graph.initializers[name]
            if value not in light.graph.inputs:
                light.graph.inputs.append(stand_in)
    return light


def _inner_graphs(model: ir.Model) -> list[ir.Graph]:
    found = []
    for node in graph_nodes(model.graph):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
                found.append(attribute.as_graph())
    return found
