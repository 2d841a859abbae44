"""The lines for trtexec and Polygraphy that build an engine from a model.

Where the flags were read: trtexec's from `trtexec --help` of TensorRT 10.5 (`--onnx`, `--saveEngine`, `--loadEngine`,
`--stronglyTyped`, `--fp16`, `--bf16`, `--skipInference`, `--versionCompatible`, `--minShapes`, `--optShapes`,
`--maxShapes`, `--shapes`, `--dynamicPlugins`, `--setPluginsToSerialize`), and what they do from its source,
samples/trtexec and samples/common; Polygraphy's from `polygraphy run --help` of 0.53.6 (`--trt`, `--strongly-typed`,
`--save-engine`, `--trt-min-shapes` and its like).

The plugin's library registers nothing when it is opened, so that it fits TensorRT 10 and 11. It must be loaded through
TensorRT's registry, as trtexec's `--dynamicPlugins` does. trtexec's `--staticPlugins` and Polygraphy's `--plugins` only
open a library: with them the parser says "Plugin not found" (tried with Polygraphy and TensorRT-RTX).
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmsnorm_onnx import modelio
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.plugin.library import library_path
from rmsnorm_onnx.plugin.nodes import Nodes
from rmsnorm_onnx.plugin.profiles import Given, Profile, profiles

_PRECISIONS = ("fp16", "bf16")


@dataclasses.dataclass(frozen=True, slots=True)
class CommandLines:
    """Commands that build an engine, each a list of arguments.

    Attributes:
        trtexec: trtexec's command.
        load: trtexec's command that loads and times the engine.
        polygraphy: Polygraphy's command.
        library: The plugin's library; None where no node of the model needs it.
        profiles: The shapes of the dynamic inputs.
        notes: What was guessed, each one sentence.
    """

    trtexec: tuple[str, ...]
    load: tuple[str, ...]
    polygraphy: tuple[str, ...]
    library: Path | None
    profiles: tuple[Profile, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The commands as a shell takes them."""
        return [shlex.join(command) for command in (self.trtexec, self.load, self.polygraphy)]

    def to_json(self) -> dict[str, Any]:
        """The commands as JSON-ready data, with their version."""
        commands = {name: list(getattr(self, name)) for name in ("trtexec", "load", "polygraphy")}
        return {
            "version": 1,
            "kind": "plugin-trtexec",
            "lines": self.lines(),
            **commands,
            "library": None if self.library is None else str(self.library),
            "profiles": [profile.to_json() for profile in self.profiles],
            "notes": list(self.notes),
        }


def command_lines(
    path: str | os.PathLike[str],
    *,
    shapes: Given | None = None,
    engine: str | os.PathLike[str] | None = None,
    serialize: bool = False,
    precisions: Sequence[str] = (),
) -> CommandLines:
    """The lines for trtexec and Polygraphy that build an engine from a model.

    Networks are strongly typed: each tensor keeps the type that the model gives it, as the norms' rounding points ask.

    Args:
        path: The model.
        shapes: Shapes of the dynamic inputs: one, or the least, the usual and the largest.
        engine: Where the engine goes; by default beside the model, as `.engine`.
        serialize: Store the plugin's library in trtexec's engine, which is then a version-compatible one, as TensorRT's
            headers want it; else the library is loaded beside the engine.
        precisions: "fp16" and "bf16" build a weakly typed network instead, which TensorRT 11 no longer has.

    Raises:
        ModelError: the model is unreadable.
        PluginError: the model has plugin nodes, and the library is not there.
        UsageError: a shape does not fit, or a precision is none.
    """
    for precision in precisions:
        if precision not in _PRECISIONS:
            raise UsageError(f"no precision {precision!r}; choose fp16 or bf16")
    model = modelio.load(path)
    library = library_path() if has_plugin_nodes(Nodes(model)) else None
    made, notes = profiles(model, shapes)
    target = os.fspath(engine) if engine is not None else os.path.splitext(os.fspath(path))[0] + ".engine"
    if precisions:
        notes += ("a weakly typed network may run a norm in another type than the model says; TensorRT 11 has none",)
    return CommandLines(
        trtexec=_trtexec(os.fspath(path), target, library, made, serialize, precisions),
        load=("trtexec", f"--loadEngine={target}", *_loaded(library, serialize), *_shapes(made, "--shapes")),
        polygraphy=_polygraphy(os.fspath(path), target, library, made, precisions),
        library=library,
        profiles=made,
        notes=notes,
    )


def has_plugin_nodes(nodes: Nodes) -> bool:
    """Whether a node of a model is one of this package's plugin."""
    return any(nodes.is_ours(node) for node, _ in nodes)


def _trtexec(
    model: str,
    engine: str,
    library: Path | None,
    made: Sequence[Profile],
    serialize: bool,
    precisions: Sequence[str],
) -> tuple[str, ...]:
    typing = [f"--{p}" for p in precisions] or ["--stronglyTyped"]
    plugin = [f"--dynamicPlugins={library}"] if library else []
    if library and serialize:
        plugin += [f"--setPluginsToSerialize={library}", "--versionCompatible"]
    # A process that builds an engine and then runs it would load the library a second time.
    return (
        "trtexec",
        f"--onnx={model}",
        f"--saveEngine={engine}",
        *typing,
        *plugin,
        *_shapes(made, "--minShapes", "--optShapes", "--maxShapes"),
        "--skipInference",
    )


def _loaded(library: Path | None, serialize: bool) -> list[str]:
    if library is None:
        return []
    return ["--versionCompatible"] if serialize else [f"--dynamicPlugins={library}"]


def _shapes(made: Sequence[Profile], *flags: str) -> list[str]:
    """Shapes as trtexec has them: x:1x3x8,y:1x8."""
    if not made:
        return []
    fields = ("least", "usual", "most") if len(flags) == 3 else ("usual",)
    return [
        f"{flag}=" + ",".join(f"{_name(p.name)}:{_sizes(getattr(p, field))}" for p in made)
        for flag, field in zip(flags, fields, strict=True)
    ]


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _name(name: str) -> str:
    """An input's name; trtexec takes single quotes around one with its separators."""
    return f"'{name}'" if set(name) & set(":,") else name


def _polygraphy(
    model: str, engine: str, library: Path | None, made: Sequence[Profile], precisions: Sequence[str]
) -> tuple[str, ...]:
    command = ["polygraphy"]
    if library:
        loading = f"import tensorrt; tensorrt.get_plugin_registry().load_library({str(library)!r})"
        command = ["python", "-c", f"{loading}; from polygraphy.tools import main; main()"]
    command += ["run", model, "--trt", *([f"--{p}" for p in precisions] or ["--strongly-typed"])]
    if made:
        for flag, field in (("min", "least"), ("opt", "usual"), ("max", "most")):
            shapes = [f"{p.name}:[{','.join(map(str, getattr(p, field)))}]" for p in made]
            command += [f"--trt-{flag}-shapes", *shapes]
    return (*command, "--save-engine", engine)
