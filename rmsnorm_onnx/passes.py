"""Rewriting: the one place that changes a graph. Find, choose a form, write it, replace the root, drop what is dead."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.passes import common

from rmsnorm_onnx import cleanup, dtypes, functions
from rmsnorm_onnx.consumers import Choice, choose, parse_consumer, takes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.forms import FORMS, contrib
from rmsnorm_onnx.forms.onnx import SINCE as _NATIVE_SINCE
from rmsnorm_onnx.forms.plugin import ONNXRUNTIME_DOMAIN
from rmsnorm_onnx.functions import FunctionLibrary
from rmsnorm_onnx.report import FusionReport, SiteReport
from rmsnorm_onnx.site import Match, patterns, selected
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.view import View, default_opset
from rmsnorm_onnx.writer import Names, Writer

if TYPE_CHECKING:
    from rmsnorm_onnx.parity import SiteParity


_OVERRIDABLE_IR = 4  # the first IR version in which an initializer need not be a graph input
_ROUNDS = 4
NOT_SELECTED = "not selected"
_NATIVE = ("onnx", "contrib")
_RESIDUAL_SUM = 3  # the output of the skip form that holds the sum


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to rewrite, and into what.

    Attributes:
        consumer: Whom the forms are chosen for; see `rmsnorm_onnx.consumers`.
        form: One form for all sites, in place of the consumer's choice.
        allow_rounding_change: Rewrite sites even where a rounding to a narrower type moves.
        only: Patterns of site or module names (as in a shell); when given, other sites are kept as they are.
        skip: Patterns of site or module names that are kept as they are.
        gain_attribute: Write constant gains as tensor attributes of function and plugin nodes.

    Raises:
        UsageError: there is no such consumer or form.
    """

    consumer: str = "any"
    form: str | None = None
    allow_rounding_change: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    gain_attribute: bool = False

    def __post_init__(self) -> None:
        """Checks the names."""
        parse_consumer(self.consumer)
        if self.form is not None and self.form not in FORMS:
            raise UsageError(f"no form {self.form!r}; there are {', '.join(FORMS)}")


