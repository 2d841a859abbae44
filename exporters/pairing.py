"""The norms of a file beside the modules that they come from: epsilon must be the module's, and the rest is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.counterparts import stated_epsilon
from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.exporters.kept import Kept
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.passes import raise_statistic
from rmsnorm_onnx.report import FusionReport, SiteReport, describe
from rmsnorm_onnx.spec import RMSNormSpec

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class PairedNorm:
    """One norm of the file, one norm of the module, or both.

    Attributes:
        module: The module's qualified name; None where the file does not say.
        kind: The module's class; None where nothing is known of it.
        site: The site's name in the file; None where the norm was not found.
        found: What the file computes.
        expected: What the module's class computes, where its rounding points are known.
        epsilon: The module's epsilon, also where only an attribute tells; None where nothing does.
        same_epsilon: Whether the file's epsilon is the module's, in the type of the statistic; None where either is
            unknown.
    """

    module: str | None
    kind: str | None
    site: str | None
    found: RMSNormSpec | None
    expected: RMSNormSpec | None
    epsilon: float | None
    same_epsilon: bool | None


def pair(
    model: ir.Model, report: FusionReport | None, module: torch.nn.Module | None, kept: Mapping[type, Any]
) -> tuple[tuple[PairedNorm, ...], list[str]]:
    """Pair the sites of a file with the norms of its module.

    Returns:
        The pairs, and what differs besides epsilon, each one sentence.

    Raises:
        ExportError: the epsilon of a norm of a known class is not the module's.
    """
    sites = _sites(model, report)
    if module is None:
        bare = sum(site.spec is not None and site.spec.epsilon == 0 for site in sites)
        lost = "torch's optimiser deletes one of 1e-8 or less, so export with optimize=False"
        notes = [f"{bare} norms have no epsilon: {lost}"] if bare else []
        return tuple(PairedNorm(s.module, None, s.name, s.spec, None, None, None) for s in sites if s.spec), notes
    known = _known(module, kept)
    given = _Given(module)
    normed = [site for site in sites if site.spec is not None]
    pairs = [_settled(_pair(site, known, module), site, given) for site in normed]
    notes = [note for pair in pairs if (note := _difference(pair, sites)) is not None]
    seen = {pair.module for pair in pairs}
    for name, (kind, spec, _) in known.items():
        inside = None if name in seen else _inside(pairs, normed, known, name)
        if inside is not None:
            pairs[inside] = _of_known(normed[inside], name, known, given)
            notes += [note for note in (_gained(pairs[inside], normed[inside]),) if note is not None]
            continue
        untraced = None if name in seen else _untraced(pairs, sites, name, spec, given)
        if untraced is not None:
            pairs[untraced] = PairedNorm(
                name, kind, pairs[untraced].site, pairs[untraced].found, spec, spec.epsilon, True
            )
        elif name not in seen:
            pairs.append(PairedNorm(name, kind, None, None, spec, spec.epsilon, None))
            notes.append(f"the {kind} {name or 'that is the module itself'} was not found in the file")
    return tuple(pairs), notes


def _inside(
    pairs: Sequence[PairedNorm],
    sites: Sequence[SiteReport],
    known: Mapping[str, tuple[str, RMSNormSpec, str | None]],
    name: str,
) -> int | None:
    """The norm whose statistic is a module's, where its parent multiplies the result and so bears the trace."""
    places = enumerate(zip(pairs, sites, strict=False))  # norms that were not found stand behind the sites
    return next((i for i, (p, site) in places if site.statistic_module == name and p.module not in known), None)


def _of_known(
    site: SiteReport, name: str, known: Mapping[str, tuple[str, RMSNormSpec, str | None]], given: _Given
) -> PairedNorm:
    """A site that is a known norm inside what its parent multiplies."""
    kind, spec, _ = known[name]
    spec = spec if site.x_type is None else given[site.x_type].get(name, spec)
    _check_epsilon(site, name, kind, spec)
    return PairedNorm(name, kind, site.name, site.spec, spec, spec.epsilon, True)


def _gained(pair: PairedNorm, site: SiteReport) -> str | None:
    """What differs between such a norm and its module, but for the factor of the parent's that became its gain."""
    if pair.found is None or pair.expected is None:
        return None
    fields = ("has_gain", "gain_offset", "gain_type", "result_type")
    as_found = pair.expected.replace(**{field: getattr(pair.found, field) for field in fields})
    return _difference(dataclasses.replace(pair, expected=as_found), [dataclasses.replace(site, module=pair.module)])


def _untraced(
    pairs: Sequence[PairedNorm], sites: Sequence[SiteReport], name: str, spec: RMSNormSpec, given: _Given
) -> int | None:
    """The first norm without a module that is a norm of this spec: in a loop's body torch.onnx leaves no trace."""
    types = {site.name: site.x_type for site in sites if site.module is None}
    for i, pair in enumerate(pairs):
        x_type = types.get(pair.site or "") if pair.module is None else None
        if x_type is None or pair.found is None:
            continue
        candidates = (spec, given[x_type].get(name, spec))  # the first goes by a guess, where the module has no gain
        if _raised(pair.found, x_type) in [_raised(candidate, x_type) for candidate in candidates]:
            return i
    return None


