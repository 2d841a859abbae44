"""The kernels under nvcc: they build by CMake as a project of their own, and ptxas finds registers for all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_build import ROOT, nvcc

HEADER = ROOT / "plugins" / "kernels" / "rmsnorm.h"
ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
KERNEL = re.compile(r"^void rmsnorm::(\w+<.*>)\(rmsnorm::Args\)$")

LIMITS = {"warpRows": 72, "blockRow": 64, "reloadRow": 64, "columns": 80}
"""Registers that leave room for as many threads as the plans count on (65,536 registers an SM)."""


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return answer.stdout + answer.stderr


def cmake() -> str:
    """The path of CMake. Skips the test where none is installed."""
    found = shutil.which("cmake")
    if found is None:
        pytest.skip("cmake is not on PATH")
    return found


def build(folder: Path, architectures: str) -> str:
    """Configures and builds the project, and returns what ptxas said."""
    assert nvcc()
    options = [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}", "-DCMAKE_CUDA_FLAGS=-Xptxas=-v"]
    run(cmake(), "-S", str(ROOT), "-B", str(folder), *options)
    return run(cmake(), "--build", str(folder), "-j2")


def registers(log: str) -> dict[tuple[str, str], int]:
    """Registers by kernel and architecture; fails where a kernel spills or keeps anything in local memory."""
    names = run("c++filt", *sorted({m[1] for m in ENTRY.finditer(log)})).splitlines()
    readable = dict(zip(sorted({m[1] for m in ENTRY.finditer(log)}), names, strict=True))
    found = {}
    parts = ENTRY.split(log)[1:]
    for mangled, architecture, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        kernel = KERNEL.match(readable[mangled])
        assert kernel, readable[mangled]
        stack, used = STACK.search(text), USED.search(text)
        assert stack and used, text
        assert stack.groups() == ("0", "0", "0"), f"{kernel[1]} for sm_{architecture}: {stack[0]}"
        found[kernel[1], architecture] = int(used[1])
    return found


def table(found: dict[tuple[str, str], int]) -> str:
    """Registers a thread: a row a kernel, a column an architecture."""
    architectures = sorted({a for _, a in found}, key=int)
    kernels = sorted({k for k, _ in found})
    head = f"{'registers a thread':42}" + "".join(f"{'sm_' + a:>8}" for a in architectures)
    return "\n".join([head, *(f"{k:42}" + "".join(f"{found[k, a]:8}" for a in architectures) for k in kernels)])


def check(folder: Path, architectures: tuple[str, ...]) -> None:
    """Builds for some architectures, looks at every kernel and at what the library exports, and runs CTest."""
    found = registers(build(folder, ";".join(architectures)))
    print(table(found))
    assert {a for _, a in found} == set(architectures)
    assert len(found) == 45 * len(architectures)
    for (kernel, architecture), used in found.items():
        # Kernels whose threads hold 32 registers of x in a warp of their own may use 80.
        limit = 80 if kernel.startswith("warpRows") and ", 8, 1>" in kernel else LIMITS[kernel.split("<")[0]]
        assert used <= limit, f"{kernel} for sm_{architecture} takes {used} registers"
    library = folder / "plugins" / "kernels" / "librmsnorm_onnx_kernels.so"
    exported = set(re.findall(r" T (\w+)", run("nm", "-D", "--defined-only", str(library))))
    assert exported == set(re.findall(r"^RMSNORM_API .*?(\w+)\(", HEADER.read_text(), re.MULTILINE))
    assert "100% tests passed, 0 tests failed out of 2" in run("ctest", "--test-dir", str(folder))


def test_one_architecture(tmp_path: Path) -> None:
    """CMake builds for the H100 and H200, no kernel spills, and the project's own tests pass."""
    check(tmp_path, ("90",))


@pytest.mark.full
def test_all_architectures(tmp_path: Path) -> None:
    """The same for every default architecture."""
    text = (ROOT / "CMakeLists.txt").read_text()
    assert f'set(CMAKE_CUDA_ARCHITECTURES "{";".join(ARCHITECTURES)}"' in text
    check(tmp_path, ARCHITECTURES)


@pytest.mark.full
@pytest.mark.parametrize(("value", "message"), [("ON", "no TensorRT plugin"), ("MAYBE", "use AUTO, ON or OFF")])
def test_the_tensorrt_option(tmp_path: Path, value: str, message: str) -> None:
    """ON without a plugin to build, and an unknown value, stop CMake with one sentence."""
    assert nvcc()
    command = [cmake(), "-S", str(ROOT), "-B", str(tmp_path), f"-DRMSNORM_ONNX_TENSORRT={value}"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode != 0 and message in answer.stderr
