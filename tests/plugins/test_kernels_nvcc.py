"""The kernels under nvcc: they build by CMake as a project of their own, and ptxas finds registers for all of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kernel_build import ROOT, cmake, native, nvcc, run

HEADER = ROOT / "plugins" / "kernels" / "rmsnorm.h"
ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
KERNEL = re.compile(r"^void rmsnorm::(\w+<.*>)\(rmsnorm::Args\)$")

LIMITS = {"warpRows": 72, "blockRow": 64, "reloadRow": 64, "columns": 80}
"""Registers that leave room for as many threads as the plans count on (65,536 registers an SM)."""


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


def check(architectures: tuple[str, ...]) -> None:
    """Builds for some architectures, looks at every kernel and at what the library exports, and runs CTest."""
    folder, log = native(architectures)
    found = registers(log)
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
    # The third is the TensorRT plugin's, where that can be built.
    tests = 3 if (folder / "plugins" / "tensorrt" / "librmsnorm_onnx_plugin.so").exists() else 2
    assert f"100% tests passed, 0 tests failed out of {tests}" in run("ctest", "--test-dir", str(folder))


def test_one_architecture() -> None:
    """CMake builds for the H100 and H200, no kernel spills, and the project's own tests pass."""
    check(("90",))


@pytest.mark.full
def test_all_architectures() -> None:
    """The same for every default architecture."""
    text = (ROOT / "CMakeLists.txt").read_text()
    assert f'set(CMAKE_CUDA_ARCHITECTURES "{";".join(ARCHITECTURES)}"' in text
    check(ARCHITECTURES)


@pytest.mark.full
def test_an_unknown_value_of_the_tensorrt_option(tmp_path: Path) -> None:
    """It stops CMake with one sentence."""
    assert nvcc()
    command = [cmake(), "-S", str(ROOT), "-B", str(tmp_path), "-DRMSNORM_ONNX_TENSORRT=MAYBE"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode != 0 and "use AUTO, ON or OFF" in answer.stderr
