"""Builds the native part for this machine's GPU, checks its numbers and times it; partial results as it goes.

    python benchmarks/gpu/measure.py [-o build/gpu/results.json] [--budget 480] [--only STAGE] [--rehearse]

Stages, each with its share of the budget: build; parity, the matrix in three types against the float64 oracle; plugin,
the same through the TensorRT plugin's enqueue; graph, each launch of a sample captured into a CUDA graph; speed;
memcheck and racecheck, a sample under compute-sanitizer where the machine allows it; plot. The results are written
after every stage and every timed size. A stage is `ok`, or not and says what `failed`, or `unrun` and says why: what it
needs is not there, and nothing was launched. It exits 1 when a stage failed, 4 when a tool or the GPU is missing.
`--rehearse` runs all that can be run without a GPU, on the kernels as g++ compiles them: its times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "plugins"), str(HERE)]

from words import in_words  # noqa: E402

VERSION = 2
"""Version of the results."""

UNAVAILABLE, CHECKER_ERRORS = 4, 99
"""Exit codes: parity.py's where there is nothing to launch on, compute-sanitizer's where it found an error."""

BUILD = ROOT / "build" / "gpu"
KERNELS = "plugins/kernels/librmsnorm_onnx_kernels.so"
PLUGIN = "plugins/tensorrt/librmsnorm_onnx_plugin.so"
HARNESS = "tests/plugins/librmsnorm_onnx_harness.so"


class Missing(RuntimeError):
    """A tool or a device that this machine lacks."""


@dataclasses.dataclass
class Session:
    """One run: its results so far, where they are written, and the time that is left.

    Attributes:
        output: The JSON file.
        end: When the budget is used up, on the monotonic clock.
        rehearse: Whether there is no GPU.
        library: The kernels, once they are built.
        plugin: The TensorRT plugin and what drives it, where TensorRT's headers were found.
        results: What was measured.
    """

    output: Path
    end: float
    rehearse: bool
    library: Path = Path()
    plugin: tuple[Path, Path] | None = None
    results: dict[str, Any] = dataclasses.field(default_factory=dict)

    def left(self, share: float = 1.0) -> float:
        """Seconds for something that may take a share of what is left; at least one."""
        return max(1.0, (self.end - time.monotonic()) * share)

    def write(self) -> None:
        """Write the results whole or not at all."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.output.parent, prefix=f".{self.output.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(self.results, file, indent=1)
            file.write("\n")
        os.chmod(name, 0o644)
        os.replace(name, self.output)

    def command(self, words: Sequence[str], share: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the checkout, within a share of the time.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=self.left(share))


def machine(session: Session) -> dict[str, Any]:
    """The hardware and the versions that the numbers are of.

    Raises:
        Missing: there is no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise Missing(f"torch cannot be imported by {sys.executable}: {error}") from error
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if session.rehearse:
        return {**facts, "device": "none: a rehearsal"}
    if not torch.cuda.is_available():
        raise Missing("torch sees no CUDA GPU here")
    properties = torch.cuda.get_device_properties(0)
    return {
        **facts,
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(session),
        "cuda": torch.version.cuda,
    }


def _driver(session: Session) -> str:
    """The driver's version, or why it is not known."""
    try:
        answer = session.command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 0.05)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {in_words(error)}"
    return answer.stdout.strip() if not answer.returncode else f"unknown: nvidia-smi exits with {answer.returncode}"


def build(session: Session) -> dict[str, Any]:
    """Builds the native part for the device; for a rehearsal, the kernels for the CPU."""
    start = time.monotonic()
    if session.rehearse:
        from kernel_build import library
        from plugin_build import harness, plugin_on_cpu

        session.library, session.plugin = library(), (plugin_on_cpu(), harness())
        return {"ok": True, "seconds": round(time.monotonic() - start, 1)}
    folder = BUILD / "cmake"
    architecture = session.results["machine"]["capability"].replace(".", "")
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")  # its packages may carry TensorRT's headers
    for words in (configure, ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 2)]):
        answer = session.command(words, 0.5)
        if answer.returncode:
            return {"ok": False, "failed": " ".join(words), "words": (answer.stdout + answer.stderr)[-2000:]}
    session.library = folder / KERNELS
    if (folder / PLUGIN).exists():
        session.plugin = (folder / PLUGIN, folder / HARNESS)
    return {"ok": True, "seconds": round(time.monotonic() - start, 1), "architecture": architecture}


def _parity(
    session: Session, *options: str, share: float, before: Sequence[str] = (), library: Path | None = None
) -> dict[str, Any]:
    host = ["--host"] if session.rehearse else []
    words = [*before, sys.executable, str(HERE / "parity.py"), str(library or session.library), *host, *options]
    return parity_result(session.command(words, share))


