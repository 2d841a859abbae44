"""Parity: every site is cut out, run and measured, or says why not; and a wrong rewrite does not pass."""

from __future__ import annotations

import io
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from rich.console import Console
from spellings import draw

from rmsnorm_onnx import dtypes, fuse
from rmsnorm_onnx.errors import ModelError, UsageError
from rmsnorm_onnx.inputs import ROWS, RowKinds, concrete_shape, fewer_rows
from rmsnorm_onnx.parity import ParityReport, SiteParity, print_report, verify
from rmsnorm_onnx.spec import RMSNormSpec

ELEMENTS = {"float": 1, "float16": 10, "bfloat16": 16, "double": 11}


def norm(
    kind: str = "float", epsilon: str = "1e-6", x: str = "x", y: str = "y", gain: str = "g", statistic: str = "float"
) -> str:
    """The nodes of one norm whose statistic is computed in a type, and which is rounded before the gain."""
    wide = ELEMENTS[statistic]
    return f"""{y}_wide = Cast <to = {wide}> ({x})
        {y}_2 = Constant <value_float = 2.0> () {y}_two = Cast <to = {wide}> ({y}_2)
        {y}_square = Pow ({y}_wide, {y}_two)
        {y}_mean = ReduceMean <axes = [-1]> ({y}_square)
        {y}_e = Constant <value_float = {epsilon}> () {y}_epsilon = Cast <to = {wide}> ({y}_e)
        {y}_sum = Add ({y}_mean, {y}_epsilon)
        {y}_root = Sqrt ({y}_sum)
        {y}_z = Div ({y}_wide, {y}_root)
        {y}_round = Cast <to = {ELEMENTS[kind]}> ({y}_z)
        {y} = Mul ({y}_round, {gain})"""


