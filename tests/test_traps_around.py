"""The traps around a norm: containers, neighbours, native operators, look-alikes, roundings."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from fused import assert_within_bound, run
from kit import NORM, edit, parse, parse_half, proto
from sites import feed, find, one, refused

from rmsnorm_onnx import RMSNormSpec, fuse
from rmsnorm_onnx.site import DeclineCode

BODY = NORM.split("{\n")[-1].removesuffix("}")
CONSTANTS = """
 two = Constant <value = float {2.0}> ()
 last = Constant <value = int64[1] {-1}> ()
 eps = Constant <value = float {1e-6}> ()
"""
W = "float[4] w = {1.0, 0.5, 2.0, -1.0}"


@pytest.mark.parametrize("gain", ["float w = {2.0}", "float[1] w = {2.0}", W])
def test_02_rank_one_loads(gain: str) -> None:
    """Trap 2: what is written for x of rank 1 loads, whatever the gain's shape, onnxruntime's fusion or not."""
    model = proto(edit(NORM, "float[N,4]", "float[4]", W, gain))
    fused, report = fuse(model)
    assert report.rewritten == 1
    feeds = feed(ir.from_proto(model))
    np.testing.assert_allclose(run(fused, feeds)["y"], run(model, feeds, optimise=False)["y"], rtol=1e-5)


def test_11_gemma_in_float16() -> None:
    """Trap 11: a float16 norm whose gain is applied in float32 becomes a file that passes the full check and loads."""
    text = edit(NORM, "float[N,4] x", "float16[N,4] x0", "=> (float[", "=> (float16[", "] y)", "] y0)")
    text = edit(
        text, "sq =", "x = Cast <to = 1> (x0)\n sq =", "y = Mul (n, w)", "y = Mul (n, w)\n y0 = Cast <to = 10> (y)"
    )
    model = proto(text, opset=23)
    x = np.random.default_rng(0).normal(0, 50, (5, 4)).astype(np.float16)
    for form in ("function", "onnx"):
        fused, report = fuse(model, form=form)
        onnx.checker.check_model(fused, full_check=True)
        assert report.rewritten == 1
        spec = report.sites[0].spec
        assert spec is not None and spec.resolve("float16").normalized_type == "float32"
        gain = np.array([1, 0.5, 2, -1], np.float32)
        assert_within_bound(run(fused, {"x0": x})["y0"], spec, x, gain)


BRANCH = f"""
m (float[3,4] x, bool c) => (float[3,4] y)
<{W}>
{{ y = If (c) <then_branch = t () => (float[3,4] y1) {{ {CONSTANTS} {edit(BODY, "y = Mul", "y1 = Mul")} }},
   else_branch = e () => (float[3,4] y2) {{ y2 = Identity (x) }}> }}"""
LOOP = f"""
m (float[3,4] x) => (float[3,4] z)
<{W}, int64 trips = {{2}}>
{{ z = Loop (trips, , x) <body = b (int64 i, bool go, float[3,4] h) => (bool on, float[3,4] y)
   {{ on = Identity (go) {CONSTANTS} {edit(BODY, "(x, two)", "(h, two)", "Div (x,", "Div (h,")} }}> }}"""
CALL = f"m (float[3,4] x) => (float[3,4] y) <{W}> {{ y = local.block (x, w) }}"
FUNCTION = f'<opset_import: ["": 18], domain: "local">\nblock (x, w) => (y) {{ {CONSTANTS} {BODY} }}'


@pytest.mark.parametrize(
    ("text", "functions"), [(BRANCH, ""), (LOOP, ""), (CALL, FUNCTION)], ids=["If", "Loop", "function"]
)
def test_18_in_branches_loops_and_functions(text: str, functions: str) -> None:
    """Trap 18: a norm in a branch, a loop or a function is found, and rewritten."""
    model = proto(text, functions=functions)
    match = one(ir.from_proto(model))
    assert functions or match.scope
    fused, report = fuse(model)
    onnx.checker.check_model(fused, full_check=True)
    assert report.rewritten == 1 and report.declined == 0
    feeds = feed(ir.from_proto(model))
    for name, want in run(model, feeds, optimise=False).items():
        np.testing.assert_allclose(run(fused, feeds)[name], want, rtol=1e-5)


def test_20_native_operators() -> None:
    """Trap 20: RMSNormalization, SimplifiedLayerNormalization and LpNormalization times sqrt(d) are matches."""
    text = f"m (float[N,4] x) => (float[N,4] y) <{W}> {{ y = RMSNormalization <epsilon = 0.001> (x, w) }}"
    match = one(text, opset=23)
    assert match.form == "onnx" and match.spec.epsilon == float(np.float32(0.001))
    match = one(edit(text, "RMSNormalization", "SimplifiedLayerNormalization"), check=False)
    assert match.form == "contrib" and match.gain is not None
    body = "{ n = LpNormalization <axis = -1, p = 2> (x)\n y = Mul (n, r) }"
    match = one(f"m (float[N,4] x) => (float[N,4] y) <float r = {{2.0}}> {body}")
    assert match.output.name == "y" and match.spec.epsilon < np.finfo(np.float32).tiny  # a row of zeros gives zeros


CENTRED = edit(NORM, "sq =", "mean = ReduceMean (x, last)\n c = Sub (x, mean)\n sq =", "Pow (x", "Pow (c")


def test_21_layer_norm_is_named() -> None:
    """Trap 21: a subtracted mean is LayerNorm, and is called so."""
    refused(edit(CENTRED, "Div (x", "Div (c"), DeclineCode.LAYER_NORM, "LayerNorm")


def test_21_variance_divides_x() -> None:
    """Trap 21: x over its standard deviation is no RMSNorm of x either."""
    matches, declined = find(parse(CENTRED))
    assert not matches and declined


def test_21_variance_from_two_means() -> None:
    """Trap 21: E[x^2] - E[x]^2 is a variance, not a mean square."""
    text = edit(
        NORM,
        "me =",
        "mean = ReduceMean (x, last)\n m2 = Mul (mean, mean)\n v = Sub (ms, m2)\n me =",
        "Add (ms",
        "Add (v",
    )
    matches, declined = find(parse(text))
    assert not matches and declined


def test_21_other_norms_are_named() -> None:
    """Trap 21: GroupNormalization and InstanceNormalization are other norms."""
    text = """
