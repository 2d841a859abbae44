"""Parity: each norm of a model, run alone in onnxruntime, against the float64 reference.

A site is cut out of its model (`rmsnorm_onnx.subgraph`) and fed rows that show what goes wrong with norms: zeros, a
huge row, a tiny one, one whose mean square is near epsilon, a constant one. With the model from before a rewrite, each
site is run before and after on the same rows.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import cleanup, dtypes, modelio, sessions
from rmsnorm_onnx.errors import ModelError, UsageError
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.inputs import RowKinds, concrete_shape, fewer_rows
from rmsnorm_onnx.oracle import tolerance
from rmsnorm_onnx.parameters import Parameters
from rmsnorm_onnx.passes import raise_statistic
from rmsnorm_onnx.sessions import one_line
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import Match, check_chosen, patterns, selected
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.subgraph import Places, UncutError
from rmsnorm_onnx.trial import Trial, measure
from rmsnorm_onnx.view import Ref

if TYPE_CHECKING:
    from rich.console import Console

VERSION = 1
"""Version of the report's JSON."""

_UNOPTIMISED = "without onnxruntime's optimisations, which break it when it stands alone"
_ELEMENT_LIMIT = 2**24
_TYPE_FIELDS = ("statistic_type", "factor_type", "normalized_type", "gain_type", "result_type")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteParity:
    """One norm, measured.

    Attributes:
        name: The root node's name in the model that the sites were found in, or its output's.
        scope: Where it stands, as in `Match`.
        spec: What it is held to: the norm's spec, a half statistic raised to float32 where it was rewritten.
        dtype: x's type.
        tolerance: The ulps that `tolerance` grants the spec; for information, `ratio` decides.
        original_ulp: Worst distance of the original, in ulp; None where it was not run.
        original_ratio: Its worst error over the bound that its own rounding points allow.
        ulp: Worst distance of the model's node, in ulp; None where it was not run.
        ratio: Its worst error over the bound.
        lost: Whether the model has no value of the norm's name in its scope.
        unrun: Why the original or the new node was not run, each one sentence.
        notes: What a reader should know, each one sentence.
    """

    name: str
    scope: str
    spec: RMSNormSpec
    dtype: str
    tolerance: float
    original_ulp: float | None = None
    original_ratio: float | None = None
    ulp: float | None = None
    ratio: float | None = None
    lost: bool = False
    unrun: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def within(self) -> bool | None:
        """Whether every element lies within its bound; None where the node was not run."""
        return None if self.ratio is None else self.ratio <= 1.0

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON-ready data; every key is always there."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = {"unrun": list(self.unrun), "notes": list(self.notes)}
        return {**data, "spec": self.spec.to_json(), "within": self.within, **lists}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """All norms of a model, measured.

    Attributes:
        sites: In the order of the graph.
        seed: What the inputs were drawn from.
    """

    sites: tuple[SiteParity, ...]
    seed: int = 0

    @property
    def ok(self) -> bool:
        """Whether no norm was lost, one at least was run where there are any, and each that was is within its bound.

        `unrun` has those that were not run.
        """
        if self.sites and len(self.unrun) == len(self.sites):
            return False
        return all(site.within is not False and not site.lost for site in self.sites)

    @property
    def unrun(self) -> tuple[SiteParity, ...]:
        """The sites whose node in the model was not run."""
        return tuple(site for site in self.sites if site.within is None)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data, with its version."""
        sites = [site.to_json() for site in self.sites]
        counts = {"within": sum(s.within is True for s in self.sites), "unrun": len(self.unrun)}
        return {"version": VERSION, "kind": "parity", "ok": self.ok, "seed": self.seed, **counts, "sites": sites}


def verify(
    model: Any, original: Any = None, *, seed: int = 0, max_rows: int = 64, only: str | Sequence[str] | None = None
) -> ParityReport:
    """Measures every norm of a model against the float64 reference, and the same norms of the original beside them.

    Each site runs alone in onnxruntime on the CPU, on one thread, with onnxruntime's default optimisations. The gain
    and bias are the model's own where they are constants, else drawn. Nothing is skipped in silence: a site that
    cannot be cut out or run is in the report with the reason.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or torch's ONNXProgram; only read.
        original: The same before a rewrite. Its norms are the sites, and each is looked for in `model` between the
            values of the same names, in the same scope. Without it, `model` is the original, and what `fuse` makes of
            it is measured beside it.
        seed: For the inputs.
        max_rows: Rows of one run; larger fixed batch dimensions are made smaller where the graph allows it.
        only: Patterns of site or module names (as in a shell); None for all.

    Returns:
        The report; its `ok` says whether every node that was run is within its bound.

    Raises:
        ModelError: a model cannot be read.
        UsageError: max_rows is not positive, an argument is no model, or no norm is called as `only` says.
        MissingDependencyError: onnxruntime is not installed.
    """
    if max_rows < 1:
        raise UsageError(f"max_rows must be at least 1, got {max_rows!r}")
    sessions.require("verify")
    old = _as_ir(model if original is None else original)
    new = _fused(old) if original is None else _as_ir(model)
    comparison = _Comparison(new, old, seed, max_rows)
    matches = [m for m in find_rms_norms(old) if isinstance(m, Match)]
    chosen = [m for m in matches if selected(m.name, m.module, patterns(only), ())]
    check_chosen(only, [(m.name, m.module) for m in matches], len(chosen))
    return ParityReport(sites=tuple(comparison.site(match) for match in chosen), seed=seed)


def _fused(model: ir.Model) -> ir.Model:
    from rmsnorm_onnx.passes import Options, rewrite

    new = model.clone()
    rewrite(new, Options())
    return new


def _as_ir(model: Any) -> ir.Model:
    return model if isinstance(model, ir.Model) else modelio.to_ir(model)[0]


class _Comparison:
    """Measures sites of a model and of what it became."""

    def __init__(self, new: ir.Model, original: ir.Model, seed: int, max_rows: int) -> None:
        self._new, self._new_places = new, Places(new)
        self._old, self._places = original, Places(original)
        self._parameters = Parameters(self._places, Shapes(self._places.view))
        self._seed, self._max_rows = seed, max_rows
        self._written = {(m.scope, m.output.name): m for m in find_rms_norms(new) if isinstance(m, Match)}

    def site(self, match: Match) -> SiteParity:
        """Measures one site, before and after."""
        spec, notes = self._promise(match)
        if not spec.epsilon:
            notes += ("epsilon is 0: a row of zeros gives NaN in the graph and is left out",)
        measured: dict[str, float] = {}
        unrun: list[str] = []
        size = 1
        try:
            trials = self._trials(match, spec)
            size = trials[0]().rows.size
        except (UncutError, ModelError, OSError, ValueError) as problem:
            trials, unrun = [], [f"not run: {one_line(problem)}"]
        if trials:
            try:
                output = self._places.of(match.output)
                before = measure(trials, self._old, self._places, output, match.spec)
                measured.update(original_ulp=before.ulp, original_ratio=before.ratio)
                notes += tuple(f"in the original, {change}" for change in match.rounding_changes)
                notes += () if before.optimised else ("the original ran " + _UNOPTIMISED,)
            except UncutError as problem:
                unrun.append(f"the original was not run: {problem}")
        if trials:
            try:
                after = measure(trials, self._new, self._new_places, self._output(match), spec)
                measured.update(ulp=after.ulp, ratio=after.ratio)
                notes += () if after.optimised else ("it ran " + _UNOPTIMISED,)
            except UncutError as problem:
                unrun.append(f"not run: {problem}")
        return SiteParity(
            name=match.name,
            scope=match.scope,
            spec=spec,
            dtype=match.x_type,
            tolerance=tolerance(spec, match.x_type, size),
            lost=self._new_places.find(match.scope, self._name(match)) is None,
            unrun=tuple(unrun),
            notes=notes,
            **measured,
        )

    def _promise(self, match: Match) -> tuple[RMSNormSpec, tuple[str, ...]]:
        """What the node in the model is held to: the original's mathematics, and the rounding points it claims."""
        spec = raise_statistic(match.spec)
        notes: tuple[str, ...] = ()
        new = self._written.get((match.scope, self._name(match)))
        if spec != match.spec:
            if new is not None and _is_kept(new, match):
                return match.spec, (f"left as it was, with its {match.spec.statistic_type} statistic",)
            notes = (f"held to a float32 statistic; the original's is {match.spec.statistic_type}",)
        if new is None or new.x_type != match.x_type or not _same_mathematics(new.spec, spec):
            return spec, notes
        claimed = raise_statistic(new.spec).resolve(match.x_type)
        rounded = spec.resolve(match.x_type).replace(**{f: getattr(claimed, f) for f in _TYPE_FIELDS})
        if not spec.gain_offset and not spec.has_bias:
            # A product of two halves is exact in float32, so that the type it is formed in makes no difference.
            rounded = rounded.replace(gain_type=spec.gain_type)
        if rounded.canonical(match.x_type) == spec.canonical(match.x_type):
            return spec, notes
        return rounded, (*notes, "held to its own rounding points, which are not the original's")

    def _name(self, match: Match) -> str | None:
        """What the result is called in the model: as it was, or as a Cast behind it that changed nothing."""
        result = dtypes.ir_dtype(match.spec.resolve(match.x_type).result_type)
        casts = [n for n, index in match.output.uses() if index == 0 and cleanup.is_idle_cast(n, result)]
        names = [match.output.name, *(cast.outputs[0].name for cast in casts)]
        return next((name for name in names if self._new_places.find(match.scope, name) is not None), names[0])

    def _output(self, match: Match) -> Ref:
        """The result in the model."""
        found = self._new_places.find(match.scope, self._name(match))
        if found is None:
            raise UncutError(f"the model has no node that gives {match.output.name}")
        return found

    def _trials(self, match: Match, spec: RMSNormSpec) -> list[Callable[[], Trial]]:
        """Inputs with few rows, and where that means other dimensions than the graph's, with the graph's own too."""
        dims = self._parameters.dims(match, match.x, "x")
        symbols: dict[str, int] = {}
        shape = concrete_shape(dims, symbols)
        small = fewer_rows(shape, spec.axes, self._max_rows)
        shapes = [s for s in dict.fromkeys((small, shape)) if math.prod(s) <= _ELEMENT_LIMIT]
        if not shapes:
            raise UncutError(f"a row set of shape {list(small)} is larger than {_ELEMENT_LIMIT} elements")
        return [functools.cache(functools.partial(self._trial, match, spec, s, symbols)) for s in shapes]

    def _trial(self, match: Match, spec: RMSNormSpec, shape: tuple[int, ...], symbols: dict[str, int]) -> Trial:
        rng = np.random.default_rng(self._seed)
        rows = RowKinds(spec, match.x_type, shape)
        stops, given = self._parameters.stops(match, spec, shape, rng, symbols)
        return Trial(match.x_type, rows, rows.batches(rng), stops, given)


