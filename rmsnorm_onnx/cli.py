"""The command line: it parses, calls the functions that everyone imports, prints, and turns errors into exit codes.

Exit codes: 0 done; 1 a check failed, an export failed, stdout took no more, or a candidate was declined under
`--strict`; 2 usage; 3 the input model is unreadable or invalid; 4 an optional dependency or a plugin is missing;
128 + the signal's number (130, 143) when it was interrupted or terminated. At 2, 3 and 4 nothing was written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx import __version__, flags, terminal
from rmsnorm_onnx.errors import RMSNormError, UsageError
from rmsnorm_onnx.plugin import commands as plugin_commands

if TYPE_CHECKING:
    from rich.console import Console

    from rmsnorm_onnx.report import Report

_DONE, _FAILED, _UNEXPECTED = 0, 1, 1
# What is piped into another program is neither folded nor cut.
_PIPE_WIDTH = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; argparse leaves by SystemExit on usage errors and `--help`."""
    terminal.open_streams()
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as leaving:
        if not leaving.code and sys.stdout is not None and not _flushed():
            return _FAILED
        raise
    output = getattr(arguments, "output", None)
    before = _state(output)
    try:
        with terminal.stoppable():
            code: int = arguments.run(arguments)
            return code
    except RMSNormError as error:
        message, code = str(error), error.exit_code
    except terminal.Interrupted as signal:
        nothing = "" if _state(output) != before else "; nothing was written"
        message, code = signal.word + nothing, signal.exit_code
    except Exception as error:
        if arguments.traceback:
            raise
        bug = "a bug: please report it with the output of --traceback"
        message, code = f"unexpected {type(error).__name__}: {error} ({bug})", _UNEXPECTED
    written = f"; {output} was written" if _state(output) != before else ""
    terminal.tell(f"rmsnorm-onnx: {message}{written}")
    return code


def _flushed() -> bool:
    """Whether the help reached stdout; else Python would complain of it when it ends."""
    try:
        terminal.write("")
    except terminal.StdoutError as error:
        terminal.tell(f"rmsnorm-onnx: {error}")
        return False
    return True


def _state(output: str | None) -> tuple[int, ...] | None:
    """What changes when a file is written; asked of the file itself, since an interruption can come at any instant."""
    try:
        status = os.stat(output or "")
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _inspect(arguments: argparse.Namespace) -> int:
    from rmsnorm_onnx import find, modelio, report, runtimes

    with _progress(f"reading {arguments.model}"):
        model = modelio.load(arguments.model)
    with _progress("finding norms"):
        found = report.InspectionReport.of(find.find_rms_norms(model), runtimes.kernel_gaps(model))
    chosen = report.select(found, arguments.only, arguments.skip)
    _check_only(arguments.only, found)
    return _show(chosen, arguments)


def _fuse(arguments: argparse.Namespace) -> int:
    from rmsnorm_onnx import modelio, passes

    if not arguments.dry_run:
        _check_output(arguments.output)
    with _progress(f"rewriting {arguments.model}"):
        model, fused = passes.fuse(
            arguments.model,
            consumer=arguments.consumer,
            form=arguments.form,
            allow_rounding_change=arguments.allow_rounding_change,
            verify=arguments.verify,
            only=arguments.only,
            skip=arguments.skip,
            gain_attribute=arguments.gain_attribute,
            opset=arguments.opset,
        )
    _check_explain(fused, arguments)
    _check_only(arguments.only, fused)
    if not arguments.dry_run and not fused.beyond:
        with _progress(f"writing {arguments.output}"):
            modelio.save(model, arguments.output)
    return _show(fused, arguments)


def _verify(arguments: argparse.Namespace) -> int:
    from rmsnorm_onnx import parity

    if arguments.against == "torch":
        return _verify_torch(arguments)
    for flag, value in (("--dtype", arguments.dtype), ("--plot", arguments.output)):
        if value is not None:
            raise UsageError(f"{flag} goes with --against torch only; leave it out")
    if _names_a_callable(arguments.original):
        raise UsageError(f"{arguments.original} is no ONNX file; add --against torch to compare with a PyTorch module")
    with _progress(f"measuring {arguments.model}"):
        only = arguments.only or None
        measured = parity.verify(arguments.model, arguments.original, seed=arguments.seed or 0, only=only)
    _print(arguments, measured.to_json(), lambda console: parity.print_report(measured, console))
    return _DONE if measured.ok and not (arguments.strict and measured.unrun) else _FAILED


def _names_a_callable(original: str | None) -> bool:
    """Whether it is written as `module:callable` is, and no file bears the name."""
    place, _, name = (original or "").rpartition(":")
    written = bool(place) and name.replace(".", "_").isidentifier() and not place.endswith((".onnx", os.sep))
    return written and not os.path.exists(original or "")


