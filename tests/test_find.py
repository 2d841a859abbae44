"""The recogniser on graphs that are large, deep or undeclared, and on calls that multiply."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from kit import NORM, edit, parse
from sites import find, one

from rmsnorm_onnx import Declined, Match, find_rms_norms, fuse, view
from rmsnorm_onnx import find as finding
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import DeclineCode

FUNCTION = """
<domain: "own", opset_import: ["" : 18, "own" : 1]> norm (a) => (b) {
 two = Constant <value = float {2.0}> () last = Constant <value_ints = [-1]> ()
 eps = Constant <value = float {1e-6}> () sq = Pow (a, two) ms = ReduceMean (sq, last) me = Add (ms, eps)
 rms = Sqrt (me) n = Div (a, rms) b = Relu (n) }
"""


def deep(relus: int) -> ir.Model:
    """A norm behind a long row of elementwise operators, none of whose types is declared."""
    row = "\n".join(f" c{i} = Relu (c{i - 1})" for i in range(1, relus + 1))
    text = edit(NORM, "float[N,4] x", "float[N,4] c0", " sq = Pow (x", f"{row}\n sq = Pow (x", "(x,", f"(c{relus},")
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>' + text)
    return ir.from_proto(model)


@pytest.mark.parametrize("relus", [1, 30, 400, pytest.param(4000, marks=pytest.mark.full)])
def test_types_are_inferred_over_any_distance(relus: int) -> None:
    """However far back the declared types are, the norm is found."""
    (site,) = find_rms_norms(deep(relus))
    assert isinstance(site, Match) and site.spec.has_gain


def test_only_a_constant_of_one_shape_is_folded_as_a_shape() -> None:
    """TorchScript reads sizes by Gather and Unsqueeze; the Reshape that they make is known."""
    text = """
m (float[2,6] x) => (float[2,2,3] y)
<float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}, int64 zero = {0}, int64[1] none = {0},
 int64[2] rest = {2, 3}>
{
 s = Shape (x)
 rows = Gather (s, zero)
 row = Unsqueeze (rows, none)
 target = Concat <axis = 0> (row, rest)
 g = Reshape (x, target)
 sq = Pow (g, two)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 y = Div (g, rms)
}"""
    model = ir.from_proto(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>' + text))
    assert Shapes(view.View(model)).shape(view.Ref(model.graph[4].outputs[0])) == (2, 2, 3)
    assert one(parse(text)).spec.axes == (-1,)


def test_calls_that_multiply_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four calls on each of fourteen levels are 4^14 bodies: the search ends, and claims nothing it has not seen."""
    levels = "".join(
        f'<domain: "own", opset_import: ["" : 18, "own" : 1]> f{i} (a) => (e) {{ b = own.{called} (a) '
        f"c = own.{called} (b) d = own.{called} (c) e = own.{called} (d) }}\n"
        for i in range(14)
        for called in [f"f{i - 1}" if i else "norm"]
    )
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "own" : 1]> m (float[3,4] x) => (float[3,4] y) { y = own.f13 (x) }'
        + levels
        + FUNCTION
    )
    monkeypatch.setattr(view, "MAX_CALLS", 500)
    seen = view.View(ir.from_proto(proto))
    assert sum(1 for _ in seen.nodes()) < 20 * 500 and seen.truncated
    sites = find_rms_norms(ir.from_proto(proto))
    assert sites and all(isinstance(site, Declined) for site in sites)


