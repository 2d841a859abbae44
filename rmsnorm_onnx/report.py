"""What was found and what was done, as data, as JSON and as text.

The JSON's keys are stable: a key is added with the same version, and removed or redefined only with a new one.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.site import Declined, Match, selected
from rmsnorm_onnx.spec import RMSNormSpec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

VERSION = 1
"""Version of the JSON layout of every report."""

Action: TypeAlias = Literal["found", "rewritten", "kept", "declined"]
"""found: by an inspection; rewritten; kept: a norm that stays as it was; declined: not proven to be a norm."""

_STYLES = {"found": "green", "rewritten": "green", "kept": "yellow", "declined": "red"}


class SiteParity(Protocol):
    """The measured difference at one site; see `rmsnorm_onnx.parity.SiteParity`."""

    @property
    def ulp(self) -> float | None:
        """The worst distance from the float64 reference, in ulp; None where it was not run."""

    @property
    def within(self) -> bool | None:
        """Whether it is within its bound; None where it was not run."""

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON-ready data."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """One site: what it is and what became of it.

    Attributes:
        name: The root node's name, or its output's.
        module: The PyTorch module that it comes from, where the exporter left a trace of it.
        statistic_module: The PyTorch module of the statistic, where the norm is plain operators with a trace.
        scope: Where it stands: "" for the main graph, else a path of branches and functions.
        action: What was done.
        form: The form it has now; None for a declined site.
        why: One sentence: why this form, or why it was left alone.
        spec: Its mathematics; None for a declined site.
        x_type: The type of the normalised tensor; None for a declined site.
        code: The decline code; None for a norm.
        notes: What a reader should know, each one sentence.
        rounding_changes: Roundings to a narrower type that were moved, added or removed, each one sentence.
        parity: The measured difference, when asked for.
    """

    name: str
    action: Action
    why: str
    module: str | None = None
    statistic_module: str | None = None
    scope: str = ""
    form: str | None = None
    spec: RMSNormSpec | None = None
    x_type: str | None = None
    code: str | None = None
    notes: tuple[str, ...] = ()
    rounding_changes: tuple[str, ...] = ()
    parity: SiteParity | None = None

    @classmethod
    def of(cls, site: Match | Declined) -> SiteReport:
        """A site as the recogniser gave it."""
        if isinstance(site, Declined):
            return cls(
                name=site.name,
                module=site.module,
                scope=site.scope,
                action="declined",
                why=site.reason,
                code=site.code.value,
            )
        return cls(
            name=site.name,
            module=site.module,
            statistic_module=site.statistic_module,
            scope=site.scope,
            action="found",
            form=site.form,
            why=f"an RMSNorm written as {site.form}",
            spec=site.spec,
            x_type=site.x_type,
            notes=site.notes,
            rounding_changes=site.rounding_changes,
        )

    def to_json(self) -> dict[str, Any]:
        """The site as JSON-ready data; every key is always there."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["spec"] = self.spec.to_json() if self.spec else None
        data["parity"] = self.parity.to_json() if self.parity else None
        return {**data, "notes": list(self.notes), "rounding_changes": list(self.rounding_changes)}


