"""What runs each norm of an engine, as text: of one build, or of two beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rmsnorm_onnx.plugin.engine import Engine
from rmsnorm_onnx.plugin.layers import NormLayers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES = {"plugin": "green", "fused": "green", "loose": "yellow", "gone": "yellow"}


def print_engine(engine: Engine, console: Console) -> None:
    """Print one build: a line for each norm, the notes, and where the engine is."""
    _print_table(console, [engine], ["run by"])
    _print_notes(console, engine.notes)
    console.print(f"{_words(engine)}: {engine.path}", style="bold", markup=False, highlight=False)


def print_comparison(pair: Sequence[Engine], console: Console) -> None:
    """Print two builds of one model, with the plugin and without."""
    _print_table(console, pair, ["with the plugin", "without"])
    _print_notes(console, dict.fromkeys(note for engine in pair for note in engine.notes))
    for engine, title in zip(pair, ("with the plugin", "without"), strict=True):
        console.print(f"{title}: {_words(engine)}", style="bold", markup=False, highlight=False)


def _print_table(console: Console, engines: Sequence[Engine], titles: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not engines[0].norms:
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ["form", *titles] if len(engines) == 1 else list(titles)
    for column in ("norm", "module", *columns):
        table.add_column(column, overflow="fold")
    others = [{norm.name: norm for norm in engine.norms} for engine in engines[1:]]
    for first in engines[0].norms:
        form = [Text(first.form)] if len(engines) == 1 else []
        cells = [_cell(norm) for norm in (first, *(other.get(first.name) for other in others))]
        table.add_row(Text(first.name), Text(first.module or ""), *form, *cells)
    shown = {norm.name for norm in engines[0].norms}
    for second in (norm for other in others for norm in other.values() if norm.name not in shown):
        table.add_row(Text(second.name), Text(second.module or ""), Text(""), _cell(second))
    console.print(table)


def _cell(norm: NormLayers | None) -> Text:
    from rich.text import Text

    return Text("" if norm is None else str(norm), style="" if norm is None else _STYLES[norm.kind])


def _print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _words(engine: Engine) -> str:
    target = f", for compute capability {engine.capability / 10}" if engine.capability else ""
    return f"{engine.layers} layers, {engine.size} bytes, by {engine.runtime} {engine.runtime_version}{target}"
