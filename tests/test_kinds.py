"""The kinds of fault that users report of other tools, each held on models of its own kind.

What is asserted is what a user sees: how many norms there are after the rewrite, which operators are gone, the
epsilon, and the distance from float64 in ulp.
"""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from fused import run
from kit import NORM, Graph, edit, proto
from sites import feed

from rmsnorm_onnx import RMSNormSpec, find_rms_norms, fuse
from rmsnorm_onnx.oracle import reference, ulp_distance
from rmsnorm_onnx.site import Declined, Match

GAIN = np.array([1, 0.5, 2, -1], np.float32)
DIV = "n = Div (x, rms)"
RECIPROCAL = "i = Reciprocal (rms)\n n = Mul (x, i)"
SPELLS = pytest.mark.parametrize("spell", [DIV, RECIPROCAL], ids=["div", "reciprocal"])


def small(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Inputs whose mean square is near epsilon, so that a wrong one shows."""
    return (0.003 * np.random.default_rng(1).normal(size=shape)).astype(dtype)


def rewritten(
    model: onnx.ModelProto, norms: int = 1, gone: tuple[str, ...] = ("Pow", "ReduceMean", "Sqrt"), **kw: str
) -> onnx.ModelProto:
    """The rewritten model: valid, with so many norms rewritten and none of these operators left in its graph."""
    fused, report = fuse(model, **kw)
    onnx.checker.check_model(fused, full_check=True)
    assert report.rewritten == norms, [(s.name, s.why) for s in report.sites]
    left = collections.Counter(node.op_type for node in fused.graph.node)
    assert not [op for op in gone if left[op]]
    return fused


def worst(got: np.ndarray, x: np.ndarray, gain: np.ndarray | None = GAIN, **spec: object) -> float:
    """The largest distance from the float64 norm, in ulp of the result."""
    want = reference(RMSNormSpec(has_gain=gain is not None, **spec), x, gain)  # type: ignore[arg-type]
    return float(np.max(ulp_distance(got, want)))


def test_textbook_chain_of_an_old_opset() -> None:
    """Kind "fusion missed": the textbook chain of opset 13, its axes an attribute, becomes one norm."""
    text = edit(NORM, "ReduceMean (sq, last)", "ReduceMean <axes = [-1]> (sq)", "int64[1] last = {-1}, ", "")
    fused = rewritten(proto(text, opset=13), gone=("Pow", "ReduceMean", "Sqrt", "Div"))
    x = small((5, 4))
    assert worst(run(fused, {"x": x})["y"], x, epsilon=1e-6) <= 4


TEN = {
    "mul": ("Pow (x, two)", "Mul (x, x)"),
    "reciprocal": (DIV, RECIPROCAL),
    "one over": (DIV, "i = Div (unit, rms)\n n = Mul (x, i)", "two = {2.0}", "two = {2.0}, float unit = {1.0}"),
    "pow": (
        "rms = Sqrt (me)\n " + DIV,
        "i = Pow (me, h)\n n = Mul (x, i)",
        "two = {2.0}",
        "two = {2.0}, float h = {-0.5}",
    ),
    "positive axis": ("{-1}", "{1}"),
    "swapped": ("Add (ms, eps)", "Add (eps, ms)", "Mul (n, w)", "Mul (w, n)"),
    "epsilon of one element": ("float eps", "float[1] eps"),
    "integer exponent": ("float two = {2.0}", "int64 two = {2}"),
    "constant nodes": ("float two = {2.0}, ", "", "sq =", "two = Constant <value = float {2.0}> ()\n sq ="),
    "root of reciprocal": ("rms = Sqrt (me)\n " + DIV, "q = Reciprocal (me)\n i = Sqrt (q)\n n = Mul (x, i)"),
}


@pytest.mark.parametrize("name", TEN)
def test_spellings_of_one_formula(name: str) -> None:
    """Kind "fusion missed": the same formula in ten spellings is one norm with one epsilon."""
    model = proto(edit(NORM, *TEN[name]))
    (site,) = find_rms_norms(ir.from_proto(model))
    assert isinstance(site, Match) and site.spec.epsilon == float(np.float32(1e-6))
    x = small((5, 4))
    assert worst(run(rewritten(model), {"x": x})["y"], x, epsilon=1e-6) <= 4


def half_norm(
    *, gain_type: str, gain_last: bool, offset: bool = False, d: int = 64
) -> tuple[onnx.ModelProto, np.ndarray]:
    """A float16 norm with float32 statistics; the gain before or after the last rounding. And its gain."""
    g = Graph(18)
    x = g.input("x", "float16", ("B", d))
    gain = np.random.default_rng(0).normal(0 if offset else 1, 0.2, d)
    gain = (2.0**-12 * np.arange(1, d + 1) / 7 if offset else gain).astype(gain_type)
    h = g.cast(x, "float32")
    mean = g.op("ReduceMean", g.op("Pow", h, g.constant(2.0, "float32")), g.ints(-1), shape=("B", 1))
    n = g.op("Mul", h, g.op("Reciprocal", g.op("Sqrt", g.op("Add", mean, g.constant(1e-6, "float32")))))
    w = g.constant(gain, gain_type)
    if gain_last:
        y = g.op("Mul", w, g.cast(n, "float16"))
    else:
        w = g.cast(w, "float32") if gain_type != "float32" else w
        w = g.op("Add", w, g.constant(1.0, "float32")) if offset else w
        y = g.cast(g.op("Mul", n, w), "float16")
    return g.model([y]), gain


def test_rounded_before_the_gain() -> None:
    """Kind "casts": Llama's order is one norm without a Cast around it, within 2 ulp of float64, up to 60000."""
    model, gain = half_norm(gain_type="float16", gain_last=True)
    fused = rewritten(model, gone=("Cast", "Pow"))
    x = (200 * np.random.default_rng(1).normal(size=(4, 64))).astype(np.float16)
    x[0] = np.clip(60.0 * x[0], -60000, 60000)
    (got,) = run(fused, {"x": x}).values()
    assert worst(got, x, gain, epsilon=1e-6) <= 2
    (before,) = run(model, {"x": x}).values()
    assert np.max(ulp_distance(got, before.astype(np.float64))) <= 1


@pytest.mark.parametrize("gain_type", ["float16", "float32"])
def test_gain_applied_in_float32(gain_type: str) -> None:
    """Kind "casts": Gemma's and gpt-oss's order still rounds once after the rewrite: within 1 ulp of float64."""
    model, gain = half_norm(gain_type=gain_type, gain_last=False)
    x = (200 * np.random.default_rng(1).normal(size=(4, 64))).astype(np.float16)
    for form in ("function", "onnx") if gain_type == "float16" else ("function",):
        fused, report = fuse(model, form=form)
        onnx.checker.check_model(fused, full_check=True)
        if report.rewritten:
            (got,) = run(fused, {"x": x}).values()
            assert worst(got, x, gain, epsilon=1e-6) <= 1
        else:
            assert form == "onnx" and "opset" in report.sites[0].why


def test_one_plus_weight() -> None:
    """Kind "one plus weight": 1 + w keeps weights of 2^-12, which would vanish in float16, within 1 ulp."""
    model, gain = half_norm(gain_type="float16", gain_last=False, offset=True)
    fused = rewritten(model, gone=("Add", "Pow"))
    x = (5 * np.random.default_rng(1).normal(size=(8, 64))).astype(np.float16)
    (got,) = run(fused, {"x": x}).values()
    assert worst(got, x, gain, epsilon=1e-6, gain_offset=1.0) <= 1


@SPELLS
@pytest.mark.parametrize(("x", "w", "y"), [("3,1", "4", "3,4"), ("3,4", "2,3,4", "2,3,4")])
def test_multiplier_that_widens(x: str, w: str, y: str, spell: str) -> None:
    """Kind "wrong fusion": a Mul that widens the tensor stays outside, and shape and values are kept."""
    text = edit(NORM, "float[N,4] x", f"float[{x}] x", "float[N,4] y", f"float[{y}] y", DIV, spell)
    text = edit(text, "float[4] w = {1.0, 0.5, 2.0, -1.0}", f"float[{w}] w")
    numbers = np.linspace(-1, 2, np.prod([int(n) for n in w.split(",")])).reshape([int(n) for n in w.split(",")])
    model = proto(edit(text, f", float[{w}] w", ""), w=numbers.astype(np.float32))
    feeds = {"x": small(tuple(int(n) for n in x.split(",")))}
    got, want = (
        run(rewritten(model), feeds)["y"],
        reference(RMSNormSpec(epsilon=1e-6, has_gain=False), feeds["x"]) * numbers,
    )
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6)


