"""The rewrite's contract: what changes, what survives, what is never touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from kit import NORM, edit, model_bytes, parse

import rmsnorm_onnx
from rmsnorm_onnx import modelio
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.functions import DOMAIN, SPEC_KEY
from rmsnorm_onnx.passes import FuseRMSNorm
from rmsnorm_onnx.spec import RMSNormSpec

TWO = """
m (float[N,4] x) => (float[N,4] z)
<float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}, float[4] w = {1.0, 0.5, 2.0, -1.0}>
{
 sq = Pow (x, two)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 n = Div (x, rms)
 y = Mul (n, w)
 sq2 = Pow (y, two)
 ms2 = ReduceMean (sq2, last)
 me2 = Add (ms2, eps)
 rms2 = Sqrt (me2)
 n2 = Div (y, rms2)
 z = Mul (n2, w)
}"""
W = np.array([1.0, 0.5, 2.0, -1.0], np.float16)
HALF_EARLY = """
m (float16[N,4] x) => (float16[N,4] y)
<int64[1] last = {-1}, float eps = {1e-6}>
{
 wide = Cast <to = 1> (x)
 sq = Mul (wide, wide)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 f = Reciprocal (rms)
 half = Cast <to = 10> (f)
 g = Mul (half, w)
 y = Mul (x, g)
}"""


def ops(model: ir.Model) -> list[str]:
    """The operators of the main graph."""
    return [node.op_type for node in model.graph]


def test_the_pass_rewrites_in_place_and_only_once() -> None:
    """The pass says that it modified the model, and on a second run that it did not, to the last byte."""
    model = parse(NORM)
    first = FuseRMSNorm()(model)
    assert first.modified and first.model is model and ops(model) == ["RMSNorm"]
    before = model_bytes(model)
    second = FuseRMSNorm()(model)
    assert not second.modified
    assert model_bytes(model) == before


def test_the_input_is_left_alone() -> None:
    """find and fuse change neither an onnx_ir model nor a proto."""
    model = parse(NORM)
    proto = ir.to_proto(model)
    before = proto.SerializeToString(deterministic=True)
    rmsnorm_onnx.find_rms_norms(model)
    rmsnorm_onnx.fuse(model)
    rmsnorm_onnx.fuse(proto)
    assert model_bytes(model) == before
    assert proto.SerializeToString(deterministic=True) == before


def test_a_new_node_carries_its_spec() -> None:
    """The spec is in the new node's metadata, beside what the old root's said."""
    model = parse(NORM)
    model.graph[-1].metadata_props["origin"] = "layers.0.norm"
    FuseRMSNorm()(model)
    (node,) = model.graph
    assert RMSNormSpec.from_json(json.loads(node.metadata_props[SPEC_KEY])).epsilon == np.float32(1e-6)
    assert node.metadata_props["origin"] == "layers.0.norm"


def test_what_a_file_says_survives() -> None:
    """Names of inputs and outputs, doc strings, metadata, foreign initializers and opset imports stay."""
    model = parse(edit(NORM, "n = Div (x, rms)", "other = Identity (x)\n n = Div (x, rms)"))
    model.graph.doc_string, model.doc_string, model.producer_name = "graph", "model", "someone"
    model.metadata_props["key"], model.graph.outputs[0].doc_string = "value", "the result"
    model.graph.outputs[0].metadata_props["axis"] = "batch"
    unused = ir.Value(name="unused", const_value=ir.tensor([1.0, 2.0], name="unused"))
    model.graph.register_initializer(unused)
    model.graph.opset_imports["foreign"] = 3
    fused, _ = rmsnorm_onnx.fuse(model)
    assert [v.name for v in fused.graph.inputs] == ["x"]
    assert [v.name for v in fused.graph.outputs] == ["y"]
    assert fused.graph.outputs[0].doc_string == "the result"
    assert fused.graph.outputs[0].metadata_props["axis"] == "batch"
    assert (fused.graph.doc_string, fused.doc_string, fused.producer_name) == ("graph", "model", "someone")
    assert fused.metadata_props["key"] == "value"
    assert set(fused.graph.initializers) == {"w", "unused"}
    assert fused.graph.opset_imports["foreign"] == 3
    assert ops(fused) == ["Identity", "RMSNorm"]


def test_shared_constants_survive() -> None:
    """An epsilon, an exponent and a gain that another site still reads stay; with the last reader they go."""
    part, report = rmsnorm_onnx.fuse(parse(TWO), skip=["z"])
    assert [site.action for site in report.sites] == ["rewritten", "kept"]
    assert set(part.graph.initializers) == {"two", "last", "eps", "w"}
    whole, _ = rmsnorm_onnx.fuse(parse(TWO))
    assert set(whole.graph.initializers) == {"w"}
    assert len(whole.functions) == 1


def test_only_and_skip() -> None:
    """Patterns choose sites by name; what is not chosen is kept, and the report says so."""
    for options in ({"only": ["y"]}, {"skip": ["z*"]}):
        fused, report = rmsnorm_onnx.fuse(parse(TWO), **options)
        assert [(s.name, s.action) for s in report.sites] == [("y", "rewritten"), ("z", "kept")]
        assert report.sites[1].why == "not selected"
        assert ops(fused).count("RMSNorm") == 1


def test_a_form_overrides_the_consumer() -> None:
    """The consumer would get another form than the one asked for."""
    model = parse(NORM, opset=23)
    assert ops(rmsnorm_onnx.fuse(model, consumer="tensorrt:10.15")[0]) == ["RMSNormalization"]
    assert ops(rmsnorm_onnx.fuse(model, consumer="tensorrt:10.15", form="function")[0]) == ["RMSNorm"]


@pytest.mark.parametrize("options", [{"form": "layer"}, {"consumer": "coreml"}, {"consumer": "tensorrt:new"}])
def test_unknown_forms_and_consumers(options: dict[str, str]) -> None:
    """Both are usage errors that name the choices, and come before anything is done."""
    with pytest.raises(UsageError, match=r"function|tensorrt"):
        rmsnorm_onnx.fuse(parse(NORM), **options)


def test_a_form_that_cannot_hold_a_site_keeps_it() -> None:
    """RMSNormalization needs opset 23: below, the site stays as it was, with the reason."""
    fused, report = rmsnorm_onnx.fuse(parse(NORM), form="onnx")
    assert ops(fused)[-1] == "Mul"
    assert report.sites[0].action == "kept" and "opset 18" in report.sites[0].why


def test_a_rounding_change_needs_leave() -> None:
    """A gain multiplied into 1/rms in a half type is kept, its rounding listed, and rewritten once that is allowed."""
    kept, report = rmsnorm_onnx.fuse(parse(HALF_EARLY, w=W))
    assert report.sites[0].action == "kept" and ops(kept)[-1] == "Mul"
    assert report.sites[0].rounding_changes == (
        "the gain times 1/rms is rounded to float16 before the rest is multiplied in",
    )
    fused, report = rmsnorm_onnx.fuse(parse(HALF_EARLY, w=W), allow_rounding_change=True)
    assert ops(fused) == ["RMSNorm"] and report.sites[0].rounding_changes


def test_from_form_to_form() -> None:
    """A fused file goes to each other form and back; a function of ours that nobody calls any more is removed."""
    model = rmsnorm_onnx.fuse(parse(NORM, opset=23))[0]
    for form, expected in (("onnx", "RMSNormalization"), ("primitive", "Mul"), ("plugin", "RMSNorm")):
        model, report = rmsnorm_onnx.fuse(model, form=form)
        assert report.rewritten == 1 and ops(model)[-1] == expected
        assert bool(model.functions) == (form == "plugin")  # a plugin node carries its body
    model, _ = rmsnorm_onnx.fuse(model, form="function")
    assert ops(model) == ["RMSNorm"] and "plugin_version" not in model.graph[0].attributes
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_gain_as_an_attribute() -> None:
    """The gain moves into the node on request, is found there, and comes back out of it."""
    stored, _ = rmsnorm_onnx.fuse(parse(NORM), gain_attribute=True)
    (node,) = stored.graph
    assert node.attributes["gain"].as_tensor().numpy().tolist() == [1.0, 0.5, 2.0, -1.0]
    (match,) = rmsnorm_onnx.find_rms_norms(stored)
    assert match.spec.has_gain and match.form == "function"
    plain, _ = rmsnorm_onnx.fuse(stored, form="primitive")
    (again,) = rmsnorm_onnx.find_rms_norms(plain)
    assert again.spec.canonical("float32") == match.spec.canonical("float32")


def test_28_weights_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is rewritten by path while its data file cannot be read, and the data file is what it was."""
    path = tmp_path / "model.onnx"
    text = edit(NORM, "y = Mul (n, w)", "z = Mul (n, w)\n y = MatMul (z, matrix)")
    model = parse(text, matrix=np.eye(4, dtype=np.float32))
    ir.save(model, path, external_data="weights.bin", size_threshold_bytes=8)
    content = (tmp_path / "weights.bin").read_bytes()
    monkeypatch.setattr(ir.ExternalTensor, "_load", lambda self: pytest.fail(f"{self.name} was read"))
    os.chmod(tmp_path / "weights.bin", 0)
    fused, report = rmsnorm_onnx.fuse(path)
    modelio.save(fused, tmp_path / "fused.onnx")
    assert report.rewritten == 1
    monkeypatch.undo()
    os.chmod(tmp_path / "weights.bin", 0o600)
    assert (tmp_path / "weights.bin").read_bytes() == content
    written = ir.load(tmp_path / "fused.onnx")
    np.testing.assert_array_equal(written.graph.initializers["w"].const_value.numpy(), [1.0, 0.5, 2.0, -1.0])


