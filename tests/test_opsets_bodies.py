"""Operators that become their definition below their first opset, refusals that name them, and external weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from rmsnorm_onnx import cli, opsets
from rmsnorm_onnx.errors import ConversionError
from tests.test_opsets import moved, run, same, text


def exact_rows(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows [2, 3, 4] of variance 1 around means up to 2048, which every step holds exactly, and their deviations."""
    signs = np.array([[1, -1, 1, -1], [-1, -1, 1, 1], [1, -1, -1, 1]])
    deviation = np.stack([signs, -signs])
    means = np.array([0, 64, 1024] if dtype == "float16" else [0, 4096, 2**20])[:, None]
    return (means + deviation).astype(dtype), deviation.astype(dtype)


@pytest.mark.parametrize("dims", ["2, 3, 4", "n, m, k"])
@pytest.mark.parametrize(("shape", "sizes"), [((4,), "a"), ((1,), "a"), ((3, 4), "a, b"), ((2, 1, 4), "a, b, c")])
def test_layer_normalization_broadcasts_its_scale(dims: str, shape: tuple[int, ...], sizes: str) -> None:
    """Scale and bias of any shape that broadcasts to x are multiplied and added as they are, static shapes or none."""
    x, deviation = exact_rows("float32")
    scale = 2.0 ** np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32)
    bias = np.random.default_rng(2).integers(-8, 9, shape).astype(np.float32)
    inputs = f"float[{dims}] x, float[{sizes}] w, float[{sizes}] b"
    proto = text(f"g ({inputs}) => (float[{dims}] y) {{ y = LayerNormalization <epsilon = 3.0> (x, w, b) }}")
    for target in (13, 16):
        [y] = run(moved(proto, target), {"x": x, "w": scale, "b": bias})
        assert same([y], [deviation / np.float32(2) * scale + bias])


@pytest.mark.parametrize(
    ("dtype", "name", "stash"),
    [
        ("float32", "float", 1),
        ("float32", "float", 11),
        ("float64", "double", 1),
        ("float64", "double", 11),
        ("float16", "float16", 1),
    ],
)
def test_layer_normalization_in_each_type(dtype: str, name: str, stash: int) -> None:
    """Variance 1 is not lost beside a large mean, and a stash_type of double is one."""
    x, deviation = exact_rows(dtype)
    if dtype == "float64":  # only a double statistic tells these apart from their mean
        x = x + 2.0**40
    body = f"y = LayerNormalization <epsilon = 3.0, stash_type = {stash}> (x, w)"
    proto = text(f"g ({name}[n, m, k] x, {name}[4] w) => ({name}[n, m, k] y) {{ {body} }}")
    weight = np.array([1, 2, 4, 0.5], dtype)
    [y] = run(moved(proto, 13), {"x": x, "w": weight})
    assert same([y], [deviation / x.dtype.type(2) * weight])


def test_layer_normalization_gives_its_statistic() -> None:
    """Mean and inverse deviation, which are outputs of their own, are there below opset 17 too."""
    x, _ = exact_rows("float32")
    body = "y, mean, inverse = LayerNormalization <axis = 1, epsilon = 3.0> (x, w)"
    outputs = "float[2, 3, 4] y, float[2, 1, 1] mean, float[2, 1, 1] inverse"
    proto = text(f"g (float[2, 3, 4] x, float[3, 4] w) => ({outputs}) {{ {body} }}")
    x -= x.mean(-1, keepdims=True)
    _, mean, inverse = run(moved(proto, 13), {"x": x, "w": np.ones((3, 4), np.float32)})
    assert same([mean, inverse], [np.zeros((2, 1, 1), np.float32), np.full((2, 1, 1), 0.5, np.float32)])


def test_layer_normalization_of_an_unknown_rank_is_refused() -> None:
    """Which axes a positive axis means is then unknown, and the operator is named."""
    body = "r = Reshape (x, s)  z = LayerNormalization <axis = 1> (r, w)  y = Reshape (z, t)"
    proto = text(f"g (float[24] x, int64[k] s, float[4] w, int64[1] t) => (float[n] y) {{ {body} }}")
    with pytest.raises(ConversionError, match=r"LayerNormalization \(version 17\) at z: .*the rank .* is unknown"):
        opsets.convert(ir.from_proto(proto), 13)


PAST = """g (float[2, 4, 3, 8] q, float[2, 2, 3, 8] k, float[2, 2, 3, 8] v, float[2, 2, p, 8] pk, float[2, 2, p, 8] pv)
    => (float[2, 4, 3, 8] y, float[2, 2, t, 8] nk, float[2, 2, t, 8] nv) {{
    y, nk, nv = Attention <is_causal = {causal}> (q, k, v, , pk, pv)
}}"""


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_with_a_past_and_no_mask(opset: int, causal: int) -> None:
    """Lowered, it gives its definition's numbers for any length of the past, and keys and values are passed on whole.

    Each key's score is far above that of the key before, so that each query takes the value of the last that it sees.
    """
    proto = text(PAST.format(causal=causal), opset)
    for past in (0, 1, 5):
        rng = np.random.default_rng(past)
        shapes = {"q": (2, 4, 3, 8), "k": (2, 2, 3, 8), "v": (2, 2, 3, 8), "pk": (2, 2, past, 8), "pv": (2, 2, past, 8)}
        feeds = {n: rng.integers(-4, 5, s).astype(np.float32) for n, s in shapes.items()}
        feeds["q"][:], feeds["pk"][:] = 1, -4096
        feeds["k"][:] = 4096 * np.arange(3, dtype=np.float32)[:, None]
        wanted = [np.asarray(a) for a in ReferenceEvaluator(proto).run(None, feeds)]
        for target in (13, 18):
            y, keys, values = run(moved(proto, target), feeds)
            assert same([keys, values], wanted[1:])
            last = feeds["v"] if causal else feeds["v"][:, :, -1:].repeat(3, axis=2)
            assert same([y], [last.repeat(2, axis=1)])


