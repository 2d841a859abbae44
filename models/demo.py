"""`python -m rmsnorm_onnx.models.demo`: five tiny models and a real file, from PyTorch to a runtime, in one table.

Each tiny model is exported in three types at two opsets, its norms are found, compared with the modules, rewritten,
run one by one against the float64 reference, and the whole file is checked, loaded and run. Then the same is done to a
trained file from PyPI; without a network one line says that it was left out. The table goes to stdout, progress to
stderr, the files and report.json to the output folder.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rmsnorm_onnx.errors import RMSNormError
from rmsnorm_onnx.models import tiny
from rmsnorm_onnx.models.measure import Row, measure_tiny
from rmsnorm_onnx.models.real_file import PARTS, UnavailableError, fetch, measure_real
from rmsnorm_onnx.report import dumps

if TYPE_CHECKING:
    from rich.console import Console

MODELS = ("llama", "qwen3", "gemma3", "mlp", "t5-encoder")
"""The tiny models that are shown."""

OPSETS = (18, 23)
"""The oldest that torch.onnx writes, and the first with RMSNormalization."""

VERSION = 1
"""Version of report.json."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration.

    Returns:
        0 when every norm of every model was found as it is and is within its bound, and every file that onnxruntime
        has kernels for loads; 1 otherwise; 4 when a package is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m rmsnorm_onnx.models.demo", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/demo"), help="folder (default: %(default)s)")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one; may be repeated")
    parser.add_argument("--dtype", choices=tiny.DTYPES, action="append", help="only this one; may be repeated")
    parser.add_argument("--opset", type=int, action="append", help=f"default: {' and '.join(map(str, OPSETS))}")
    parser.add_argument("--no-real-file", action="store_true", help="leave the trained file out")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except (RMSNormError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, RMSNormError) else 1


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    started = time.monotonic()
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    cases = itertools.product(options.model or MODELS, options.dtype or tiny.DTYPES, options.opset or OPSETS)
    rows = list(_tiny_rows(list(cases), folder))
    absent = "left out, as asked" if options.no_real_file else ""
    if not absent:
        try:
            rows += _real_rows(folder)
        except UnavailableError as error:
            absent = f"left out: {error}"
    # Not on a terminal, the table is as wide as it needs to be: a log has no edge to fold at.
    console = Console(width=None if sys.stdout.isatty() else 200)
    print_rows(rows, console)
    if absent:
        console.print(f"real file: {absent}", markup=False, highlight=False, soft_wrap=True)
    ok = all(row.ok for row in rows)
    report = {"version": VERSION, "kind": "demo", "ok": ok, "real_file": absent or "measured"}
    _write(folder / "report.json", dumps({**report, "rows": [row.to_json() for row in rows]}))
    verdict = "all as in PyTorch" if ok else "NOT all as in PyTorch"
    elapsed = time.monotonic() - started
    console.print(
        f"{len(rows)} files, {verdict}, in {elapsed:.0f} s; files and report.json in {folder}", highlight=False
    )
    return 0 if ok else 1


def _tiny_rows(cases: Sequence[tuple[str, str, int]], folder: Path) -> Iterator[Row]:
    for i, (name, dtype, opset) in enumerate(cases, 1):
        print(f"[{i}/{len(cases)}] {name} {dtype} opset {opset}", file=sys.stderr, flush=True)
        yield measure_tiny(tiny.build(name, dtype), opset, folder)


def _real_rows(folder: Path) -> list[Row]:
    print("fetching a trained file (68.5 MB, once)", file=sys.stderr, flush=True)
    paths = fetch()
    rows = []
    for part in PARTS:
        print(f"flan-t5-small {part}", file=sys.stderr, flush=True)
        rows.append(measure_real(part, paths, folder))
    return rows


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print one line for each model, then what the norms are, and every remark once."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    right = {"opset", "norms in PyTorch", "found", "declined", "specs equal", "ulp, PyTorch", "worst ulp per norm"}
    heads = ("model", "opset", "dtype", "norms in PyTorch", "found", "declined", "specs equal", "form", "ulp, PyTorch")
    for head in (*heads, "worst ulp per norm", "whole output off by", "loads, or why not"):
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    for row in rows:
        equal = row.expected - len(row.differences)
        good = row.found == row.expected
        output = "" if row.output is None else f"{row.output:.1e}"
        table.add_row(
            Text(row.model),
            str(row.opset),
            row.dtype,
            str(row.expected),
            Text(str(row.found), style="green" if good else "bold red"),
            str(row.declined),
            Text(f"{equal}/{row.expected}", style="bold red" if row.differences else "green"),
            ", ".join(row.forms),
            "" if row.torch_ulp is None else f"{row.torch_ulp:.2f}",
            Text(_ulp(row), style="green" if row.within else "bold red"),
            output if row.allowed is None else f"{output} of {row.allowed:.1e}",
            Text("loads" if row.loads else _shortened(row.why), style="green" if row.loads else "yellow"),
        )
    console.print(table)
    _print_remarks(rows, console)


def _ulp(row: Row) -> str:
    number = "none run" if math.isnan(row.ulp) else f"{row.ulp:.2f} of {row.tolerance:.0f}"
    if row.within:
        return number
    return f"{number}: beyond its bound" if any(site["within"] is False for site in row.sites) else f"{number}; not all"


def _shortened(why: str, limit: int = 3) -> str:
    """The first few of a list of kernels; report.json has all of them."""
    first, *others = why.split(", ")
    shown = [first, *others[: limit - 1]]
    left = len(others) + 1 - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _print_remarks(rows: Sequence[Row], console: Console) -> None:
    """What the norms are, by model and type; differences and notes; and how to read the table."""

    def line(text: str) -> None:
        console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)

    console.print("\nnorms, as found and as their modules have them:", style="bold")
    for text in dict.fromkeys(f"{row.model} {row.dtype}: {'; '.join(row.specs)}" for row in rows):
        line(text)
    console.print("\nnotes:", style="bold")
    for row in rows:
        for text in (*row.differences, *row.notes):
            line(f"{row.model} {row.dtype} opset {row.opset}: {text}")
    for route, names in _routes(rows).items():
        line(f"{route}: {', '.join(names)}")
    line("worst ulp: each norm alone in onnxruntime against float64, on rows of zeros, huge, tiny and near epsilon")
    if any(not row.loads for row in rows):
        line("where onnxruntime lacks a kernel for some operator of a model, its norms are still run one by one")
    console.print()


def _routes(rows: Sequence[Row]) -> dict[str, list[str]]:
    routes: dict[str, list[str]] = {}
    for row in rows:
        names = routes.setdefault(row.route, [])
        if row.model not in names:
            names.append(row.model)
    return routes


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


if __name__ == "__main__":
    sys.exit(main())