@SPELLS
def test_statistic_along_another_axis(spell: str) -> None:
    """Kind "wrong fusion": keepdims=0 on a square batch is left, and the numbers are the original's."""
    text = edit(NORM, "float[N,4]", "float[4,4]", "ReduceMean (", "ReduceMean <keepdims = 0> (", DIV, spell)
    model = proto(text)
    fused, report = fuse(model)
    assert report.found == 0 and report.declined == 1
    x = small((4, 4)) * 100
    want = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1) + 1e-6) * GAIN
    np.testing.assert_allclose(run(fused, {"x": x}, optimise=False)["y"], want, rtol=1e-6)


LOOKALIKES = {
    "cubed": ("two = {2.0}", "two = {3.0}", "me =", "a = Abs (ms)\n me =", "Add (ms", "Add (a"),
    "two square roots": ("me =", "s = Sqrt (ms)\n me =", "Add (ms", "Add (s"),
    "epsilon vector": ("float eps = {1e-6}", "float[4] eps = {0.1, 0.2, 0.3, 0.4}"),
    "epsilon fed": ("(float[N,4] x)", "(float[N,4] x, float[1] e)", "Add (ms, eps)", "Add (ms, e)"),
    "mean of another": ("(float[N,4] x)", "(float[N,4] x, float[N,4] z)", "Pow (x", "Pow (z"),
}


