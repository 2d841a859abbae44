"""A picture of a `TorchParityReport`: the error of each norm, and how far the model has drifted there."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_onnx import files
from rmsnorm_onnx.comparison import Difference, NormComparison, TorchParityReport
from rmsnorm_onnx.errors import MissingDependencyError, UsageError

EXTENSIONS = ("png", "svg", "pdf")
"""What a plot is written as, by its name's extension."""

_TICKS = 48  # more names than this cannot be read
_LABEL = 44
_STEPS = (1.0, 2.0, 5.0)  # labelled in each decade
# Colours that stay apart for colour-blind readers; rings, so that points in one place are all seen.
_TORCH: Mapping[str, Any] = {"color": "#d55e00", "marker": "o", "size": 10.0}
_RUNTIME: Mapping[str, Any] = {"color": "#0072b2", "marker": "s", "size": 4.5}
_BETWEEN: Mapping[str, Any] = {"color": "#009e73", "marker": "^", "size": 6.0}


def check(path: str | os.PathLike[str]) -> None:
    """Check that `draw` could write there, before the work that comes first is paid for.

    Raises:
        UsageError: the extension is none of `EXTENSIONS`, or nothing can be written there.
        MissingDependencyError: matplotlib is not installed.
    """
    files.output_file(path)
    extension = Path(path).suffix[1:].lower()
    if extension not in EXTENSIONS:
        known = ", ".join(f".{e}" for e in EXTENSIONS)
        raise UsageError(f"cannot plot to {files.shown(path)}: its extension must be one of {known}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "the plot", "rmsnorm_onnx[plot]") from error


def draw(report: TorchParityReport, path: str | os.PathLike[str]) -> None:
    """Draw the norms of a report in the order of the graph, and write the picture whole or not at all.

    Above, in ulp: PyTorch's and the runtime's error, each on its own x, and what is allowed. Below, relative (rms): how
    far y lies from the float64 run of the module on each side, and how far the two sides lie apart. Both axes are
    logarithmic; an error of zero has no point, and an infinite one a cross above the others.

    Raises:
        UsageError: there is no norm to draw, or `check` would raise one.
        MissingDependencyError: matplotlib is not installed.
    """
    check(path)
    if not report.norms:
        raise UsageError(f"cannot plot to {files.shown(path)}: there is no norm to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(report.norms)
    figure = Figure(figsize=(min(max(7.0, 0.32 * count + 2.5), 24.0), 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_errors(above, report.norms)
    _draw_drift(below, report.norms)
    _label(below, report.norms)
    above.set_title("each norm, against a float64 reference on its own x", fontsize=10, loc="left")
    below.set_title("the model up to each norm, against a float64 run", fontsize=10, loc="left")
    target = files.output_file(path)
    try:
        with files.replacing(target) as temporary:
            figure.savefig(temporary, format=Path(path).suffix[1:].lower(), dpi=150)
    except OSError as error:
        raise UsageError(f"cannot write {files.shown(path)}: {files.words(error)}") from error


def _draw_errors(axes: Any, norms: Sequence[NormComparison]) -> None:
    places = range(len(norms))
    allowed = [n.tolerance if math.isfinite(n.tolerance) else math.nan for n in norms]
    axes.step(places, allowed, where="mid", color="0.45", linestyle="--", label="allowed")
    _series(axes, [n.torch_ulp for n in norms], "PyTorch, on its x", **_TORCH)
    _series(axes, [n.runtime_ulp for n in norms], "runtime, on its x", **_RUNTIME)
    sides = [(i, u, within) for i, n in enumerate(norms) for u, within in _sides(n) if u is not None]
    top = 10 * max([1.0, *(u for _, u, _ in sides if math.isfinite(u)), *(a for a in allowed if a == a)])
    beyond = [(i, min(u, top)) for i, u, within in sides if within is False]
    if beyond:
        at, size = zip(*beyond, strict=True)
        axes.plot(at, size, "x", color="#b00020", markersize=11, markeredgewidth=2, label="beyond its bound")
    _finish(axes, "worst error of y (ulp)")


def _sides(norm: NormComparison) -> tuple[tuple[float | None, bool | None], ...]:
    return (norm.torch_ulp, norm.torch_within), (norm.runtime_ulp, norm.runtime_within)


def _draw_drift(axes: Any, norms: Sequence[NormComparison]) -> None:
    _series(axes, [_rms(n.torch_drift) for n in norms], "PyTorch from float64", **_TORCH)
    _series(axes, [_rms(n.runtime_drift) for n in norms], "runtime from float64", **_RUNTIME)
    alone = any(n.how == "alone" for n in norms)
    label = "runtime from PyTorch" + (", on the same x" if alone else "")
    _series(axes, [_rms(n.y_difference) for n in norms], label, **_BETWEEN)
    _finish(axes, "drift of y (relative, rms)")


def _rms(value: Difference | None) -> float | None:
    return None if value is None else value.rms


def _series(axes: Any, values: Sequence[float | None], label: str, *, color: str, marker: str, size: float) -> None:
    """A line with points; nothing where nothing was measured, or nothing is positive and finite."""
    points = [v if v is not None and 0.0 < v < float("inf") else float("nan") for v in values]
    if any(v == v for v in points):
        look = {"color": color, "marker": marker, "markersize": size, "markerfacecolor": "none", "markeredgewidth": 1.4}
        axes.plot(range(len(points)), points, linewidth=1.0, label=label, **look)


def _finish(axes: Any, title: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.autoscale_view()
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 1.5)
    axes.yaxis.set_major_locator(LogLocator(subs=_STEPS if high / low < 1e3 else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(title)
    axes.grid(True, which="major", color="0.88")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    else:
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color="0.4")


def _label(axes: Any, norms: Sequence[NormComparison]) -> None:
    step = -(-len(norms) // _TICKS)
    labels = _short([n.label for n in norms])
    axes.set_xticks(range(0, len(norms), step), labels[::step], rotation=60, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", labelsize=8)


def _short(labels: Sequence[str]) -> list[str]:
    """Names without the modules that all of them are in, and not endless."""
    parts = [label.split(".") for label in labels]
    shared = 0
    while len(parts) > 1 and len({tuple(p[: shared + 1]) for p in parts}) == 1 and min(map(len, parts)) > shared + 1:
        shared += 1
    names = [".".join(p[shared:]) for p in parts]
    return [name if len(name) <= _LABEL else f"…{name[1 - _LABEL :]}" for name in names]
