"""Builds the TensorRT plugin for the CPU, over the kernels that the shim runs there, and the harness that drives it."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from kernel_build import BUILT, KERNELS, ROOT, SHIM, compiler, cuda_include
from kernel_build import library as kernels_on_cpu

TENSORRT = ROOT / "plugins" / "tensorrt"
HERE = Path(__file__).parent
SOURCES = tuple(sorted(TENSORRT.glob("*.cpp")))
HEADERS = tuple(sorted(TENSORRT.glob("*.h")))


@functools.cache
def tensorrt_include() -> Path:
    """The folder of TensorRT's headers: TENSORRT_INCLUDE_DIR, else the package that carries them.

    Skips the test where there is neither.
    """
    named = os.environ.get("TENSORRT_INCLUDE_DIR")
    if named:
        return Path(named)
    package = importlib.util.find_spec("kernel_lens")
    if package is None or not package.submodule_search_locations:
        pytest.skip("kernel-lens, which carries TensorRT's headers, is not installed (tests/headers.txt)")
    return Path(package.submodule_search_locations[0]) / "include" / "tensorrt"


def _compile(
    name: str, texts: Mapping[str, str], units: Sequence[str], flags: Sequence[str] = (), link: Sequence[str] = ()
) -> Path:
    """A shared library of some files, built once for each set of texts and flags."""
    command = [compiler(), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{KERNELS}", "-isystem", str(tensorrt_include()), "-isystem", str(cuda_include()), *flags]
    digest = hashlib.sha256(repr((command, link, dict(texts), units)).encode()).hexdigest()[:16]
    target = BUILT / f"{name}-{digest}.so"
    if target.exists():
        return target
    folder = BUILT / f"{name}-{digest}.{os.getpid()}"
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text)
    # One unit: TensorRT's headers are read once.
    (folder / "all.cpp").write_text("".join(f'#include "{unit}"\n' for unit in units))
    built = folder / "built.so"
    answer = subprocess.run(
        [*command, f"-I{folder}", str(folder / "all.cpp"), "-o", str(built), *link], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    built.replace(target)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return target


def plugin_on_cpu(flags: Sequence[str] = (), changed: Mapping[str, str] | None = None) -> Path:
    """The plugin as a library for the CPU: its own sources, the kernels through the shim, and a stand-in for CUDA.

    Args:
        flags: Of g++, besides the usual ones, for the kernels too.
        changed: Other text for some files of plugins/tensorrt, by name.
    """
    kernels = kernels_on_cpu(flags=[flag for flag in flags if flag.startswith("-f") or flag == "-g"])
    texts = {path.name: path.read_text() for path in (*SOURCES, *HEADERS, SHIM / "cuda_memory.cpp")}
    units = ["cuda_memory.cpp", *(path.name for path in SOURCES)]
    link = [str(kernels), "-Wl,-z,defs", "-Wl,-Bsymbolic"]
    return _compile("plugin", texts | dict(changed or {}), units, flags, link)


def out_of_memory() -> Path:
    """The library that makes `new` fail on demand, to be preloaded."""
    path = SHIM / "out_of_memory.cpp"
    return _compile("out-of-memory", {path.name: path.read_text()}, [path.name])


def harness() -> Path:
    """The library that drives a plugin's library by its entry points."""
    files = [HERE / "harness.h", HERE / "harness.cpp", TENSORRT / "finder.h"]
    return _compile("harness", {path.name: path.read_text() for path in files}, ["harness.cpp"], link=["-ldl"])