@SPELLS
@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes(name: str, spell: str) -> None:
    """Kind "wrong fusion": chains that look like a norm are declined, and the graph stays as it was."""
    model = proto(edit(NORM, *LOOKALIKES[name], DIV, spell))
    fused, report = fuse(model)
    assert report.found == 0 and report.declined == 1
    assert [n.op_type for n in fused.graph.node] == [n.op_type for n in model.graph.node]


@SPELLS
def test_variants_that_say_what_they_are(spell: str) -> None:
    """Kind "wrong fusion": epsilon outside, two axes, a middle axis and a centred x are found as just that."""
    outside = edit(NORM, "me = Add (ms, eps)\n rms = Sqrt (me)", "me = Sqrt (ms)\n rms = Add (me, eps)", DIV, spell)
    middle = edit(NORM, DIV, spell, "float[N,4]", "float[N,3,4]", "last = {-1}", "last = {1}")
    two = edit(NORM, DIV, spell, "float[N,4]", "float[N,3,4]", "int64[1] last = {-1}", "int64[2] last = {-2, -1}")
    specs = []
    for text in (outside, middle, two):
        model = proto(text)
        (site,) = find_rms_norms(ir.from_proto(model))
        assert isinstance(site, Match)
        specs.append((site.spec.axes, site.spec.epsilon_placement))
        feeds = feed(ir.from_proto(model))
        # a middle axis takes no gain along the last one: there the Mul by powers of two follows, which is exact
        inside = site.spec.has_gain
        want = reference(site.spec, feeds["x"], GAIN if inside else None) * (1 if inside else GAIN)
        for got in (run(rewritten(model), feeds)["y"], run(model, feeds, optimise=False)["y"]):
            assert np.max(ulp_distance(got, want)) <= 4
    assert specs == [((-1,), "outside"), ((-2,), "inside"), ((-2, -1), "inside")]