def test_a_function_called_twice_is_found_once() -> None:
    """The norm inside a body that two callers agree on is one site, in the function."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "own" : 1]> m (float[3,4] x) => (float[3,4] z) '
        "{ y = own.norm (x) z = own.norm (y) }" + FUNCTION
    )
    matches, declined = find(ir.from_proto(proto))
    assert [m.scope for m in matches] == ["function own::norm"] and not declined


def test_many_gains_on_one_value_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One normalised value under more gains than anybody has: the search ends, and says that it has."""
    monkeypatch.setattr(finding, "_WALK_LIMIT", 100)
    lines = "\n".join(f" y{i} = Mul (n, w)" for i in range(200))
    text = edit(NORM, " y = Mul (n, w)", f"{lines}\n y = Mul (n, w)")
    sites = find_rms_norms(ir.from_proto(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>' + text)))
    declined = [site for site in sites if isinstance(site, Declined)]
    assert [d.code for d in declined] == [DeclineCode.LIMIT] and "100" in declined[0].reason
    assert 80 < len(sites) - 1 < 100


def test_one_statistic_of_two_values() -> None:
    """A part and the whole, both divided by the root of the part's mean square: two norms."""
    text = """
m (float[N,4] x) => (float[N,2] part, float[N,4] whole)
<float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}, int64[1] zero = {0}, int64[1] half = {2}>
{
 p = Slice (x, zero, half, last)
 sq = Pow (p, two)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 part = Div (p, rms)
 whole = Div (x, rms)
}"""
    matches, declined = find(parse(text))
    assert not declined
    assert {m.output.name: (m.x.name, m.spec.leading) for m in matches} == {"part": ("p", None), "whole": ("x", 2)}


def test_an_operator_of_another_domain_is_not_onnxs() -> None:
    """A foreign function named Cast doubles a scale of one: the scale is no 1, and it is not looked through."""
    proto = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["" : 23, "own" : 1]> m (float[3,4] x) => (float[3,4] y)
        <float[1] one = {1.0}> { w = own.Cast (one) y = RMSNormalization <axis = -1> (x, w) }
        <domain: "own", opset_import: ["" : 23]> Cast (a) => (b) { b = Add (a, a) }"""
    )
    assert one(ir.from_proto(proto)).spec.has_gain


@pytest.mark.parametrize(("factor", "found"), [("1.0", 0), ("0.5", 1)])
def test_only_the_whole_mean_makes_it_layer_norm(factor: str, found: int) -> None:
    """A value less half its mean is any value, and its norm is one."""
    text = edit(
        NORM,
        " sq = Pow (x,",
        " mu = ReduceMean (x, last)\n half = Mul (mu, c)\n v = Sub (x, half)\n sq = Pow (v,",
        "Div (x,",
        "Div (v,",
        "float two",
        f"float c = {{{factor}}}, float two",
    )
    matches, declined = find(parse(text))
    assert (len(matches), len(declined)) == (found, 1 - found)


def test_a_reduction_of_nothing_is_none() -> None:
    """ReduceMean without axes reduces all of them, or nothing when it is told so."""
    text = edit(NORM, "ReduceMean (sq, last)", "ReduceMean <noop_with_empty_axes = 1> (sq)")
    assert find_rms_norms(parse(text)) == []


@pytest.mark.parametrize(("kind", "number"), [("double", "1.0000004"), ("float", "1.0000004"), ("float", "0.99999994")])
def test_a_factor_near_one_is_a_gain(kind: str, number: str) -> None:
    """A constant that nothing cancels against is 1, or a factor: no tolerance swallows it."""
    text = edit(NORM, "y = Mul (n, w)", "y = Mul (n, c)", "float eps", f"float c = {{{number}}}, float eps")
    match = one(text.replace("float", kind) if kind == "double" else text)
    assert match.spec.has_gain and match.gain is not None and match.gain.name == "c"
    plain = edit(NORM, "y = Mul (n, w)", "y = Mul (n, c)", "float eps", "float c = {1.0}, float eps")
    assert not one(plain).spec.has_gain


def test_a_coefficient_is_judged_in_its_own_type() -> None:
    """1/d that is off by more than roundings of its type is no mean, and one that is rounded to its type is."""
    text = edit(NORM, "ReduceMean (sq", "ReduceSum (sq", "me = Add (ms,", "mm = Mul (ms, c)\n me = Add (mm,")
    for kind, number, found in (("double", "0.25000001", 0), ("float", "0.25000003", 1), ("float", "0.250001", 0)):
        changed = edit(text, "float eps", f"float c = {{{number}}}, float eps").replace("float", kind)
        assert len(find(parse(changed))[0]) == found


def test_a_statistic_of_a_rounded_x() -> None:
    """x is rounded to a half type for the statistic alone: that is the statistic's type."""
    text = edit(NORM, " sq = Pow (x,", " half = Cast <to = 10> (x)\n wide = Cast <to = 1> (half)\n sq = Pow (wide,")
    (match,) = find_rms_norms(parse(text))
    assert isinstance(match, Match) and match.x.name == "x" and match.spec.statistic_type == "float16"
    assert any("float16" in note for note in match.notes)


@pytest.mark.parametrize("equation", ["...d,...d->...", "nd, nd -> n"])
def test_an_einsum_of_squares(equation: str) -> None:
    """A sum of squares by Einsum is one, with its last axis put back."""
    text = edit(
        NORM,
        " sq = Pow (x, two)\n ms = ReduceMean (sq, last)",
        f' s = Einsum <equation = "{equation}"> (x, x)\n u = Unsqueeze (s, last)\n ms = Div (u, four)',
        "float two = {2.0}",
        "float four = {4.0}",
    )
    assert one(text).spec.axes == (-1,)
    assert not find_rms_norms(parse(edit(text, "(x, x)", "(x, z)", "(float[N,4] x)", "(float[N,4] x, float[N,4] z)")))


def test_the_first_part_by_a_sequence() -> None:
    """torch.split exports as SplitToSequence and SequenceAt; the statistic over the first part is pRMSNorm's."""
    text = edit(
        NORM,
        " sq = Pow (x, two)",
        " parts = SplitToSequence <axis = -1> (x, sizes)\n part = SequenceAt (parts, zero)\n sq = Pow (part, two)",
        "float two",
        "int64[2] sizes = {3, 1}, int64 zero = {0}, float two",
    )
    (match,) = find_rms_norms(parse(text))
    assert isinstance(match, Match) and match.spec.leading == 3 and match.x.name == "x"
    assert isinstance(find_rms_norms(parse(edit(text, "zero = {0}", "zero = {1}")))[0], Declined)


def test_a_scale_that_is_filled_with_ones_is_no_gain() -> None:
    """torch writes the missing weight of nn.RMSNorm as ones of x's full shape."""
    text = """
m (float[S,N,4] x) => (float[S,N,4] y)
{
 s = Shape (x)
 ones = ConstantOfShape <value = float[1] {1.0}> (s)
 y = RMSNormalization (x, ones)
}"""
    assert not one(parse(text, opset=23)).spec.has_gain


def test_what_only_the_native_form_holds_is_kept() -> None:
    """A scale along other axes, and a second output that is read, have no place in another form."""
    wide = "m (float[2,3,4] x, float[3,4] w) => (float[2,3,4] y) { y = RMSNormalization (x, w) }"
    read = (
        "m (float[N,4] x, float[4] w) => (float[N,4] y, float[N,1] inv) {y, inv = SimplifiedLayerNormalization (x, w)}"
    )
    for text, words in ((wide, "axes that are not normalised"), (read, "inv is read too")):
        model = parse(text, opset=23, check=False)
        fused, report = fuse(model, form="function")
        assert [site.action for site in report.sites] == ["kept"] and words in report.sites[0].why
        assert [n.op_type for n in fused.graph] == [n.op_type for n in model.graph]


@pytest.mark.parametrize(
    "mean",
    [
        "mu = ReduceMean (x, last)\n c = Sub (x, mu)",
        "m0 = ReduceMean <keepdims = 0> (x, last)\n mu = Unsqueeze (m0, last)\n c = Sub (x, mu)",
        "t = ReduceSum (x, last)\n mu = Div (t, four)\n c = Sub (x, mu)",
        "t = ReduceMean (x, last)\n mu = Neg (t)\n c = Add (mu, x)",
    ],
)
def test_layer_norm_in_any_spelling(mean: str) -> None:
    """However the mean is subtracted, it is LayerNorm, and named."""
    text = edit(NORM, " sq = Pow (x,", f" {mean}\n sq = Pow (c,", "Div (x,", "Div (c,")
    text = edit(text, "float two", "float four = {4.0}, float two")
    (site,) = find_rms_norms(parse(text))
    assert isinstance(site, Declined) and site.code is DeclineCode.LAYER_NORM


def test_invented_symbols_are_not_declared_ones() -> None:
    """onnx numbers unknown dimensions anew in each inference: a file's unk__1 is another dimension than its own."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]> m (float[M,N] a0, int64[2] shape) => (float y)
        <float eps = {1e-5}, int64[1] last = {-1}> { nz = NonZero (a0) a = Cast <to = 1> (nz) b = Reshape (a, shape)
        sq = Mul (b, b) ms = ReduceMean (sq, last) me = Add (ms, eps) rms = Sqrt (me) y = Div (a, rms) }"""
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    for first in range(4):
        del proto.graph.value_info[:]
        dims = [f"unk__{first}", f"unk__{first + 1}"]
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, dims))
        (site,) = find_rms_norms(ir.from_proto(proto))
        assert isinstance(site, Declined)