class _Counts:
    """Counts over `sites`, shared by the reports."""

    __slots__ = ()
    sites: tuple[SiteReport, ...]

    @property
    def found(self) -> int:
        """How many sites are norms, rewritten or not."""
        return len(self.sites) - self.declined

    @property
    def declined(self) -> int:
        """How many candidates were not proven to be norms."""
        return sum(site.action == "declined" for site in self.sites)

    @property
    def rewritten(self) -> int:
        """How many norms were rewritten."""
        return sum(site.action == "rewritten" for site in self.sites)

    @property
    def beyond(self) -> int:
        """How many norms were measured beyond their bound; 0 where nothing was measured."""
        return sum(site.parity is not None and site.parity.within is False for site in self.sites)

    @property
    def unmeasured(self) -> int:
        """How many norms a measurement was asked of and could not be run; 0 where none was asked for."""
        return sum(site.parity is not None and site.parity.within is None for site in self.sites)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectionReport(_Counts):
    """What a model holds.

    Attributes:
        sites: Every norm and every candidate that was declined, in graph order.
        missing_kernels: What onnxruntime has no kernel for, each one sentence.
    """

    sites: tuple[SiteReport, ...]
    missing_kernels: tuple[str, ...] = ()

    @classmethod
    def of(cls, sites: Iterable[Match | Declined], missing_kernels: Sequence[str] = ()) -> InspectionReport:
        """The report of what the recogniser gave."""
        return cls(sites=tuple(SiteReport.of(s) for s in sites), missing_kernels=tuple(missing_kernels))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data, with its version."""
        return {"version": VERSION, "kind": "inspection", **_body(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusionReport(_Counts):
    """What a rewrite did.

    Attributes:
        sites: Every norm and every candidate that was declined, in graph order.
        consumer: Whom the forms were chosen for.
        missing_kernels: What onnxruntime has no kernel for in the result, each one sentence.
        opset: The opset of the result's default domain; None where nobody said.
    """

    sites: tuple[SiteReport, ...]
    consumer: str
    missing_kernels: tuple[str, ...] = ()
    opset: int | None = None

    @property
    def kept(self) -> int:
        """How many norms stay as they were."""
        return self.found - self.rewritten

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data, with its version."""
        return {"version": VERSION, "kind": "fusion", "consumer": self.consumer, "opset": self.opset, **_body(self)}


Report: TypeAlias = InspectionReport | FusionReport


def _body(report: Report) -> dict[str, Any]:
    return {
        "found": report.found,
        "rewritten": report.rewritten,
        "declined": report.declined,
        "missing_kernels": list(report.missing_kernels),
        "sites": [site.to_json() for site in report.sites],
    }


def dumps(data: Any) -> str:
    """JSON text; a number that JSON cannot hold becomes its name, so that any parser can read it.

    >>> dumps({"worst_ulp": float("inf")})
    '{\\n  "worst_ulp": "inf"\\n}'
    """
    return json.dumps(_plain(data), indent=2, allow_nan=False, ensure_ascii=False)


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def describe(spec: RMSNormSpec, x_type: str | None = None) -> str:
    """A spec in a few words: its axes, epsilon, gain, and how often it rounds.

    >>> from rmsnorm_onnx.spec import preset
    >>> describe(preset("gemma"), "float16")
    'axes -1, epsilon 1e-06, gain + 1, rounds once'
    >>> describe(preset("llama"), "bfloat16")
    'axes -1, epsilon 1e-06, gain, rounds before the gain'
    >>> describe(preset("zhang2019"), "float32")
    'axes -1, epsilon 1e-08 outside the root, gain'
    """
    words = [
        f"axes {', '.join(map(str, spec.axes))}",
        f"epsilon {_shortest(spec.epsilon)}{_PLACES[spec.epsilon_placement]}",
    ]
    if spec.leading is not None:
        words.append(f"statistic of the first {spec.leading}")
    words.append(f"gain + {spec.gain_offset:g}" if spec.gain_offset else "gain" if spec.has_gain else "no gain")
    if spec.has_bias:
        words.append("bias")
    if x_type and x_type != "float64":
        words += _rounding(spec.resolve(x_type), x_type)
    return ", ".join(words)


def _shortest(value: float) -> str:
    """The shortest text that is this float32, or this float64 where it is none."""
    single = np.float32(value)
    return str(single) if float(single) == value else repr(value)


_PLACES = {"inside": "", "outside": " outside the root", "clamp": " as a clamp"}


def _rounding(spec: RMSNormSpec, x_type: str) -> list[str]:
    words = []
    if not dtypes.holds(spec.statistic_type, "float32"):
        words.append(f"statistic in {spec.statistic_type}")
    if x_type != "float32" and spec.has_gain:
        early = spec.normalized_type == x_type
        words.append("rounds before the gain" if early else "rounds once")
    return words


