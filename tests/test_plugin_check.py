"""`plugin check`: a plugin node with any one fault is named, with the field; a right one passes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from form_kit import SPECS, Site, write
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper
from test_cli import Run, run  # noqa: F401

from rmsnorm_onnx import RMSNormSpec, plugin
from rmsnorm_onnx.errors import ModelError
from rmsnorm_onnx.forms.plugin import FIELDS, ONNXRUNTIME_DOMAIN

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


OTHER_TYPE: dict[int, Any] = {
    AttributeProto.FLOAT: [1, "1e-6", helper.make_tensor("e", TensorProto.DOUBLE, [1], [1e-6]), [1e-6]],
    AttributeProto.INT: [1.0, "1", [1]],
    AttributeProto.INTS: [1, [1.0], "-1"],
    AttributeProto.STRING: [1, 1.0, ["x"]],
}
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


def drop(node: onnx.NodeProto, field: str, draw: Callable[..., Any]) -> str | None:
    """Removes a field."""
    set_field(node, field, None)
    return field


def retype(node: onnx.NodeProto, field: str, draw: Callable[..., Any]) -> str | None:
    """Gives a field another ONNX type."""
    kind = AttributeProto.STRING if field in IDENTITY else FIELDS[field].value
    set_field(node, field, draw(st.sampled_from(OTHER_TYPE[kind])))
    return field


def out_of_range(node: onnx.NodeProto, field: str, draw: Callable[..., Any]) -> str | None:
    """Gives a field a value of its type without meaning; None where it has one there."""
    value = draw(st.sampled_from(OUT_OF_RANGE[field]))
    held = next(a for a in node.attribute if a.name == field)
    if field == "leading" and value > 0 and next(a for a in node.attribute if a.name == "axes").ints != [-1]:
        return None
    if held.type == AttributeProto.STRING and held.s.decode() == value:
        return None
    set_field(node, field, value)
    return field


def misspell(node: onnx.NodeProto, field: str, draw: Callable[..., Any]) -> str | None:
    """Gives a field another name."""
    held = next(a for a in node.attribute if a.name == field)
    held.name = draw(st.sampled_from([field + "s", field[:-1], field.title(), field.replace("_", "") + "_"]))
    return field


@pytest.mark.parametrize(
    "damage", [drop, retype, out_of_range, misspell], ids=["drop", "retype", "out of range", "misspell"]
)
def test_any_one_damaged_field_is_named(damage: Callable[..., str | None]) -> None:
    """From any spec, any one field that is dropped, of another type, out of range or misspelt is found by its name."""

    @given(st.data())
    @settings(max_examples=40, deadline=None, database=None)
    def holds(data: st.DataObject) -> None:
        name, x_type = data.draw(st.sampled_from(GOOD))
        domain = data.draw(st.sampled_from(["rmsnorm_onnx", ONNXRUNTIME_DOMAIN]))
        model = good(name, x_type, domain)
        field = data.draw(st.sampled_from([*FIELDS, *IDENTITY]))
        expected = damage(norm(model), field, data.draw)
        node = norm(model)
        if field == "result_type" and damage is out_of_range and expected is not None:
            said = next(a.s.decode() for a in node.attribute if a.name == field)
            if said == (SPECS[name].resolve(x_type).result_type):
                return  # the same type by its own name
        faults = plugin.check(model).faults
        if expected is None:
            assert not faults
        else:
            assert expected in {f.field for f in faults}, (expected, [str(f) for f in faults])
            assert all(f.node.startswith("norm0") and f.mend for f in faults)

    holds()


@pytest.mark.parametrize(("name", "x_type"), GOOD)
def test_a_right_node_passes(name: str, x_type: str) -> None:
    """A node of any spec, as it is written, has no fault, and nothing about it is left unchecked."""
    for domain in ("rmsnorm_onnx", ONNXRUNTIME_DOMAIN):
        report = plugin.check(good(name, x_type, domain))
        assert report.ok and not report.notes and [n.ours for n in report.nodes] == [True], report


def change_gain(model: onnx.ModelProto, dims: list[int], dtype: int = TensorProto.FLOAT16) -> None:
    """Another gain than the model's."""
    kept = helper.make_tensor(norm(model).input[1], dtype, dims, np.ones(math.prod(dims)).tolist())
    model.graph.initializer[0].CopyFrom(kept)