def model(
    body: str, kind: str = "float", x: str = "b, s, 64", g: str = "64", extra: str = "", more: str = ""
) -> onnx.ModelProto:
    """A model of inputs x and g and output y at opset 17."""
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        g ({kind}[{x}] x, {kind}[{g}] g{extra}) => ({kind}[{x}] y) {{ {body} }} {more}"""
    )


def one(report: ParityReport) -> SiteParity:
    """The only site of a report."""
    assert len(report.sites) == 1, [s.name for s in report.sites]
    return report.sites[0]


@pytest.mark.parametrize("kind", ["float", "float16", "double"])
@pytest.mark.parametrize("consumer", ["any", "onnxruntime"])
def test_a_right_rewrite_is_within(kind: str, consumer: str) -> None:
    """Before and after, a rewritten norm is measured and lies within its bound."""
    before = model(norm(kind, statistic="double" if kind == "double" else "float"), kind)
    site = one(verify(fuse(before, consumer=consumer)[0], before))
    assert site.within and site.original_ratio is not None and site.original_ratio <= 1
    assert site.ulp is not None and 0 < site.ulp <= site.tolerance
    assert not site.unrun and site.dtype == {"float": "float32", "double": "float64"}.get(kind, kind)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1e-6", "1.1e-6"),
        ("1e-6", "1e-5"),
        ("1e-6", "0.0"),
        ("ReduceMean", "ReduceSum"),
        ("<axes = [-1]>", "<axes = [-2]>"),
        (
            "y_sum = Add (y_mean, y_epsilon) y_root = Sqrt (y_sum)",
            "y_sum = Sqrt (y_mean) y_root = Add (y_sum, y_epsilon)",
        ),
        ("Mul (y_round, g)", "Div (y_round, g)"),
    ],
)
def test_a_wrong_rewrite_is_beyond(old: str, new: str) -> None:
    """Another epsilon, even by a tenth, another placement, axis, coefficient or gain leaves the bound by far."""
    right = " ".join(norm().split())
    assert old in right
    wrong = right.replace(old, new)
    if "ReduceSum" in new:
        wrong = wrong.replace("ReduceSum <axes = [-1]> (y_square)", "ReduceSum (y_square, minus)").replace(
            "y_wide =", "minus = Constant <value_ints = [-1]> () y_wide =", 1
        )
    report = verify(model(wrong, x="3, 4, 64"), model(right, x="3, 4, 64"))
    site = one(report)
    assert not site.unrun and site.within is False and not report.ok
    assert site.ratio is not None and site.ratio > 10


def test_a_half_statistic_is_held_to_float32() -> None:
    """A graph that squares in float16 is a wide claim; the node that replaces it is held to a float32 statistic."""
    before = model(norm("float16", epsilon="1e-5", statistic="float16"), "float16")
    site = one(verify(fuse(before)[0], before))
    assert site.spec.statistic_type == site.spec.factor_type == "float32" and site.within
    assert site.notes == ("held to a float32 statistic; the original's is float16",)


def test_bfloat16_says_what_was_not_run() -> None:
    """The original has no Mul kernel in bfloat16, which is the reason given; the new node is measured."""
    before = model(norm("bfloat16"), "bfloat16")
    report = verify(fuse(before)[0], before)
    site = one(report)
    assert (
        site.original_ulp is None
        and "the original was not run: Could not find an implementation for Mul" in site.unrun[0]
    )
    assert site.within and report.ok and not report.unrun


def test_a_model_alone_is_measured_beside_its_rewrite() -> None:
    """Without an original, the model is the original, and what fuse makes of it stands beside it."""
    before = model(norm("float16"), "float16")
    alone, pair = one(verify(before)), one(verify(fuse(before)[0], before))
    assert alone == pair
    assert alone.original_ulp is not None and alone.ulp is not None


def test_a_plugin_node_is_listed_as_unrun() -> None:
    """onnxruntime cannot run a bare plugin node, which the report says rather than skips."""
    before = model(norm())
    after, _ = fuse(before, consumer="onnxruntime-tensorrt", form="plugin")
    for key in list(ir.from_proto(after).functions):
        assert key[0] != "trt.plugins"
    report = verify(after, before)
    assert [s.name for s in report.unrun] == [one(report).name] and one(report).unrun[0].startswith("not run: ")


BRANCH = f"""c = Constant <value = bool {{1}}> ()
    y = If (c) <
        then_branch = a () => (float[b, s, 64] y_then) {{ {norm(y="y_then")} }},
        else_branch = b () => (float[b, s, 64] y_else) {{ {norm(y="y_else", epsilon="1e-3")} }}>"""
LOOP = f"""n = Constant <value = int64 {{2}}> () go = Constant <value = bool {{1}}> ()
    y = Loop (n, go, x) <body = l (int64 i, bool c, float[b, s, 64] state) => (bool c2, float[b, s, 64] next) {{
        c2 = Identity (c) {norm(x="state", y="next")} }}>"""
FUNCTION = f"""y = local.Norm <e = 1e-3> (x, g) }}
    <domain: "local", opset_import: ["" : 17]> Norm <e> (a, w) => (r) {{
    {norm(x="a", y="r", gain="w").replace("<value_float = 1e-6>", "<value_float: float = @e>")}"""
ARGUMENT = f"""small = Constant <value_float = 1e-3> ()
    y = local.Norm (x, g, small) }}
    <domain: "local", opset_import: ["" : 17]> Norm (a, w, e) => (r) {{
    {norm(x="a", y="r", gain="w").replace("r_e = Constant <value_float = 1e-6> ()", "r_e = Identity (e)")}"""
OPERATORS = (
    norm().replace("Pow (", "local.Power (").replace("Sqrt (", "local.Root (")
    + """ }
    <domain: "local", opset_import: ["" : 17]> Power (a, b) => (r) { r = Pow (a, b) }
    <domain: "local", opset_import: ["" : 17, "local" : 1]> Root (a) => (r) { r = local.Inner (a) }
    <domain: "local", opset_import: ["" : 17]> Inner (a) => (r) { r = Sqrt (a)"""
)


@pytest.mark.parametrize(
    ("body", "epsilons", "scopes"),
    [
        (BRANCH, [1e-6, 1e-3], ["If/then_branch", "If/else_branch"]),
        (LOOP, [1e-6], ["Loop/body"]),
        (FUNCTION, [1e-3], [""]),
        (ARGUMENT, [1e-3], [""]),
        (OPERATORS, [1e-6], [""]),
    ],
    ids=["branches", "loop", "function with an attribute", "function with an argument", "functions for operators"],
)
def test_sites_in_branches_loops_and_functions(body: str, epsilons: list[float], scopes: list[str]) -> None:
    """A site in a body is cut out with what the body captures, and one in a function with what a call gives it."""
    before = model(body)
    report = verify(fuse(before)[0], before)
    assert [s.spec.epsilon for s in report.sites] == pytest.approx(epsilons, rel=1e-6)
    assert [s.scope for s in report.sites] == scopes or all("function" in s.scope for s in report.sites)
    for site in report.sites:
        assert not site.unrun and site.within and site.original_ratio is not None and site.original_ratio <= 1


def test_a_wrong_epsilon_in_a_branch_is_beyond() -> None:
    """The site of the other branch, with the same inner names, is not taken for it."""
    report = verify(model(BRANCH.replace("1e-3", "2e-3")), model(BRANCH))
    assert [s.within for s in report.sites] == [True, False]


def zero_gain_file(folder: Path) -> Path:
    """A model on disk whose external gain is all zeros."""
    proto = model(norm(), g="64").__class__()
    proto.CopyFrom(model(norm()))
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(64, np.float32), "g"))
    path = folder / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0)
    return path


def test_the_gain_is_the_models_own(tmp_path: Path) -> None:
    """An external gain of zeros gives exact zeros; a gain that is an input is drawn, and gives none."""
    path = zero_gain_file(tmp_path)
    assert one(verify(path)).ulp == 0.0 and one(verify(fuse(path)[0], path)).ulp == 0.0
    drawn = one(verify(model(norm()))).ulp
    assert drawn is not None and drawn > 0


def test_a_gain_that_cannot_be_read_is_a_reason(tmp_path: Path) -> None:
    """A data file that vanished after loading leaves the site unrun; a path to such a model is an error."""
    path = zero_gain_file(tmp_path)
    loaded = fuse(path)[0]
    (tmp_path / "weights").unlink()
    assert one(verify(loaded)).unrun[0].startswith("not run: ")
    with pytest.raises(ModelError):
        verify(path)


def test_epsilon_zero_leaves_out_the_zero_row() -> None:
    """Without an epsilon a graph gives NaN for a row of zeros: the row is left out, and the note says so."""
    before = model(norm(epsilon="0.0"))
    site = one(verify(fuse(before)[0], before))
    assert site.within and any("a row of zeros gives NaN" in note for note in site.notes)
    assert not any("zeros" in note for note in one(verify(model(norm()))).notes)


def test_channel_first_leading_and_stored_gains() -> None:
    """An inner axis, a statistic over the leading part and a gain that is the node's attribute are measured too."""
    inner = norm().replace("[-1]", "[1]")
    sites = [one(verify(fuse(m)[0], m)) for m in (model(inner, x="b, 12, 3, 3", g="12, 1, 1"),)]
    leading = (
        norm()
        .replace("Pow (y_wide, y_two)", "Pow (y_part, y_two)")
        .replace(
            "y_two =",
            "y_from = Constant <value_ints = [0]> () y_to = Constant <value_ints = [16]> () "
            "y_at = Constant <value_ints = [-1]> () y_part = Slice (y_wide, y_from, y_to, y_at) y_two =",
        )
    )
    sites.append(one(verify(fuse(model(leading))[0], model(leading))))
    stored = model(norm())
    del stored.graph.input[1]
    stored.graph.initializer.append(onnx.numpy_helper.from_array(np.linspace(-1, 1, 64, dtype=np.float32), "g"))
    sites.append(one(verify(fuse(stored, gain_attribute=True)[0])))
    assert [s.spec.axes for s in sites] == [(-3,), (-1,), (-1,)] and sites[1].spec.leading == 16
    assert all(s.within and not s.unrun for s in sites)


def test_a_skip_form_is_run_with_its_residual() -> None:
    """onnxruntime's form that adds a residual first is measured on a residual of zeros."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[2, 3, 64] x, float[2, 3, 64] r, float[64] g) => (float[2, 3, 64] y)
        { y = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-6> (x, r, g) }"""
    assert one(verify(onnx.parser.parse_model(text))).within


def test_a_site_that_the_model_lost_is_unrun() -> None:
    """A result that has no node of its name in the rewritten model is named."""
    before = model(norm(y="h") + " y = Identity (h)")
    after = model("k = Identity (x) y = Identity (k)")
    report = verify(after, before)
    assert report.unrun and one(report).unrun == ("not run: the model has no node that gives h",)


def test_a_site_that_no_longer_starts_at_x_is_unrun() -> None:
    """Where the way back from the result misses x, the reason names what it met."""
    after = model(norm(x="z") + " ", extra=", float[b, s, 64] z")
    assert "its result also depends on z" in one(verify(after, model(norm()))).unrun[0]


def test_fixed_batches_are_made_smaller_where_the_graph_allows_it() -> None:
    """A large fixed batch is not run whole, but a constant of its shape keeps it."""
    start = time.perf_counter()
    assert one(verify(model(norm(), x="512, 512, 64"))).within
    assert time.perf_counter() - start < 5
    full = model(norm().replace("Constant <value_float = 1e-6> ()", "Identity (e)"), x="8, 16, 64")
    full.graph.initializer.append(onnx.numpy_helper.from_array(np.full((8, 16, 1), 1e-6, np.float32), "e"))
    site = one(verify(full, max_rows=16))
    assert site.within and not site.unrun


def test_only_and_seed() -> None:
    """Sites are chosen by pattern; a seed gives the same numbers again, another one others."""
    two = model(norm(y="h") + norm(x="h"))
    assert [s.name for s in verify(two).sites] == ["h", "y"]
    assert [s.name for s in verify(two, only=["h*"]).sites] == ["h"]
    numbers = [one(verify(two, only=["y"], seed=seed)).ratio for seed in (0, 0, 1)]
    assert numbers[0] == numbers[1] != numbers[2]


def test_arguments_are_checked_and_left_alone() -> None:
    """A proto is read, not changed; max_rows must be positive, and a model a model."""
    before = model(norm())
    data = before.SerializeToString()
    verify(before, before)
    assert before.SerializeToString() == data
    with pytest.raises(UsageError, match="max_rows must be at least 1, got 0"):
        verify(before, max_rows=0)
    with pytest.raises(UsageError):
        verify(17)


def test_report_as_json_and_text() -> None:
    """The report has a version and stable keys, and its table says which site is beyond."""
    report = verify(model(norm(epsilon="1e-5")), model(norm()), seed=3)
    data = json.loads(json.dumps(report.to_json()))
    assert (data["version"], data["kind"], data["ok"], data["seed"], data["within"]) == (1, "parity", False, 3, 0)
    assert set(data["sites"][0]) == {
        *("name", "scope", "spec", "dtype", "tolerance", "original_ulp", "original_ratio", "ulp", "ratio"),
        *("lost", "unrun", "notes", "within"),
    }
    assert RMSNormSpec.from_json(data["sites"][0]["spec"]) == report.sites[0].spec
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=120))
    assert "beyond" in stream.getvalue() and "0 within, 1 beyond, 0 not run" in stream.getvalue()