def test_nodes_that_were_dead_before_stay() -> None:
    """Only what the rewrite made dead is removed."""
    model = parse(edit(NORM, "y = Mul (n, w)", "dead = Exp (x)\n y = Mul (n, w)"))
    assert ops(rmsnorm_onnx.fuse(model)[0]) == ["Exp", "RMSNorm"]


def test_functions_of_others_stay() -> None:
    """A function that is a norm gives its call to ours and stays in the file; its name is not taken."""
    function = """
<domain: "acme", opset_import: ["" : 18]>
RMSNorm (a, b) => (c)
{
 two = Constant <value = float {2.0}> ()
 last = Constant <value_ints = [-1]> ()
 eps = Constant <value = float {1e-6}> ()
 sq = Pow (a, two)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 n = Div (a, rms)
 c = Mul (n, b)
}"""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "acme" : 1]>\n'
        "m (float[N,4] x, float[4] w) => (float[N,4] y) { y = acme.RMSNorm (x, w) }" + function
    )
    fused, _ = rmsnorm_onnx.fuse(proto)
    (node,) = fused.graph.node
    assert node.domain == DOMAIN and node.op_type.startswith("RMSNorm_")
    assert {(f.domain, f.name) for f in fused.functions} == {("acme", "RMSNorm"), (DOMAIN, node.op_type)}
    onnx.checker.check_model(fused, full_check=True)