def parity_result(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a run of parity.py says, with or without a checker before it: first by its exit code, then by its line."""
    text = answer.stdout + answer.stderr
    line = next((line for line in answer.stdout.splitlines() if line.startswith("{")), "{}")
    result: dict[str, Any] = json.loads(line)
    nothing_launched = "unavailable" in result
    if nothing_launched and "Device not supported" in text and answer.returncode in (CHECKER_ERRORS, UNAVAILABLE):
        return {"unrun": "compute-sanitizer says that this device is not supported"}
    if answer.returncode == CHECKER_ERRORS:
        return {"ok": False, "failed": f"errors under the checker: {text[-2000:]}"}
    if answer.returncode == UNAVAILABLE and nothing_launched:
        return {"unrun": result["unavailable"]}
    if result.get("ok") is False or (result.get("ok") and not answer.returncode):
        return result
    return {"ok": False, "failed": f"parity.py ended with {answer.returncode}: {text[-2000:]}"}


def parity(session: Session) -> dict[str, Any]:
    """The matrix of cases against the float64 oracle."""
    return _parity(session, share=0.3)


def plugin(session: Session) -> dict[str, Any]:
    """The same matrix through the TensorRT plugin's enqueue, without TensorRT."""
    if session.plugin is None:
        return {"unrun": "the plugin was not built: no TensorRT headers were found"}
    library, harness = session.plugin
    return _parity(session, "--plugin", str(harness), share=0.3, library=library)


def graph(session: Session) -> dict[str, Any]:
    """A sample of them, each launch captured into a CUDA graph."""
    return _parity(session, "--graph", "--small", share=0.2)


def sanitizer(tool: str) -> Callable[[Session], dict[str, Any]]:
    """A sample of them under one of compute-sanitizer's tools."""

    def run(session: Session) -> dict[str, Any]:
        found = shutil.which("compute-sanitizer")
        if session.rehearse or found is None:
            return {"unrun": "there is no compute-sanitizer on PATH" if found is None else "there is no GPU"}
        before = [found, "--tool", tool, "--error-exitcode", str(CHECKER_ERRORS)]
        try:
            return _parity(session, "--small", "--draw", "20", share=0.4, before=before)
        except subprocess.TimeoutExpired as error:  # a checker may slow a launch by any factor
            return {"unrun": f"stopped after {error.timeout:.0f} s"}

    return run


def speed(session: Session) -> dict[str, Any]:
    """Times beside the peers."""
    from speed import REHEARSAL, Scale, measure, verdicts

    rows: list[dict[str, Any]] = []
    scale = REHEARSAL if session.rehearse else Scale()
    sizes = {"bfloat16": (64, 256)} if session.rehearse else None
    more = {} if sizes is None else {"sizes": sizes}
    for row in measure(session.library, scale, session.left(0.7), **more):
        rows.append(row)
        session.results["stages"]["speed"] = {"rows": rows, "partial": True}
        session.write()
    failed = [f"{row['type']}, d = {row['d']}: {row['failed']}" for row in rows if "failed" in row]
    result: dict[str, Any] = {"ok": not failed, "rows": rows}
    if failed:
        result["failed"] = failed
    # A rehearsal's times are no measure of any goal.
    return result if session.rehearse else {**result, "missed": verdicts(rows)}


def plot(session: Session) -> dict[str, Any]:
    """The picture beside the JSON."""
    from plot import draw, drawn_rows

    path = session.output.with_suffix(".png")
    rows = drawn_rows(session.results["stages"].get("speed", {}).get("rows", []))
    if not rows:
        return {"unrun": "nothing was timed in bfloat16"}
    try:
        draw(rows, session.results["machine"]["device"], path)
    except ImportError:
        return {"unrun": "matplotlib is not installed"}
    return {"ok": True, "path": path.name}


STAGES: Mapping[str, Callable[[Session], dict[str, Any]]] = MappingProxyType(
    {
        "build": build,
        "parity": parity,
        "plugin": plugin,
        "graph": graph,
        "speed": speed,
        "memcheck": sanitizer("memcheck"),
        "racecheck": sanitizer("racecheck"),
        "plot": plot,
    }
)


def run(session: Session, wanted: Sequence[str]) -> int:
    """Name the machine, and run stages on it.

    Raises:
        Missing: there is no GPU.
    """
    session.results |= {"version": VERSION, "rehearsal": session.rehearse, "machine": machine(session), "stages": {}}
    return run_stages(session, wanted)


def run_stages(session: Session, wanted: Sequence[str]) -> int:
    """Run stages, in order; a stage that fails is told, and the others are run where they can be.

    Returns:
        0; 1 when a number is wrong or a stage failed.
    """
    failed = False
    for name in wanted:
        result = {"unrun": "the build failed"} if _no_build(session) else _stage(session, name)
        session.results["stages"][name] = result
        session.write()
        print(f"{name}: {_words(result)}", file=sys.stderr, flush=True)
        failed = failed or result.get("ok") is False
    return 1 if failed else 0


def _no_build(session: Session) -> bool:
    return session.results["stages"].get("build", {}).get("ok") is False


def _stage(session: Session, name: str) -> dict[str, Any]:
    """A stage's result; whatever it raises is its failure, and what it had so far is kept."""
    try:
        return STAGES[name](session)
    except subprocess.TimeoutExpired as error:
        failed = f"stopped after {error.timeout:.0f} s, its share of the budget"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pytest's skip, which the tests' builds raise without a compiler, is no Exception
        failed = in_words(error)
    return {**session.results["stages"].get(name, {}), "ok": False, "failed": failed}


def _words(result: dict[str, Any]) -> str:
    if "unrun" in result:
        return f"unrun: {result['unrun']}"
    if "rows" in result:
        failed = result.get("failed", [])
        lines = [f"{len(result['rows'])} sizes", *([failed] if isinstance(failed, str) else failed)]
        return "\n  ".join([*lines, *result.get("missed", [])])
    return json.dumps(result)[:600]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=BUILD / "results.json")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=[*STAGES], help="these stages; the build is always run")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    chosen = parser.parse_args(arguments)
    session = Session(chosen.output.resolve(), time.monotonic() + chosen.budget, chosen.rehearse)
    wanted = [name for name in STAGES if not chosen.only or name in (*chosen.only, "build")]
    try:
        return run(session, wanted)
    except Missing as reason:
        print(f"measure.py: {reason}", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