def test_twenty_five_sites_take_seconds() -> None:
    """A model of 25 norms is measured before and after in a few seconds."""
    body = " ".join(norm(x=f"h{i}" if i else "x", y=f"h{i + 1}" if i < 24 else "y") for i in range(25))
    before = model(body, x="b, s, 512", g="512")
    after = fuse(before)[0]
    start = time.perf_counter()
    report = verify(after, before)
    assert time.perf_counter() - start < 8
    assert len(report.sites) == 25 and all(s.within for s in report.sites)


# Inputs


@pytest.mark.parametrize("x_type", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
def test_rows_are_what_they_say(x_type: str, placement: str) -> None:
    """Among the rows are zeros, one that nearly fills the type, one far below epsilon and one near it."""
    spec = RMSNormSpec(epsilon=1e-5, epsilon_placement=placement)  # type: ignore[arg-type]
    kinds = RowKinds(spec, x_type, (4, 64))
    rows = np.concatenate(kinds.batches(np.random.default_rng(0))).astype(np.float64)
    rms = dict(zip(ROWS, np.sqrt(np.mean(rows**2, -1)), strict=True))
    at = math.sqrt(1e-5) if placement == "inside" else 1e-5
    squares = np.sum(rows[ROWS.index("huge")] ** 2)
    assert rms["zero"] == 0 and 0 < rms["tiny"] < 0.1 * at < at / 2 < rms["near epsilon"] < 2 * at
    assert np.max(np.abs(rows)) > float(dtypes.finfo(x_type).max) / 8 or squares > 3.4e38 / 100
    assert x_type == "float64" or squares < 3.4e38
    assert np.ptp(rows[ROWS.index("constant")]) == 0 and np.max(rows[ROWS.index("one large element")]) == 100


def test_shapes_of_inputs() -> None:
    """Symbols get small numbers, one each; batches shrink to the limit, normalised axes never."""
    symbols: dict[str, int] = {}
    assert concrete_shape(("b", 7, "s", "b"), symbols) == (2, 7, 3, 2) and concrete_shape(("s",), symbols) == (3,)
    assert fewer_rows((512, 64, 99), (-2, -1), 64) == (64, 64, 99)
    assert fewer_rows((8, 99, 8, 8), (-3,), 64) == (1, 99, 8, 8)
    assert len(RowKinds(RMSNormSpec(), "float32", (1, 1, 8)).batches(np.random.default_rng(0))) == len(ROWS)


def assert_spellings_are_measured(seeds: range) -> None:
    """Random spellings are rewritten and measured: all that run are within, and nearly all of both sides run."""
    ran = original = 0
    for seed in seeds:
        spelling = draw(random.Random(seed))
        after, _ = fuse(spelling.model, allow_rounding_change=True)
        site = one(verify(after, spelling.model))
        assert site.within is not False, (seed, site)
        ran += site.within is not None
        halves = site.dtype == "bfloat16"
        original += halves or site.original_ratio is not None
    assert ran >= 0.95 * len(seeds) and original >= 0.98 * len(seeds)


def test_spellings_are_measured() -> None:
    """Twenty random spellings: rewritten, they are measured and within."""
    assert_spellings_are_measured(range(20))


@pytest.mark.full
def test_many_spellings_are_measured() -> None:
    """As above, of 300."""
    assert_spellings_are_measured(range(1000, 1300))


def test_a_lost_norm_is_not_ok() -> None:
    """A norm of the original that the model does not have under any node fails the report, and is said to be lost."""
    before = model(norm("float"), "float")
    header = '<ir_version: 8, opset_import: ["" : 18]>'
    other = onnx.parser.parse_model(header + "m (float[2] a) => (float[2] b) { b = Relu (a) }")
    report = verify(other, before)
    assert one(report).lost and not report.ok


@pytest.mark.parametrize("cast", ["Cast <to = 1> (h)", "CastLike (h, x)"])
def test_a_norm_whose_idle_cast_went(cast: str) -> None:
    """Where a Cast that changes nothing gives the output, the rewritten norm bears that name and is measured there."""
    before = model(norm(y="h") + f" y = {cast}")
    after = fuse(before)[0]
    assert [node.op_type for node in after.graph.node] == ["RMSNorm"]
    site = one(verify(after, before))
    assert site.within and not site.lost and site.unrun == ()
