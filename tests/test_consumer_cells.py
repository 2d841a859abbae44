"""Each consumer that runs here gets its forms, and is right; the others' cells say what they are worth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import consumer_kit as kit
import numpy as np
import onnx
import pytest
from form_kit import run

from rmsnorm_onnx.consumers import TABLE
from rmsnorm_onnx.plugin import engine, library

WEB = os.environ.get("RMSNORM_ONNX_WEB")
SOURCE = '<ir_version: 10, opset_import: ["" : 18]> '
CELLS = [(case, x_type) for case in kit.CASES for x_type in kit.TYPES]


@pytest.mark.parametrize("x_type", kit.TYPES)
@pytest.mark.parametrize("case", kit.CASES)
@pytest.mark.parametrize("consumer", ("any", "onnxruntime"))
def test_onnxruntime(consumer: str, case: str, x_type: str) -> None:
    """The CPU provider loads the form, and its numbers are within the bound."""
    norm = kit.site(case, x_type)
    (y,) = run(kit.written(consumer, case, x_type), [norm])
    assert kit.within(norm, y)


@pytest.mark.parametrize(("case", "x_type"), CELLS)
def test_onnx_reference(case: str, x_type: str) -> None:
    """onnx.reference runs the form within the bound, in every type."""
    norm = kit.site(case, x_type)
    assert kit.within(norm, kit.run_reference(kit.written("onnx-reference", case, x_type), norm))


def test_onnx_reference_is_wrong_on_the_operator() -> None:
    """Why onnx.reference gets no RMSNormalization: in float16 it squares 2000 in float16, whatever stash_type says."""
    norm = kit.site("plain (Llama)", "float16")
    y = kit.run_reference(kit.written("tensorrt:11.x", "plain (Llama)", "float16"), norm)
    assert not kit.within(norm, y)


@pytest.mark.parametrize(("case", "x_type"), CELLS)
def test_openvino(case: str, x_type: str) -> None:
    """OpenVINO takes the form, in its RMS kernel where the norm is plain; numbers are as the cell says."""
    pytest.importorskip("openvino")
    norm = kit.site(case, x_type)
    compiled = kit.compile_openvino(kit.written("openvino", case, x_type))
    kinds = [kind for kind, _ in kit.kernels(compiled)]
    assert ("RMS" in kinds) is (case not in ("epsilon outside", "inner axis"))
    assert kit.within(norm, compiled([kit.fed(norm)])[0]) is (("openvino", x_type) not in kit.BEYOND)


@pytest.mark.parametrize("case", ("plain (Llama)", "1 + gain (Gemma)", "rounded once (OLMo)", "no gain"))
def test_openvino_fuses_plain_operators(case: str) -> None:
    """Below opset 23, where there is no RMSNormalization, its RMS kernel runs the plain operators too."""
    pytest.importorskip("openvino")
    model = kit.write([kit.site(case, "float32")], "primitive", 18)
    assert "RMS" in [kind for kind, _ in kit.kernels(kit.compile_openvino(model))]


def test_openvino_reads_no_function() -> None:
    """Why OpenVINO gets no function: its reader names our operator as one that it cannot convert."""
    openvino = pytest.importorskip("openvino")
    model = kit.written("any", "plain (Llama)", "float32")
    with pytest.raises(Exception, match=r"rmsnorm_onnx\.RMSNorm"):
        openvino.Core().read_model(model.SerializeToString())


def test_openvino_rounds_to_bfloat16_its_own_way() -> None:
    """Why bfloat16 is beyond the bound: a Cast alone cuts where the last bit kept is 0, and rounds where it is 1."""
    pytest.importorskip("openvino")
    text = "m (float[N] x) => (float[N] y) { h = Cast <to = 16> (x) y = Cast <to = 1> (h) }"
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    y = kit.compile_openvino(onnx.parser.parse_model(SOURCE + text))([x])[0]
    bits = x.view(np.uint32)
    assert (y.view(np.uint32) == (bits + ((bits & 0x10000) >> 1) & 0xFFFF0000)).all()


def test_openvino_leaves_float32_unless_told() -> None:
    """On a CPU that has bfloat16, a float32 norm between products runs in bfloat16; the hint f32 keeps it float32."""
    openvino = pytest.importorskip("openvino")
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no bfloat16")
    ones = ", ".join(["1.0"] * 64)
    text = (
        f"m (float[N,64] x, float[64,64] a) => (float[N,64] y) <float[64] g = {{{ones}}}> {{ h = MatMul (x, a) "
        "n = RMSNormalization <epsilon = 1e-6> (h, g) y = MatMul (n, a) }"
    )
    model = onnx.parser.parse_model(SOURCE.replace("18", "23") + text)
    assert ("RMS", "bf16") in kit.kernels(kit.compile_openvino(model, EXECUTION_MODE_HINT="PERFORMANCE"))
    assert ("RMS", "f32") in kit.kernels(kit.compile_openvino(model))


@pytest.mark.skipif("tensorrt-rtx" not in engine.installed(), reason="TensorRT-RTX is not installed")
@pytest.mark.parametrize(
    ("case", "x_type"),
    [
        pytest.param(c, t, marks=() if c in ("plain (Llama)", "inner axis") else pytest.mark.full)
        for c, t in CELLS
    ],
)  # fmt: skip
def test_tensorrt_rtx_builds_one_kernel(case: str, x_type: str, tmp_path: Path) -> None:
    """TensorRT-RTX parses the form and builds one kernel for the norm; nothing is executed."""
    onnx.save(kit.written("tensorrt-rtx", case, x_type), tmp_path / "m.onnx")
    built = engine.build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", runtime="tensorrt-rtx")
    assert [norm.kind for norm in built.norms] == ["fused"]


@pytest.mark.skipif("tensorrt-rtx" not in engine.installed(), reason="TensorRT-RTX is not installed")
@pytest.mark.parametrize(
    ("case", "x_type"),
    [pytest.param(c, t, marks=() if c == "epsilon outside" else pytest.mark.full) for c, t in CELLS],
)
def test_tensorrt_rtx_builds_the_plugin(
    case: str, x_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin's node becomes the plugin's layer; nothing is executed."""
    from plugin_build import plugin_on_cpu

    monkeypatch.setenv(library.VARIABLE, str(plugin_on_cpu()))
    onnx.save(kit.written("tensorrt-plugin", case, x_type), tmp_path / "m.onnx")
    built = engine.build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", runtime="tensorrt-rtx")
    assert [norm.kind for norm in built.norms] == ["plugin"]


