"""What stands around a norm that moves: computed gains of undeclared shape, sums, values without a declared type."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from rmsnorm_onnx import Declined, Match, find_rms_norms, fuse
from rmsnorm_onnx.forms import plugin

PLAIN = (
    "s = Pow (x, two)  m = ReduceMean <axes = [-1]> (s)  e = Constant <value_float = 1e-5> ()  "
    "a = Add (m, e)  r = Sqrt (a)  d = Div (x, r)"
)


def model(graph: str, opset: int = 23) -> onnx.ModelProto:
    """A model from the text of its graph, with onnxruntime's operators at hand."""
    imports = f'"": {opset}, "com.microsoft": 1'
    return onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> g {graph}")


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Its outputs in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    """Whether two runs agree as far as two orders of a float32 sum do."""
    return all(np.allclose(a, b, rtol=2e-6, atol=0) and a.shape == b.shape for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("make", ["Neg (w)", "Add (w, w)", "Mul (w, w)"])
@pytest.mark.parametrize("form", ["function", "primitive", "plugin", "onnx"])
def test_a_computed_gain_of_rank_0(form: str, make: str) -> None:
    """Nothing declares its shape; for x of rank 1 the rewritten file loads, or the form refuses the gain by name."""
    proto = model(f"(float[8] x, float w) => (float[8] y) {{ g = {make}  y = RMSNormalization <axis = -1> (x, g) }}")
    feeds = {"x": np.arange(8, dtype=np.float32), "w": np.array(1.5, np.float32)}
    fused, report = fuse(proto, form=form)
    assert close(run(fused, feeds), run(proto, feeds))
    if form == "plugin":
        [site] = report.sites
        assert site.action == "kept" and "a value for each normalised element, not of []" in site.why


def test_the_plugin_refuses_a_short_gain_of_a_node() -> None:
    """A gain that a node holds as its attribute has a shape too, and the plugin does not take each."""
    proto = model(
        "(float[2,3,8] x) => (float[2,3,8] y) <float[8] w = {1,2,3,4,5,6,7,8}> {"
        " y = RMSNormalization <axis = -2> (x, w) }"
    )
    held, report = fuse(proto, form="function", gain_attribute=True)
    assert report.rewritten == 1
    for keep in (False, True):
        again, report = fuse(held, form="plugin", gain_attribute=keep)
        [site] = report.sites
        assert site.action == "kept" and "not of [8]" in site.why
        assert again == held


@pytest.mark.parametrize("form", ["function", "primitive", "plugin"])
@pytest.mark.parametrize("dims", ["1, 2, 8", "c, d, 8"])
def test_a_sum_keeps_what_the_file_declares(form: str, dims: str) -> None:
    """The sum of the skip operator is an output of the graph with a type and a shape of its own."""
    proto = model(
        f"(float[n, m, 8] x, float[8] w) => (float[n, m, 8] y, float[{dims}] z) {{"
        " h = SimplifiedLayerNormalization <axis = -1> (x, w)"
        " y, ia, ib, z = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (h, h, w) }",
        17,
    )
    fused, report = fuse(proto, form=form)
    assert report.rewritten == 2
    onnx.checker.check_model(fused, full_check=True)
    assert fused.graph.output[1] == proto.graph.output[1]
    x = np.random.default_rng(0).normal(size=(1, 2, 8)).astype(np.float32)
    feeds = {"x": x, "w": np.linspace(0.5, 2, 8, dtype=np.float32)}
    assert close(run(fused, feeds), run(proto, feeds))


@pytest.mark.parametrize(
    ("x_type", "make"),
    [
        ("float", "one = Constant <value_float = 1.0> ()  g = Add (one, w)"),
        ("float16", "f = Constant <value_float = 1.0> ()  one = Cast <to = 10> (f)  g = Add (w, one)"),
    ],
)
def test_a_plugin_node_behind_an_offset(x_type: str, make: str) -> None:
    """1 + w that is computed around it is the gain its fields speak of; its body, read with it, says the same."""
    proto = model(
        f"({x_type}[2,8] x, {x_type}[8] w) => ({x_type}[2,8] y) {{ {make} "
        "y = RMSNormalization <axis = -1, epsilon = 1e-5> (x, g) }"
    )
    written, _ = fuse(proto, form="plugin")
    [site] = find_rms_norms(ir.from_proto(written))
    assert isinstance(site, Match) and site.form == "plugin" and site.spec.gain_offset == 0
    again, report = fuse(written, form="plugin")
    assert again == written and report.declined == 0
    back, report = fuse(written, form="onnx")
    assert report.rewritten == 1
    rng = np.random.default_rng(3)
    kind = np.float16 if x_type == "float16" else np.float32
    feeds = {"x": rng.normal(size=(2, 8)).astype(kind), "w": rng.normal(size=8).astype(kind)}
    ours, theirs = run(back, feeds)[0], run(proto, feeds)[0]
    assert np.abs(ours.astype(np.float64) - theirs).max() <= np.spacing(np.abs(theirs).max())


def test_a_plugin_node_whose_body_says_otherwise_is_declined() -> None:
    """The gain that it is given explains an offset in its body's reading only as far as it is added there."""
    proto = model(
        "(float[2,8] x, float[8] w) => (float[2,8] y) { one = Constant <value_float = 1.0> ()  g = Add (one, w)"
        " y = RMSNormalization <axis = -1, epsilon = 1e-5> (x, g) }"
    )
    written, _ = fuse(proto, form="plugin")
    [function] = written.functions
    [product] = [node for node in function.node if node.op_type == "Mul"]
    gain = next(name for name in product.input if name in function.input)
    function.node.insert(0, onnx.helper.make_node("Constant", [], ["two"], value_float=2.0))
    function.node.insert(1, onnx.helper.make_node("Add", [gain, "two"], ["more"]))
    product = next(node for node in function.node if node.op_type == "Mul")
    product.input[list(product.input).index(gain)] = "more"
    [site] = find_rms_norms(ir.from_proto(written))
    assert isinstance(site, Declined), site


@pytest.mark.parametrize("domain", ["trt.plugins", "rmsnorm_onnx"])
def test_a_plugin_node_without_a_body_keeps_xs_shape(domain: str) -> None:
    """No value behind it is declared, and the norm that reads it is still found and rewritten the second time."""
    proto = model(
        "(float[2,8] x, float[8] w, float v) => (float[2,8] y) { h = RMSNormalization <axis = -1> (x, w)  n = Neg (h)"
        " y = RMSNormalization <axis = 1> (n, v) }"
    )
    options: dict[str, Any] = {"consumer": "onnxruntime-tensorrt"} if domain == "trt.plugins" else {"form": "plugin"}
    first, report = fuse(proto, **options)
    assert report.sites[0].form == "plugin"
    if domain == "rmsnorm_onnx":
        del first.functions[:]
    second, report = fuse(first, **options)
    assert report.declined == 0 and report.found == 2
    assert second == first


@pytest.mark.parametrize("opset", [13, 17])
def test_what_pads_a_norm_moves(opset: int) -> None:
    """The norm's result is of undeclared shape, and what was inferred of it holds for the one that takes its place."""
    proto = model(
        "(float[2,8] x, float[8] w) => (float[2,10] y) <float two = {2.0}, int64[2] p = {0,2}, float c = {0}, "
        f"int64[1] ax = {{1}}> {{ {PLAIN.replace('<axes = [-1]> (s)', '(s, ax)')}  n = Mul (d, w)  "
        "y = Pad (n, p, c, ax) }",
        18,
    )
    feeds = {"x": np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32), "w": np.ones(8, np.float32)}
    moved, report = fuse(proto, opset=opset)
    assert report.rewritten == 1
    onnx.checker.check_model(moved, full_check=True)
    assert close(run(moved, feeds), run(proto, feeds))


