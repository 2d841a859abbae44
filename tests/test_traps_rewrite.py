"""The traps of odd files and of rewriting: what must be kept, what must not be written, and what x may be."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from fused import run
from kit import NORM, edit, parse, parse_half, proto
from onnx import helper
from sites import feed, find, one, refused

from rmsnorm_onnx import find_rms_norms, fuse
from rmsnorm_onnx.errors import ModelError
from rmsnorm_onnx.site import DeclineCode

BODY = NORM.split("{\n")[-1].removesuffix("}")
CONSTANTS = """
 two = Constant <value = float {2.0}> ()
 last = Constant <value = int64[1] {-1}> ()
 eps = Constant <value = float {1e-6}> ()
"""
W = "float[4] w = {1.0, 0.5, 2.0, -1.0}"


CALL = f"m (float[3,4] x) => (float[3,4] y) <{W}> {{ y = local.block (x, w) }}"
FUNCTION = f'<opset_import: ["": 18], domain: "local">\nblock (x, w) => (y) {{ {CONSTANTS} {BODY} }}'


def test_29_odd_files() -> None:
    """Trap 29: empty and duplicate node names, an unused opset import, IR 3: no crash, and the result is valid."""
    model = proto(
        edit(NORM, "ReduceMean (sq, last)", "ReduceMean <axes = [-1]> (sq)", ", int64[1] last = {-1}", ""), opset=13
    )
    for i, node in enumerate(model.graph.node):
        node.name = "" if i % 2 else "same"
    model.opset_import.append(helper.make_opsetid("com.example.unused", 1))
    model.ir_version = 3
    model.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer if t.name == "w"
    )
    fused, report = fuse(model)
    assert report.rewritten == 1
    onnx.checker.check_model(fused, full_check=True)


def test_30_initializers_that_can_be_overridden() -> None:
    """Trap 30: an epsilon that a caller may override is declined; such a gain stays an input."""
    refused(edit(NORM, "(float[N,4] x)", "(float[N,4] x, float eps)"), DeclineCode.EPSILON)
    text = edit(NORM, "(float[N,4] x)", "(float[N,4] x, float[4] w)")
    assert one(text).spec.has_gain
    fused, report = fuse(proto(text))
    assert report.rewritten == 1
    x, w = np.ones((2, 4), np.float32), np.array([5, 6, 7, 8], np.float32)
    np.testing.assert_allclose(run(fused, {"x": x, "w": w})["y"], np.tile(w, (2, 1)), rtol=1e-5)


def test_31_no_contrib_operator_in_a_function() -> None:
    """Trap 31: SimplifiedLayerNormalization is never written into a function, on which onnxruntime crashes."""
    for options in ({"form": "contrib"}, {"consumer": "onnxruntime"}):
        fused, _ = fuse(proto(CALL, functions=FUNCTION), **options)
        assert not any(n.op_type == "SimplifiedLayerNormalization" for f in fused.functions for n in f.node)


def test_32_subnormal_epsilon() -> None:
    """Trap 32: 1e-5 in float16 is subnormal; its stored value is kept exactly."""
    match = one(parse_half(NORM.replace("1e-6", "1e-5")))
    assert match.spec.epsilon == float(np.float16(1e-5)) != 1e-5


def test_33_every_node_has_its_own_body() -> None:
    """Trap 33: specs that differ get functions whose names differ, whatever domain or overload a parser looks at."""
    text = """
