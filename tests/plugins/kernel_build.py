"""Builds the CUDA kernels for the CPU: g++ compiles the very same sources, with the shim in place of CUDA."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "plugins" / "kernels"
SHIM = Path(__file__).parent / "shim"
BUILT = ROOT / "build" / "kernels-on-cpu"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")

SOURCES = tuple(sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cpp")]))
HEADERS = tuple(sorted([*KERNELS.glob("*.h"), *KERNELS.glob("*.cuh")]))


@functools.cache
def nvcc() -> str:
    """The path of nvcc. Skips the test where none is installed; fails where one is there and does not work."""
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("nvcc is not on PATH, and these tests need CUDA's compiler and headers (no GPU)")
    answer = subprocess.run([found, "--version"], capture_output=True, text=True)
    assert answer.returncode == 0 and "release" in answer.stdout, f"{found} does not work: {answer.stderr}"
    return found


@functools.cache
def cuda_include() -> Path:
    """The folder of CUDA's headers, as nvcc itself would look for it."""
    plan = subprocess.run([nvcc(), "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    found = re.search(r'INCLUDES="-I([^"]+)"', plan)
    assert found and (Path(found[1]) / "cuda_fp16.h").is_file(), f"nvcc names no folder with cuda_fp16.h: {plan}"
    return Path(found[1])


def compiler() -> str:
    """The path of g++. Skips the test where none is installed."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("g++ is not on PATH, and these tests run the kernels on the CPU")
    return found


def library(flags: Sequence[str] = (), changed: Mapping[str, str] | None = None, only: Sequence[str] = ()) -> Path:
    """The kernels as a shared library for the CPU, built once for each set of sources and flags.

    Args:
        flags: Of g++, besides the usual ones.
        changed: Other text for some files of plugins/kernels, by name.
        only: Build the kernels of these types of x alone; the others are RMSNORM_BAD_TYPE.
    """
    texts = {path.name: path.read_text() for path in (*SOURCES, *HEADERS)} | dict(changed or {})
    shim = {path.name: path.read_text() for path in sorted(SHIM.iterdir())}
    # One thread's frame of a sanitized kernel is large, so -O1 there too.
    command = [compiler(), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", *flags]
    command += ["-shared", "-fPIC", f"-I{SHIM}", f"-I{cuda_include()}"]
    digest = hashlib.sha256(repr((command, texts, shim, only)).encode()).hexdigest()[:16]
    target = BUILT / f"{digest}.so"
    if target.exists():
        return target
    folder = BUILT / f"{digest}.{os.getpid()}"
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "all.cpp").write_text(_one_file(only))
    built = folder / "kernels.so"
    answer = subprocess.run(
        [*command, f"-I{folder}", str(folder / "all.cpp"), "-o", str(built)], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    built.replace(target)
    shutil.rmtree(folder)
    return target


def cmake() -> str:
    """The path of CMake. Skips the test where none is installed."""
    found = shutil.which("cmake")
    if found is None:
        pytest.skip("cmake is not on PATH")
    return found


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return answer.stdout + answer.stderr


def native(architectures: Sequence[str]) -> tuple[Path, str]:
    """The project as CMake and nvcc build it, once for each set of sources: the folder, and what ptxas said."""
    assert nvcc()
    folders = (ROOT / "plugins", ROOT / "tests" / "plugins")
    files = [ROOT / "CMakeLists.txt", *(path for folder in folders for path in folder.rglob("*") if path.is_file())]
    built = [path for path in sorted(files) if path.suffix not in (".py", ".pyc", ".md")]
    texts = {str(path.relative_to(ROOT)): path.read_bytes() for path in built}
    digest = hashlib.sha256(repr((architectures, texts, str(ROOT))).encode()).hexdigest()[:16]
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(BUILT / "native.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = BUILT / f"native-{digest}"
        log = folder / "ptxas.log"
        if not log.exists():
            shutil.rmtree(folder, ignore_errors=True)
            options = [f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}", "-DCMAKE_CUDA_FLAGS=-Xptxas=-v"]
            run(cmake(), "-S", str(ROOT), "-B", str(folder), *options, f"-DPython_EXECUTABLE={sys.executable}")
            text = run(cmake(), "--build", str(folder), "-j2")
            log.write_text(text)
        return folder, log.read_text()


def _one_file(only: Sequence[str]) -> str:
    """One file that includes all: the toolkit's headers are read once."""
    types = {"float32", "float16", "bfloat16"}
    kept = [path.name for path in SOURCES if path.stem not in types or not only or path.stem in only]
    lines = [f'#include "{name}"' for name in ["cuda_shim.h", *kept, "controls.cpp"]]
    absent = sorted(types - set(only)) if only else []
    for name in absent:
        lines.append(
            f"int32_t rmsnorm::launch{name.capitalize()}(Args const&, RmsnormPlan const&, void*)"
            " { return RMSNORM_BAD_TYPE; }"
        )
    return "\n".join(lines) + "\n"