def _is_kept(new: Match, match: Match) -> bool:
    """Whether a norm is what it was: a rewrite would have raised its half statistic, or written another form."""
    return (new.form, new.spec, new.rounding_changes) == (match.form, match.spec, match.rounding_changes)


def _same_mathematics(a: RMSNormSpec, b: RMSNormSpec) -> bool:
    """Whether two specs differ in their types alone, and in what an epsilon loses as a float attribute."""
    types = {field: "x" for field in _TYPE_FIELDS}
    a, b = (spec.replace(epsilon=float(np.float32(spec.epsilon)), **types) for spec in (a, b))
    return a == b


def print_report(report: ParityReport, console: Console) -> None:
    """Print the measurements as a table, what was not run with its reasons, and a closing line of counts."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("site", "type", "ulp before", "ulp", "allowed", "of the bound", ""):
        table.add_column(column, overflow="fold")
    for site in report.sites:
        verdict = {True: Text("within", "green"), False: Text("beyond", "bold red"), None: Text("not run", "yellow")}
        numbers = [site.original_ulp, site.ulp, site.tolerance, site.ratio]
        cells = [Text("" if n is None else f"{n:.3g}") for n in numbers]
        name = f"{site.scope}/{site.name}" if site.scope else site.name
        table.add_row(Text(name), Text(site.dtype), *cells, verdict[site.within])
    if report.sites:
        console.print(table)
    for title, field in (("not run", "unrun"), ("notes", "notes")):
        lines = collections.Counter(line for site in report.sites for line in getattr(site, field))
        if lines:
            console.print(f"\n{title}:", style="bold", markup=False)
        for line, count in lines.items():
            console.print(f"  {line}" + (f" ({count} sites)" if count > 1 else ""), markup=False, highlight=False)
    counts = [sum(site.within is value for site in report.sites) for value in (True, False, None)]
    console.print("\n{} within, {} beyond, {} not run".format(*counts), style="bold", markup=False, highlight=False)
