"""`plugin check`: a plugin node with any one fault is named, with the field; a right one passes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from form_kit import SPECS, Site, write
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, TensorProto, helper
from plugin_kit import GOOD, IDENTITY, OUT_OF_RANGE, change_gain, fields, good, norm, set_field
from test_cli import Run, run  # noqa: F401

from rmsnorm_onnx import RMSNormSpec, plugin
from rmsnorm_onnx.errors import ModelError
from rmsnorm_onnx.forms.plugin import FIELDS, ONNXRUNTIME_DOMAIN

OTHER_TYPE: dict[int, Any] = {
    AttributeProto.FLOAT: [1, "1e-6", helper.make_tensor("e", TensorProto.DOUBLE, [1], [1e-6]), [1e-6]],
    AttributeProto.INT: [1.0, "1", [1]],
    AttributeProto.INTS: [1, [1.0], "-1"],
    AttributeProto.STRING: [1, 1.0, ["x"]],
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
