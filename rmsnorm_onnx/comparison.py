"""The report of a file beside its PyTorch model: each norm, each output, as text and JSON."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.rounding import spacing
from rmsnorm_onnx.spec import RMSNormSpec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

VERSION = 1
"""Version of the report's JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor lies from another.

    Attributes:
        relative: max |a - b| / max |b|.
        rms: sqrt(mean((a - b)^2) / mean(b^2)).
    """

    relative: float
    rms: float


def difference(value: np.ndarray, reference: np.ndarray) -> Difference | None:
    """The relative error of a tensor, as a whole; None where the shapes differ.

    Equal infinities are no difference; a NaN, and any other infinity, is an infinite one. Against a reference of zeros
    every difference is infinite.

    >>> difference(np.array([1.0, 3.0]), np.array([1.0, 4.0]))
    Difference(relative=0.25, rms=0.24253562503633297)
    """
    if value.shape != reference.shape:
        return None
    a, b = value.astype(np.float64), reference.astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error)
    size = np.where(np.isfinite(b), np.abs(b), 0.0)
    return Difference(
        _over(float(np.max(error, initial=0.0)), float(np.max(size, initial=0.0))),
        _over(float(np.linalg.norm(error)), float(np.linalg.norm(size))),
    )


def _over(error: float, size: float) -> float:
    return 0.0 if error == 0.0 else error / size if size else np.inf


def ulp_of_largest(value: np.ndarray, reference: np.ndarray) -> float | None:
    """max |a - b| over the spacing of a's type at max |b|; None where a is of no float type, or the shapes differ.

    An output crosses zero, where its own spacing says nothing of the computation that led there.
    """
    apart = difference(value, reference)
    name = value.dtype.name
    if apart is None or name not in dtypes.FLOAT_TYPES:
        return None
    largest = float(np.max(np.abs(reference[np.isfinite(reference)]), initial=0.0))
    if not np.isfinite(apart.relative):
        return np.inf
    return apart.relative * largest / float(spacing(largest, name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NormComparison:
    """One norm in PyTorch and in the runtime.

    Attributes:
        name: The root node's name in the file, or its output's.
        scope: Where it stands, as in `Match`.
        module: The PyTorch module; None where the file does not tell.
        spec: What both are held to: the file's.
        dtype: x's type in the file.
        tolerance: The ulps that `tolerance` grants the spec; for information, the ratios decide.
        gain: "equal", "rounded", "differs", "none" or "unknown": the file's gain beside the module's, bit for bit.
        how: How the runtime's ulps were measured: "in place" in a run of the whole file; "own x" by the norm alone on
            the x of that run, because the norm had read it before it was rounded; "alone" on PyTorch's x; or None.
        torch_ulp: Worst distance of PyTorch's y from the reference on PyTorch's own x.
        torch_ratio: Its worst error over the bound.
        runtime_ulp: Worst distance of the runtime's y from the reference on the runtime's own x.
        runtime_ratio: Its worst error over the bound.
        x_difference: The runtime's x from PyTorch's; None for a norm that ran alone.
        y_difference: The runtime's y from PyTorch's.
        torch_drift: PyTorch's y from that of the float64 run of the whole module.
        runtime_drift: The runtime's y from the same; None for a norm that ran alone.
        faults: What is wrong, each one sentence that names the norm.
        unrun: Why a side was not measured, each one sentence.
        notes: What a reader should know, each one sentence.
    """

    name: str
    scope: str
    module: str | None
    spec: RMSNormSpec
    dtype: str
    tolerance: float
    gain: str
    how: str | None = None
    torch_ulp: float | None = None
    torch_ratio: float | None = None
    runtime_ulp: float | None = None
    runtime_ratio: float | None = None
    x_difference: Difference | None = None
    y_difference: Difference | None = None
    torch_drift: Difference | None = None
    runtime_drift: Difference | None = None
    faults: tuple[str, ...] = ()
    unrun: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What a reader knows it by: its module, else its node."""
        return self.module or self.name

    @property
    def torch_within(self) -> bool | None:
        """Whether PyTorch's y lies within the bound; None where it was not measured."""
        return None if self.torch_ratio is None else self.torch_ratio <= 1.0

    @property
    def runtime_within(self) -> bool | None:
        """Whether the runtime's y lies within the bound; None where it was not measured."""
        return None if self.runtime_ratio is None else self.runtime_ratio <= 1.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it: both sides within bounds, gain and epsilon the module's, no call lost."""
        return not self.faults and self.torch_within is not False and self.runtime_within is not False

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON-ready data; every key is always there."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("x_difference", "y_difference", "torch_drift", "runtime_drift"):
            data[name] = _plain(data[name])
        lists = {name: list(getattr(self, name)) for name in ("faults", "unrun", "notes")}
        within = {"torch_within": self.torch_within, "runtime_within": self.runtime_within}
        return {**data, "spec": self.spec.to_json(), **lists, **within, "ok": self.ok}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputComparison:
    """One output of the model in PyTorch's type and in the runtime, against the float64 run of the module.

    Ulps are those of each side's own type. An output of another type than float is compared with PyTorch's alone.

    Attributes:
        name: Its name in the file.
        dtype: Its type in the file; PyTorch's where the file did not run.
        torch_ulp: PyTorch's worst error, in ulps at the output's largest value.
        torch_error: PyTorch's error relative to the whole output.
        runtime_ulp: The runtime's worst error, likewise.
        runtime_error: The runtime's.
        difference: The runtime's from PyTorch's.
        nonfinite: How many elements are NaN or infinite in the runtime where the float64 run's are finite (PyTorch's,
            if there is no float64 run).
        allowed_ulp: The error that the runtime's output may have, as `rmsnorm_onnx.outputs` derives it; None where it
            was not judged.
        faults: What is wrong with the runtime's output, each one sentence.
        unrun: Why something was not measured, each one sentence.
    """

    name: str
    dtype: str
    torch_ulp: float | None = None
    torch_error: Difference | None = None
    runtime_ulp: float | None = None
    runtime_error: Difference | None = None
    difference: Difference | None = None
    nonfinite: int = 0
    allowed_ulp: float | None = None
    faults: tuple[str, ...] = ()
    unrun: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether both sides were measured."""
        if self.dtype and self.dtype not in dtypes.FLOAT_TYPES:
            return self.difference is not None
        return self.torch_error is not None and self.runtime_error is not None

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON-ready data; every key is always there."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("torch_error", "runtime_error", "difference"):
            data[name] = _plain(data[name])
        return {**data, "faults": list(self.faults), "unrun": list(self.unrun)}


def _plain(value: Difference | None) -> dict[str, float] | None:
    return None if value is None else dataclasses.asdict(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchParityReport:
    """A file beside the PyTorch model that it was exported from.

    Attributes:
        norms: In the order of the graph.
        outputs: In the order of the graph.
        whole: Whether the whole file ran; else each norm ran alone, on PyTorch's x.
        faults: What is wrong with the file as a whole, each one sentence: a norm that it lacks, no norm at all, another
            number of outputs.
        unrun: Why the whole file, or the float64 run of the module, did not run, each one sentence.
        notes: What a reader should know, each one sentence.
    """

    norms: tuple[NormComparison, ...]
    outputs: tuple[OutputComparison, ...]
    whole: bool
    faults: tuple[str, ...] = ()
    unrun: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with any norm or output, as far as it was measured; `unmeasured` has the rest."""
        wrong = self.faults or any(output.faults for output in self.outputs)
        return not wrong and all(norm.ok for norm in self.norms)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The norms and outputs of which a side was not measured, by name."""
        norms = [n.label for n in self.norms if n.torch_within is None or n.runtime_within is None]
        return (*norms, *(output.name for output in self.outputs if not output.measured))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data, with its version."""
        counts = {
            "within": sum(norm.ok and norm.runtime_within is True for norm in self.norms),
            "beyond": sum(not norm.ok for norm in self.norms),
            "unmeasured": list(self.unmeasured),
        }
        lists = {name: list(getattr(self, name)) for name in ("faults", "unrun", "notes")}
        sides = {"norms": [n.to_json() for n in self.norms], "outputs": [o.to_json() for o in self.outputs]}
        return {
            "version": VERSION,
            "kind": "torch-parity",
            "ok": self.ok,
            "whole": self.whole,
            **counts,
            **lists,
            **sides,
        }


