"""Models at another opset: each operator's numbers to the bit, whole models value by value, and what is refused."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from standin import build

import rmsnorm_onnx
from rmsnorm_onnx import adapters, cli, opsets, relabel, single
from rmsnorm_onnx.errors import ConversionError, UsageError
from rmsnorm_onnx.models import tiny
from rmsnorm_onnx.site import Match
from tests.opset_cases import ADAPTED, DEFINED, OLDER, SAME, Case

NEWEST = onnx.defs.onnx_opset_version()
# onnxruntime computes these with other kernels from some opset on, or has none there: onnx's own evaluator judges.
JUDGED_BY_ONNX = {
    *("AveragePool", "ReduceLogSum", "ReduceLogSumExp"),
}


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], *, runtime: str = "onnxruntime") -> list[np.ndarray]:
    """The outputs, without optimisations."""
    if runtime == "onnx":
        return [np.asarray(a) for a in ReferenceEvaluator(proto).run(None, dict(feeds))]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    """Whether all are equal to the bit, NaN where NaN."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )


def moved(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model at an opset, checked in full."""
    model, report = opsets.convert(ir.from_proto(proto), opset)
    result = ir.to_proto(model)
    onnx.checker.check_model(result, full_check=True)
    assert {i.domain: i.version for i in result.opset_import}[""] == opset == report.opset
    return result


def differences(case: Case, targets: tuple[int, ...], reference: onnx.ModelProto | None = None) -> list[str]:
    """Where a case's numbers at other opsets, or back at its own, are not those that it had."""
    wrong = []
    runtime = "onnx" if case.op in JUDGED_BY_ONNX else "onnxruntime"
    for dynamic in (False, True):
        proto = case.model(dynamic=dynamic)
        expected = run(reference or proto, case.feeds(), runtime=runtime)
        for target in (t for t in targets if case.oldest <= t <= case.newest):
            there = moved(proto, target)
            results = {"there": there} if reference else {"there": there, "back": moved(there, max(case.opset, 13))}
            for name, result in results.items():
                if not same(expected, run(result, case.feeds(), runtime=runtime)):
                    wrong.append(f"{case} {name} at {target}, dynamic {dynamic}")
    return wrong


@pytest.mark.parametrize("cases", [SAME, ADAPTED], ids=["same", "adapted"])
def test_each_operator_keeps_its_numbers(cases: tuple[Case, ...]) -> None:
    """At opset 13, at a recent one, and back: the same bits."""
    assert [d for case in cases for d in differences(case, (13, 24))] == []


def test_older_operators_are_raised() -> None:
    """From 11 and 12, where axes were attributes and Softmax had another default, to 13 and beyond."""
    assert [d for case in OLDER for d in differences(case, (13, 24))] == []


def test_operators_that_are_defined_by_a_body() -> None:
    """Below their first opset they become the body that ONNX defines them by, with that body's numbers."""
    wrong = []
    for case in DEFINED:
        proto = case.model()
        body = onnx.inliner.inline_selected_functions(proto, [("", case.op)], inline_schema_functions=True)
        assert all(node.op_type != case.op for node in body.graph.node), case
        wrong += differences(case, (13,), body)
    assert wrong == []


@pytest.mark.full
@pytest.mark.parametrize("target", [17, 16, 15, 14, 19, 21, 23, NEWEST])
def test_each_operator_at_every_opset(target: int) -> None:
    """The same at every opset between."""
    assert [d for case in (*SAME, *ADAPTED, *OLDER) for d in differences(case, (target,))] == []


def test_the_table_agrees_with_the_schemas() -> None:
    """Each row joins neighbouring versions of one signature, whose older types are all allowed by the newer one."""
    for (name, older, newer), row in relabel.steps().items():
        a, b = onnx.defs.get_schema(name, older), onnx.defs.get_schema(name, newer)
        versions = opsets._versions(name)
        assert (a.since_version, b.since_version) == (older, newer), name
        assert versions.index(newer) == versions.index(older) + 1, name
        added = set(b.attributes) - set(a.attributes)
        # Attributes without a default mean nothing when they are absent, and are refused when they are there.
        assert {n for n in added if relabel.default(b, n) is not None} <= set(row.was), (name, newer)
        assert set(a.attributes) <= set(b.attributes), name
        assert all(relabel.default(a, n) == relabel.default(b, n) for n in a.attributes), name
        assert len(a.outputs) == len(b.outputs) or row.outputs is not None, name
        assert len(a.inputs) <= len(b.inputs), name
        for old, new in zip(a.inputs, b.inputs, strict=False):
            assert set(old.types) <= set(new.types) or (name, newer) in relabel.NARROWER, (name, newer, old.name)


def test_every_step_has_its_place() -> None:
    """From 13 on each step of each operator is in the table, has an adapter or is onnx's, but for one."""
    known = {(n, max(a, b), min(a, b)) for n, a, b in (*adapters.ADAPTERS, *single.CONVERTED) if b is not None}
    known |= {(name, newer, older) for name, older, newer in relabel.steps()}
    missing = {
        (name, newer, older)
        for name, versions in opsets._all_versions().items()
        for older, newer in itertools.pairwise(versions)
        if newer > 12 and (name, newer, older) not in known
    }
    assert missing == {("GroupNormalization", 21, 18)}  # its scale changed from groups to channels


@functools.cache
def exported(name: str, dtype: str) -> ir.Model:
    """A tiny model at opset 18, its norms plain operators."""
    built = build(name, dtype)
    return rmsnorm_onnx.export(
        built.module, built.args, opset=18, fuse=False, dynamic_shapes=built.dynamic_shapes
    ).model


def everything(model: ir.Model) -> onnx.ModelProto:
    """The model with every float value as an output too, so that a runtime cannot keep one wider than it is."""
    proto = ir.to_proto(model)
    outputs = {o.name for o in proto.graph.output}
    for node in proto.graph.node:
        proto.graph.output.extend(onnx.ValueInfoProto(name=o) for o in node.output if o and o not in outputs)
    return proto


def values(model: ir.Model, feeds: Mapping[str, np.ndarray], rounds: bool = True) -> dict[str, np.ndarray]:
    """Each value by name, in onnxruntime; where that leaves out roundings, in onnx's own evaluator."""
    proto = everything(model)
    computed = run(proto, feeds) if rounds else ReferenceEvaluator(proto).run(None, dict(feeds))
    return dict(zip((o.name for o in proto.graph.output), computed, strict=True))


UNROUNDED = {("mamba2", "float16"), ("nemotron", "float16")}
"""onnxruntime has no float16 kernel of some operators, such as Softplus, and leaves roundings before them out."""


def check_whole(name: str, dtype: str, target: int) -> None:
    """Moves a tiny model as it is and with its norms as functions, and compares values, norms, names and traces."""
    original = exported(name, dtype)
    before = ir.to_proto(original).SerializeToString()
    found = [m for m in rmsnorm_onnx.find_rms_norms(original) if isinstance(m, Match)]
    built = build(name, dtype)
    feeds = {v.name: a.numpy() for v, a in zip(original.graph.inputs, built.inputs(3, 5, seed=1), strict=True)}

    plain, report = opsets.convert(original, target, form="primitive")
    assert report.found == len(found) and ir.to_proto(original).SerializeToString() == before
    old, new = (values(m, feeds, rounds=(name, dtype) not in UNROUNDED) for m in (original, plain))
    shared = old.keys() & new.keys()
    assert shared >= {o.name for o in original.graph.outputs} and len(shared) > 0.9 * len(old)
    wrong = [n for n in shared if not same([old[n]], [new[n]])]
    # Below 17 LayerNormalization is computed by its equations, which round where onnxruntime's kernel does not.
    expanded = target < 17 and any(n.op_type == "LayerNormalization" for n in original.graph)
    assert wrong == [] or expanded

    fused, report = opsets.convert(original, target)
    proto = ir.to_proto(fused)
    onnx.checker.check_model(proto, full_check=True)
    run(proto, feeds)
    assert report.found == len(found)
    assert (
        report.rewritten == rmsnorm_onnx.fuse(original)[1].rewritten
    )  # as where it stands, so all but moved roundings
    again = [m for m in rmsnorm_onnx.find_rms_norms(ir.from_proto(proto)) if isinstance(m, Match)]
    told = [(m.spec.canonical(m.x_type), m.x_type, m.module) for m in found]
    assert [(m.spec.canonical(m.x_type), m.x_type, m.module) for m in again] == told
    for ours, theirs in ((fused.graph.inputs, original.graph.inputs), (fused.graph.outputs, original.graph.outputs)):
        assert [(v.name, v.type, v.shape) for v in ours] == [(v.name, v.type, v.shape) for v in theirs]
    assert fused.metadata_props == original.metadata_props and fused.graph.doc_string == original.graph.doc_string


@pytest.mark.parametrize(("name", "dtype", "target"), [("qwen3", "float16", 13), ("qwen3", "float16", NEWEST)])
def test_whole_models(name: str, dtype: str, target: int) -> None:
    """Every value is equal to the bit, every norm is found as before with its module, nothing else moves."""
    check_whole(name, dtype, target)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", tiny.NAMES)
def test_all_whole_models(name: str, dtype: str) -> None:
    """The same for every model in two types, in float16 at the ends, and for some at each opset."""
    between = (16, 15, 14, 24) if name in ("llama", "gpt-oss", "t5", "mlp") else ()
    for target in (17, 13, 23, NEWEST, *between) if dtype == "float16" else (13,):
        check_whole(name, dtype, target)


def text(body: str, opset: int = 18, functions: str = "", imports: str = "") -> onnx.ModelProto:
    """A model in onnx's text form, its shapes inferred."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}{imports}]>\n{body}\n{functions}')
    onnx.checker.check_model(model, full_check=True)
    return model


BRANCHES = """g (bool c, float[2, 3] x) => (float[?, ?] y) {
    y = If (c) <
        then_branch = a () => (float[?, ?] p) {
            s = Shape <start = 0, end = 1> (x)
            t = CastLike (s, x)
            q = Relu (x)
            p = Add (q, t)
        },
        else_branch = b () => (float[?, ?] r) {
            axes = Constant <value_ints = [1]> ()
            r = ReduceMax (x, axes)
        }>
}"""


@pytest.mark.parametrize("target", [13, 17, NEWEST])
def test_branches_are_moved(target: int) -> None:
    """The nodes of both branches of an If are moved, and read what they read around it."""
    proto = text(BRANCHES)
    x = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
    result = moved(proto, target)
    for c in (True, False):
        feeds = {"c": np.array(c), "x": x}
        assert same(run(proto, feeds), run(result, feeds))


def test_loop_bodies_are_moved() -> None:
    """A sum of halves: the body's nodes are of the new opset, the carried values stay."""
    body = """g (int64 n, float[2, 3] x) => (float[2, 3] y) {
        c = Constant <value = bool {1}> ()
        y = Loop (n, c, x) <body = b (int64 i, bool d, float[2, 3] a) => (bool e, float[2, 3] o) {
            e = Identity (d)  t = CastLike (i, a)  axes = Constant <value_ints = [0]> ()
            m = ReduceMean (a, axes)  u = Add (m, t)  o = Add (a, u) }>
    }"""
    proto = text(body)
    feeds = {"n": np.array(3, np.int64), "x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    for target in (13, 21):
        assert same(run(proto, feeds), run(moved(proto, target), feeds))


FUNCTION = """<domain: "others", opset_import: ["" : 18]> Half (x, k) => (y) {
    axes = Constant <value_ints = [-1]> ()
    m = ReduceMean (x, axes)
    s = CastLike (k, x)
    y = Mul (m, s)
}"""


def test_functions_of_others_are_moved() -> None:
    """A model-local function is moved by the types that its calls pass, and stays a function."""
    proto = text(
        "g (float[2, 3] x, int64 k) => (float[?, ?] y) { y = others.Half (x, k) }", 18, FUNCTION, ', "others" : 1'
    )
    result = moved(proto, 13)
    (function,) = result.functions
    assert {i.domain: i.version for i in function.opset_import}[""] == 13
    assert "CastLike" not in [node.op_type for node in function.node]
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "k": np.array(3)}
    assert same(run(proto, feeds), run(result, feeds))


def test_a_function_that_is_called_with_two_types_is_refused() -> None:
    """What a cast in it casts to differs between its calls, so that it has no equal without CastLike."""
    body = """g (float[2, 3] x, double[2, 3] z, int64 k) => (float[?, ?] y, double[?, ?] w) {
        y = others.Half (x, k)
        w = others.Half (z, k)
    }"""
    proto = text(body, 18, FUNCTION, ', "others" : 1')
    with pytest.raises(ConversionError, match=r"CastLike \(version 15\) at s: .*the type that it casts to is unknown"):
        opsets.convert(ir.from_proto(proto), 14)


REFUSED = """g (float[2, 3] x) => (float[2, 3] y, int64[1] n) {
    k = Cast <to = 6> (x)
    a = BitwiseNot (k)
    y = Cast <to = 1> (a)
    n = Shape <start = 0, end = 1> (x)
}"""


def test_what_has_no_equal_is_named() -> None:
    """The operator, its version, where it stands and the opset that it exists from; the model is left as it was."""
    model = ir.from_proto(text(REFUSED))
    before = ir.to_proto(model).SerializeToString()
    with pytest.raises(ConversionError) as caught:
        opsets.convert(model, 17)
    assert "BitwiseNot (version 18) at a: it exists from opset 18 on" in str(caught.value)
    assert "\n" not in str(caught.value) and "Shape" not in str(caught.value)
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("opset", [12, NEWEST + 1])
def test_opsets_that_there_are_not(opset: int) -> None:
    """Older than 13 or newer than the installed onnx is a usage error that says what there is."""
    with pytest.raises(UsageError, match=f"choose one of 13 to {NEWEST}"):
        opsets.convert(ir.from_proto(text(REFUSED)), opset)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fuse --opset` moves the model and tells the opset; what it cannot move is exit 1, one line, and no file."""
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(text(REFUSED), source)
    assert cli.main(["fuse", str(source), "-o", str(target), "--opset", "17"]) == 1
    told = capsys.readouterr().err.strip()
    assert "BitwiseNot" in told and "\n" not in told and not target.exists()
    assert cli.main(["fuse", str(source), "-o", str(target), "--opset", "21", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["opset"] == 21
    assert onnx.load(target).opset_import[0].version == 21


NATIVE = (
    "g (float16[2, 3, 8] x, float16[8] w) => (float16[2, 3, 8] y) { y = RMSNormalization <epsilon = 0.001> (x, w) }"
)


@pytest.mark.parametrize(
    ("consumer", "form", "operator"),
    [
        ("any", None, "RMSNorm"),
        ("any", "onnx", "RMSNorm"),
        ("any", "primitive", "Mul"),
        ("tensorrt:10.15", None, "RMSNorm"),
    ],
)
def test_native_norms_below_their_first_opset(consumer: str, form: str | None, operator: str) -> None:
    """RMSNormalization becomes a form that opset 17 has, whoever asks, with the same spec."""
    model = ir.from_proto(text(NATIVE, 23))
    (before,) = rmsnorm_onnx.find_rms_norms(model)
    lowered, report = opsets.convert(model, 17, consumer=consumer, form=form)
    onnx.checker.check_model(ir.to_proto(lowered), full_check=True)
    assert report.rewritten == 1 and lowered.graph.node(-1).op_type == operator
    (after,) = rmsnorm_onnx.find_rms_norms(lowered)
    assert after.spec.canonical("float16") == before.spec.canonical("float16")


def test_native_norms_stay_where_they_exist() -> None:
    """From 23 to 24 the operator stays for those who take it."""
    lifted, report = opsets.convert(ir.from_proto(text(NATIVE, 23)), 24, consumer="tensorrt:10.15")
    assert [n.op_type for n in lifted.graph] == ["RMSNormalization"] and report.sites[0].action == "kept"


def test_functions_of_ours_are_moved() -> None:
    """A file that was fused before is moved with its function, which still says what its nodes say."""
    fused, _ = rmsnorm_onnx.fuse(ir.from_proto(text(NATIVE, 23)))
    lowered, _ = opsets.convert(fused, 13)
    proto = ir.to_proto(lowered)
    onnx.checker.check_model(proto, full_check=True)
    assert [f.name for f in proto.functions] == ["RMSNorm"] and proto.functions[0].opset_import[0].version == 13
    (norm,) = rmsnorm_onnx.find_rms_norms(lowered)
    assert norm.form == "function" and norm.spec.epsilon == pytest.approx(1e-3)


def test_weights_are_neither_read_nor_copied(tmp_path: Path) -> None:
    """A weight of 3 GB in a file that holds nothing is moved by reference."""
    proto = text("g (float[1, 3] x, float[3, 250000000] w) => (float[1, ?] y) { z = Relu (x)  y = MatMul (z, w) }")
    weight = proto.graph.initializer.add(name="w", dims=[3, 250000000], data_type=TensorProto.FLOAT, data_location=1)
    weight.external_data.add(key="location", value="weights.bin")
    del proto.graph.input[1]
    with (tmp_path / "weights.bin").open("wb") as data:
        data.truncate(3_000_000_000)
    onnx.save(proto, tmp_path / "m.onnx")
    before = (tmp_path / "weights.bin").stat()
    model, _ = rmsnorm_onnx.fuse(tmp_path / "m.onnx", opset=13)
    (kept,) = model.graph.initializers.values()
    assert isinstance(kept.const_value, ir.ExternalTensor) and kept.const_value.nbytes == 3_000_000_000
    assert (tmp_path / "weights.bin").stat() == before and before.st_blocks < 1000


def test_dynamic_sizes_of_zero() -> None:
    """A Reshape with allowzero=1 gives an empty result for an empty batch at opset 13 too."""
    body = """g (float[n, m, 4] x, int64[3] s) => (float[a, b, c] y) { y = Reshape <allowzero = 1> (x, s) }"""
    proto = text(body)
    result = moved(proto, 13)
    for shape, wanted in (((0, 3, 4), (3, 0, 4)), ((2, 3, 4), (3, 4, 2)), ((2, 3, 4), (3, 8, -1))):
        feeds = {"x": np.ones(shape, np.float32), "s": np.array(wanted, np.int64)}
        assert same(run(proto, feeds), run(result, feeds))