def test_exponent_shared_through_a_cast() -> None:
    """Kind "crash in fusion": two float16 norms that share an exponent behind a Cast are rewritten, and it goes."""
    g = Graph(14)
    x = g.input("x", "float16", ("B", 8))
    two = g.cast(g.constant(2.0, "float16"), "float32")
    gains = [np.random.default_rng(i).normal(1, 0.1, 8).astype(np.float16) for i in range(2)]
    y = x
    for gain in gains:
        h = g.cast(y, "float32")
        mean = g.op("ReduceMean", g.op("Pow", h, two), shape=("B", 1), axes=[-1])
        n = g.op("Div", h, g.op("Sqrt", g.op("Add", mean, g.constant(1e-6, "float32"))))
        y = g.op("Mul", g.cast(n, "float16"), g.constant(gain, "float16"))
    fused = rewritten(g.model([y]), norms=2, gone=("Cast", "Pow"))
    data = np.random.default_rng(9).normal(size=(3, 8)).astype(np.float16)
    (got,) = run(fused, {"x": data}).values()
    first = reference(RMSNormSpec(epsilon=1e-6), data, gains[0]).astype(np.float16)
    assert worst(got, first, gains[1], epsilon=1e-6) <= 3


def test_epsilon_too_small_for_float16() -> None:
    """Kind "epsilon": 1e-8 stored as float16 is 0, and that is said with the node's name."""
    g = Graph(18)
    x = g.input("x", "float16", ("B", 4))
    mean = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1), shape=("B", 1))
    y = g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.constant(1e-8, "float16"))))
    _, report = fuse(g.model([y]))
    (site,) = report.sites
    assert site.spec is not None and site.spec.epsilon == 0 and site.name == f"n_{y.name}"
    assert any("zero" in note for note in site.notes)


@pytest.mark.parametrize("opset", [18, 20, 22])
def test_no_operator_that_the_opset_lacks(opset: int) -> None:
    """Kind "opset": below 23 a file never holds RMSNormalization, by whatever consumer or form, and stays valid."""
    model = proto(edit(NORM, DIV, RECIPROCAL), opset=opset)
    x = small((3, 4))
    for consumer in ("any", "onnxruntime", "tensorrt"):
        fused, _ = fuse(model, consumer=consumer)
        nodes = [*fused.graph.node, *(n for f in fused.functions for n in f.node)]
        assert not any(n.op_type == "RMSNormalization" for n in nodes)
        if not any(n.op_type == "SimplifiedLayerNormalization" for n in nodes):
            onnx.checker.check_model(fused, full_check=True)
        assert worst(run(fused, {"x": x})["y"], x, epsilon=1e-6) <= 4
    _, report = fuse(model, form="onnx")
    assert report.rewritten == 0 and "23" in report.sites[0].why


@pytest.mark.parametrize("form", ["primitive", "function"])
def test_native_operator_goes_back(form: str) -> None:
    """Kind "downgrade": RMSNormalization becomes plain operators, with its default epsilon and a float32 statistic."""
    g = Graph(23)
    x = g.input("x", "float16", ("B", 4))
    y = g.op("RMSNormalization", x, g.constant(GAIN, "float16"))
    fused = rewritten(g.model([y]), gone=("RMSNormalization",), form=form)
    data = (5000 * np.random.default_rng(1).normal(size=(3, 4))).astype(np.float16)
    (got,) = run(fused, {"x": data}).values()
    assert worst(got, data, GAIN.astype(np.float16), epsilon=float(np.float32(1e-5))) <= 2


