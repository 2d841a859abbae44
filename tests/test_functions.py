"""The operator's body and the function rules: each rule has its test."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from form_kit import ONCE, PLAIN, SPECS, Site, assert_right, build, double, replace, run, write

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.body import Body, refusal
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.functions import (
    DOMAIN,
    FunctionLibrary,
    build_function,
    disagreement,
    node_attributes,
)
from rmsnorm_onnx.oracle import reference
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.writer import Names, Writer

NEWEST = onnx.defs.onnx_opset_version()
OPSETS = (11, 12, 13, 17, 18, 21, 23, NEWEST)
TYPES = ("float32", "float16", "bfloat16", "float64")


def site(name: str, x_type: str, gain_type: str | None = None) -> Site:
    """A spec of the matrix on a type; in double, a spec of doubles."""
    spec = double(SPECS[name]) if x_type == "float64" else SPECS[name]
    return Site(spec, x_type, gain_type=gain_type)


def ops(function: onnx.FunctionProto) -> list[str]:
    """Operators of a body, without its constants."""
    return [n.op_type for n in function.node if n.op_type != "Constant"]


def optimized(model: onnx.ModelProto, sites: list[Site], folder: Path) -> list[str]:
    """What onnxruntime's optimiser makes of a model."""
    path = folder / "optimized.onnx"
    run(model, sites, str(path))
    return [n.op_type for n in onnx.load(path).graph.node]


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("name", SPECS)
def test_every_field_has_its_body(name: str, x_type: str) -> None:
    """Each field of the spec, on each type: the file passes the full check and computes the spec's numbers."""
    s = site(name, x_type)
    model = write([s], "function", 18)
    onnx.checker.check_model(model, full_check=True)
    assert_right(model, [s])


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_has_its_body(opset: int) -> None:
    """From opset 11 to the newest, four specs in one file are checker-clean and right."""
    sites = [site(n, "float32") for n in ("llama", "outside", "leading", "bias")] + [site("gemma", "float16")]
    model = write(sites, "function", opset)
    onnx.checker.check_model(model, full_check=True)
    assert_right(model, sites)


@pytest.mark.full
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("x_type", TYPES)
def test_every_body_at_every_opset(x_type: str, opset: int) -> None:
    """The full matrix: every spec, type, type of the gain and opset."""
    for name, gain_type in itertools.product(SPECS, sorted({x_type, "float32", "float16"})):
        s = site(name, x_type, gain_type)
        if refusal(s.spec, x_type, opset) is not None:
            assert opset < 13
            assert "bfloat16" in str(refusal(s.spec, x_type, opset))
            continue
        model = write([s], "function", opset)
        onnx.checker.check_model(model, full_check=True)
        assert_right(model, [s])


def test_every_opset_between_is_known() -> None:
    """Bodies are refused below 11, above the newest opset, and nowhere between."""
    refused = {o for o in range(9, NEWEST + 3) if refusal(PLAIN, "float32", o) is not None}
    assert refused == {9, 10, NEWEST + 1, NEWEST + 2}