m (float[N,4,3] x) => (float[N,4,3] y) <float[4] w = {1.0, 2.0, 3.0, 4.0}, float[4] b = {0.0, 0.0, 0.0, 0.0}>
{ y = InstanceNormalization (x, w, b) }"""
    refused(text, DeclineCode.OTHER_NORM, "InstanceNorm")


def test_22_two_square_roots() -> None:
    """Trap 22: sqrt(sqrt(m) + e) is no root mean square."""
    refused(edit(NORM, "me = Add (ms", "s = Sqrt (ms)\n me = Add (s"), DeclineCode.EXPONENT)


def test_23_statistic_and_gain_on_different_axes() -> None:
    """Trap 23: a statistic over axis 1 does not take in a gain over the last axis."""
    text = edit(NORM, "float[N,4]", "float[N,3,4]", "last = {-1}", "last = {1}")
    match = one(text)
    assert match.spec.axes == (-2,) and not match.spec.has_gain and match.output.name == "n"


def test_23_channel_norm() -> None:
    """Trap 23: a norm over NCHW's axis 1 has axes (-3,), and its gain is [C,1,1]."""
    text = edit(NORM, "float[N,4]", "float[N,4,2,3]", "last = {-1}", "last = {1}", "float[4] w", "float[4,1,1] w")
    match = one(text)
    assert match.spec.axes == (-3,) and match.spec.has_gain


@pytest.mark.parametrize("scale", [300.0, 20000.0, 1e-4, 1e-7])
def test_24_large_and_small_rows_in_float16(scale: float) -> None:
    """Trap 24: where float16 squares overflow or vanish, the rewritten norm is finite and within two ulp."""
    text = NORM.replace("1e-6", "1e-5")
    model = ir.to_proto(parse_half(text))
    fused, report = fuse(model)
    assert report.rewritten == 1
    x = (scale * np.random.default_rng(1).uniform(0.5, 1, (5, 4))).astype(np.float16)
    got = run(fused, {"x": x})["y"]
    epsilon = float(np.float16(1e-5))
    spec = RMSNormSpec(epsilon=epsilon)
    assert np.isfinite(got.astype(np.float64)).all()
    assert_within_bound(got, spec, x, np.array([1, 0.5, 2, -1], np.float16))


def test_25_epsilon_that_is_zero_in_float16() -> None:
    """Trap 25: 1e-8 beside a float16 model survives a rewrite; one that was stored as 0 is reported."""
    text = edit(NORM, "float[N,4] x", "float16[N,4] x0", "=> (float[", "=> (float16[", "] y)", "] y0)", "1e-6", "1e-8")
    text = edit(
        text, "sq =", "x = Cast <to = 1> (x0)\n sq =", "y = Mul (n, w)", "y = Mul (n, w)\n y0 = Cast <to = 10> (y)"
    )
    fused, report = fuse(proto(text))
    assert report.sites[0].spec is not None and report.sites[0].spec.epsilon == float(np.float32(1e-8))
    assert not np.isnan(run(fused, {"x0": np.zeros((1, 4), np.float16)})["y0"]).any()
    match = one(parse_half(NORM.replace("1e-6", "1e-8")))
    assert match.spec.epsilon == 0 and any("zero" in note for note in match.notes)


def test_26_quantised_around_the_norm() -> None:
    """Trap 26: QuantizeLinear and DequantizeLinear pairs stay outside, and the norm between them is one node."""
    text = edit(
        NORM,
        "(float[N,4] x)",
        "(float[N,4] x0)",
        "=> (float[N,4] y)",
        "=> (float[N,4] z)",
        "two =",
        "s = {0.1}, int8 p = {0}, float two =",
    )
    text = edit(text, "sq =", "q0 = QuantizeLinear (x0, s, p)\n x = DequantizeLinear (q0, s, p)\n sq =")
    text = edit(
        text, "y = Mul (n, w)", "y = Mul (n, w)\n q1 = QuantizeLinear (y, s, p)\n z = DequantizeLinear (q1, s, p)"
    )
    fused, report = fuse(proto(text))
    assert report.rewritten == 1
    kinds = [node.op_type for node in fused.graph.node]
    assert kinds == ["QuantizeLinear", "DequantizeLinear", "RMSNorm", "QuantizeLinear", "DequantizeLinear"]


def test_27_residual_sum_is_kept() -> None:
    """Trap 27: a residual sum that is a graph output is kept, and is the norm's x."""
    text = edit(
        NORM, "(float[N,4] x)", "(float[N,4] a, float[N,4] b)", "(float[N,4] y)", "(float[N,4] y, float[N,4] x)"
    )
    text = edit(text, "sq =", "x = Add (a, b)\n sq =")
    assert one(text).x.name == "x"
    fused, _ = fuse(proto(text))
    feeds = {k: np.random.default_rng(i).normal(size=(3, 4)).astype(np.float32) for i, k in enumerate("ab")}
    np.testing.assert_array_equal(run(fused, feeds)["x"], feeds["a"] + feeds["b"])
    assert [o.name for o in fused.graph.output] == ["y", "x"]
