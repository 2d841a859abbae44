"""Which GPUs the plugin's library has code for, read from the file, and held to the GPU of an engine."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from rmsnorm_onnx.errors import PluginError
from rmsnorm_onnx.plugin import choice, fatbin
from rmsnorm_onnx.plugin.choice import Choice

MACHINE, PTX = 2, 1


def library(folder: Path, *fatbins: list[tuple[int, int]]) -> Path:
    """A file with fatbins between other bytes, each of entries by kind and compute capability."""
    data = b"\x7fELF" + bytes(60)
    for entries in fatbins:
        body = b""
        for kind, capability in entries:
            body += struct.pack("<HHIQIIHHI", kind, 257, 64, 24, 0, 0, 8, 1, capability) + bytes(32) + b"code" * 6
        data += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + b"between"
    path = folder / "library.so"
    path.write_bytes(data)
    return path


def test_the_code_of_a_library(tmp_path: Path) -> None:
    """Every entry of every fatbin counts once; a file without any, or with a header at its very end, has none."""
    path = library(tmp_path, [(MACHINE, 80), (MACHINE, 120), (PTX, 120)], [(MACHINE, 80), (MACHINE, 90)])
    assert fatbin.code_of(path) == fatbin.Code((80, 90, 120), (120,))
    assert str(fatbin.code_of(path)) == "80, 90, 120, 120 (PTX)"
    path.write_bytes(b"no code")
    assert fatbin.code_of(path) is None
    path.write_bytes(bytes(8) + struct.pack("<IH", 0xBA55ED50, 1))
    assert fatbin.code_of(path) is None


@pytest.mark.parametrize(
    ("entries", "capability", "runs"),
    [
        ([(MACHINE, 80)], 80, True),
        ([(MACHINE, 80)], 89, True),
        ([(MACHINE, 89)], 86, False),
        ([(MACHINE, 80)], 75, False),
        ([(MACHINE, 80)], 90, False),
        ([(MACHINE, 120)], 121, True),
        ([(PTX, 80)], 121, True),
        ([(PTX, 80)], 75, False),
        ([(MACHINE, 100), (PTX, 75)], 89, True),
    ],
)
def test_a_gpu_that_the_library_has_no_code_for(
    entries: list[tuple[int, int]], capability: int, runs: bool, tmp_path: Path
) -> None:
    """Machine code runs on later GPUs of one major number, PTX on all later ones; else the error has the command."""
    path = library(tmp_path, entries)
    if runs:
        assert choice.check_code(path, Choice("tensorrt-rtx", capability)) == ()
        return
    with pytest.raises(PluginError, match=rf"none that runs on .* {capability / 10}; .*build --arch {capability}$"):
        choice.check_code(path, Choice("tensorrt-rtx", capability))


def test_a_library_that_does_not_say(tmp_path: Path) -> None:
    """Of a library without code that can be read, it is said that nothing is known."""
    path = library(tmp_path)
    (note,) = choice.check_code(path, Choice("tensorrt-rtx", 89))
    assert "no CUDA code that can be read" in note and "8.9 is unknown" in note


def test_the_gpu_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT builds for the GPU that the driver names; where none is named, nothing is said."""
    path = library(tmp_path, [(MACHINE, 80)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choice.check_code(path, Choice("tensorrt", None)) == ()
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 9.0\n")
    driver.chmod(0o755)
    with pytest.raises(PluginError, match=r"has code for 80, and none that runs on compute capability 9\.0"):
        choice.check_code(path, Choice("tensorrt", None))
    driver.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert choice.check_code(path, Choice("tensorrt", None)) == ()


@pytest.mark.skipif(not shutil.which("nvcc"), reason="the library is compiled with nvcc")
def test_a_library_of_nvcc(tmp_path: Path) -> None:
    """What nvcc was told to compile for is what is read, machine code and PTX, compressed or not."""
    (tmp_path / "a.cu").write_text(
        '__global__ void k(float* x) { *x += 1; }\nextern "C" void f(float* x) { k<<<1, 1>>>(x); }'
    )
    told = [
        f"-gencode=arch=compute_{a},code={c}" for a, c in (("80", "sm_80"), ("90a", "sm_90a"), ("75", "compute_75"))
    ]
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", *told, "a.cu", "-o", "a.so"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=dict(os.environ))
    assert fatbin.code_of(tmp_path / "a.so") == fatbin.Code((80, 90), (75,))
