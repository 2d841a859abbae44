"""`plugin check`: what the node says against what stands beside it: a function's body, other functions, its fields."""

from __future__ import annotations

from typing import Any

import pytest
from form_kit import SPECS, Site, write
from onnx import helper
from plugin_kit import fields, good, norm, set_field

from rmsnorm_onnx import plugin
from rmsnorm_onnx.forms.plugin import ONNXRUNTIME_DOMAIN


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"epsilon_placement": "outside"}, "epsilon_placement"),
        ({"gain_offset": 1.0}, "gain_offset"),
        ({"normalized_type": "float32"}, "normalized_type"),
        ({"leading": 4}, "leading"),
    ],
)
def test_a_body_that_computes_something_else(changes: dict[str, Any], field: str) -> None:
    """The function that a node runs as without the plugin must say what its fields say; else the field is named."""
    model = good()
    assert [f.name for f in model.functions] == ["RMSNorm"]
    for name, value in changes.items():
        set_field(norm(model), name, value)
    found = plugin.check(model).faults
    assert field in {f.field for f in found} and "body of the function" in found[0].what
    del model.functions[:]
    assert plugin.check(model).ok


def test_a_body_with_an_epsilon_of_its_own() -> None:
    """A body that does not take epsilon from the node, and holds another one, is named by epsilon."""
    model = good()
    for node in model.functions[0].node:
        if node.op_type == "Constant" and node.attribute[0].ref_attr_name == "epsilon":
            set_field(node, "value_float", None)
            node.attribute.append(helper.make_attribute("value_float", 1e-3))
    assert fields(model) == {"epsilon"}


def test_a_body_with_other_inputs() -> None:
    """A function with another number of inputs than the node has is named."""
    model = good()
    model.functions[0].CopyFrom(write([Site(SPECS["no gain"], "float16")], "plugin", 18).functions[0])
    assert fields(model) == {"function"}


def test_a_function_that_hides_the_node() -> None:
    """A function of another domain with the plugin's name is named: TensorRT's parser looks them up by name alone."""
    model = good(domain=ONNXRUNTIME_DOMAIN)
    body = [helper.make_node("Abs", ["a"], ["b"])]
    model.functions.append(helper.make_function("acme", "RMSNorm", ["a"], ["b"], body, [helper.make_opsetid("", 18)]))
    (fault,) = plugin.check(model).faults
    assert fault.field == "function" and "acme::RMSNorm" in fault.what


def test_fields_that_contradict_each_other() -> None:
    """An offset without a gain, and a leading count over two axes, are named by the field."""
    model = good("no gain")
    set_field(norm(model), "gain_offset", 1.0)
    assert "gain_offset" in fields(model)
    model = good("two axes")
    set_field(norm(model), "leading", 4)
    assert "leading" in fields(model)


def test_what_readers_are_told() -> None:
    """`axis` and `trailing` must say what `axes` says."""
    model = good()
    set_field(norm(model), "axis", -2)
    assert fields(model) == {"axis"}
    model = good("inner axis")
    set_field(norm(model), "trailing", 1)
    assert fields(model) == {"trailing"}