def test_a_refusal_names_the_node_of_the_file() -> None:
    """What has no equal inside an operator's body is told of the operator that the file has, once."""
    body = "[att] y = Attention (q, k, v)"
    kind = "bfloat16[2, 4, 3, 8]"
    proto = text(f"g ({kind} q, {kind} k, {kind} v) => ({kind} y) {{ {body} }}", 23)
    with pytest.raises(ConversionError) as caught:
        opsets.convert(ir.from_proto(proto), 13)
    assert str(caught.value).count("Attention (version 23) at att: in its body ") == 1
    assert "att/" not in str(caught.value).split(" at att: ")[0]


PARTS = "n = Constant <value_int = 2> ()  s = SplitToSequence (x, n)  {k} = Identity (s)"
IN_GRAPH = (
    "g (float[4, 3] x) => (float[2, 3] y) {{ {parts}  at = Constant <value_int = 1> ()  y = SequenceAt (k, at) }}"
)
IN_FUNCTION = """<ir_version: 10, opset_import: ["" : 24, "user" : 1]>
g (float[4, 3] x) => (float[2, 3] y) {{ y = user.Second (x) }}
<domain: "user", opset_import: ["" : 24]>
Second (x) => (y) {{ {parts}  at = Constant <value_int = 1> ()  y = SequenceAt (k, at) }}
"""


@pytest.mark.parametrize("inside", [False, True])
def test_sequences_are_moved(inside: bool) -> None:
    """Files often declare types for tensors alone; a sequence's follows from what it is made of, in functions too."""
    parts = PARTS.format(k="k")
    proto = (
        onnx.parser.parse_model(IN_FUNCTION.format(parts=parts)) if inside else text(IN_GRAPH.format(parts=parts), 24)
    )
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for opset in (17, 23, 18):
        proto = moved(proto, opset)
        assert same(run(proto, {"x": x}), [x[2:]])
    with pytest.raises(ConversionError, match=r"Identity \(version 14\).*seq\(tensor\(float\)\)"):
        opsets.convert(ir.from_proto(proto), 13)


def test_an_operator_that_holds_a_graph() -> None:
    """SequenceMap's body may read what is around it: it is refused by name, and so is told."""
    body = "y = SequenceMap (s) <body = b (float[2] a) => (float[2] c) { c = Relu (a) }>"
    proto = text(f"g (seq(float[2]) s) => (seq(float[2]) y) {{ {body} }}", 17)
    with pytest.raises(ConversionError, match=r"SequenceMap \(version 17\).*it holds a graph"):
        opsets.convert(ir.from_proto(proto), 13)


ROI = """g (float[1, 2, 6, 6] x, float[1, 4] b, int64[1] i) => (float[1, 2, 2, 2] y) {
    [roi] y = RoiAlign <output_height = 2, output_width = 2> (x, b, i)
}"""


def test_an_operator_that_onnxruntime_has_no_kernel_for_there(tmp_path: Path, capsys) -> None:
    """RoiAlign is raised as ONNX has it, and the report names it: onnxruntime has no kernel of that version."""
    onnx.save(text(ROI, 16), tmp_path / "m.onnx")
    _, report = opsets.convert(ir.from_proto(text(ROI, 16)), 24)
    assert [gap for gap in report.missing_kernels if gap.startswith("RoiAlign(22)") and "'roi'" in gap]
    assert cli.main(["fuse", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx"), "--opset", "24"]) == 0
    assert "RoiAlign(22)" in capsys.readouterr().out


EXTERNAL = "g (float[2, 3] x, int32[2, 3] k, float[3, 512] w) => (float[2, 512] y, int32[2, 3] z) {{ {body} }}"


def with_external_data(folder: Path, body: str) -> Path:
    """A file whose weight stands in a data file beside it."""
    folder.mkdir()
    proto = text(EXTERNAL.format(body=body))
    weight = np.arange(1536, dtype=np.float32).reshape(3, 512)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del proto.graph.input[2]
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return folder / "m.onnx"


def test_external_weights_stay_external(tmp_path: Path) -> None:
    """A file that is moved and written into another folder has its weights in a data file there, to the bit."""
    source = with_external_data(tmp_path / "in", "h = Mish (x)  y = MatMul (h, w)  z = Identity (k)")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "o.onnx"
    assert cli.main(["fuse", str(source), "-o", str(target), "--opset", "13"]) == 0
    written = onnx.load(target, load_external_data=False)
    [weight] = written.graph.initializer
    assert weight.data_location == onnx.TensorProto.EXTERNAL and not weight.raw_data
    assert sorted(p.name for p in target.parent.iterdir()) == ["m.data", "o.onnx"]
    assert (target.parent / "m.data").read_bytes() == (source.parent / "m.data").read_bytes()
    onnx.checker.check_model(str(target), full_check=True)


def test_a_refused_move_leaves_nothing(tmp_path: Path) -> None:
    """Neither the file nor its data is written where an operator has no equal."""
    source = with_external_data(tmp_path / "in", "y = MatMul (x, w)  z = BitwiseNot (k)")
    (tmp_path / "out").mkdir()
    assert cli.main(["fuse", str(source), "-o", str(tmp_path / "out" / "o.onnx"), "--opset", "13"]) == 1
    assert list((tmp_path / "out").iterdir()) == []
