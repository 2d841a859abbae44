"""Which TensorRT builds an engine, and for which GPU: the first that can be imported here."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rmsnorm_onnx import files
from rmsnorm_onnx.errors import PluginError, UsageError
from rmsnorm_onnx.plugin import fatbin
from rmsnorm_onnx.plugin.worker import IMPORT, MODULES

RUNTIMES: tuple[str, ...] = tuple(MODULES)
CAPABILITIES = (75, 80, 86, 89, 120, 121)
"""The compute capabilities that TensorRT-RTX builds for."""
_CAPABILITY = 89


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What builds an engine.

    Attributes:
        runtime: The TensorRT.
        capability: The compute capability that it builds for; None for the GPU that it finds.
        notes: What was passed over, each one sentence.
    """

    runtime: str
    capability: int | None
    notes: tuple[str, ...] = ()


def installed() -> tuple[str, ...]:
    """The TensorRTs that can be imported here; each is tried in a process of its own."""
    return tuple(name for name in RUNTIMES if is_there(name) and import_problem(name) is None)


def is_there(runtime: str) -> bool:
    """Whether a package of a TensorRT is there, which may be broken."""
    return any(map(importlib.util.find_spec, MODULES[runtime]))


def import_problem(runtime: str) -> str | None:
    """Why a TensorRT cannot be imported, one line; None where it can."""
    command = [sys.executable, "-m", "rmsnorm_onnx.plugin.worker", IMPORT, runtime]
    done = subprocess.run(command, env=import_path(), capture_output=True, text=True, errors="replace")
    if done.returncode == 0 and done.stdout.endswith(f"{IMPORT}\n"):
        return None
    lines = done.stderr.strip().splitlines()
    if lines:
        return " ".join(lines[-1].split())[:200]
    return f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"


def import_path() -> dict[str, str]:
    """An environment in which a process imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def choose(runtime: str | None, capability: int | None) -> Choice:
    """The TensorRT that builds an engine.

    Raises:
        PluginError: none can be imported.
        UsageError: the runtime is none, or does not build for that capability.
    """
    if runtime is not None and runtime not in RUNTIMES:
        raise UsageError(f"no runtime {runtime!r}; choose {' or '.join(RUNTIMES)}")
    broken: list[str] = []
    for name in (name for name in RUNTIMES if runtime in (None, name) and is_there(name)):
        problem = import_problem(name)
        if problem is None:
            notes = tuple(f"{said}; {name} was taken" for said in broken)
            return Choice(name, _capability(name, capability), notes)
        broken.append(f"{name} is installed, and importing it fails ({problem})")
    if broken:
        raise PluginError(f"{'; '.join(broken)}; install it again: pip install --force-reinstall PACKAGE")
    raise PluginError(
        f"building an engine needs {runtime or 'TensorRT'}: pip install 'tensorrt>=10.15', "
        "or tensorrt-rtx, which builds without a GPU"
    )


def _capability(runtime: str, capability: int | None) -> int | None:
    if runtime != "tensorrt-rtx":
        if capability is not None:
            raise UsageError(
                "TensorRT builds for the GPU that it finds; a compute capability is for tensorrt-rtx alone"
            )
        return None
    if capability is not None and capability not in CAPABILITIES:
        raise UsageError(
            f"TensorRT-RTX does not build for {capability}; choose one of {', '.join(map(str, CAPABILITIES))}"
        )
    return capability or _CAPABILITY


def check_code(library: Path, choice: Choice) -> tuple[str, ...]:
    """The plugin's library must have code for the GPU of an engine: TensorRT does not look, and the engine would fail.

    Returns:
        What could not be known, each one sentence.

    Raises:
        PluginError: it has code, and none that runs there.
    """
    capability = choice.capability or _capability_here()
    if capability is None:
        return ()
    code = fatbin.code_of(library)
    words = f"compute capability {capability / 10}"
    if code is None:
        return (f"{files.shown(library)} has no CUDA code that can be read: whether it runs on {words} is unknown",)
    if not code.runs_on(capability):
        raise PluginError(
            f"{files.shown(library)} has code for {code}, and none that runs on {words}; "
            f"build it anew: rmsnorm-onnx plugin build --arch {capability}"
        )
    return ()


def _capability_here() -> int | None:
    """The compute capability of the first GPU, as its driver says it; None where there is none to ask."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = re.match(r"(\d+)\.(\d)", subprocess.run(asked, capture_output=True, text=True, errors="replace").stdout)
    return int(found[1] + found[2]) if found else None
