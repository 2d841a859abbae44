"""One run settles: whatever a consumer gets, a second run finds the norms again and changes nothing."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from kit import edit, model_bytes, parse

import rmsnorm_onnx


def test_a_function_whose_callers_disagree_is_settled_in_one_run() -> None:
    """Once one caller has been rewritten, those that are left agree: the first run gives what a second one would."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "l" : 1]>\n'
        "m (float[3,4] x, float[2,3,4] x2, float[4] w) => (float[3,4] y, float[2,3,4] z) {\n"
        "y = l.n (x, w) z = l.n (x2, w) }"
        """<domain: "l", opset_import: ["" : 18]> n (x, w) => (y) {
        ax = Constant <value_ints = [1]> () ep = Constant <value_float = 0.001> () s = Mul (x, x)
        m = ReduceMean (s, ax) p = Add (m, ep) q = Sqrt (p) r = Reciprocal (q) d = Mul (x, r) y = Mul (d, w) }"""
    )
    fused, report = rmsnorm_onnx.fuse(proto)
    assert (report.rewritten, report.declined) == (2, 0)
    again, report = rmsnorm_onnx.fuse(fused)
    assert report.rewritten == 0 and again == fused


HALF_ONCE = """
m (TYPE[2,3,4] x) => (TYPE[2,3,4] y)
<float eps = {1e-5}, int64[1] last = {-1}, float[4] w = {1.0, 0.5, 2.0, -1.0}>
{
 wide = Cast <to = 1> (x)
 sq = Mul (wide, wide)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 n = Div (wide, rms)
 g = Mul (n, w)
 y = Cast <to = NUMBER> (g)
}"""


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize(("kind", "number"), [("float16", "10"), ("bfloat16", "16")])
@pytest.mark.parametrize(
    "consumer",
    ["any", "onnxruntime", "onnxruntime-cuda", "tensorrt:10.15", "tensorrt-plugin", "openvino", "onnx-reference"],
)
def test_a_half_norm_settles_in_one_run(consumer: str, kind: str, number: str, opset: int) -> None:
    """Whatever form with whatever Casts a consumer gets, a second run changes nothing."""
    model = parse(HALF_ONCE.replace("TYPE", kind).replace("NUMBER", number), opset=opset)
    fused, first = rmsnorm_onnx.fuse(model, consumer=consumer)
    again, second = rmsnorm_onnx.fuse(fused, consumer=consumer)
    plain = consumer == "openvino" and opset < 23  # it gets plain operators there, which the model has
    assert (first.rewritten, second.rewritten) == (0 if plain else 1, 0)
    assert (first.found, second.found) == (1, 1)
    assert model_bytes(again) == model_bytes(fused)


@pytest.mark.parametrize("consumer", ["any", "onnxruntime", "tensorrt:10.15"])
def test_11_a_native_node_of_mixed_types_is_mended(consumer: str) -> None:
    """torch's exporter writes a float16 X with a float32 scale, which no runtime takes: it never stays as it is."""
    model = parse(
        "m (float16[N,4] x, float[4] w) => (float16[N,4] y) { z = RMSNormalization (x, w) y = Cast <to = 10> (z) }",
        opset=23,
        check=False,
    )
    fused, report = rmsnorm_onnx.fuse(model, consumer=consumer)
    assert report.rewritten == 1
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    again, report = rmsnorm_onnx.fuse(fused, consumer=consumer)
    assert report.rewritten == 0 and model_bytes(again) == model_bytes(fused)


TWO_HALF = """
m (float16[3,4] x) => (float16[3,4] y)
<float eps = {1e-5}, int64[1] last = {-1}>
{
 wide = Cast <to = 1> (x)
 sq = Mul (wide, wide)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 n = Div (wide, rms)
 h = Cast <to = 10> (n)
 wide2 = Cast <to = 1> (h)
 sq2 = Mul (wide2, wide2)
 ms2 = ReduceMean (sq2, last)
 me2 = Add (ms2, eps)
 rms2 = Sqrt (me2)
 n2 = Div (wide2, rms2)
 y = Cast <to = 10> (n2)
}"""


@pytest.mark.parametrize("consumer", ["any", "onnxruntime", "tensorrt"])
def test_two_half_norms_in_a_row(consumer: str) -> None:
    """The first ends in a Cast that its rewrite removes, and the second reads it: both are rewritten."""
    _, report = rmsnorm_onnx.fuse(parse(TWO_HALF), consumer=consumer)
    assert [site.action for site in report.sites] == ["rewritten", "rewritten"]


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize(
    "changes",
    [
        ("g = Mul (n, w)", "g = Add (n, w)"),  # a bias in float32 before the one rounding
        (" y = Cast <to = 10> (g)", " y = Identity (g)", "=> (float16[2,3,4] y)", "=> (float[2,3,4] y)"),
    ],
)
def test_a_native_node_that_the_consumer_takes_stays(changes: tuple[str, ...], opset: int) -> None:
    """Where the Casts around a native node are read by something else, the node alone looks like another norm."""
    text = edit(HALF_ONCE.replace("TYPE", "float16").replace("NUMBER", "10"), *changes)
    fused, first = rmsnorm_onnx.fuse(parse(text, opset=opset), consumer="onnxruntime")
    again, second = rmsnorm_onnx.fuse(fused, consumer="onnxruntime")
    assert (first.rewritten, second.rewritten) == (1, 0) and model_bytes(again) == model_bytes(fused)