def test_onnx_under_its_long_name() -> None:
    """A file that imports "ai.onnx" is rewritten as one that imports ""."""
    model = parse(NORM)
    model.graph.opset_imports["ai.onnx"] = model.graph.opset_imports.pop("")
    fused, report = rmsnorm_onnx.fuse(model)
    assert report.rewritten == 1
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)


def test_29_an_old_file_keeps_its_constants() -> None:
    """IR 3 lists initializers among the inputs; in the newer file that would let callers override them."""
    proto = ir.to_proto(parse(TWO))
    proto.ir_version = 3
    for tensor in proto.graph.initializer:
        proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    part, report = rmsnorm_onnx.fuse(proto, only=["y"])
    assert report.found == 2 and [v.name for v in part.graph.input] == ["x"]
    _, report = rmsnorm_onnx.fuse(part)
    assert report.found == 2 and report.rewritten == 1


def test_a_string_is_one_pattern() -> None:
    """A pattern given as a string is not taken as its letters."""
    for options in ({"only": "y"}, {"skip": "z"}):
        assert [s.action for s in rmsnorm_onnx.fuse(parse(TWO), **options)[1].sites] == ["rewritten", "kept"]
    assert FuseRMSNorm(only="layers.*").options.only == ("layers.*",)
    assert len(rmsnorm_onnx.verify(parse(TWO), only="z").sites) == 1


def test_a_plugin_without_a_body_is_noted() -> None:
    """Plugin nodes of two bodies cannot both carry one: the report says that the file needs the plugin."""
    text = edit(TWO, "me2 = Add (ms2, eps)\n rms2 = Sqrt (me2)", "root = Sqrt (ms2)\n rms2 = Add (root, eps)")
    _, report = rmsnorm_onnx.fuse(parse(text), form="plugin")
    assert all(any("with the plugin alone" in note for note in site.notes) for site in report.sites)
    _, report = rmsnorm_onnx.fuse(parse(TWO), form="plugin")
    assert not any(site.notes for site in report.sites)


def test_native_norms_without_declared_types() -> None:
    """Files that onnxruntime wrote declare no types: those of its own norms' outputs follow from their inputs."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        m (float[2,3,4] x, float[2,3,4] r, float[4] w, float[4,4] matrix) => (float[2,3,4] y)
        <float eps = {0.125}, int64[1] last = {-1}> {
        a, mean, inv, sum = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.125> (x, r, w)
        t = Relu (sum) u = MatMul (t, matrix) b = SimplifiedLayerNormalization <epsilon = 0.125> (u, w)
        c, mean2, inv2, sum2 = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.125> (b, a, w)
        k = MatMul (sum2, matrix) sq = Mul (k, k) ms = ReduceMean (sq, last) me = Add (ms, eps) rms = Sqrt (me)
        y = Div (k, rms) }"""
    )
    fused, report = rmsnorm_onnx.fuse(proto)
    assert (report.rewritten, report.declined) == (4, 0)
    onnx.checker.check_model(fused, full_check=True)