def test_a_body_is_authored_by_onnxscript(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function comes from onnxscript's own builder, with the attributes epsilon and axis."""
    import onnxscript

    calls = []
    original = onnxscript.build_function
    monkeypatch.setattr(onnxscript, "build_function", lambda *a, **k: calls.append(k["name"]) or original(*a, **k))
    function = build_function(Body.of(PLAIN, x_type="float32", gain_type="float32", opset=18))
    assert calls == ["RMSNorm"]
    assert list(function.attributes) == ["epsilon", "axis"]


def test_a_float32_body_starts_with_a_cast_and_ends_without() -> None:
    """The first operator casts to float32, the last one multiplies, and no CastLike or Range is there."""
    (function,) = write([Site(PLAIN)], "function", 18).functions
    assert ops(function) == ["Cast", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul"]
    assert function.node[[n.op_type for n in function.node].index("Cast")].attribute[0].i == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("opset", (11, 17, 18, 21, 23, NEWEST))
@pytest.mark.parametrize("name", ("llama", "torch", "gemma"))
def test_onnxruntime_fuses_the_float32_body(name: str, opset: int, tmp_path: Path) -> None:
    """In float32 onnxruntime makes one kernel of node and function, with nothing left around it."""
    s = site(name, "float32")
    assert optimized(write([s], "function", opset), [s], tmp_path) == ["SimplifiedLayerNormalization"]


@pytest.mark.parametrize("opset", (11, 17, 18, 21, 23, NEWEST))
@pytest.mark.parametrize("name", ("llama", "torch", "gemma"))
def test_onnxruntime_fuses_the_float16_body(name: str, opset: int, tmp_path: Path) -> None:
    """In float16 onnxruntime makes of it what it makes of the plain spelling: one kernel between two Casts."""
    s = site(name, "float16")
    left = optimized(write([s], "function", opset), [s], tmp_path)
    assert left == optimized(write([s], "primitive", opset), [s], tmp_path)
    assert left == ["Cast", "SimplifiedLayerNormalization", "Cast"]


def test_the_first_body_is_rmsnorm_and_others_have_a_digest() -> None:
    """Four specs make four functions of four names, the first of them plain, none an overload."""
    model = write([Site(SPECS[n]) for n in ("llama", "outside", "gemma", "leading")], "function", 18)
    names = [f.name for f in model.functions]
    assert names[0] == "RMSNorm"
    assert len(set(names)) == 4
    assert all(n.startswith("RMSNorm_") for n in names[1:])
    assert {f.overload for f in model.functions} == {""}
    assert {f.domain for f in model.functions} == {DOMAIN}


def test_names_are_the_same_on_every_run() -> None:
    """Writing the same sites twice gives the same bytes."""
    sites = [Site(SPECS[n]) for n in ("llama", "outside", "leading")]
    first, second = (write(sites, "function", 18).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_a_body_that_the_file_has_already_is_shared() -> None:
    """A second run on a file that was written and read back adds no function of equal body."""
    model = ir.from_proto(write([Site(SPECS["llama"]), Site(SPECS["outside"])], "function", 18))
    library = FunctionLibrary(model)
    names = [f.name for f in model.functions.values()]
    for name, known in (("llama", names[0]), ("outside", names[1])):
        body = Body.of(SPECS[name], x_type="float32", gain_type="float32", opset=18)
        assert library.get(body).name == known
    assert [f.name for f in model.functions.values()] == names


def test_epsilon_alone_shares_the_body() -> None:
    """Two epsilons, one function: its body refers to the node's attribute, so each node computes with its own."""
    sites = [Site(PLAIN.replace(epsilon=e)) for e in (1e-6, 0.5)]
    model = write(sites, "function", 18)
    assert len(model.functions) == 1
    (constant,) = (n for n in model.functions[0].node if n.attribute and n.attribute[0].ref_attr_name)
    assert (constant.attribute[0].name, constant.attribute[0].ref_attr_name) == ("value_float", "epsilon")
    assert_right(model, sites)


@pytest.mark.parametrize(("spec", "opset"), ((double(PLAIN), 18), (PLAIN, 11)), ids=("double", "opset 11"))
def test_epsilon_is_a_constant_where_an_attribute_is_wrong(spec: RMSNormSpec, opset: int) -> None:
    """A double statistic, and opset 11, have one body an epsilon; the double 1e-6 is exact."""
    x_type = "float64" if opset == 18 else "float32"
    sites = [Site(spec.replace(epsilon=e), x_type) for e in (1e-6, 1e-5)]
    model = write(sites, "function", opset)
    assert len(model.functions) == 2
    assert [round(n.attribute[0].f, 9) for n in model.graph.node] == [1e-6, 1e-5]
    assert_right(model, sites)


def test_a_foreign_function_keeps_its_name_alone() -> None:
    """A function called RMSNorm in any other domain, or a custom operator of that name, leaves ours a suffix."""
    for custom_only in (False, True):
        model, (match,) = build([Site(PLAIN)], 18)
        foreign = ir.node("RMSNorm", [match.x], domain="acme", name="foreign")
        model.graph.insert_before(match.node, foreign)
        model.graph.opset_imports["acme"] = 1
        if not custom_only:
            graph = ir.Graph([ir.Value(name="a")], [], nodes=[], opset_imports={"": 18})
            graph.append(ir.node("Abs", [graph.inputs[0]]))
            graph.outputs.append(graph[0].outputs[0])
            model.functions["acme", "RMSNorm", ""] = ir.Function("acme", "RMSNorm", graph=graph, attributes=[])
        replace(model, match, "function", Names(model), FunctionLibrary(model))
        (own,) = (f for f in model.functions.values() if f.domain == DOMAIN)
        assert own.name.startswith("RMSNorm_")


def test_a_norm_in_a_function_of_the_file_becomes_a_function_in_it() -> None:
    """Inside a user's function the domain is imported by that function as well; the body has the model's opset."""
    import onnxruntime as ort

    text = """
        <ir_version: 8, opset_import: ["": 18, "acme": 1]>
        g (float[N,8] x) => (float[N,8] y) { y = acme.Block (x) }
        <domain: "acme", opset_import: ["": 17]>
        Block (a) => (b) { b = Identity (a) }
    """
    model = ir.from_proto(onnx.parser.parse_model(text))
    (block,) = model.functions.values()
    _, (match,) = build([Site(PLAIN)], 17)
    spec = PLAIN.replace(has_gain=False)
    root, b = block[0], block.outputs[0]
    inside = dataclasses.replace(match, spec=spec, node=root, x=block.inputs[0], gain=None, output=b)
    writer = Writer(model, block, 17, before=root, names=Names(model), functions=FunctionLibrary(model))
    new = FORMS["function"].write(inside, writer)
    block.insert_before(root, writer.nodes)
    ir.convenience.replace_all_uses_with(b, new, replace_graph_outputs=True)
    block.remove(root, safe=True)
    assert block.opset_imports[DOMAIN] == model.opset_imports[DOMAIN] == 1
    assert model.functions[DOMAIN, "RMSNorm", ""].opset_imports[""] == 18
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    (y,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(y, reference(spec, x), rtol=1e-6)


@pytest.mark.parametrize("name", ("llama", "no gain", "bias", "bias alone"))
@pytest.mark.parametrize("gain_attribute", (False, True))
def test_a_node_has_as_many_inputs_as_its_function(name: str, gain_attribute: bool) -> None:
    """With and without gain and bias, and with the gain as an attribute; right in each case."""
    s = site(name, "float32")
    model = write([s], "function", 18, gain_attribute=gain_attribute)
    assert len(model.graph.node[0].input) == len(model.functions[0].input)
    expected = 1 + (s.spec.has_gain and not gain_attribute) + s.spec.has_bias
    assert len(model.functions[0].input) == expected
    assert ("gain" in model.functions[0].attribute) == (s.spec.has_gain and gain_attribute)
    onnx.checker.check_model(model, full_check=True)
    assert_right(model, [s])


def test_axis_names_the_first_axis_and_trailing_an_inner_one() -> None:
    """axis is the first normalised axis; a statistic over that axis alone says trailing = 0."""
    assert node_attributes(PLAIN) == {"epsilon": 1e-5, "axis": -1}
    assert node_attributes(SPECS["two axes"])["axis"] == -2
    assert node_attributes(SPECS["inner axis"]) == {"epsilon": 1e-5, "axis": -2, "trailing": 0}


@pytest.mark.parametrize(
    ("changes", "word"),
    (
        ({}, None),
        ({"axis": 2}, None),
        ({"axis": 1}, "axis"),
        ({"axis": -2}, "axis"),
        ({"epsilon": 1e-4}, "epsilon"),
        ({"trailing": 0}, "trailing"),
    ),
)
def test_a_node_that_denies_its_body_is_named(changes: dict[str, float], word: str | None) -> None:
    """Attributes that say another epsilon or axis than the body computes with give a sentence that names it."""
    node = ir.node("RMSNorm", [ir.Value(name="x")], {**node_attributes(PLAIN), **changes}, domain=DOMAIN)
    said = disagreement(node, PLAIN, rank=3)
    assert said is None if word is None else word in said


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("name", SPECS)
def test_a_body_reads_back_as_its_spec(name: str, x_type: str) -> None:
    """The recogniser reads a function's node from its body alone, as the spec that it was written from."""
    s = site(name, x_type)
    (match,) = find_rms_norms(ir.from_proto(write([s], "function", 18)))
    assert isinstance(match, Match)
    assert match.form == "function"
    assert match.spec.canonical(x_type) == s.spec.canonical(x_type)


def test_functions_need_ir_version_8() -> None:
    """A file of IR version 3 becomes one of at least 8, with the domain imported."""
    model, (match,) = build([Site(PLAIN)], 18, ir_version=3)
    replace(model, match, "function", Names(model), FunctionLibrary(model))
    assert model.ir_version == 8
    assert model.opset_imports[DOMAIN] == 1


def test_a_bfloat16_body_needs_no_bfloat16_arithmetic() -> None:
    """Its only operators on bfloat16 are Casts, and the rounding before the gain is there to the last bit."""
    s = site("llama", "bfloat16")
    model = write([s], "function", 18)
    body = ops(model.functions[0])
    assert body == ["Cast", "Pow", "ReduceMean", "Add", "Sqrt", "Div", "Cast", "Cast", "Cast", "Mul", "Cast"]
    a = s.arrays()
    (y,) = run(model, [s])
    expected = reference(s.spec, a["x"], a["gain"], rounded=True)
    np.testing.assert_array_equal(y.astype(np.float64), expected)


@pytest.mark.parametrize("weights", (False, True))
def test_a_file_converted_to_float16_never_squares_in_half(weights: bool) -> None:
    """Inputs turned to float16 by another tool: right at x = 300; with the weights too, the file fails to load."""
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail

    model = write([Site(SPECS["torch"])], "function", 18)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    half = Site(SPECS["torch"].replace(result_type="float32"), "float16", gain_type="float32")
    assert np.abs(half.arrays()["x"]).max() > 300
    if not weights:
        assert_right(model, [half])
        return
    gain = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(np.float16)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(gain, "gain0"))
    with pytest.raises(Fail, match=r"inconsistent type|different types"):
        run(model, [half])


@pytest.mark.parametrize(
    ("spec", "x_type", "opset", "words"),
    (
        (PLAIN.replace(statistic_type="float16"), "float16", 18, "raise statistic_type to float32"),
        (PLAIN, "bfloat16", 12, "takes opset 13"),
        (PLAIN.replace(result_type="float8_e4m3fn"), "float32", 21, "result_type is float8_e4m3fn"),
        (PLAIN, "float32", 10, "outside 11 to"),
    ),
)
def test_what_no_body_computes_is_refused(spec: RMSNormSpec, x_type: str, opset: int, words: str) -> None:
    """Half statistics, float8, and opsets without the operators: one sentence that names the reason."""
    assert words in str(refusal(spec, x_type, opset))


def test_the_digest_tells_bodies_apart() -> None:
    """All bodies of the matrix, over types and opsets, have digests of their own."""
    bodies = {
        Body.of(spec, x_type=t, gain_type=g, opset=o)
        for spec, t, g, o in itertools.product(SPECS.values(), TYPES, ("float32", "float16"), (11, 18))
    }
    assert len({b.digest() for b in bodies}) == len(bodies) > 150


def test_plugin_nodes_and_functions_never_meet() -> None:
    """Where plugin nodes bear the name RMSNorm, a function of another body gives way, and its node with it."""
    model, matches = build([Site(SPECS["llama"]), Site(SPECS["outside"])], 18)
    names, library = Names(model), FunctionLibrary(model)
    replace(model, matches[0], "function", names, library)
    replace(model, matches[1], "plugin", names, library)
    library.finish()
    first, second = model.graph[0], model.graph[1]
    assert first.op_type != "RMSNorm"
    assert second.op_type == "RMSNorm"
    assert_right(ir.to_proto(model), [Site(SPECS["llama"]), Site(SPECS["outside"])])


def test_dtypes_of_the_matrix_are_the_writable_ones() -> None:
    """The types tested here are the types that ONNX norms are computed in."""
    assert {dtypes.ir_dtype(t) for t in TYPES} == {
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.DOUBLE,
    }
    assert ONCE.product_type("float16") == "float32"