def _raised(spec: RMSNormSpec, x_type: str) -> RMSNormSpec:
    """A spec as every form writes it, comparable."""
    return raise_statistic(spec.resolve(x_type)).canonical(x_type)


def _sites(model: ir.Model, report: FusionReport | None) -> Sequence[SiteReport]:
    return report.sites if report is not None else [SiteReport.of(site) for site in find_rms_norms(model)]


def _known(module: torch.nn.Module, kept: Mapping[type, Any]) -> dict[str, tuple[str, RMSNormSpec, str | None]]:
    """What is known of each norm of a module, by name: its class, its spec, and the type of x that this is for."""
    from rmsnorm_onnx.models import inventory

    known: dict[str, tuple[str, RMSNormSpec, str | None]] = {}
    for norm in inventory.norms(module, strict=False):
        known[norm.name] = (norm.kind, norm.spec, norm.x_type)
    for name, part in module.named_modules():
        if type(part) in kept:
            known[name] = (type(part).__name__, Kept.of(kept[type(part)]).read(part).spec, None)
    return known


class _Given:
    """The spec of each norm of a module, by name, where what it is given is of a type."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._specs: dict[str, dict[str, RMSNormSpec]] = {}

    def __getitem__(self, x_type: str) -> dict[str, RMSNormSpec]:
        from rmsnorm_onnx.models import inventory

        if x_type not in self._specs:
            names = {norm.name: x_type for norm in inventory.norms(self._module, strict=False)}
            norms = inventory.norms(self._module, strict=False, x_types=names)
            self._specs[x_type] = {norm.name: norm.spec for norm in norms}
        return self._specs[x_type]


def _settled(pair: PairedNorm, site: SiteReport, given: _Given) -> PairedNorm:
    """The pair with what the module computes of the type that the file shows it is given.

    Which type that is, is not written in the module: the gain's type is a guess, a norm without a gain gives none, and
    a model of a half type may hand a norm float32, as Mamba 2 does behind its scan.
    """
    if pair.expected is None or site.spec is None or site.x_type is None:
        return pair
    other = given[site.x_type].get(pair.module or "")
    if other is None:
        return pair
    same = _raised(site.spec, site.x_type) == _raised(other, site.x_type)
    return dataclasses.replace(pair, expected=other, epsilon=other.epsilon) if same else pair


def _pair(
    site: SiteReport, known: Mapping[str, tuple[str, RMSNormSpec, str | None]], module: torch.nn.Module
) -> PairedNorm:
    name, spec = site.module, site.spec
    if name is not None and name in known:
        kind, expected, _ = known[name]
        _check_epsilon(site, name, kind, expected)
        return PairedNorm(name, kind, site.name, spec, expected, expected.epsilon, True)
    part = dict(module.named_modules()).get(name) if name is not None else None
    value = stated_epsilon(part)
    same = None if value is None else _same_epsilon(site, value)
    return PairedNorm(name, None if part is None else type(part).__name__, site.name, spec, None, value, same)


def _check_epsilon(site: SiteReport, name: str, kind: str, expected: RMSNormSpec) -> None:
    """Refuse a file in which the epsilon of a norm of a known class is another one."""
    if not _same_epsilon(site, expected.epsilon):
        assert site.spec is not None
        raise ExportError(
            f"the epsilon of {site.name} is {site.spec.epsilon!r}, and the {kind} {name} that it comes from has "
            f"{expected.epsilon!r}; nothing was written: please report this with the module"
        )


def _difference(pair: PairedNorm, sites: Sequence[SiteReport]) -> str | None:
    """What differs between a site and its module, in one sentence."""
    if pair.same_epsilon is False:
        assert pair.found is not None
        return (
            f"the epsilon of {pair.site} is {pair.found.epsilon!r}, and the {pair.kind} {pair.module} that it comes "
            f"from has {pair.epsilon!r}"
        )
    site = next(s for s in sites if s.name == pair.site and s.module == pair.module)
    if pair.expected is None or pair.found is None or site.x_type is None:
        return None
    found, meant = (raise_statistic(s.resolve(site.x_type)).canonical(site.x_type) for s in (pair.found, pair.expected))
    if found == meant:
        return None
    said, want = describe(found, site.x_type), describe(meant, site.x_type)
    if said == want:
        fields = [f.name for f in dataclasses.fields(found) if getattr(found, f.name) != getattr(meant, f.name)]
        said, want = (", ".join(f"{name} {getattr(s, name)}" for name in fields) for s in (found, meant))
    return f"{pair.module} was found as: {said}; the {pair.kind} is: {want}"


def _same_epsilon(site: SiteReport, epsilon: float) -> bool:
    """In the type of the statistic, in which a graph holds epsilon."""
    assert site.spec is not None
    kind = site.spec.statistic_type if site.x_type is None else site.spec.resolve(site.x_type).statistic_type
    types = {"float64"} if kind == "float64" else {"float32", "float32" if kind == "x" else kind}
    return any(_rounded(site.spec.epsilon, name) == _rounded(epsilon, name) for name in types)


def _rounded(value: float, name: str) -> float:
    return float(np.asarray(value, dtypes.numpy_dtype(name)))
