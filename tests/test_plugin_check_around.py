"""`plugin check`: what stands around a node's fields: operator, domain, import, output, and the scopes it stands in."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from form_kit import SPECS, Site, write
from onnx import AttributeProto, TensorProto, helper
from plugin_kit import IDENTITY, change_gain, fields, good, in_branch, in_function, inner_node, norm, set_field

from rmsnorm_onnx import plugin
from rmsnorm_onnx.forms.plugin import FIELDS, ONNXRUNTIME_DOMAIN


def rename_operator(model: onnx.ModelProto) -> None:
    """Another operator."""
    norm(model).op_type = "RMSNormPlugin"


def leave_domain(model: onnx.ModelProto) -> None:
    """ONNX's own domain."""
    norm(model).domain = ""


def misspell_domain(model: onnx.ModelProto) -> None:
    """A domain that is nobody's."""
    norm(model).domain = "rmsnorm"


def forget_import(model: onnx.ModelProto) -> None:
    """ONNX's domain alone is imported."""
    del model.opset_import[1:]


def second_output(model: onnx.ModelProto) -> None:
    """A second output."""
    norm(model).output.append("factor")


def narrower_output(model: onnx.ModelProto) -> None:
    """The file declares another type than the plugin gives."""
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT


def other_output_shape(model: onnx.ModelProto) -> None:
    """The file declares another shape than x's."""
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (rename_operator, "op_type"),
        (leave_domain, "domain"),
        (misspell_domain, "domain"),
        (forget_import, "domain"),
        (second_output, "outputs"),
        (narrower_output, "result_type"),
        (other_output_shape, "y"),
    ],
)
def test_what_stands_around_the_fields(change: Callable[[onnx.ModelProto], None], field: str) -> None:
    """Operator, domain, its import and the output are held to what the plugin gives."""
    model = good()
    change(model)
    assert field in fields(model)


@pytest.mark.parametrize("field", [f for f in FIELDS if f not in ("axes", "epsilon")])
def test_one_field_reveals_a_node(field: str) -> None:
    """A node of our operator with a single field left is known, and each of the others is named as missing."""
    model = good()
    node = norm(model)
    for attribute in list(node.attribute):
        if attribute.name != field:
            node.attribute.remove(attribute)
    assert fields(model) >= {*FIELDS, *IDENTITY} - {field}


def test_a_node_without_field_or_function() -> None:
    """A node of our domain that neither the plugin nor a function would run is named; a function's node is none."""
    model = write([Site(SPECS["llama"])], "function", 18)
    assert plugin.check(model).ok and not plugin.check(model).nodes
    del model.functions[:]
    (fault,) = plugin.check(model).faults
    assert fault.field == "plugin_namespace" and "no function of its name" in fault.what


@pytest.mark.parametrize("move", [in_branch, in_function])
def test_nodes_in_branches_and_functions(move: Callable[[onnx.ModelProto], None]) -> None:
    """A node in a branch or in a function is checked as any other, and named with where it stands."""
    model = good()
    move(model)
    report = plugin.check(model)
    assert report.ok and len(report.nodes) == 1 and report.nodes[0].scope
    set_field(inner_node(model), "epsilon", 1)
    (fault,) = plugin.check(model).faults
    assert fault.field == "epsilon" and fault.scope in str(fault)


def test_a_function_must_import_the_domain() -> None:
    """A node in a function needs the import there, whatever the model imports."""
    model = good()
    in_function(model)
    function = next(f for f in model.functions if f.name == "Block")
    del function.opset_import[1:]
    assert fields(model) == {"domain"}


def test_a_field_from_the_call() -> None:
    """A field that refers to the function's attribute is read at the call, and missing where the call lacks it."""
    model = good()
    in_function(model)
    function = next(f for f in model.functions if f.name == "Block")
    function.attribute.append("eps")
    set_field(function.node[0], "epsilon", None)
    function.node[0].attribute.add(name="epsilon", type=AttributeProto.FLOAT, ref_attr_name="eps")
    assert fields(model) == {"epsilon"}
    call = model.graph.node[-1]
    call.attribute.append(helper.make_attribute("eps", 1e-6))
    assert plugin.check(model).ok
    set_field(call, "eps", -1.0)
    assert "epsilon" in fields(model)


def test_an_unknown_type_is_said() -> None:
    """What cannot be checked, because the file does not say a type, is a note and no fault."""
    model = good(domain=ONNXRUNTIME_DOMAIN)
    node = helper.make_node("Mystery", ["x0"], ["m"], domain="acme")
    norm(model).input[0] = "m"
    model.graph.node.insert(0, node)
    model.opset_import.append(helper.make_opsetid("acme", 1))
    report = plugin.check(model)
    assert report.ok and "type or the rank of x is unknown" in report.notes[0]


def test_a_chain_of_norms_is_known_through() -> None:
    """A norm whose x is another plugin node's undeclared result is checked too."""
    model = good(domain=ONNXRUNTIME_DOMAIN)
    second = onnx.NodeProto()
    second.CopyFrom(norm(model))
    second.name = "second"
    second.input[0], norm(model).output[0] = "between", "between"
    model.graph.node.append(second)
    assert plugin.check(model).ok and not plugin.check(model).notes
    change_gain(model, [15])
    assert {f.node for f in plugin.check(model).faults} == {norm(model).name, "second"}