@SPELLS
def test_functions_are_not_lost(spell: str) -> None:
    """Kind "local functions": a function that norms, called twice, is rewritten, and both calls are right."""
    body = edit(NORM.split("{\n")[-1].removesuffix("}"), DIV, spell)
    constants = """
 two = Constant <value = float {2.0}> ()
 last = Constant <value = int64[1] {-1}> ()
 eps = Constant <value = float {1e-6}> ()"""
    gain = "float[4] v = {1.0, 0.5, 2.0, -1.0}"
    text = f"m (float[3,4] x) => (float[3,4] z) <{gain}> {{ h = local.F (x, v) z = local.F (h, v) }}"
    functions = f'<opset_import: ["": 18], domain: "local">\nF (x, w) => (y) {{ {constants} {body} }}'
    model = proto(text, functions=functions)
    fused, report = fuse(model)
    onnx.checker.check_model(fused, full_check=True)
    assert report.rewritten in (1, 2) and report.declined == 0
    x = small((3, 4))
    first = reference(RMSNormSpec(epsilon=1e-6), x, GAIN)
    np.testing.assert_allclose(run(fused, {"x": x})["z"], reference(RMSNormSpec(epsilon=1e-6), first, GAIN), rtol=2e-6)


@SPELLS
@pytest.mark.parametrize("skip", ["1,4", "N,4"])
def test_residual_sum(skip: str, spell: str) -> None:
    """Kind "skip": the sum in front of a norm, read again as an output, is kept with its values."""
    text = edit(
        NORM,
        "(float[N,4] x)",
        f"(float[N,4] a, float[{skip}] b)",
        "=> (float[N,4] y)",
        "=> (float[N,4] y, float[N,4] x)",
    )
    model = proto(edit(text, "sq =", "x = Add (a, b)\n sq =", DIV, spell))
    a, b = small((3, 4)), small((3 if skip[0] == "N" else 1, 4))
    for consumer in ("any", "onnxruntime"):
        fused, report = fuse(model, consumer=consumer)
        assert report.rewritten == 1
        got = run(fused, {"a": a, "b": b})
        np.testing.assert_array_equal(got["x"], a + b)
        assert worst(got["y"], a + b, epsilon=1e-6) <= 4


@pytest.mark.parametrize("opset", [18, pytest.param(23, marks=pytest.mark.full)])
def test_exported_module(opset: int) -> None:
    """Kind "export": eps=None is float32's epsilon in float16 too; two axes are two; no weight is no gain."""
    import torch

    from rmsnorm_onnx import export

    for module, axes in ((torch.nn.RMSNorm((3, 8)), (-2, -1)), (torch.nn.RMSNorm(8, elementwise_affine=False), (-1,))):
        result = export(module.half(), (torch.randn(2, 3, 8).half(),), opset=opset)
        (site,) = [s for s in find_rms_norms(ir.from_proto(ir.to_proto(result.model))) if not isinstance(s, Declined)]
        assert site.spec.axes == axes and site.spec.epsilon == 2.0**-23
        assert site.spec.resolve("float16").statistic_type == "float32"


def test_plugin_node_has_every_field() -> None:
    """Kind "plugin": a plugin node names version and namespace, in a domain that the file imports."""
    fused, _ = fuse(proto(NORM), consumer="tensorrt-plugin")
    (node,) = [n for n in fused.graph.node if n.op_type == "RMSNorm"]
    held = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert held["plugin_version"] == b"1" and held["plugin_namespace"] == b"rmsnorm_onnx"
    assert held["epsilon"] == float(np.float32(1e-6))
    assert node.domain in {o.domain for o in fused.opset_import}
    assert next(a for a in node.attribute if a.name == "epsilon").type == onnx.AttributeProto.FLOAT


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.full)])
def test_whole_model(dtype: str) -> None:
    """Kind "whole model": every norm of a small Qwen3, per-head ones included, is one operator, and the file loads."""
    import torch
    import transformers

    from rmsnorm_onnx import export

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=31,
        use_cache=False,
    )
    model = transformers.Qwen3Model(config).eval().to(getattr(torch, dtype))

    class Encode(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids)[0]

    ids = torch.randint(0, 31, (2, 7))
    result = export(Encode(), (ids,), opset=18)
    assert result.report.rewritten == 5 and result.report.declined == 0
    written = ir.to_proto(result.model)
    onnx.checker.check_model(written, full_check=True)
    (got,) = run(written, {written.graph.input[0].name: ids.numpy()}).values()
    want = Encode()(ids).detach().float().numpy()
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=0, atol=2e-2 if dtype == "float16" else 1e-5)