def test_what_stands_behind_a_native_norm_in_a_branch_moves() -> None:
    """Within a branch too the norm that onnx does not know has x's shape and its scale's type."""
    branch = "{{ {h} = SimplifiedLayerNormalization <axis = -1> (x, w)  {t} = Identity ({h}) }}"
    proto = model(
        "(float[2,8] x, float[8] w, bool c) => (float[2,8] y) { y = If (c) <"
        f"then_branch = a () => (float[2,8] t) {branch.format(h='h', t='t')}, "
        f"else_branch = b () => (float[2,8] u) {branch.format(h='k', t='u')}> }}",
        21,
    )
    moved, report = fuse(proto, form="contrib", opset=17)
    assert report.found == 2 and {site.form for site in report.sites} == {"contrib"}
    feeds = {"x": np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32), "w": np.ones(8, np.float32)}
    feeds["c"] = np.array(True)
    assert close(run(moved, feeds), run(proto, feeds))


def test_a_wide_scale_below_opset_23() -> None:
    """Only the operator holds it: below its first opset its definition stands there, as the report says."""
    proto = model("(float[2,8] x, float[2,1] w) => (float[2,8] y) { y = RMSNormalization <axis = -1> (x, w) }")
    moved, report = fuse(proto, opset=17)
    [site] = report.sites
    assert (site.action, site.form) == ("kept", "primitive") and "moved as the plain operators" in site.why
    assert "RMSNormalization" not in {node.op_type for node in moved.graph.node}
    feeds = {"x": np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32), "w": np.full((2, 1), 3, np.float32)}
    assert close(run(moved, feeds), run(proto, feeds))


