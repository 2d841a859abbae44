"""`plugin check` on nodes of other plugins for RMSNorm, and on operators that stand where a plugin was expected."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from form_kit import PLAIN, Site, write
from onnx import TensorProto, helper
from plugin_kit import good

from rmsnorm_onnx import plugin
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.forms.plugin import ONNXRUNTIME_DOMAIN


def foreign(**changes: Any) -> onnx.ModelProto:
    """A node of another plugin for RMSNorm."""
    attributes = {"eps": 1e-6, "plugin_version": "1", "plugin_namespace": "acme", "hidden": 8} | changes
    held = {k: v for k, v in attributes.items() if v is not None and k not in ("domain", "scale", "imports")}
    node = helper.make_node("FastRMSNorm", ["x", "w"], ["y"], name="norm", domain=changes.get("domain", "acme"), **held)
    value = helper.make_tensor_value_info
    scale = helper.make_tensor("w", changes.get("scale", TensorProto.FLOAT), [8], [1.0] * 8)
    graph = helper.make_graph(
        [node], "g", [value("x", TensorProto.FLOAT, ["n", 8])], [value("y", TensorProto.FLOAT, ["n", 8])], [scale]
    )
    imports = [helper.make_opsetid("", 18), *(helper.make_opsetid(d, 1) for d in changes.get("imports", ["acme"]))]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, None),
        ({"eps": None}, "epsilon"),
        ({"eps": 0}, "eps"),
        ({"eps": -1.0}, "eps"),
        ({"eps": helper.make_tensor("e", TensorProto.DOUBLE, [1], [1e-6])}, "eps"),
        ({"plugin_version": 1}, "plugin_version"),
        ({"plugin_version": "2"}, "plugin_version"),
        ({"plugin_version": None}, None),  # TensorRT's default is "1"
        ({"plugin_namespace": ""}, "plugin_namespace"),
        ({"plugin_namespace": None}, "plugin_namespace"),
        ({"domain": ""}, "domain"),
        ({"domain": "other", "imports": ["other"]}, "domain"),
        ({"imports": []}, "domain"),
        ({"scale": TensorProto.FLOAT16}, "scale"),
    ],
)
def test_a_plugin_of_others(changes: dict[str, Any], field: str | None) -> None:
    """Of a plugin that is described, its names, its epsilon and its scale are checked, whatever its fields are."""
    report = plugin.check(foreign(**changes), op="FastRMSNorm", domain="acme", namespace="acme", version="1")
    assert {f.field for f in report.faults} == ({field} if field else set())
    assert [(n.op.rpartition("::")[2], n.ours) for n in report.nodes] == [("FastRMSNorm", False)]


def test_a_contrib_operator_where_a_plugin_was_expected() -> None:
    """onnxruntime's own operator is named, since TensorRT has none of that name; beside trt.plugins it may stand."""
    model = write([Site(PLAIN)], "contrib", 18)
    (fault,) = plugin.check(model).faults
    assert fault.field == "op_type" and "SimplifiedLayerNormalization" in fault.what
    mixed = good(domain=ONNXRUNTIME_DOMAIN)
    mixed.graph.node.append(model.graph.node[0])
    mixed.graph.node[-1].output[0] = "another"
    mixed.graph.initializer.extend(i for i in model.graph.initializer if i.name != mixed.graph.initializer[0].name)
    assert plugin.check(mixed).ok


def test_an_operator_that_is_nowhere() -> None:
    """An operator that was described and is not in the file is a fault."""
    (fault,) = plugin.check(good(), op="FastNorm").faults
    assert fault.field == "op_type" and "FastNorm" in fault.what


def test_names_without_an_operator() -> None:
    """A namespace alone describes no plugin: the call says what is missing."""
    with pytest.raises(UsageError, match="--op"):
        plugin.check(good(), namespace="acme")