@pytest.mark.parametrize("dims", [[15], [2, 16], [1, 1, 1, 16], [16, 1], [1], [], [1, 1, 1]])
def test_a_gain_of_another_shape(dims: list[int]) -> None:
    """A gain that has not x's sizes along the normalised axes is named with both shapes: the plugin broadcasts none."""
    model = good()
    change_gain(model, dims)
    (fault,) = plugin.check(model).faults
    assert fault.field == "gain" and "[?, 2, 16]".replace("?", "n") in fault.what


@pytest.mark.parametrize("dims", [[16], [1, 16], [1, 1, 16]])
def test_a_gain_of_a_right_shape(dims: list[int]) -> None:
    """x's size along the axis, with or without leading ones: no fault."""
    model = good()
    change_gain(model, dims)
    assert plugin.check(model).ok


@pytest.mark.parametrize("dtype", [TensorProto.DOUBLE, TensorProto.INT32, TensorProto.BFLOAT16])
def test_a_gain_of_another_type(dtype: int) -> None:
    """A gain that is neither of x's type nor float32 is named."""
    model = good(domain=ONNXRUNTIME_DOMAIN)
    change_gain(model, [16], dtype)
    assert fields(model) == {"gain"}


def test_a_float32_gain_of_a_half_norm() -> None:
    """float32 is fine beside any x."""
    model = good(domain=ONNXRUNTIME_DOMAIN)
    change_gain(model, [16], TensorProto.FLOAT)
    assert plugin.check(model).ok


@pytest.mark.parametrize("size", [15, 16, 32])
def test_a_gain_that_is_an_attribute(size: int) -> None:
    """A gain that the node holds has one element for each normalised one, and counts as no input."""
    model = write(
        [Site(SPECS["llama"], "float16")], "plugin", 18, plugin_domain=ONNXRUNTIME_DOMAIN, gain_attribute=True
    )
    set_field(norm(model), "gain", helper.make_tensor("gain", TensorProto.FLOAT16, [size], [1.0] * size))
    assert fields(model) == (set() if size == 16 else {"gain"})
    set_field(norm(model), "has_gain", 0)
    assert "gain" in fields(model)


@pytest.mark.parametrize("change", ["too few", "too many", "empty"])
def test_the_number_of_inputs(change: str) -> None:
    """Inputs that the fields do not ask for, or do, are counted; an empty one is named."""
    model = good(domain=ONNXRUNTIME_DOMAIN)
    node = norm(model)
    if change == "too few":
        del node.input[1:]
    elif change == "too many":
        node.input.append(node.input[1])
    else:
        node.input[1] = ""
    assert fields(model) == {"gain" if change == "empty" else "inputs"}


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


def test_an_invalid_model_is_an_error() -> None:
    """What is wrong beside the plugin nodes is an invalid model; a damaged plugin node comes first."""
    model = good()
    model.graph.output[0].name = "nowhere"
    with pytest.raises(ModelError, match="nowhere"):
        plugin.check(model)
    set_field(norm(model), "statistic_type", None)
    assert "statistic_type" in fields(model)


def test_the_caller_keeps_its_model() -> None:
    """A check changes nothing."""
    model = good()
    before = model.SerializeToString(deterministic=True)
    plugin.check(model)
    assert model.SerializeToString(deterministic=True) == before


def test_the_command(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Exit 0 and a line on what was checked; 1 with every fault; 3 for an unreadable file; JSON with a version."""
    path = tmp_path / "model.onnx"
    onnx.save(good(), path)
    assert run("plugin", "check", path) == (0, "1 plugin node checked, 0 faults\n", "")
    model = good()
    set_field(norm(model), "epsilon", 0)
    set_field(norm(model), "leading", None)
    onnx.save(model, path)
    code, out, err = run("plugin", "check", path)
    assert (code, err) == (1, "") and "epsilon: it is INT" in out and "leading: it is missing" in out
    code, out, _ = run("plugin", "check", path, "--json")
    data = json.loads(out)
    assert code == 1 and (data["version"], data["kind"], data["ok"]) == (1, "plugin-check", False)
    assert {f["field"] for f in data["faults"]} == {"epsilon", "leading"}
    path.write_bytes(b"nothing")
    assert run("plugin", "check", path)[0] == 3
    assert run("plugin", "check", path, "--domain", "acme")[0] == 2


def test_every_field_of_the_spec_is_checked() -> None:
    """A field that the spec gains without a range in these tests would go unchecked."""
    assert {f.name for f in dataclasses.fields(RMSNormSpec)} == set(FIELDS) == set(OUT_OF_RANGE) - set(IDENTITY)
