"""The demonstration: its table, its report, its exit codes, and what it says without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest

from rmsnorm_onnx.errors import CheckFailedError
from rmsnorm_onnx.models import demo, measure, real_file

ONE = ["--model", "mlp", "--dtype", "float32", "--opset", "18"]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and an index that nobody answers for; the cache's folder."""
    for name in [n for n in os.environ if n.upper().startswith("PIP_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("RMSNORM_ONNX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(no_network: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel of the real one's name with two small files in it, which pip finds in place of PyPI's."""
    links = tmp_path / "links"
    links.mkdir()
    path = links / "traceforge_title_model-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for part in real_file.PARTS:
            archive.writestr(f"traceforge_title_model/data/span/{part}.onnx", part)
        info = "traceforge_title_model-0.2.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: traceforge-title-model\nVersion: 0.2.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return path


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run prints one line for each model, says why a file does not load, and writes the files and a JSON report."""
    arguments = ["--output", str(tmp_path), *ONE, "--dtype", "bfloat16", "--no-real-file"]
    assert demo.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["[1/2] mlp float32 opset 18", "[2/2] mlp bfloat16 opset 18"]
    lines = captured.out.splitlines()
    head = lines[0].split("  ")
    assert {"model", "opset", "dtype", "norms in PyTorch", "found", "declined", "form"} <= {h.strip() for h in head}
    float32, bfloat16 = lines[1], lines[2]
    assert float32.split()[:7] == ["mlp", "18", "float32", "3", "3", "0", "3/3"] and "loads" in float32
    assert "no kernel: bfloat16 Add(14)" in bfloat16
    assert "real file: left out, as asked" in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["version"], report["ok"], len(report["rows"])) == (1, True, 2)
    assert {"mlp-float32-opset18.onnx", "mlp-bfloat16-opset18.onnx", "report.json"} == set(os.listdir(tmp_path))
    [first, second] = report["rows"]
    assert first["loads"] and first["ulp"] <= first["tolerance"] and len(first["sites"]) == 3
    assert not second["loads"] and "MatMul(13)" in second["why"] and second["within"]


def test_without_a_network(no_network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a network the real file is left out with one line, and the demonstration succeeds."""
    assert demo.main(["--output", str(tmp_path / "out"), *ONE]) == 0
    out = capsys.readouterr().out
    assert out.count("real file: left out: no network: traceforge-title-model==0.2.0 cannot be fetched from PyPI") == 1
    assert "Connection refused" in out and "Traceback" not in out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["real_file"].startswith("left out: no network")
    assert not [p for p in no_network.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    "change",
    [
        {"found": 2},
        {"differences": ("0 was found as another",)},
        {"within": False},
        {"valid": False},
        {"loads": False, "why": "some error"},
        {"output": 2.0, "allowed": 1.0},
    ],
)
def test_any_shortfall_fails(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A norm that is missing, differs or is beyond its bound, and a file that should load and does not, exit 1."""
    monkeypatch.setattr(demo, "measure_tiny", lambda *_: dataclasses.replace(_good_row(), **change))
    assert demo.main(["--output", str(tmp_path), *ONE, "--no-real-file"]) == 1
    assert "NOT all as in PyTorch" in capsys.readouterr().out


def test_a_good_row_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that the failures above start from is a success, also where it lacks kernels."""
    for row in (_good_row(), dataclasses.replace(_good_row(), loads=False, why="no kernel: bfloat16 Mul(14)")):
        monkeypatch.setattr(demo, "measure_tiny", lambda *_, row=row: row)
        assert demo.main(["--output", str(tmp_path), *ONE, "--no-real-file"]) == 0


def _good_row() -> measure.Row:
    return measure.Row(
        model="mlp",
        opset=18,
        dtype="float32",
        expected=3,
        found=3,
        declined=0,
        differences=(),
        specs=("3 x axes -1",),
        forms=("function",),
        torch_ulp=0.5,
        ulp=0.5,
        tolerance=1.0,
        within=True,
        valid=True,
        loads=True,
        why="",
        output=0.5,
        allowed=1.0,
        route="by hand",
        file="mlp.onnx",
    )


def test_unpacked_once(wheel: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is downloaded once, only the two files are kept, and a damaged file is fetched again."""
    monkeypatch.setattr(real_file, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    hashes = {part: hashlib.sha256(part.encode()).hexdigest() for part in real_file.PARTS}
    monkeypatch.setattr(real_file, "PARTS", hashes)
    paths = real_file.fetch()
    assert {p.name: p.read_text() for p in no_network.rglob("*") if p.is_file()} == {
        "encoder.onnx": "encoder",
        "decoder.onnx": "decoder",
    }
    paths["encoder"].write_text("damaged")
    assert real_file.fetch()["encoder"].read_text() == "encoder"
    wheel.unlink()
    assert real_file.fetch() == paths


def test_another_wheel_is_refused(wheel: Path, no_network: Path) -> None:
    """A wheel with another hash than the pinned one is refused, and nothing of it is kept."""
    with pytest.raises(CheckFailedError, match="does not have the pinned hash"):
        real_file.fetch()
    assert not [p for p in no_network.rglob("*") if p.is_file()]


def test_other_contents_are_refused(wheel: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the wheel with another hash than the pinned one is refused, and not kept."""
    monkeypatch.setattr(real_file, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(CheckFailedError, match=r"encoder\.onnx of traceforge-title-model==0\.2\.0"):
        real_file.fetch()
    assert not [p for p in no_network.rglob("*") if p.is_file()]


def test_missing_model_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown model is a usage error, exit 2, that lists the known ones."""
    with pytest.raises(SystemExit) as caught:
        demo.main(["--model", "gpt"])
    assert caught.value.code == 2 and "t5-encoder" in capsys.readouterr().err