def print_report(report: TorchParityReport, console: Console) -> None:
    """Print the norms and the outputs as tables, what was not measured with its reasons, and a closing line."""
    _print_norms(report, console)
    _print_outputs(report, console)
    faults = [*report.faults, *(line for norm in report.norms for line in norm.faults)]
    faults += [line for output in report.outputs for line in output.faults]
    unrun = [*report.unrun, *(line for norm in report.norms for line in norm.unrun)]
    unrun += [line for output in report.outputs for line in output.unrun]
    notes = [*report.notes, *(line for norm in report.norms for line in norm.notes)]
    for title, lines in (("wrong", faults), ("not measured", unrun), ("notes", notes)):
        if lines:
            console.print(f"\n{title}:", style="bold", markup=False)
        for line, count in collections.Counter(lines).items():
            console.print(f"  {line}" + (f" ({count} times)" if count > 1 else ""), markup=False, highlight=False)
    data = report.to_json()
    line = f"\n{data['within']} within, {data['beyond']} beyond, {len(report.unmeasured)} not measured on both sides"
    wrong = len(report.faults) + sum(bool(output.faults) for output in report.outputs)
    line += f"; {wrong} wrong beside the norms" if wrong else ""
    console.print(line, style="bold", markup=False, highlight=False)


def _print_norms(report: TorchParityReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ("norm", "type", "PyTorch ulp", "runtime ulp", "allowed", "x apart", "y apart", "PyTorch drift")
    for column in (*columns, "runtime drift", ""):
        table.add_column(column, overflow="fold")
    for norm in report.norms:
        parts = [norm.x_difference, norm.y_difference, norm.torch_drift, norm.runtime_drift]
        numbers = [norm.torch_ulp, norm.runtime_ulp, norm.tolerance, *map(_rms, parts)]
        table.add_row(Text(norm.label), Text(norm.dtype), *map(_cell, numbers), _verdict(norm))
    if report.norms:
        console.print(table)


def _verdict(norm: NormComparison) -> Text:
    from rich.text import Text

    if norm.gain == "differs":
        return Text("another gain", "bold red")
    sides = {"PyTorch": norm.torch_within, "runtime": norm.runtime_within}
    beyond = [side for side, within in sides.items() if within is False]
    missing = [side for side, within in sides.items() if within is None]
    if beyond:
        return Text(f"{' and '.join(beyond)} beyond", "bold red")
    alone = " alone" if norm.how == "alone" else ""
    return Text(f"no {' or '.join(missing)}", "yellow") if missing else Text(f"within{alone}", "green")


def _print_outputs(report: TorchParityReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ("output", "type", "PyTorch ulp", "runtime ulp", "allowed", "PyTorch max", "runtime max", "PyTorch rms")
    for column in (*columns, "runtime rms", "apart rms", ""):
        table.add_column(column, overflow="fold")
    for output in report.outputs:
        a, b, c = output.torch_error, output.runtime_error, output.difference
        largest = [None if side is None else side.relative for side in (a, b)]
        numbers = [output.torch_ulp, output.runtime_ulp, output.allowed_ulp, *largest, _rms(a), _rms(b), _rms(c)]
        table.add_row(Text(output.name), Text(output.dtype), *map(_cell, numbers), _output_verdict(output))
    if report.outputs:
        console.print("\nagainst a float64 run of the module, relative to the whole output:", style="bold")
        console.print(table)


def _output_verdict(output: OutputComparison) -> Text:
    from rich.text import Text

    if output.nonfinite:
        return Text(f"{output.nonfinite} not finite", "bold red")
    if output.faults:
        return Text("wrong", "bold red")
    return Text("within", "green") if output.allowed_ulp is not None else Text("")


def _rms(value: Difference | None) -> float | None:
    return None if value is None else value.rms


def _cell(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"
