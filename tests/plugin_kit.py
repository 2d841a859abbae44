"""Models with one right plugin node, and the ways to change it, for the tests of `plugin check` and its neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from form_kit import SPECS, Site, write
from onnx import TensorProto, helper

from rmsnorm_onnx import plugin

IDENTITY = ("plugin_version", "plugin_namespace")
GOOD = [(n, t) for n in SPECS if n != "double statistic" for t in ("float32", "float16", "bfloat16")]


def good(name: str = "llama", x_type: str = "float16", domain: str = "rmsnorm_onnx") -> onnx.ModelProto:
    """A right plugin node of a spec, as `fuse` writes it."""
    return write([Site(SPECS[name], x_type)], "plugin", 18, plugin_domain=domain)


def norm(model: onnx.ModelProto) -> onnx.NodeProto:
    """The plugin node of the main graph."""
    return next(n for n in model.graph.node if n.op_type == "RMSNorm")


def set_field(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Gives an attribute another value; None removes it."""
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def fields(model: onnx.ModelProto, **options: Any) -> set[str]:
    """The fields that a check finds at fault."""
    return {fault.field for fault in plugin.check(model, **options).faults}


OUT_OF_RANGE: dict[str, list[Any]] = {
    "axes": [[0], [1], [-1, -2], [-3, -1], [-1, -1], [-9]],
    "epsilon": [-1.0, math.inf, math.nan],
    "epsilon_placement": ["within", ""],
    "leading": [-1, 17],
    "has_gain": [2, -1],
    "has_bias": [2, -1],
    "gain_offset": [math.inf, math.nan],
    "statistic_type": ["float16", "float64", "half"],
    "factor_type": ["float64", "fp32", ""],
    "normalized_type": ["float64", "int8"],
    "gain_type": ["float64", "double"],
    "result_type": ["float64", "single", "float32", "float16"],
    "plugin_version": ["2", ""],
    "plugin_namespace": ["", "acme"],
}


def change_gain(model: onnx.ModelProto, dims: list[int], dtype: int = TensorProto.FLOAT16) -> None:
    """Another gain than the model's."""
    kept = helper.make_tensor(norm(model).input[1], dtype, dims, np.ones(math.prod(dims)).tolist())
    model.graph.initializer[0].CopyFrom(kept)


def nested(node: onnx.NodeProto, depth: str) -> onnx.NodeProto:
    """An If whose branches hold the node."""
    graph = helper.make_graph([node], "branch", [], [helper.make_empty_tensor_value_info(node.output[0])])
    other = helper.make_graph(
        [helper.make_node("Identity", ["x0"], ["same"])], "other", [], [helper.make_empty_tensor_value_info("same")]
    )
    return helper.make_node("If", ["flag"], [f"{depth}_out"], name=depth, then_branch=graph, else_branch=other)


def in_branch(model: onnx.ModelProto) -> None:
    """Moves the norm into a branch of an If."""
    node = onnx.NodeProto()
    node.CopyFrom(norm(model))
    model.graph.node.remove(norm(model))
    result = node.output[0]
    node.output[0] = "inner"
    choice = nested(node, "choice")
    choice.output[0] = result
    model.graph.node.append(choice)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))


def in_function(model: onnx.ModelProto) -> None:
    """Moves the norm into a function of another domain."""
    node = norm(model)
    inner = helper.make_node("RMSNorm", ["a", "b"], ["c"], name="norm0", domain=node.domain)
    inner.attribute.extend(node.attribute)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(node.domain, 1)]
    model.functions.append(helper.make_function("acme", "Block", ["a", "b"], ["c"], [inner], imports))
    model.opset_import.append(helper.make_opsetid("acme", 1))
    call = helper.make_node("Block", list(node.input), list(node.output), name="block", domain="acme")
    model.graph.node.remove(node)
    model.graph.node.append(call)


def inner_node(model: onnx.ModelProto) -> onnx.NodeProto:
    """The norm, wherever it was moved to."""
    for function in model.functions:
        if function.name == "Block":
            return function.node[0]
    branch = next(a.g for a in model.graph.node[-1].attribute if a.name == "then_branch")
    return branch.node[0]
