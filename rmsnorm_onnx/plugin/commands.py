"""The command `rmsnorm-onnx plugin`: it parses, calls the functions of `rmsnorm_onnx.plugin`, and prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Print = Callable[[argparse.Namespace, dict[str, Any], "Callable[[Console], None]"], None]
"""Prints a result: as JSON, or as text by the function."""

Command = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""Adds one command to a group: the group, its name, what it runs, and what it does."""


def add(commands: Any, command: Command, show: Print) -> None:
    """Add the group `plugin` and its commands.

    Args:
        commands: The command line's group of commands.
        command: Adds a command with the flags that all of them have.
        show: Prints a result.
    """
    text = "find, build and use the TensorRT plugin, and check a model's nodes for it"
    group = commands.add_parser("plugin", help=text, description=f"{text[:1].upper()}{text[1:]}.")
    added = group.add_subparsers(required=True, metavar="COMMAND")
    for one in (_add_path, _add_build, _add_check, _add_trtexec, _add_engine):
        one(added, command, show)


def _add_path(added: Any, command: Command, show: Print) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from rmsnorm_onnx.plugin import library

        path = library.library_path()
        data = {"version": 1, "kind": "plugin-path", "path": str(path)}
        show(arguments, data, lambda console: console.print(str(path), markup=False, highlight=False))
        return 0

    command(added, "path", run, "print where the plugin's library is")


def _add_build(added: Any, command: Command, show: Print) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from rmsnorm_onnx.plugin import compilation

        built = compilation.build(
            arguments.folder, architectures=arguments.arch, tensorrt_include=arguments.tensorrt_include
        )
        show(
            arguments, built.to_json(), lambda console: console.print(str(built.library), markup=False, highlight=False)
        )
        return 0

    build = command(added, "build", run, "build the plugin's library with CMake and nvcc; no GPU is needed")
    build.add_argument(
        "-o", "--output", dest="folder", metavar="DIR", help="the library's folder (default: your cache)"
    )
    build.add_argument(
        "--arch", nargs="+", default=[], metavar="N", help="compute capabilities, such as 90 (default: 80 to 120)"
    )
    build.add_argument("--tensorrt-include", metavar="DIR", help="the folder of TensorRT's NvInferRuntime.h")


def _add_check(added: Any, command: Command, show: Print) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from rmsnorm_onnx import files, terminal
        from rmsnorm_onnx.plugin import checker, faults

        names = {name: getattr(arguments, name) for name in ("op", "domain", "namespace", "version")}
        report = checker.check(arguments.model, **names)
        if not report.nodes:
            terminal.tell(f"note: no plugin node in {files.shown(arguments.model)}")
        show(arguments, report.to_json(), lambda console: faults.print_report(report, console))
        return 0 if report.ok else 1

    check = command(added, "check", run, "name every fault of a model's plugin nodes, without TensorRT")
    check.add_argument("model", metavar="MODEL", help="an ONNX file")
    check.add_argument("--op", metavar="NAME", help="also check this operator, of another plugin for RMSNorm")
    check.add_argument("--domain", help="the domain of that plugin's nodes")
    check.add_argument("--namespace", help="the namespace that it is registered with")
    check.add_argument("--version", help="the version that it is registered with")


def _add_trtexec(added: Any, command: Command, show: Print) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from rmsnorm_onnx.plugin import commandline

        made = commandline.command_lines(
            arguments.model,
            shapes=_shapes(arguments.shape),
            engine=arguments.engine,
            serialize=arguments.serialize,
            precisions=[name for name in ("fp16", "bf16") if getattr(arguments, name)],
        )
        lines = [*made.lines(), *(f"# {note}" for note in made.notes)]
        show(arguments, made.to_json(), lambda console: _print_lines(console, lines))
        return 0

    trtexec = command(added, "trtexec", run, "print the trtexec and polygraphy lines that build an engine of a model")
    trtexec.add_argument("model", metavar="MODEL", help="an ONNX file")
    trtexec.add_argument(
        "-o", "--engine", metavar="FILE", help="the engine's name in the lines (default: MODEL.engine)"
    )
    _shape_flag(trtexec)
    _serialize_flag(trtexec)
    for name in ("fp16", "bf16"):
        trtexec.add_argument(f"--{name}", action="store_true", help=f"weakly typed with {name}, up to TensorRT 10")


def _add_engine(added: Any, command: Command, show: Print) -> None:
    def run(arguments: argparse.Namespace) -> int:
        from rmsnorm_onnx.errors import UsageError
        from rmsnorm_onnx.plugin import engine, enginetext

        given = {"runtime": arguments.runtime, "capability": arguments.sm, "shapes": _shapes(arguments.shape)}
        if arguments.compare:
            if arguments.output or arguments.without_plugin or arguments.serialize:
                raise UsageError("--compare keeps no engine: leave out -o, --without-plugin and --serialize-plugin")
            pair = engine.compare_engines(arguments.model, **given)
            data = engine.comparison_json(pair)
            show(arguments, data, lambda console: enginetext.print_comparison(pair, console))
            return 0
        if not arguments.output:
            raise UsageError("an engine needs a place: name it with -o, or ask for --compare")
        options = {"without_plugin": arguments.without_plugin, "serialize": arguments.serialize}
        built = engine.build_engine(arguments.model, arguments.output, **given, **options)
        show(arguments, built.to_json(), lambda console: enginetext.print_engine(built, console))
        return 0

    build = command(
        added, "engine", run, "build an engine with the TensorRT that is here, and tell what runs each norm"
    )
    build.add_argument("model", metavar="MODEL", help="an ONNX file")
    build.add_argument("-o", "--output", metavar="FILE", help="where to write the engine")
    build.add_argument(
        "--with",
        dest="runtime",
        choices=("tensorrt", "tensorrt-rtx"),
        help="which TensorRT (default: the first that is installed)",
    )
    build.add_argument("--sm", type=int, metavar="N", help="the compute capability, of tensorrt-rtx (default: 89)")
    _shape_flag(build)
    build.add_argument("--without-plugin", action="store_true", help="rewrite plugin nodes to what TensorRT imports")
    build.add_argument("--compare", action="store_true", help="build with and without the plugin, and keep neither")
    _serialize_flag(build)


def _serialize_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--serialize-plugin", dest="serialize", action="store_true", help="store the plugin's library in the engine"
    )


def _shape_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=SHAPES",
        help="an input's shape, or its least, usual and largest: x=1x3x8,4x3x8,8x3x8; may be repeated",
    )


def _shapes(given: list[str]) -> dict[str, Any]:
    from rmsnorm_onnx.errors import UsageError
    from rmsnorm_onnx.plugin import profiles

    shapes: dict[str, Any] = {}
    for text in given:
        name, parsed = profiles.parse(text)
        if name in shapes:
            raise UsageError(f"--shape is given twice for the input {name!r}; give three shapes at once: MIN,OPT,MAX")
        shapes[name] = parsed
    return shapes


def _print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
