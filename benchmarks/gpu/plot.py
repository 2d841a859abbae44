"""A picture of what `measure.py` timed: time over a copy's, by the size of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    """Draw the rows in bfloat16 to a PNG or SVG.

    Raises:
        ImportError: matplotlib is not here.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["type"] == "bfloat16" and "over_copy" in row]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    names = dict.fromkeys(name for row in rows for name in row["over_copy"] if name != "copy")
    for name in names:
        points = [(row["d"], row["over_copy"][name]) for row in rows if name in row["over_copy"]]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == "ours" else 1)
    goals = [(row["d"], row["goal"]) for row in rows if row["goal"] is not None]
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
