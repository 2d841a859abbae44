"""Which routes lead to an opset, in which order, and what is said of those that fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import onnx_ir as ir

from rmsnorm_onnx import opsets, passes
from rmsnorm_onnx.errors import ExportError, RMSNormError, UsageError
from rmsnorm_onnx.exporters import dynamo, torchscript
from rmsnorm_onnx.exporters.job import Job, Routed
from rmsnorm_onnx.exporters.steps import step

if TYPE_CHECKING:
    from rmsnorm_onnx.exporters.pairing import PairedNorm
    from rmsnorm_onnx.report import FusionReport

OLDEST_OPSET = 13
"""The oldest opset that `export` writes."""

ROUTES = ("dynamo", "torchscript")
"""The routes by the names that `export` takes."""


_VALUES = ("data-dependent", "fake tensor in the exported program constant's list", "decides by values")
"""What is said of torch.export where Python reads the inputs' values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What is to become of the norms, and which route is forced.

    Attributes:
        fuse: Whether norms become one operator.
        consumer: As `rmsnorm_onnx.fuse` takes it.
        form: As `rmsnorm_onnx.fuse` takes it.
        route: The one route to take; None tries several.
        pair: A model's norms beside the module's, and what differs, each one sentence.
    """

    fuse: bool
    consumer: str
    form: str | None
    route: str | None = None
    pair: Callable[[ir.Model, FusionReport | None], tuple[tuple[PairedNorm, ...], list[str]]] = lambda *_: ((), [])


@dataclasses.dataclass(frozen=True)
class Made:
    """A finished model.

    Attributes:
        model: The model.
        route: Its route in words.
        report: What became of the norms; None where nothing was to.
        notes: Each one sentence.
        baked: How many dimensions the tracer baked in.
        paired: Its norms beside the module's.
        remarks: What differs between them, each one sentence.
    """

    model: ir.Model
    route: str
    report: FusionReport | None
    notes: tuple[str, ...]
    baked: int = 0
    paired: tuple[PairedNorm, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def flaws(self) -> tuple[int, int]:
        """What another way may do better: baked dimensions, then norms."""
        return self.baked, len(self.remarks)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to an opset: a route, the opset it writes, and the conversion that may follow."""

    name: str
    words: str
    export: Callable[[Job, int], Routed]
    opset: int


def ways(job: Job, route: str | None) -> list[Way]:
    """The ways to a job's opset, the better first.

    From opset 18 on the symbolic trace comes first: its shapes are proven. Below, TorchScript writes the opset itself.
    """
    symbolic = Way("dynamo", dynamo.ROUTE, dynamo.export_program, max(job.opset, dynamo.OLDEST_OPSET))
    traced = Way("torchscript", torchscript.ROUTE, torchscript.export_traced, min(job.opset, torchscript.NEWEST_OPSET))
    if route is not None:
        return [way for way in (symbolic, traced) if way.name == route]
    if job.module is None:
        return [symbolic]
    return [symbolic, traced] if job.opset >= dynamo.OLDEST_OPSET else [traced, symbolic]


def run(job: Job, goal: Goal) -> Made:
    """Take the first way that leads to a whole model.

    Where torch.export finds that values decide what is computed, nothing is traced after it. A trace that holds sizes
    of the example as numbers, or norms that are not found as their modules compute them, is the last resort.

    Raises:
        ExportError: none does; each is named with its step and the exporter's words, the first one first.
        UsageError: a name cannot be used.
    """
    failures: list[tuple[Way, ExportError]] = []
    fallback: Made | None = None
    for way in ways(job, goal.route):
        try:
            made = _take(way, job, goal)
        except ExportError as error:
            failures.append((way, error))
            if way.name == "dynamo" and any(words in str(error) for words in _VALUES):
                break  # a trace would hold what the example's values decide, and compute something else for others
            continue
        if made.flaws == (0, 0):
            return _with_failures(made, failures, fallback)
        fallback = made if fallback is None or made.flaws < fallback.flaws else fallback
    if fallback is not None:
        return _with_failures(fallback, failures, None)
    (_, first), *others = failures
    text = "; ".join([str(first), *(f"{way.name}: {error}" for way, error in others)])
    raise ExportError(text) from (first.__cause__ or first)


def _with_failures(made: Made, failures: list[tuple[Way, ExportError]], passed_over: Made | None) -> Made:
    notes = [f"the route {way.name} failed: {error}" for way, error in failures]
    if passed_over is not None:
        baked = f"the tracer bakes in {passed_over.baked} of the dynamic dimensions"
        notes.append(f"not by {passed_over.route}: {baked if passed_over.baked else passed_over.remarks[0]}")
    return dataclasses.replace(made, notes=(*made.notes, *notes))


def _take(way: Way, job: Job, goal: Goal) -> Made:
    routed = way.export(job, way.opset)
    model, words, report = finish(routed.model, job.opset, goal, way.words)
    paired, remarks = goal.pair(model, report)
    return Made(model, words, report, routed.notes, routed.baked, paired, tuple(remarks))


def finish(model: ir.Model, opset: int, goal: Goal, words: str) -> tuple[ir.Model, str, FusionReport | None]:
    """Rewrite the norms, or convert the model to another opset with its norms kept aside."""
    written = model.opset_imports.get("", 0)
    if written != opset:
        model, report = _convert(model, opset, goal)
        direction = "lowered" if opset < written else "raised"
        return model, f"{words} at opset {written}, {direction} to {opset}", report if goal.fuse else None
    if not goal.fuse:
        return model, words, None
    with step("fusion"):
        fused, made = passes.fuse(model, consumer=goal.consumer, form=goal.form)
    return fused, words, made


def finish_program(model: ir.Model, opset: int | None, goal: Goal) -> Made:
    """Torch's ONNXProgram with its norms rewritten, at its own opset or at another."""
    model, words, report = finish(model, opset or model.opset_imports[""], goal, "an ONNXProgram as it was")
    return Made(model, words, report, ())


def _convert(model: ir.Model, opset: int, goal: Goal) -> tuple[ir.Model, FusionReport]:
    name = f"conversion to opset {opset}"
    try:
        with step(name):
            return opsets.convert(model, opset, consumer=goal.consumer, form=goal.form if goal.fuse else "primitive")
    except (ExportError, UsageError):
        raise
    except RMSNormError as error:
        raise ExportError(f"{name} failed: {error}") from error