def test_a_norm_beside_a_skip_norm_is_its_own() -> None:
    """A skip norm divides the sum: the norm of x alone, with the same epsilon, is no interior of it."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        m (float[2,3,4] x, float[2,3,4] r, float[4] w) => (float[2,3,4] y, float[2,3,4] z)
        <float eps = {0.125}, int64[1] last = {-1}> {
        y = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 0.125> (x, r, w) sq = Mul (x, x)
        ms = ReduceMean (sq, last) me = Add (ms, eps) rms = Sqrt (me) z = Div (x, rms) }"""
    )
    _, report = rmsnorm_onnx.fuse(proto)
    assert (report.rewritten, report.declined) == (2, 0)


def test_plugin_nodes_of_two_runs_never_share_a_wrong_body() -> None:
    """A body that an earlier plugin node has is not replaced by the one that a later node needs."""
    text = edit(TWO, "me2 = Add (ms2, eps)\n rms2 = Sqrt (me2)", "root = Sqrt (ms2)\n rms2 = Add (root, big)")
    model = parse(edit(text, "float eps", "float big = {0.5}, float eps"))
    first, _ = rmsnorm_onnx.fuse(model, form="plugin", only="y")
    assert len(first.functions) == 1
    both, report = rmsnorm_onnx.fuse(first, form="plugin", only="z")
    assert not both.functions and any("with the plugin alone" in note for note in report.sites[1].notes)
    alike, _ = rmsnorm_onnx.fuse(rmsnorm_onnx.fuse(parse(TWO), form="plugin", only="y")[0], form="plugin", only="z")
    assert len(alike.functions) == 1 and all("plugin_version" in node.attributes for node in alike.graph)


def behind(*more: str, outputs: str = "float[N,4] z") -> ir.Model:
    """A norm with more nodes behind it, rewritten."""
    text = edit(NORM, "float[N,4] y)", f"{outputs})", "\n}", "".join(f"\n {line}" for line in more) + "\n}")
    return rmsnorm_onnx.fuse(parse(text))[0]


@pytest.mark.parametrize("cast", ["Cast <to = 1> (y)", "CastLike (y, x)"])
def test_a_cast_to_the_same_type_behind_a_norm_goes(cast: str) -> None:
    """Torch writes `type_as` so, and onnxruntime keeps it as a copy behind its fused kernel; names of outputs stay."""
    model = behind(f"same = {cast}", "z = Relu (same)")
    assert ops(model) == ["RMSNorm", "Relu"]
    assert model.graph[1].inputs[0] is model.graph[0].outputs[0]
    model = behind(f"z = {cast}")
    assert ops(model) == ["RMSNorm"] and [value.name for value in model.graph.outputs] == ["z"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_two_casts_that_are_outputs() -> None:
    """One name takes the norm's own value, the other one keeps its Cast."""
    model = behind("z = Cast <to = 1> (y)", "also = Cast <to = 1> (y)", outputs="float[N,4] z, float[N,4] also")
    assert ops(model) == ["RMSNorm", "Cast"] and [value.name for value in model.graph.outputs] == ["z", "also"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_the_norms_own_output_keeps_its_name() -> None:
    """Where the norm's value is an output as well, the Cast behind it stays."""
    model = behind("z = Cast <to = 1> (y)", outputs="float[N,4] y, float[N,4] z")
    assert ops(model) == ["RMSNorm", "Cast"] and [value.name for value in model.graph.outputs] == ["y", "z"]


@pytest.mark.parametrize(
    ("lines", "outputs", "wanted"),
    [
        (["z = Cast <to = 11> (y)"], "double[N,4] z", ["RMSNorm", "Cast"]),
        (["d = Cast <to = 11> (x)", "z = CastLike (y, d)"], "double[N,4] z", ["Cast", "RMSNorm", "CastLike"]),
        (["z = CastLike (x, y)"], "float[N,4] z", ["RMSNorm", "CastLike"]),
    ],
)
def test_other_casts_stay(lines: list[str], outputs: str, wanted: list[str]) -> None:
    """A Cast to another type, and one of another value to the norm's type, are the file's own."""
    assert sorted(ops(behind(*lines, outputs=outputs))) == sorted(wanted)


def test_a_cast_in_a_branch_stays_an_output_of_its_branch() -> None:
    """A branch cannot give a value of the graph around it: only there the Cast is kept."""
    branch = "b () => (float[N,4] {name}) {{ {name} = Cast <to = 1> (y) }}"
    then, other = branch.format(name="t"), "b () => (float[N,4] o) { o2 = Cast <to = 1> (y)  o = Relu (o2) }"
    model = behind(
        "yes = Constant <value_int = 1> ()",
        "cond = Cast <to = 9> (yes)",
        f"z = If (cond) <then_branch = {then}, else_branch = {other}>",
    )
    branches = [[n.op_type for n in a.as_graph()] for a in model.graph[-1].attributes.values()]
    assert sorted(branches) == [["Cast"], ["Relu"]]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
