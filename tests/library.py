"""Local functions around single operators, as torchlib writes a model before its functions are inlined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
from onnx import helper

if TYPE_CHECKING:
    from kit import Graph

DOMAIN = "pkg.torchlib"


def operator_function(
    g: Graph, op_type: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]
) -> onnx.NodeProto:
    """A call of a local function that does what one operator does; adds the function to the graph's model."""
    name = f"aten_{op_type.lower()}_{len(g.functions)}"
    arguments = [f"a{i}" for i in range(len(inputs))]
    results = ["result", *(f"rest{i}" for i in range(len(outputs) - 1))]
    call: dict[str, Any] = {}
    parameters: list[str] = []
    node = helper.make_node(op_type, arguments, results, **attributes)
    body = [node]
    if op_type == "Add" and g.opset >= 15:
        # aten::add(self, other, alpha) multiplies by alpha first, whatever it is.
        body = [
            helper.make_node("Constant", [], ["one"], value_float=1.0),
            helper.make_node("CastLike", ["one", "a1"], ["alpha"]),
            helper.make_node("Mul", ["a1", "alpha"], ["other"]),
            helper.make_node("Add", ["a0", "other"], ["result"]),
        ]
    elif op_type == "ReduceMean" and g.opset >= 18:
        # aten::mean.dim takes its axes as an input and keepdim as an attribute.
        node = helper.make_node("ReduceMean", ["a0", "dims"], ["result"])
        node.attribute.append(
            onnx.AttributeProto(name="keepdims", ref_attr_name="keepdim", type=onnx.AttributeProto.INT)
        )
        body = [
            helper.make_node("Constant", [], ["flat"], value_ints=[-1]),
            helper.make_node("Reshape", ["a1", "flat"], ["dims"]),
            node,
        ]
        parameters, call = ["keepdim"], {"keepdim": attributes.get("keepdims", 1)}
    elif op_type == "Reciprocal":
        node.input[0] = "copy"
        body = [helper.make_node("Identity", ["a0"], ["copy"]), node]
    opsets = [helper.make_opsetid("", g.opset)]
    g.functions.append(helper.make_function(DOMAIN, name, arguments, results, body, opsets, attributes=parameters))
    return helper.make_node(name, inputs, outputs, domain=DOMAIN, **call)