@pytest.mark.skipif(
    not WEB or shutil.which("node") is None,
    reason="needs node, and RMSNORM_ONNX_WEB naming a folder where `npm install onnxruntime-web` was run",
)
def test_onnxruntime_web(tmp_path: Path) -> None:
    """Under node, the wasm provider of onnxruntime-web runs every cell's form within the bound."""
    jobs = []
    for i, (case, x_type) in enumerate(CELLS):
        onnx.save(kit.written("onnxruntime-web", case, x_type), tmp_path / f"{i}.onnx")
        x = kit.fed(kit.site(case, x_type))
        values = (x.view(np.uint16) if x.dtype == np.float16 else x).ravel().tolist()
        jobs.append([str(tmp_path / f"{i}.onnx"), str(x.dtype), list(x.shape), values])
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("consumer_web.mjs")
    command = ["node", str(script), str(Path(str(WEB)).resolve()), str(tmp_path / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for (case, x_type), result in zip(CELLS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert "error" not in result, (case, x_type, result["error"])
        y = np.frombuffer(bytes.fromhex(result["hex"]), dtype=result["type"]).reshape(result["dims"])
        assert kit.within(kit.site(case, x_type), y), (case, x_type)


def test_every_consumer_has_its_cells() -> None:
    """No consumer of the table is left out of the cells, and no cell claims a run that no test here makes."""
    assert {consumer.partition(":")[0] for consumer in kit.VERSIONED} == set(TABLE)
    claims = {c for c in kit.VERSIONED for case, t in CELLS if kit.chosen(c, case, t).evidence == "run here"}
    assert claims == {"any", "onnxruntime", "onnxruntime-web", "openvino", "onnx-reference"}
