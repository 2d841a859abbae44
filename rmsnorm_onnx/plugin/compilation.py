"""`build`: the plugin's library from its sources, with CMake; what is missing is named before anything is started."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_onnx import files
from rmsnorm_onnx.errors import CheckFailedError, PluginError, UsageError
from rmsnorm_onnx.plugin.library import NAME, cache_folder, source_folder

_HEADER = "NvInferRuntime.h"
_TOOLKIT = "/usr/local/cuda"  # where NVIDIA's installers put it
_OLDEST_CMAKE = (3, 24)
_SYSTEM = ("/usr/include", "/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/local/include")


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """A library that was built.

    Attributes:
        library: Where it is.
        architectures: The compute capabilities that it was compiled for; empty for those of CMakeLists.txt.
        headers: The folder of TensorRT's headers.
    """

    library: Path
    architectures: tuple[str, ...]
    headers: Path

    def to_json(self) -> dict[str, Any]:
        """The build as JSON-ready data, with its version."""
        data = {"library": str(self.library), "architectures": list(self.architectures), "headers": str(self.headers)}
        return {"version": 1, "kind": "plugin-build", **data}


def build(
    folder: str | os.PathLike[str] | None = None,
    *,
    architectures: Sequence[str | int] = (),
    tensorrt_include: str | os.PathLike[str] | None = None,
) -> Build:
    """Build the plugin's library; no GPU and no library of TensorRT is needed.

    Args:
        folder: Where the library goes; by default the user's cache, where `library_path` finds it.
        architectures: Compute capabilities to compile for ("90"); by default all that CMakeLists.txt names.
        tensorrt_include: The folder of TensorRT's NvInferRuntime.h; by default it is looked for.

    Returns:
        The library, which took its place whole.

    Raises:
        PluginError: CMake, CUDA's compiler, TensorRT's headers or the sources are missing; the message has the mend.
        CheckFailedError: the compilation failed; the message has its first error.
        UsageError: the folder cannot be written to, or an architecture is none.
    """
    names = tuple(str(a) for a in architectures)
    for name in names:
        if not re.fullmatch(r"\d{2,3}[af]?(-real|-virtual)?", name):
            raise UsageError(
                f"{name!r} is no CUDA architecture; write a compute capability without its dot, such as 90"
            )
    source = source_folder()
    cmake, headers = _cmake(), _headers(tensorrt_include)
    compiler = _nvcc()
    target = _target(folder)
    options = {
        "RMSNORM_ONNX_TENSORRT": "ON",
        "BUILD_TESTING": "OFF",
        "TENSORRT_INCLUDE_DIR": str(headers),
        "CMAKE_CUDA_COMPILER": str(compiler),
        **({"CMAKE_CUDA_ARCHITECTURES": ";".join(names)} if names else {}),
    }
    with tempfile.TemporaryDirectory(prefix="rmsnorm_onnx-") as work:
        made = _compile(cmake, source, Path(work) / "build", options)
        with files.replacing(target) as temporary:
            shutil.copyfile(made, temporary)
    return Build(target, names, headers)


def missing() -> tuple[str, ...]:
    """What a build lacks here, each one sentence with its mend; empty where it could start."""
    found = []
    for look in (source_folder, _cmake, _nvcc, lambda: _headers(None)):
        try:
            look()
        except PluginError as error:
            found.append(str(error))
    return tuple(found)


def _target(folder: str | os.PathLike[str] | None) -> Path:
    place = cache_folder() if folder is None else Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write into {files.shown(place)}: {files.words(error)}; name another folder"
        ) from error
    return files.output_file(place / NAME)


def _cmake() -> Path:
    found = shutil.which("cmake")
    if found is None:
        raise PluginError("building the plugin needs cmake: pip install 'cmake>=3.24'")
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"version (\d+)\.(\d+)", said)
    if version is not None and (int(version[1]), int(version[2])) < _OLDEST_CMAKE:
        raise PluginError(f"{found} is CMake {version[1]}.{version[2]}, too old: pip install 'cmake>=3.24'")
    return Path(found)


def _nvcc() -> Path:
    """CUDA's compiler: CUDACXX, the PATH, then CUDA's own places, as CMake looks for it."""
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + [_TOOLKIT]
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), *(f"{root}/bin/nvcc" for root in roots if root)]
    for candidate in candidates:
        found = shutil.which(candidate) if candidate else None
        if found:
            return Path(found)
    raise PluginError("building the plugin needs nvcc: install NVIDIA's CUDA toolkit, or name its folder in CUDA_HOME")


def _headers(named: str | os.PathLike[str] | None) -> Path:
    """The folder of TensorRT's headers, looked for where plugins/tensorrt/FindTensorRTHeaders.cmake looks.

    What is named and has none is an error, no reason to look elsewhere.
    """
    folder, root = named or os.environ.get("TENSORRT_INCLUDE_DIR"), os.environ.get("TENSORRT_ROOT")
    if folder:
        places = [Path(folder)]
    elif root:
        places = [Path(root, "include", triple) for triple in ("", "x86_64-linux-gnu", "aarch64-linux-gnu")]
    else:
        places = [*map(Path, _SYSTEM), *_packaged()]
    for place in places:
        if (place / _HEADER).is_file():
            return place.absolute()
    if folder or root:
        raise PluginError(f"{files.shown(places[0])} has no {_HEADER}; name the folder of TensorRT's headers")
    raise PluginError(
        "building the plugin needs TensorRT's headers: name their folder (--tensorrt-include), set TENSORRT_ROOT, "
        "or pip install --no-deps 'kernel-lens==2.0.1', which carries them"
    )


def _packaged() -> Iterator[Path]:
    """The headers in the Python package that carries them, which is looked up without running any of it."""
    package = importlib.util.find_spec("kernel_lens")
    for place in (package.submodule_search_locations or ()) if package else ():
        yield Path(place) / "include" / "tensorrt"


def _compile(cmake: Path, source: Path, folder: Path, options: Mapping[str, str]) -> Path:
    defined = [f"-D{name}={value}" for name, value in options.items()]
    _run([str(cmake), "-S", str(source), "-B", str(folder), *defined], "configuring the plugin")
    jobs = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    _run(
        [str(cmake), "--build", str(folder), "--target", "rmsnorm_onnx_plugin", "--parallel", jobs],
        "compiling the plugin",
    )
    made = next(folder.rglob(NAME), None)
    if made is None:
        raise CheckFailedError(f"compiling the plugin made no {NAME}: are the sources in {source} whole?")
    return made


def _run(command: Sequence[str], doing: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise CheckFailedError(f"{doing} failed: {_first_error(lines)}; the command was {' '.join(command)}")


def _first_error(lines: Sequence[str]) -> str:
    """What the compiler says first, else the first line that speaks of an error, and the four after it.

    CMake quotes the compiler far below its own first line, which names a file of CMake's.
    """
    for pattern in (r"^\W*nvcc\s+(fatal|error)", r"\berror\b"):
        at = next((i for i, line in enumerate(lines) if re.search(pattern, line, re.IGNORECASE)), None)
        if at is not None:
            break
    more = 1 if pattern.startswith("^") else 5
    return " ".join(" ".join(lines[at or 0 : (at or 0) + more]).split())[:400] or "it said nothing"