m (float[N,4] x) => (float[N,4] y)
<float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}, float[4] w = {1.0, 0.5, 2.0, -1.0}, float one = {1.0}>
{
 s1 = Pow (x, two) m1 = ReduceMean (s1, last) e1 = Add (m1, eps) r1 = Sqrt (e1) n1 = Div (x, r1) y1 = Mul (n1, w)
 s2 = Pow (y1, two) m2 = ReduceMean (s2, last) q2 = Sqrt (m2) r2 = Add (q2, eps) y2 = Div (y1, r2)
 w3 = Add (w, one) s3 = Pow (y2, two) m3 = ReduceMean (s3, last) e3 = Add (m3, eps) r3 = Sqrt (e3) n3 = Div (y2, r3)
 y = Mul (n3, w3)
}"""
    foreign = '<opset_import: ["": 18], domain: "local">\nRMSNorm (x) => (y) { y = Sigmoid (x) }'
    model = proto(
        edit(text, " s1 = Pow (x,", " x1 = local.RMSNorm (x) s1 = Pow (x1,", "Div (x,", "Div (x1,"), functions=foreign
    )
    fused, report = fuse(model)
    onnx.checker.check_model(fused, full_check=True)
    assert report.rewritten == 3
    names = [f.name for f in fused.functions]
    assert len(names) == len(set(names)) == 4 and not any(f.overload for f in fused.functions)
    arity = {f.name: len(f.input) for f in fused.functions}
    assert all(len(node.input) == arity[node.op_type] for node in fused.graph.node if node.op_type in arity)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_allclose(run(fused, {"x": x})["y"], run(model, {"x": x}, optimise=False)["y"], rtol=1e-5)


def test_34_attribute_and_body_disagree() -> None:
    """Trap 34: a node whose axis denies its function's body is declined, and named."""
    fused, _ = fuse(proto(NORM))
    (node,) = [n for n in fused.graph.node if n.op_type == "RMSNorm"]
    next(a for a in node.attribute if a.name == "axis").i = -2
    sites = find_rms_norms(ir.from_proto(fused))
    codes = [getattr(s, "code", None) for s in sites]
    assert codes == [DeclineCode.MISMATCH] and "axis" in sites[0].reason