def test_a_numeral_is_no_symbol() -> None:
    """torch names a dimension that the module fixes "4"; values that say 4 have the same."""
    model = parse(NORM)
    proto = ir.to_proto(model)
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "4"
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("sq", onnx.TensorProto.FLOAT, ["N", 4]))
    (site,) = find_rms_norms(ir.from_proto(proto))
    assert isinstance(site, Match) and site.spec.has_gain
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "F"  # what is not proven is still no silence
    assert find_rms_norms(ir.from_proto(proto))


def test_a_half_constant_before_epsilon() -> None:
    """1/sqrt(d) rounded to float16 beside epsilon is found like sqrt(d) after it, and its rounding is listed."""
    text = """
m (float16[N,32] x) => (float16[N,32] y)
<int64[1] last = {-1}>
{
 n = ReduceL2 (x, last)
 r = Mul (n, c)
 e = Add (r, eps)
 y = Div (x, e)
}"""
    model = parse(text, c=np.float16(32**-0.5), eps=np.float16(1e-3))
    (match,) = find_rms_norms(model)
    assert isinstance(match, Match) and match.spec.epsilon_placement == "outside"
    assert match.spec.epsilon == float(np.float16(1e-3))
    assert any("0.176777" in change and "float16" in change for change in match.rounding_changes)