def summary(report: Report) -> str:
    """The counts in one line."""
    declined = f"{report.declined} declined"
    for count, words in ((report.beyond, "beyond their bound"), (report.unmeasured, "not run")):
        declined += f", {count} {words}" if count else ""
    if isinstance(report, FusionReport):
        kept = f", {report.kept} kept" if report.kept else ""
        return f"{report.found} found, {report.rewritten} rewritten for {report.consumer}{kept}, {declined}"
    return f"{report.found} found, {declined}"


def print_report(report: Report, console: Console) -> None:
    """Print a report as a table, its notes each once, and a closing line of counts."""
    if report.sites:
        console.print(_site_table(report.sites))
    for title, lines in _remarks(report).items():
        console.print(f"\n{title}:", style="bold", markup=False)
        for line, count in lines.items():
            console.print(f"  {line}" + (f" ({count} sites)" if count > 1 else ""), markup=False, highlight=False)
    console.print(f"\n{summary(report)}", style="bold", markup=False, highlight=False)


def print_explanation(sites: Sequence[SiteReport], console: Console) -> None:
    """Print everything known of a few sites, one field a line."""
    for site in sites:
        for key, value in site.to_json().items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            elif isinstance(value, list):
                value = " ".join(value)
            if value not in (None, ""):
                console.print(f"{key:>16}  {value}", markup=False, highlight=False)
        console.print()


def _site_table(sites: Sequence[SiteReport]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    measured = any(site.parity is not None for site in sites)
    modules = any(site.module for site in sites)
    for column in (
        "site",
        *(["module"] if modules else []),
        "type",
        "action",
        "form",
        *(["ulp"] if measured else []),
        "norm, or reason",
    ):
        table.add_column(column, overflow="fold")
    for site in sites:
        # Node names are a file's own text: Text keeps a bracket in one from being read as markup.
        name = f"{site.scope}/{site.name}" if site.scope else site.name
        action = Text(site.action, style=_STYLES[site.action])
        said = describe(site.spec, site.x_type) if site.spec else f"{site.code}: {site.why}"
        ulp = [_ulp_cell(site.parity)] if measured else []
        module = [Text(site.module or "")] if modules else []
        table.add_row(Text(name), *module, Text(site.x_type or ""), action, Text(site.form or ""), *ulp, Text(said))
    return table


def _ulp_cell(parity: SiteParity | None) -> Text:
    from rich.text import Text

    if parity is None or parity.ulp is None:
        return Text("" if parity is None else "not run")
    return Text(f"{parity.ulp:.3g}" + (" beyond" if parity.within is False else ""))


def _remarks(report: Report) -> dict[str, collections.Counter[str]]:
    """Sentences by title, each with the number of sites that it is said of."""
    sites = report.sites
    remarks = {
        "why": collections.Counter(s.why for s in sites if s.action in ("rewritten", "kept") and s.why),
        "notes": collections.Counter(note for s in sites for note in s.notes),
        "rounding changes": collections.Counter(change for s in sites for change in s.rounding_changes),
        "no kernel in onnxruntime": collections.Counter(report.missing_kernels),
    }
    return {title: lines for title, lines in remarks.items() if lines}


def explain(report: Report, node: str) -> list[SiteReport]:
    """The sites of a name, with or without their scope, or of a module.

    Raises:
        UsageError: there is none; the nearest names are given.
    """
    named = [(s, f"{s.scope}/{s.name}" if s.scope else s.name) for s in report.sites]
    chosen = [site for site, name in named if node in (site.name, name, site.module)]
    if not chosen:
        near = difflib.get_close_matches(node, [name for _, name in named], n=3, cutoff=0.3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise UsageError(f"no norm and no candidate is named {node!r}{hint}; inspect lists all of them")
    return chosen


def select(report: InspectionReport, only: Sequence[str] = (), skip: Sequence[str] = ()) -> InspectionReport:
    """The sites whose names or modules match some pattern of `only` (all, if there is none) and none of `skip`."""
    chosen = tuple(s for s in report.sites if selected(s.name, s.module, only, skip))
    return dataclasses.replace(report, sites=chosen)