class FuseRMSNorm(ir.passes.InPlacePass):
    """Turns every RMSNorm of a model into one operator, in place.

    Args:
        consumer: Whom the forms are chosen for.
        form: One form for all sites, in place of the consumer's choice.
        allow_rounding_change: Rewrite sites even where a rounding to a narrower type moves.
        only: Patterns of site or module names; when given, other sites are kept.
        skip: Patterns of site or module names that are kept.
        gain_attribute: Write constant gains as tensor attributes of function and plugin nodes.

    Raises:
        UsageError: there is no such consumer or form.
    """

    def __init__(
        self,
        consumer: str = "any",
        form: str | None = None,
        allow_rounding_change: bool = False,
        only: str | Sequence[str] = (),
        skip: str | Sequence[str] = (),
        gain_attribute: bool = False,
    ) -> None:
        """Holds the options."""
        super().__init__()
        self.options = Options(
            consumer=consumer,
            form=form,
            allow_rounding_change=allow_rounding_change,
            only=patterns(only),
            skip=patterns(skip),
            gain_attribute=gain_attribute,
        )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass; a model whose norms are in their forms already is left unmodified."""
        sites = rewrite(model, self.options)
        return ir.passes.PassResult(model, any(site.action == "rewritten" for site in sites))


def fuse(
    model: Any,
    *,
    consumer: str = "any",
    form: str | None = None,
    allow_rounding_change: bool = False,
    verify: bool = False,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    gain_attribute: bool = False,
    opset: int | None = None,
) -> tuple[Any, FusionReport]:
    """Turns every RMSNorm of a model into one operator.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or torch's ONNXProgram. It is left unchanged.
        consumer: Whom the forms are chosen for: "any", "onnxruntime", "tensorrt" and others.
        form: One form for all sites, in place of the consumer's choice.
        allow_rounding_change: Rewrite sites even where a rounding to a narrower type moves.
        verify: Measure every site against the float64 reference, before and after; needs onnxruntime.
        only: Patterns of site or module names; when given, other sites are kept.
        skip: Patterns of site or module names that are kept.
        gain_attribute: Write constant gains as tensor attributes of function and plugin nodes.
        opset: Move the whole model to this opset of ONNX's own operators, as `rmsnorm_onnx.opsets.convert` does.

    Returns:
        The rewritten model, of the caller's kind (an onnx_ir.Model for a path), and what was done.

    Raises:
        ModelError: the model cannot be read or is not valid.
        UsageError: there is no such consumer, form or opset.
        ConversionError: an operator has no equal at `opset`.
        MissingDependencyError: `verify` is asked for and onnxruntime is not installed.
    """
    from rmsnorm_onnx import modelio
    from rmsnorm_onnx.runtimes import kernel_gaps

    options = Options(
        consumer=consumer,
        form=form,
        allow_rounding_change=allow_rounding_change,
        only=patterns(only),
        skip=patterns(skip),
        gain_attribute=gain_attribute,
    )
    working, kind = modelio.to_ir(model)
    original = working.clone() if verify else None
    before = default_opset(working.opset_imports)
    if opset is None:
        sites = rewrite(working, options)
    else:
        from rmsnorm_onnx.opsets import move

        sites = move(working, opset, options)
    if original is not None:
        sites = _measured(sites, working, original)
    now = default_opset(working.opset_imports)
    report = FusionReport(sites=tuple(sites), consumer=consumer, missing_kernels=kernel_gaps(working), opset=now)
    return modelio.from_ir(working, kind, model, changed=report.rewritten > 0 or now != before), report


def rewrite(model: ir.Model, options: Options, *, opset: int | None = None) -> list[SiteReport]:
    """Rewrites a model in place.

    Args:
        model: The model.
        options: What to rewrite, and into what.
        opset: Write for this opset, and let the model say that it is of it: all that is not written here is then still
            to be moved there, by the caller.

    Returns:
        What became of each site, in the order of the graph.
    """
    foreign = any(domain != functions.DOMAIN for domain, _, _ in model.functions)
    reports = _Rewriter(model, options, opset).run()
    for _ in range(_ROUNDS if foreign and opset is None else 0):
        # Callers that disagreed on a function may be rewritten by now, so that those that are left agree.
        later = [s for s in _Rewriter(model, options).run() if s.action == "rewritten"]
        if not later:
            break
        reports = merged(reports, later)
    return reports


def merged(reports: list[SiteReport], later: list[SiteReport]) -> list[SiteReport]:
    """Reports with what a later run did in the place of what an earlier one said."""
    later = [s for s in later if s.action == "rewritten"]
    seen = {(s.scope, s.name) for s in later}
    return [s for s in reports if (s.scope, s.name) not in seen] + later


class _Rewriter:
    """One rewrite of one model."""

    def __init__(self, model: ir.Model, options: Options, opset: int | None = None) -> None:
        self._model = model
        self._options = options
        self._opset = opset
        self._view = View(model)
        self._names: Names | None = None
        self._functions: FunctionLibrary | None = None
        self._replaced: dict[ir.Value, ir.Value] = {}
        self._dead: list[ir.Node] = []
        self._needed: set[ir.Value] = set()  # what sites read, which may stand inside of one that is rewritten first

    def run(self) -> list[SiteReport]:
        had_functions = any(domain == functions.DOMAIN for domain, _, _ in self._model.functions)
        oldest = self._model.ir_version
        sites = find_rms_norms(self._model)
        if self._opset is not None:
            cleanup.set_opset(self._model, self._opset)
        self._needed = {v for s in sites if isinstance(s, Match) for v in (s.x, s.gain, s.bias, s.residual) if v}
        reports = [self._settle(s) if isinstance(s, Match) else SiteReport.of(s) for s in sites]
        if self._functions is not None:
            for value in self._replaced.values():
                self._dead += cleanup.bypass_idle_casts(value)
            cleanup.remove(self._dead)
            if self._names is not None and any(r.action == "rewritten" and r.form == "plugin" for r in reports):
                cleanup.drop_orphaned(self._model, functions.NAME, self._names.called)
            self._functions.finish()
            reports = [self._with_plugin_note(report) for report in reports]
            if had_functions:
                cleanup.drop_own_uncalled(self._model)
            if oldest < _OVERRIDABLE_IR <= self._model.ir_version:
                # Until then initializers had to be inputs too; from then on that says that a caller may override them.
                common.RemoveInitializersFromInputsPass()(self._model)
        return reports

    def _with_plugin_note(self, report: SiteReport) -> SiteReport:
        """Says of a plugin node whether the file also runs without the plugin."""
        own = (functions.DOMAIN, functions.NAME, "")
        if report.action != "rewritten" or report.form != "plugin" or own in self._model.functions:
            return report
        note = "runs with the plugin alone: one body under the plugin's name cannot serve all nodes of this file"
        return dataclasses.replace(report, notes=(*report.notes, note))

    def _settle(self, match: Match) -> SiteReport:
        """Rewrites a site, or says why it is kept."""
        found = SiteReport.of(match)
        if not selected(found.name, found.module, self._options.only, self._options.skip):
            return dataclasses.replace(found, action="kept", why=NOT_SELECTED)
        container = self._view.container(match.node)
        opset = default_opset(container.opset_imports, default_opset(self._model.opset_imports))
        spec = raise_statistic(match.spec)
        raised = match if spec is match.spec else dataclasses.replace(match, spec=spec)
        choice = self._choose(raised, opset)
        form, why = choice.form, choice.why
        unloadable = _is_unloadable(match)
        gone = match.form == "onnx" and opset < _NATIVE_SINCE  # the model is on its way to an older opset
        if gone and (form is None or FORMS[form].refusal(raised, opset) is not None):
            form, why = "function", f"RMSNormalization exists from opset {_NATIVE_SINCE} on"
            choice = Choice(form, why)
        if (match.form == form or self._serves(match)) and not unloadable and not gone:
            return dataclasses.replace(found, action="kept", why=f"already in the form {match.form}")
        if form is None:
            return dataclasses.replace(found, action="kept", why=f"no form can hold it: {why}")
        only = _only_in_its_form(match, form)
        if only is not None and gone:
            why = (
                f"{only}; it exists from opset {_NATIVE_SINCE} on, so that it is moved as the plain operators it means"
            )
            return dataclasses.replace(found, action="kept", form="primitive", why=why)
        if only is not None:
            return dataclasses.replace(found, action="kept", why=only)
        refusal = FORMS[form].refusal(raised, opset)
        if refusal is not None:
            return dataclasses.replace(found, action="kept", why=f"the form {form} cannot hold it: {refusal}")
        moved = FORMS[form].rounding_change(raised)
        changes = match.rounding_changes if moved is None else (*match.rounding_changes, moved)
        if changes and not self._options.allow_rounding_change:
            why = "a rounding would change, which takes --allow-rounding-change"
            return dataclasses.replace(found, action="kept", why=why, rounding_changes=changes)
        self._write(raised, choice, container, opset)
        return dataclasses.replace(
            found, action="rewritten", form=form, why=why, spec=raised.spec, rounding_changes=changes
        )

    def _choose(self, match: Match, opset: int) -> Choice:
        options = self._options
        if options.form is None:
            return choose(options.consumer, match, opset, allow_rounding_change=options.allow_rounding_change)
        domain = ONNXRUNTIME_DOMAIN if options.consumer == "onnxruntime-tensorrt" else functions.DOMAIN
        return Choice(options.form, "asked for", domain)

    def _serves(self, match: Match) -> bool:
        """Whether a site is one native operator already that the consumer takes.

        The Casts around such a node are no part of it, so that what would be chosen for it now may be another form than
        what was chosen for the whole norm: it stays, or each run would find something else to do.
        """
        asked = self._options.form
        return match.form in _NATIVE and asked is None and takes(self._options.consumer, match.form)

    def _write(self, match: Match, choice: Choice, container: ir.Graph | ir.Function, opset: int) -> None:
        if self._names is None or self._functions is None:
            cleanup.settle_domain(self._model)
            self._names = Names(self._model)
            self._functions = FunctionLibrary(self._model, self._names.operators)
        writer = Writer(
            self._model,
            container,
            opset,
            before=match.node,
            names=self._names,
            functions=self._functions,
            plugin_domain=choice.domain,
            gain_attribute=self._options.gain_attribute,
            metadata={**match.node.metadata_props, functions.SPEC_KEY: _spec_text(match.spec)},
        )
        assert choice.form is not None
        new = FORMS[choice.form].write(self._current(match, writer), writer)
        graph = match.node.graph
        assert graph is not None
        graph.insert_before(match.node, writer.nodes)
        self._replace(match.output, new)
        if writer.residual_sum is not None and len(match.node.outputs) > _RESIDUAL_SUM:
            total = match.node.outputs[_RESIDUAL_SUM]
            if total.type is not None and total.shape is not None:  # as the file declares an output of it
                writer.residual_sum.type, writer.residual_sum.shape = total.type, total.shape
            self._replace(total, writer.residual_sum)
        self._dead += cleanup.detach_dead(match.node, self._needed)

    def _current(self, match: Match, writer: Writer) -> Match:
        """The match with values that earlier rewrites replaced, and a gain that its node holds as an attribute."""

        def now(value: ir.Value | None) -> ir.Value | None:
            while value is not None and value in self._replaced:
                value = self._replaced[value]
            return value

        x, gain, bias, residual = now(match.x), now(match.gain), now(match.bias), now(match.residual)
        assert x is not None
        stored = match.node.attributes.get("gain")
        if match.spec.has_gain and gain is None and stored is not None:
            gain = writer.op("Constant", value=stored.as_tensor())
            gain.type = ir.TensorType(stored.as_tensor().dtype)
            gain.shape = ir.Shape(stored.as_tensor().shape.numpy())
        if x is match.x and gain is match.gain and bias is match.bias and residual is match.residual:
            return match
        return dataclasses.replace(match, x=x, gain=gain, bias=bias, residual=residual)

    def _replace(self, old: ir.Value, new: ir.Value) -> None:
        """Puts a new value in an old one's place, under its name, with what the file says of it."""
        assert self._names is not None
        name = old.name
        old.name = self._names.fresh(f"{name}_replaced")
        new.name = name
        new.doc_string = new.doc_string or old.doc_string
        new.metadata_props.update(old.metadata_props)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self._replaced[old] = new


