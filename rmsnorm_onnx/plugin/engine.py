"""`build_engine`: an engine from a model with whichever TensorRT is here, and what runs each of its norms.

TensorRT builds for the GPU that it finds. TensorRT-RTX builds ahead of time, for a compute capability, without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from rmsnorm_onnx import files, modelio, passes
from rmsnorm_onnx.errors import CheckFailedError, UsageError
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.plugin import checker, choice, layers
from rmsnorm_onnx.plugin.choice import Choice
from rmsnorm_onnx.plugin.choice import installed as installed
from rmsnorm_onnx.plugin.commandline import has_plugin_nodes
from rmsnorm_onnx.plugin.layers import NormLayers
from rmsnorm_onnx.plugin.library import library_path
from rmsnorm_onnx.plugin.nodes import Nodes
from rmsnorm_onnx.plugin.profiles import Given, Profile, profiles
from rmsnorm_onnx.site import Match

_TITLES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
WITH, WITHOUT = "tensorrt-plugin", "tensorrt:10.15"
"""The consumers that a model is rewritten for, with and without the plugin."""


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """An engine that was built.

    Attributes:
        runtime: The TensorRT that built it: "tensorrt" or "tensorrt-rtx".
        runtime_version: Its version.
        path: Where the engine is; None where only its layers were asked for.
        size: Its bytes.
        capability: The compute capability that it is for; None for the GPU that it was built on.
        library: The plugin's library; None where no node of the model needs it.
        layers: How many layers it has.
        norms: What became of each norm, in the order of the graph.
        profiles: The shapes of the dynamic inputs.
        notes: What was guessed, each one sentence.
    """

    runtime: str
    runtime_version: str
    path: Path | None
    size: int
    capability: int | None
    library: Path | None
    layers: int
    norms: tuple[NormLayers, ...]
    profiles: tuple[Profile, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The engine as JSON-ready data, with its version."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data |= {name: None if data[name] is None else str(data[name]) for name in ("path", "library")}
        data |= {name: [item.to_json() for item in data[name]] for name in ("norms", "profiles")}
        return {"version": 1, "kind": "plugin-engine", **data, "notes": list(self.notes)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """What one build needs, found before anything is started."""

    choice: Choice
    shapes: Given | None
    serialize: bool


def build_engine(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    capability: int | None = None,
    shapes: Given | None = None,
    without_plugin: bool = False,
    serialize: bool = False,
) -> Engine:
    """Build an engine from a model, strongly typed, in a process of its own.

    Args:
        path: The model. Plugin nodes in it need the plugin's library (`library_path`).
        output: Where the engine goes, whole or not at all.
        runtime: "tensorrt" or "tensorrt-rtx"; by default the first of them that is installed.
        capability: The compute capability to build for, 89 for 8.9; of TensorRT-RTX only, by default 89.
        shapes: Shapes of the dynamic inputs: one, or the least, the usual and the largest.
        without_plugin: Rewrite plugin nodes first, to what TensorRT imports by itself.
        serialize: Store the plugin's library in the engine.

    Returns:
        The engine, with what runs each norm.

    Raises:
        PluginError: no TensorRT can be imported, or the plugin's library is not there, or has no code for the GPU.
        CheckFailedError: a plugin node is at fault, which TensorRT need not notice, or the build failed, or the engine
            has no layer for a plugin node; the message has the first fault or TensorRT's first error.
        ModelError: the model is unreadable.
        UsageError: an argument cannot be used, or the engine cannot be written there.
    """
    job = _Job(choice.choose(runtime, capability), shapes, serialize)
    if not without_plugin:
        _check_nodes(path)
    target = files.output_file(output)
    if files.same(path, target):
        raise UsageError(f"cannot write the engine over its model {files.shown(path)}; name another file")
    with tempfile.TemporaryDirectory(prefix="rmsnorm_onnx-") as work, _replacing(target) as temporary:
        folder = Path(work)
        if without_plugin:
            built = _build_rewritten(path, WITHOUT, temporary, job, folder)
        else:
            built = _build(Path(path), temporary, job, folder)
    return dataclasses.replace(built, path=Path(output))


def compare_engines(
    path: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    capability: int | None = None,
    shapes: Given | None = None,
) -> tuple[Engine, Engine]:
    """What runs each norm of a model with the plugin, and without it: two builds, neither of which is kept.

    The model is rewritten for each of them: `fuse` for "tensorrt-plugin", and for "tensorrt:10.15".

    Args:
        path: The model, in whatever form its norms are.
        runtime: As `build_engine` takes it.
        capability: As `build_engine` takes it.
        shapes: As `build_engine` takes them.

    Returns:
        The engine with the plugin, and the one without; their norms are in one order.

    Raises:
        PluginError: no TensorRT can be imported, or the plugin's library is not there, or has no code for the GPU.
        CheckFailedError: a build failed.
        ModelError: the model is unreadable.
        UsageError: an argument cannot be used.
    """
    job = _Job(choice.choose(runtime, capability), shapes, False)
    library_path()  # before the first build is paid for
    built = []
    for consumer in (WITH, WITHOUT):
        with tempfile.TemporaryDirectory(prefix="rmsnorm_onnx-") as work:
            folder = Path(work)
            built.append(_build_rewritten(path, consumer, folder / "engine", job, folder))
    return built[0], _paired(*built)


def _paired(first: Engine, second: Engine) -> Engine:
    """The second engine with its norms under the first one's names: what is written anew in a function is named anew.

    Both are listed in the order of the graph.
    """
    if len(first.norms) != len(second.norms):
        return second
    named = [
        dataclasses.replace(n, name=m.name, module=m.module) for m, n in zip(first.norms, second.norms, strict=True)
    ]
    return dataclasses.replace(second, norms=tuple(named))


def comparison_json(pair: tuple[Engine, Engine]) -> dict[str, Any]:
    """Two builds as JSON-ready data, with their version."""
    return {"version": 1, "kind": "plugin-comparison", "with": pair[0].to_json(), "without": pair[1].to_json()}


def _check_nodes(path: str | os.PathLike[str]) -> None:
    """TensorRT passes over some faults of a plugin node, and then runs something else."""
    faults = checker.check(path).faults
    if faults:
        more = f" (and {len(faults) - 1} more; `rmsnorm-onnx plugin check` lists all)" if len(faults) > 1 else ""
        raise CheckFailedError(f"{files.shown(path)}: {faults[0]}{more}")


def _build_rewritten(path: str | os.PathLike[str], consumer: str, engine: Path, job: _Job, folder: Path) -> Engine:
    """A build of what `fuse` makes of a model; its norms keep the names that they have in the model."""
    model, report = passes.fuse(path, consumer=consumer)
    target = folder / "model.onnx"
    modelio.save(model, target)
    built = _build(target, engine, job, folder)
    sites = [site for site in report.sites if site.action != "declined"]
    if len(sites) != len(built.norms):
        return built
    named = [dataclasses.replace(n, name=s.name, module=s.module) for n, s in zip(built.norms, sites, strict=True)]
    return dataclasses.replace(built, norms=tuple(named))


def _build(path: Path, engine: Path, job: _Job, folder: Path) -> Engine:
    model = modelio.load(path)
    shapes, notes = profiles(model, job.shapes)
    library = library_path() if has_plugin_nodes(Nodes(model.clone())) else None
    notes += (*job.choice.notes, *(() if library is None else choice.check_code(library, job.choice)))
    told = {
        "runtime": job.choice.runtime,
        "model": str(path.absolute()),
        "engine": str(engine),
        "library": None if library is None else str(library),
        "serialize": job.serialize,
        "capability": job.choice.capability,
        "profiles": [profile.to_json() for profile in shapes],
    }
    result = _run(told, folder, files.shown(path))
    found = layers.parse(result["layers"])
    matches = _matches(model)
    norms = layers.norms(matches, found)
    if library is not None:
        notes += _unplugged(matches, norms, files.shown(path))
    return Engine(
        runtime=job.choice.runtime,
        runtime_version=result["version"],
        path=None,
        size=engine.stat().st_size,
        capability=job.choice.capability,
        library=library,
        layers=len(found),
        norms=norms,
        profiles=shapes,
        notes=notes,
    )


def _unplugged(matches: Sequence[Match], norms: Sequence[NormLayers], name: str) -> tuple[str, ...]:
    """Plugin nodes that the plugin does not run, each one sentence; one that nothing runs is an error."""
    notes = []
    for match, norm in zip(matches, norms, strict=True):
        if norm.form != "plugin" or norm.kind == "plugin":
            continue
        if norm.kind != "gone":
            notes.append(f"{norm.name} is a plugin node, and TensorRT runs it as {norm}, not by the plugin")
        elif _is_read(match.output):
            raise CheckFailedError(
                f"no layer of the engine of {name} runs the plugin node {norm.name}: TensorRT took something else for "
                "it or for what is around it; rename functions of one name, or build with --without-plugin"
            )
        else:
            notes.append(f"nothing reads the result of {norm.name}, and the engine leaves it out")
    return tuple(notes)


def _is_read(value: ir.Value) -> bool:
    """Whether a value leads to an output of its graph, branch or function."""
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            return True
        after = {output for node, _ in current.uses() for output in node.outputs} - seen
        seen |= after
        pending += after
    return False


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """As `files.replacing`; a place that refuses the file only when it is written is an error of usage too."""
    try:
        with files.replacing(target) as temporary:
            yield temporary
    except OSError as error:
        raise UsageError(f"cannot write {files.shown(target)}: {files.words(error)}; name another place") from error


def _matches(model: ir.Model) -> list[Match]:
    return [site for site in find_rms_norms(model) if isinstance(site, Match)]


def _run(job: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """One build in a process of its own; whatever kills that process is one line here."""
    told, answer = folder / "job.json", folder / "result.json"
    told.write_text(json.dumps(job))
    command = [sys.executable, "-m", "rmsnorm_onnx.plugin.worker", str(told), str(answer)]
    done = subprocess.run(
        command, env=_environment(job["runtime"], folder), capture_output=True, text=True, errors="replace"
    )
    title = _TITLES[job["runtime"]]
    if done.returncode or not answer.is_file():
        last = " ".join((done.stderr or done.stdout).split())[-300:]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise CheckFailedError(f"{title} ended with {how} while it built an engine from {name}: {last or 'silently'}")
    result: dict[str, Any] = json.loads(answer.read_text())
    if result["problem"]:
        first = " ".join(" ".join(result["errors"][:1]).split())[:400]
        raise CheckFailedError(
            f"{title} built no engine from {name}: {result['problem']} ({first or 'no reason given'})"
        )
    return result


def _environment(runtime: str, folder: Path) -> dict[str, str]:
    """The environment of a build: its own import path, and for TensorRT-RTX a name that its wheel leaves out.

    Its parser opens libtensorrt_rtx.so to find plugins, and the wheel has libtensorrt_rtx.so.1 alone.
    """
    environment = choice.import_path()
    spec = importlib.util.find_spec("tensorrt_rtx_libs") if runtime == "tensorrt-rtx" else None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        library = Path(place) / "libtensorrt_rtx.so.1"
        if library.is_file():
            (folder / "lib").mkdir(exist_ok=True)
            (folder / "lib" / "libtensorrt_rtx.so").symlink_to(library)
            before = os.environ.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = f"{folder / 'lib'}{os.pathsep + before if before else ''}"
    return environment