def _verify_torch(arguments: argparse.Namespace) -> int:
    from rmsnorm_onnx import against, comparison, plot
    from rmsnorm_onnx.exporters.source import resolve

    if arguments.original is None:
        raise UsageError("--against torch needs the module after MODEL: module:callable or file.py:callable")
    if arguments.seed is not None:
        raise UsageError("--seed does not go with --against torch: the callable gives the inputs; leave it out")
    if arguments.output is not None:
        plot.check(arguments.output)
        _check_output(arguments.output)
    with _progress(f"building {arguments.original}"):
        module, inputs, *more = resolve(arguments.original)
    keywords = more[0].get("kwargs") if more else None
    with _progress(f"measuring {arguments.model}"):
        measured = against.verify_torch(
            arguments.model, module, inputs, kwargs=keywords, dtype=arguments.dtype, only=arguments.only or None
        )
    if arguments.output is not None and measured.norms:
        plot.draw(measured, arguments.output)
    elif arguments.output is not None:
        terminal.tell(f"rmsnorm-onnx: {arguments.output} was not drawn: there is no norm in the file")
    _print(arguments, measured.to_json(), lambda console: comparison.print_report(measured, console))
    return _DONE if measured.ok and not (arguments.strict and measured.unmeasured) else _FAILED


def _export(arguments: argparse.Namespace) -> int:
    from rmsnorm_onnx import exporters, modelio
    from rmsnorm_onnx.exporters.source import is_checkpoint, resolve

    _check_output(arguments.output)
    given = {
        "opset": arguments.opset,
        "dtype": arguments.dtype,
        "fuse": not arguments.no_fuse,
        "consumer": arguments.consumer,
        "form": arguments.form,
        "route": arguments.route,
    }
    if is_checkpoint(arguments.source):
        with _progress(f"exporting {arguments.source}"):
            exported = exporters.export_transformers(arguments.source, cache=arguments.cache, **given)
    elif arguments.cache:
        raise UsageError("--cache is for the folder of a transformers checkpoint; a module has the inputs that it has")
    else:
        with _progress(f"building {arguments.source}"):
            source, inputs, options = resolve(arguments.source)
        with _progress("exporting"):
            exported = exporters.export(source, inputs, **options, **given)
    if exported.report is not None:
        _check_explain(exported.report, arguments)
    with _progress(f"writing {arguments.output}"):
        modelio.save(exported.model, arguments.output)
    facts = {"opset": exported.opset, "route": exported.route, "notes": list(exported.notes)}
    for line in (exported.route, *exported.notes):
        terminal.tell(line)
    if exported.report is None:
        _print(arguments, {"version": 1, "kind": "export", **facts}, lambda console: None)
        return _DONE
    return _show(exported.report, arguments, {"export": facts})


def _doctor(arguments: argparse.Namespace) -> int:
    from rmsnorm_onnx import runtimes

    with _progress("looking"):
        diagnosis = runtimes.doctor()
    _print(arguments, diagnosis.to_json(), lambda console: runtimes.print_diagnosis(diagnosis, console))
    return _DONE


def _check_only(only: Sequence[str], found: Report) -> None:
    """Refuse patterns that choose no site, before anything is written: most often they are misspelt."""
    from rmsnorm_onnx.site import check_chosen, selected

    if only:
        chosen = [s for s in found.sites if selected(s.name, s.module, only, ())]
        check_chosen(only, [(s.name, s.module) for s in found.sites], len(chosen))


def _check_output(output: str) -> None:
    """Find that an output cannot be written before the work is paid for."""
    from rmsnorm_onnx import modelio

    modelio.check_output(output)
    if sys.stdout is not None and _is_stdout(output):
        raise UsageError(f"cannot write {output}: the report on stdout goes there; name another file")


def _is_stdout(output: str) -> bool:
    try:
        return os.path.samestat(os.stat(output), os.fstat(1))
    except OSError:
        return False


def _check_explain(shown: Report, arguments: argparse.Namespace) -> None:
    """Find that there is nothing to explain before anything is written."""
    from rmsnorm_onnx import report

    if arguments.explain is not None:
        report.explain(shown, arguments.explain)


def _show(shown: Report, arguments: argparse.Namespace, more: dict[str, Any] | None = None) -> int:
    from rmsnorm_onnx import report

    if arguments.explain is not None:
        sites = report.explain(shown, arguments.explain)
        data = {"version": report.VERSION, "kind": "explanation", "sites": [site.to_json() for site in sites]}
        _print(arguments, data, lambda console: report.print_explanation(sites, console))
    else:
        _print(arguments, {**shown.to_json(), **(more or {})}, lambda console: report.print_report(shown, console))
    strict = arguments.strict and (shown.declined or shown.unmeasured)
    return _FAILED if shown.beyond or strict else _DONE