def _is_unloadable(match: Match) -> bool:
    """Whether no runtime takes a node of ours or a native one as it is: by its types, or by its domain."""
    mixed = match.form == "onnx" and match.spec.resolve(match.x_type).result_type != match.x_type
    return match.stranded or mixed or (match.form == "contrib" and not contrib.loads(match.node))


def _only_in_its_form(match: Match, form: str) -> str | None:
    """What of a native node another one in `form` does not give, in one sentence; None when there is nothing."""
    if match.wide_gain and form != match.form:
        return f"its scale also varies along axes that are not normalised, which only {match.form} holds"
    for index, output in enumerate(match.node.outputs):
        replaced = index == 0 or (index == _RESIDUAL_SUM and match.residual is not None)
        if not replaced and (output.uses() or output.is_graph_output()):
            return f"its output {output.name} is read too, which only {match.form} gives"
    return None


@functools.lru_cache(maxsize=256)
def _spec_text(spec: RMSNormSpec) -> str:
    return json.dumps(spec.to_json())


def raise_statistic(spec: RMSNormSpec) -> RMSNormSpec:
    """The spec with a half statistic raised to float32, as every form computes it; the factor follows it.

    >>> raise_statistic(RMSNormSpec(statistic_type="float16", factor_type="float16")).statistic_type
    'float32'
    """
    statistic = spec.statistic_type
    if statistic == "x" or dtypes.holds(statistic, "float32"):
        return spec
    factor = spec.factor_type if dtypes.holds(spec.factor_type, "float32") else "float32"
    return spec.replace(statistic_type="float32", factor_type=factor)


def _measured(sites: list[SiteReport], model: ir.Model, original: ir.Model) -> list[SiteReport]:
    """The reports with what `verify` measured at each site."""
    from rmsnorm_onnx.parity import verify

    measured: dict[tuple[str, str], SiteParity] = {(p.scope, p.name): p for p in verify(model, original).sites}
    return [dataclasses.replace(s, parity=measured.get((s.scope, s.name))) for s in sites]