def test_the_plugin_form_needs_a_proven_shape() -> None:
    """A match whose gain has no known shape is not written for the plugin, which would refuse the file."""
    [site] = find_rms_norms(
        ir.from_proto(model("(float[2,8] x, float[8] w) => (float[2,8] y) { y = RMSNormalization <axis = -1> (x, w) }"))
    )
    assert isinstance(site, Match) and plugin.refusal(site, 23) is None
    unknown = dataclasses.replace(site, gain=ir.val("g", ir.DataType.FLOAT), gain_dims=None)
    assert "this one's shape is unknown" in str(plugin.refusal(unknown, 23))


@pytest.mark.parametrize("form", ["function", "plugin"])
def test_a_norm_that_reads_the_inside_of_another(form: str) -> None:
    """A factor that rounds to one belongs to the first, and the second looks through it at what is inside."""
    first = PLAIN.replace("Pow (x", "Pow (u").replace("Div (x", "Div (u")
    again = re.sub(r"\b([smeard])\b", r"\g<1>2", PLAIN).replace("Pow (x", "Pow (v").replace("Div (x", "Div (v")
    proto = model(
        "(float16[2,8] x) => (float16[2,8] y) <float two = {2.0}, float c = {1.0001}> { u = Cast <to = 1> (x)"
        f" {first} k = Cast <to = 10> (d)  one = Cast <to = 10> (c)  h = Mul (one, k)  v = Cast <to = 1> (h)"
        f" {again} y = Cast <to = 10> (d2) }}",
        17,
    )
    onnx.checker.check_model(proto, full_check=True)
    fused, report = fuse(proto, form=form)
    assert (report.found, report.rewritten) == (2, 2)
    onnx.checker.check_model(fused, full_check=True)
    feeds = {"x": np.random.default_rng(2).normal(size=(2, 8)).astype(np.float16)}
    ours, theirs = run(fused, feeds)[0], run(proto, feeds)[0]
    assert np.abs(ours.astype(np.float64) - theirs).max() <= np.spacing(np.abs(theirs).max())


def test_the_plugin_takes_an_x_of_undeclared_shape() -> None:
    """What is proven of x counts: here its second to last dimension is 1, as the gain's may be then."""
    proto = model(
        "(float[1,3,1,8] x, float[1,8] w) => (float[1,3,1,8] y) { h = Neg (x)"
        " y = RMSNormalization <axis = 2, epsilon = 0.1> (h, w) }"
    )
    written, report = fuse(proto, form="plugin")
    assert report.rewritten == 1
    assert fuse(written, form="plugin")[0] == written


@pytest.mark.parametrize("half", [False, True])
def test_what_reads_an_inverse_moves(half: bool) -> None:
    """A contrib node whose 1 / rms is read is kept, and a Cast of that, float32 in any type, moves to another opset."""
    kind = "float16" if half else "float"
    proto = model(
        f"({kind}[2,8] x, {kind}[8] w) => ({kind}[2,8] y, double[2,1] z) {{"
        " y, inverse = SimplifiedLayerNormalization <axis = -1> (x, w)  z = Cast <to = 11> (inverse) }",
        21,
    )
    moved, report = fuse(proto, opset=17)
    assert [site.action for site in report.sites] == ["kept"]
    dtype = np.float16 if half else np.float32
    feeds = {"x": np.random.default_rng(1).normal(size=(2, 8)).astype(dtype), "w": np.ones(8, dtype)}
    assert close(run(moved, feeds), run(proto, feeds))