def test_a_node_of_ours_without_its_function() -> None:
    """What it computes stands in its function: without one it is declined, and so is one whose attributes are odd."""
    header = '<ir_version: 8, opset_import: ["" : 18, "rmsnorm_onnx" : 1]> '
    bare = header + "m (float[N,4] x) => (float[N,4] y) { y = rmsnorm_onnx.RMSNorm <epsilon = 1e-5, axis = -1> (x) }"
    (site,) = find_rms_norms(onnx.parser.parse_model(bare))
    assert isinstance(site, Declined) and site.code is DeclineCode.INVALID and "not in the file" in site.reason
    fused, _ = fuse(parse(NORM))
    fused.graph[0].attributes["axis"] = ir.AttrFloat32("axis", -1.0)
    (site,) = find_rms_norms(fused)
    assert isinstance(site, Declined) and site.code is DeclineCode.MISMATCH and "axis" in site.reason


@pytest.mark.parametrize("factor", ["1.0", "2.0"])
def test_a_norm_ends_where_others_read_it(factor: str) -> None:
    """A scalar that one of two readers applies is that reader's, 1 too: one norm, and a second run finds no other."""
    text = edit(
        NORM, "=> (float[N,4] y)", "=> (float[N,4] a, float[N,4] b)", "float eps", f"float c = {{{factor}}}, float eps"
    )
    model = parse(edit(text, "y = Mul (n, w)", "y = Mul (n, w)\n a = Relu (y)\n z = Mul (y, c)\n b = Sigmoid (z)"))
    assert one(model).output.name == "y"
    fused, first = fuse(model)
    again, second = fuse(fused)
    assert (first.rewritten, second.rewritten) == (1, 0) and ir.to_proto(again) == ir.to_proto(fused)


def test_a_type_is_no_number() -> None:
    """A CastLike that takes the statistic's type alone gives no reason to decline anything."""
    text = edit(NORM, "me = Add (ms, eps)", "like = CastLike (half, ms)\n me = Add (ms, like)")
    assert one(parse(text, half=np.float16(0.25))).spec.epsilon == 0.25
    text = edit(NORM, "me = Add (ms, eps)\n rms = Sqrt (me)", "like = CastLike (half, ms)\n rms = Exp (ms)")
    declined = [s for s in find_rms_norms(parse(text, half=np.float16(0.25))) if isinstance(s, Declined)]
    assert not any("integers" in site.reason for site in declined)


def test_a_root_that_an_optimiser_made_has_its_sources_module() -> None:
    """A last Cast without a trace is of the module that the node before it was traced in."""
    model = parse(NORM)
    model.graph[-2].metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'layers.0', 'layers.0.norm', 'div']"
    assert one(model).module == "layers.0.norm"


def test_finding_renames_nothing() -> None:
    """A Constant's tensor keeps the name it had, since a clone of the caller's model shares it."""
    model = parse(
        """m (float[N,4] x) => (float[N,4] y) <float[1] one> {
        one = Constant <value = float[1] {1.0}> () y = RMSNormalization (x, one) }""",
        opset=23,
    )
    tensor = model.graph.node(0).attributes["value"].as_tensor()
    tensor.name = "theirs"
    (match,) = find_rms_norms(model)
    assert isinstance(match, Match) and not match.spec.has_gain
    assert tensor.name == "theirs"