def test_35_converted_to_float16_afterwards() -> None:
    """Trap 35: a rewritten file that another tool then converts to float16 is right, or fails loudly."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    fused, _ = fuse(proto(edit(NORM, "float[N,4]", "float[3,4]")))
    x = np.full((3, 4), 3e4, np.float16)
    try:
        got = run(convert_float_to_float16(fused, keep_io_types=False), {"x": x})["y"]
    except Exception as error:
        assert str(error)  # it does not load: loud enough
    else:
        np.testing.assert_allclose(got.astype(np.float64), np.tile([1, 0.5, 2, -1], (3, 1)), rtol=2e-3)


def test_36_activation_as_the_multiplier() -> None:
    """Trap 36: an activation of shape [B,1,d] or [B,S,d] that multiplies is left outside."""
    for shape in ("N,1,4", "N,S,4"):
        text = edit(NORM, "(float[N,4] x)", f"(float[N,S,4] x, float[{shape}] a)", "(float[N,4] y)", "(float[N,S,4] y)")
        match = one(edit(text, "y = Mul (n, w)", "g = Sigmoid (a)\n y = Mul (n, g)"))
        assert not match.spec.has_gain and match.output.name == "n"


def test_37_epsilon_deleted_by_an_exporter() -> None:
    """Trap 37: without an Add the norm is found with epsilon 0, and a note says what a zero row gives."""
    match = one(edit(NORM, "Add (ms, eps)", "Identity (ms)"))
    assert match.spec.epsilon == 0 and any("NaN" in note for note in match.notes)


def test_38_statistic_over_the_sequence() -> None:
    """Trap 38: a statistic over the sequence is found as what it is, with its axis."""
    text = edit(NORM, "float[N,4]", "float[N,6,4]", "last = {-1}", "last = {1}", "float[4] w", "float[6,1] w")
    text = edit(text, "{1.0, 0.5, 2.0, -1.0}", "{1.0, 0.5, 2.0, -1.0, 1.0, 3.0}")
    assert one(text).spec.axes == (-2,)


def test_39_x_is_a_product_or_a_norm() -> None:
    """Trap 39: a norm of y * silu(z), and a norm of a norm, are found, with x as it is."""
    gated = edit(
        NORM,
        "(float[N,4] x)",
        "(float[N,4] a, float[N,4] z)",
        "sq =",
        "s = Sigmoid (z)\n t = Mul (z, s)\n x = Mul (a, t)\n sq =",
    )
    assert one(gated).x.name == "x"
    second = BODY
    for name in ("sq", "ms", "me", "rms", "n", "y"):
        second = (
            second.replace(f" {name} =", f" {name}2 =")
            .replace(f"({name},", f"({name}2,")
            .replace(f"({name})", f"({name}2)")
        )
    second = second.replace(", rms)", ", rms2)").replace("(x,", "(y,")
    twice = edit(NORM.replace("\n}", second + "}"), "=> (float[N,4] y)", "=> (float[N,4] y2)")
    matches, declined = find(parse(twice))
    assert [(m.x.name, m.output.name) for m in matches] == [("x", "y"), ("y", "y2")] and not declined


@pytest.mark.parametrize("operator", ["Abs", "Neg", "Sqrt", "Identity", "Reciprocal", "Exp"])
def test_39_x_is_whatever_it_is(operator: str) -> None:
    """Trap 39: x may come from any operator, and is not taken apart."""
    text = edit(NORM, "(float[N,4] x)", "(float[N,4] a)", "sq =", f"x = {operator} (a)\n sq =")
    match = one(text)
    assert match.output.name == "y" and match.x.name in ("x", "a" if operator == "Identity" else "x")


@pytest.mark.parametrize(
    "changes",
    [
        ("n = Div (x, rms)", "i = Cast <to = 6> (x)\n f = Cast <to = 1> (i)\n n = Div (f, rms)"),
        ("me =", "i = Cast <to = 6> (ms)\n f = Cast <to = 1> (i)\n me =", "Add (ms", "Add (f"),
        ("n = Div (x, rms)", "i = Cast <to = 7> (rms)\n f = Cast <to = 1> (i)\n n = Div (x, f)"),
    ],
    ids=["numerator", "mean square", "root"],
)
def test_40_through_an_integer(changes: tuple[str, ...]) -> None:
    """Trap 40: a numerator or statistic that passes through an integer is no norm."""
    matches, declined = find(parse(edit(NORM, *changes)))
    assert not matches
    assert {d.code for d in declined} <= {DeclineCode.TYPE, DeclineCode.NUMERATOR} and declined


def test_41_the_papers_own_code() -> None:
    """Trap 41: norm * d^-0.5 + epsilon, then a division: epsilon outside the root, exactly."""
    text = edit(
        NORM,
        "sq = Pow (x, two)\n ms = ReduceMean (sq, last)\n me = Add (ms, eps)\n rms = Sqrt (me)",
        "ms = ReduceL2 (x, last)\n me = Mul (ms, two)\n rms = Add (me, eps)",
        "two = {2.0}",
        "two = {0.5}",
        "1e-6",
        "1e-8",
    )
    match = one(text)
    assert match.spec.epsilon_placement == "outside" and match.spec.epsilon == float(np.float32(1e-8))


def test_42_one_statistic_two_gains() -> None:
    """Trap 42: one normalised value under two gains, and read bare: all of it stays right after a rewrite."""
    text = edit(
        NORM,
        "=> (float[N,4] y)",
        "=> (float[N,4] y, float[N,4] v, float[N,4] n)",
        "two =",
        "two2 = {3.0}, float[4] u = {4.0, 3.0, 2.0, 1.0}, float two =",
    )
    text = edit(text, "y = Mul (n, w)", "y = Mul (n, w)\n v = Mul (u, n)")
    matches, declined = find(parse(text))
    assert {m.output.name for m in matches} >= {"y", "v"} and not declined
    model = proto(text)
    fused, _ = fuse(model)
    onnx.checker.check_model(fused, full_check=True)
    feeds = feed(ir.from_proto(model))
    want, got = run(model, feeds, optimise=False), run(fused, feeds)
    for name in ("y", "v", "n"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)


def test_43_files_that_are_no_models(tmp_path: object) -> None:
    """Trap 43: a truncated file, and one of random bytes, give one clear line; a graph with a cycle does too."""
    from pathlib import Path

    folder = Path(str(tmp_path))
    data = proto(NORM).SerializeToString()
    cyclic = proto(NORM)
    cyclic.graph.node[0].input[0] = "y"
    for name, content in (
        ("cut", data[: len(data) // 2]),
        ("noise", bytes(range(7, 250))),
        ("cycle", cyclic.SerializeToString()),
    ):
        path = folder / f"{name}.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError) as caught:
            fuse(path)
        assert "\n" not in str(caught.value) and caught.value.exit_code == 3