def _print(arguments: argparse.Namespace, data: dict[str, Any], text: Callable[[Console], None]) -> None:
    from rich.console import Console

    from rmsnorm_onnx import report

    if arguments.json:
        terminal.write(report.dumps(data) + "\n")
    else:
        # Not to stdout itself: there rich decides what a broken pipe means.
        shown, colour = io.StringIO(), sys.stdout is not None and sys.stdout.isatty()
        width = None if colour else _PIPE_WIDTH
        text(Console(file=shown, force_terminal=colour or None, width=width, highlight=False))
        terminal.write(shown.getvalue())


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[None]:
    """Show what is being done, on stderr, while it is done and only on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(doing)):
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rmsnorm-onnx",
        description="Find every RMSNorm of an ONNX model and rewrite it to one operator.",
        epilog="exit codes: 0 done, 1 a check failed, 2 usage, 3 an invalid model, 4 a missing dependency, "
        "128 and a signal's number: interrupted",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = _command(commands, "inspect", _inspect, "list the norms of a model, and what was declined and why")
    inspect.add_argument("model", metavar="MODEL", help="an ONNX file")
    flags.add_site(inspect)

    fuse = _command(commands, "fuse", _fuse, "rewrite each norm to one operator")
    fuse.add_argument("model", metavar="MODEL", help="an ONNX file")
    target = fuse.add_mutually_exclusive_group(required=True)
    target.add_argument("-o", "--output", metavar="FILE", help="where to write the result; the input itself is allowed")
    target.add_argument("--dry-run", action="store_true", help="report what would be done and write nothing")
    _form_flags(fuse)
    fuse.add_argument(
        "--gain-attribute", action="store_true", help="keep constant gains in the nodes (forms function and plugin)"
    )
    flags.add_rewrite(fuse)

    expand = _command(commands, "expand", _fuse, "write each norm as plain operators: fuse --form primitive")
    expand.add_argument("model", metavar="MODEL", help="an ONNX file")
    expand.add_argument("-o", "--output", metavar="FILE", required=True, help="where to write the result")
    expand.set_defaults(consumer="any", form="primitive", dry_run=False, gain_attribute=False)
    flags.add_rewrite(expand)

    verify = _command(commands, "verify", _verify, "measure each norm of a model against a float64 reference")
    verify.add_argument("model", metavar="MODEL", help="an ONNX file")
    verify.add_argument(
        "original",
        metavar="ORIGINAL",
        nargs="?",
        help="the model that it was made from; with --against torch the module, as module:callable or file.py:callable",
    )
    verify.add_argument(
        "--against", choices=("onnx", "torch"), default="onnx", help="what the original is (default: onnx)"
    )
    verify.add_argument("--dtype", metavar="TYPE", help="convert the module to float32, float16 or bfloat16 first")
    verify.add_argument(
        "--plot", dest="output", metavar="FILE", help="draw the error by layer, as .png, .svg or .pdf (--against torch)"
    )
    verify.add_argument("--seed", type=int, help="of the inputs (default: 0)")
    verify.add_argument("--strict", action="store_true", help="exit 1 if a norm could not be run")
    flags.add_pattern(verify, "--only", "take sites that match")

    export = _command(commands, "export", _export, "export a PyTorch module, each norm as one operator")
    export.add_argument(
        "source",
        metavar="SOURCE",
        help="module:callable or file.py:callable, giving (module, args[, options]), or a checkpoint's folder",
    )
    export.add_argument("-o", "--output", metavar="FILE", required=True, help="where to write the model")
    export.add_argument("--opset", type=int, help="the opset to write, 13 or newer (default: 18)")
    export.add_argument("--dtype", metavar="TYPE", help="convert to float32, float16 or bfloat16 first")
    export.add_argument(
        "--cache", action="store_true", help="of a checkpoint: keys and values of earlier tokens as inputs and outputs"
    )
    export.add_argument(
        "--route", metavar="ROUTE", help="dynamo or torchscript alone (default: the better one, the other if it fails)"
    )
    export.add_argument("--no-fuse", action="store_true", help="leave the norms as plain operators")
    _form_flags(export)
    flags.add_report(export)

    _command(commands, "doctor", _doctor, "show which packages are here, and which forms run in which types")
    plugin_commands.add(commands, _command, _print)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[:1].upper()}{text[1:]}."
    )
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    command.add_argument("--traceback", action="store_true", help="show where an unexpected error was raised")
    return command


def _form_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--for",
        dest="consumer",
        metavar="CONSUMER",
        default="any",
        help="the runtime that will load it: any, onnxruntime, onnxruntime-cuda, onnxruntime-tensorrt, "
        "onnxruntime-web, tensorrt[:version], tensorrt-rtx, tensorrt-plugin, openvino, onnx-reference (default: any)",
    )
    command.add_argument(
        "--form",
        metavar="FORM",
        help="write this form instead of the one chosen for the consumer: function, onnx, contrib, plugin, primitive",
    )


if __name__ == "__main__":
    sys.exit(main())
