"""A picture of what `measure.py` timed: time over a copy's, by the size of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def drawn_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that have a place in the picture: those in bfloat16 with times over a copy's."""
    return [row for row in rows if row["type"] == "bfloat16" and row.get("over_copy")]


def draw(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    """Draw `drawn_rows` to a PNG or SVG.

    Raises:
        ImportError: matplotlib is not here.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    names = dict.fromkeys(name for row in rows for name in row["over_copy"] if name != "copy")
    for name in names:
        points = [(row["d"], row["over_copy"][name]) for row in rows if name in row["over_copy"]]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == "ours" else 1)
    goals = [(row["d"], row["goal"]) for row in rows if row.get("goal") is not None]
    if goals:
        axes.plot(*zip(*goals, strict=True), linestyle=":", color="grey", label="goal")
    axes.set(xscale="log", xlabel="elements of a row", ylabel="time over a copy of the same bytes")
    axes.set_xscale("log", base=2)
    axes.set_title(f"RMSNorm in bfloat16 on {device}")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
