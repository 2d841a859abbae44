"""`verify_torch`: a file beside the PyTorch model that it was exported from, norm by norm and end to end.

Each side is held to the float64 reference on its own x, so that an error is seen where it is made and not where it is
passed on; and the two sides are compared with each other and with a float64 run of the whole module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes, modelio, sessions
from rmsnorm_onnx.alone import Alone
from rmsnorm_onnx.comparison import (
    Difference,
    NormComparison,
    OutputComparison,
    TorchParityReport,
    difference,
)
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.oracle import tolerance
from rmsnorm_onnx.outputs import Sides, compare_output
from rmsnorm_onnx.sides import Side, row_size, torch_side
from rmsnorm_onnx.site import Declined, Match, check_chosen, patterns, selected
from rmsnorm_onnx.subgraph import UncutError
from rmsnorm_onnx.torchrun import TorchRun, prepared
from rmsnorm_onnx.trial import worst

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.capture import Call
    from rmsnorm_onnx.counterparts import Gain, Pair
    from rmsnorm_onnx.observation import Observation

_WIDE_X = (
    "the runtime reads x before it is rounded to its type, so its ulps are those of the norm alone on its x as stored"
)
_CHANGED = "watching the norms changed the outputs in the runtime; the outputs are those of the file as it is"
_UNOPTIMISED = "the file ran without onnxruntime's optimisations, which break it"


def verify_torch(
    model: Any,
    module: torch.nn.Module,
    args: Sequence[Any] | torch.Tensor,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    only: str | Sequence[str] | None = None,
) -> TorchParityReport:
    """Measures a file beside its PyTorch module: every norm, and every output.

    The module runs in inference mode on the CPU and is left as it was; the file runs in onnxruntime's CPU provider, on
    one thread, with its default optimisations. For each norm, PyTorch's x and y come from hooks on its module (or
    from its call of F.rms_norm), the runtime's are extra outputs of the file. Both y's are held to the file's spec.
    Where the file does not load, each norm runs alone on PyTorch's x. Nothing is skipped in silence.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or torch's ONNXProgram; fused or not; only read.
        module: The module that it was exported from, with the same weights.
        args: Example inputs for its forward, which become the file's inputs, by name or in order.
        kwargs: Example keyword inputs.
        dtype: "float32", "float16" or "bfloat16" converts a copy of the module, and floating-point inputs, first, as
            `export(dtype=...)` does.
        only: Patterns of site or module names (as in a shell); None for all.

    Returns:
        The report; its `ok` says whether every norm of the module is in the file, the gains are the module's, every
        norm is within its bound on both sides, and every output is the module's, as `rmsnorm_onnx.outputs` judges it:
        no further from a float64 run than rounding explains, and finite where that is.

    Raises:
        ModelError: the model cannot be read.
        UsageError: an argument has no meaning, the example does not fit the module or the file, or no norm is called as
            `only` says; the message has the closest names.
        ExportError: the module raised on its example inputs; its words are kept.
        MissingDependencyError: torch or onnxruntime is not installed.
    """
    sessions.require("verify --against torch")
    module, arguments, keywords = prepared(module, args, kwargs, dtype)
    graph = modelio.to_ir(model)[0]
    from rmsnorm_onnx import absent
    from rmsnorm_onnx.counterparts import pair
    from rmsnorm_onnx.exporters.steps import inference
    from rmsnorm_onnx.feeds import feeds

    results = find_rms_norms(graph)
    matches = [m for m in results if isinstance(m, Match)]
    with inference(module):
        pairs = pair(matches, module)
        chosen = [p for p in pairs if selected(p.match.name, p.module, patterns(only), ())]
        check_chosen(only, [(p.match.name, p.module) for p in pairs], len(chosen))
        fed, notes = feeds(graph, module, arguments, keywords)
        likely = absent.candidates(module)
        watched = {p.module: p.key for p in pairs if p.module is not None and p.key is not None}
        run = TorchRun(module, arguments, keywords, {**likely, **watched})
        run.plain, run.exact  # noqa: B018  # while the module is in inference mode
        seen = _observe(graph, fed, chosen)
        declined = [site for site in results if isinstance(site, Declined)]
        faults, remarks = absent.faults(run, pairs, declined, likely)
        comparison = _Comparison(graph, run, fed, seen, len(declined))
        outputs = comparison.outputs()
    if declined:
        notes += (f"{len(declined)} candidates were declined, and are not measured; inspect lists them",)
    norms = tuple(comparison.norm(p) for p in chosen)
    return comparison.report(norms, outputs, faults, notes + remarks)


def _observe(model: ir.Model, fed: Mapping[str, np.ndarray], pairs: Sequence[Pair]) -> Observation | tuple[str, ...]:
    """What the file does in the runtime, or why it does not run."""
    from rmsnorm_onnx.observation import NotRunError, observe
    from rmsnorm_onnx.runtimes import missing_kernels

    watched: dict[ir.Value, str] = {}
    for match in (p.match for p in pairs):
        result = match.spec.resolve(match.x_type).result_type
        for value, kind in ((match.x, match.x_type), (match.output, result)):
            node = value.producer()
            if node is not None and node.graph is model.graph:
                watched[value] = kind
    try:
        return observe(model, fed, watched)
    except NotRunError as problem:
        reason = "the whole file does not run, so norms run one by one: "
        gaps = [(f"{gap.domain}::{gap.op}" if gap.domain else gap.op, gap.type) for gap in missing_kernels(model)]
        if not gaps:
            return (reason + str(problem),)
        kinds = dict.fromkeys(kind for _, kind in gaps)
        named = {kind: ", ".join(op for op, of in gaps if of == kind) for kind in kinds}
        return tuple(f"{reason}no {kind + ' ' if kind else ''}kernel for {ops}" for kind, ops in named.items())


class _Comparison:
    """Puts both sides of a file's norms and outputs beside each other."""

    def __init__(
        self,
        model: ir.Model,
        run: TorchRun,
        fed: Mapping[str, np.ndarray],
        seen: Observation | tuple[str, ...],
        declined: int,
    ) -> None:
        self._model, self._module, self._fed, self._declined = model, run.module, fed, declined
        self._run, self._ours, exact = run, run.plain, run.exact
        self._exact = None if isinstance(exact, str) else exact
        self._seen = None if isinstance(seen, tuple) else seen
        self._unrun = (*(seen if isinstance(seen, tuple) else ()), *((exact,) if isinstance(exact, str) else ()))
        self._alone = Alone(model)

    def report(
        self,
        norms: tuple[NormComparison, ...],
        outputs: tuple[OutputComparison, ...],
        faults: tuple[str, ...],
        notes: tuple[str, ...],
    ) -> TorchParityReport:
        """The norms with the outputs."""
        seen = self._seen
        if seen is not None:
            notes += () if seen.unchanged else (_CHANGED,)
            notes += () if seen.optimised else (_UNOPTIMISED,)
        count = len(self._ours.outputs)
        if count != len(outputs):
            faults += (f"the module gives {count} tensors, and the file {len(outputs)} outputs; in order they are:",)
        return TorchParityReport(
            norms=norms, outputs=outputs, whole=seen is not None, faults=faults, unrun=self._unrun, notes=notes
        )

    def norm(self, pair: Pair) -> NormComparison:
        """One norm on both sides."""
        from rmsnorm_onnx.counterparts import compare_gain

        match = pair.match
        unrun: list[str] = []
        parameters: tuple[np.ndarray | None, np.ndarray | None] | None = None
        try:
            parameters = self._alone.parameters(match, self._fed)
        except UncutError as problem:
            unrun.append(f"{pair.module or match.name} was not measured: {problem}")
        call = pair.call(self._ours)
        gain = compare_gain(match, parameters and parameters[0], self._candidates(pair, call))
        notes = [
            *(f"in the file, {change}" for change in match.rounding_changes),
            *([gain.words] if gain.verdict in ("unknown", "rounded") else []),
        ]
        ours = theirs = how = None
        if isinstance(call, str):
            unrun.append(f"PyTorch's side of {match.name}: {call}")
        if parameters is not None:
            try:
                ours = None if isinstance(call, str) else torch_side(match, call, parameters)
            except UsageError as problem:
                unrun.append(f"PyTorch's side of {match.name}: {problem}")
            try:
                theirs, how = self._runtime_side(match, call, parameters)
            except UncutError as problem:
                unrun.append(f"the runtime's side of {match.name}: {problem}")
        for side, who in ((ours, "PyTorch"), (theirs, "the runtime")):
            if side is not None:
                notes += side.notes
                if side.x is not None and not np.all(np.isfinite(side.x.astype(np.float64))):
                    notes.append(f"{pair.module or match.name}: its x holds NaN or infinity in {who}")
        size = row_size(match, ours or theirs)
        return NormComparison(
            name=match.name,
            scope=match.scope,
            module=pair.module,
            spec=match.spec,
            dtype=match.x_type,
            tolerance=tolerance(match.spec, match.x_type, size),
            gain=gain.verdict,
            how=how,
            torch_ulp=None if ours is None else ours.ulp,
            torch_ratio=None if ours is None else ours.ratio,
            runtime_ulp=None if theirs is None else theirs.ulp,
            runtime_ratio=None if theirs is None else theirs.ratio,
            faults=tuple(self._faults(pair, gain, ours, theirs)),
            unrun=tuple(unrun),
            notes=tuple(notes),
            **self._differences(pair, ours, theirs),
        )

    def _candidates(self, pair: Pair, call: Call | str) -> list[np.ndarray]:
        """What the file's gain may be in the module."""
        from rmsnorm_onnx.counterparts import gain_candidates

        if not isinstance(call, str) and call.functional:
            return [] if call.gain is None else [call.gain]
        return [] if pair.key is None else gain_candidates(self._module, pair.key)

    def _faults(self, pair: Pair, gain: Gain, ours: Side | None, theirs: Side | None) -> Iterator[str]:
        """What is wrong with a norm, and what is known of the cause."""
        from rmsnorm_onnx.counterparts import module_epsilon

        label = pair.module or pair.match.name
        if theirs is not None and theirs.ratio > 1.0:
            yield f"{label}: the runtime is {theirs.ratio:.3g} times beyond the bound, on its own x"
        held = None if pair.key is None or pair.bare else module_epsilon(self._module, pair.key)
        epsilon = pair.match.spec.epsilon
        if held is not None and np.float32(held) != np.float32(epsilon):
            yield f"{label}: its epsilon is {np.float32(held)!s}, the file's {np.float32(epsilon)!s}"
        if pair.misses(self._ours) and not self._declined:
            yield f"{label}: {pair.call(self._ours)}"
        if pair.invents(self._ours):
            yield f"{label}: the file computes it, and PyTorch does not run its module"
        if gain.verdict == "differs":
            yield f"{label}: {gain.words}"
        elif ours is not None and ours.ratio > 1.0:
            yield f"{label}: PyTorch is {ours.ratio:.3g} times beyond the bound of the file's norm, on its own x"

    def _runtime_side(
        self, match: Match, call: Call | str, parameters: tuple[np.ndarray | None, np.ndarray | None]
    ) -> tuple[Side, str]:
        x, y = self._value(match.x), self._value(match.output)
        if x is not None and y is not None and match.residual is None:
            return self._in_place(match, x, y, parameters)
        if isinstance(call, str):
            raise UncutError("it is not in the main graph or the file did not run, and there is no x of PyTorch's")
        given = call.x.astype(dtypes.numpy_dtype(match.x_type))
        result, optimised = self._alone.run(match, given)
        note = () if optimised else ("it ran without onnxruntime's optimisations, which break it when it stands alone",)
        return Side(*worst(result, match.spec, given, *parameters), None, result, note), "alone"

    def _in_place(
        self, match: Match, x: np.ndarray, y: np.ndarray, parameters: tuple[np.ndarray | None, np.ndarray | None]
    ) -> tuple[Side, str]:
        """The runtime's y on its own x.

        Where y is further from the stored x's reference than the spec allows, but not further than the rounding of x
        explains, the norm has read another x; then it runs alone on the stored one, which says what it is worth.
        """
        here = worst(y, match.spec, x, *parameters)
        stored = not dtypes.holds(match.x_type, "float32") and match.x.producer() is not None
        if here[1] <= 1.0 or not stored:
            return Side(*here, x, y), "in place"
        _, explained = worst(y, match.spec, x, *parameters, x_was_stored=True)
        if explained > 1.0:
            return Side(*here, x, y), "in place"
        try:
            again, _ = self._alone.run(match, x)
        except UncutError as problem:
            note = f"the runtime reads x before it is rounded, and its norm cannot run alone on the stored x: {problem}"
            return Side(here[0], explained, x, y, (note,)), "in place"
        return Side(*worst(again, match.spec, x, *parameters), x, y, (_WIDE_X,)), "own x"

    def _value(self, value: ir.Value) -> np.ndarray | None:
        """A value of the run in place; None where it was not seen."""
        if self._seen is None:
            return None
        name = value.name or ""
        if value.is_graph_input() and name in self._fed:
            return self._fed[name]
        return self._seen.values.get(name)

    def _differences(self, pair: Pair, ours: Side | None, theirs: Side | None) -> dict[str, Difference | None]:
        exact = None if self._exact is None else pair.call(self._exact)
        y = None if exact is None or isinstance(exact, str) else exact.y
        found: dict[str, Difference | None] = {}
        if ours is not None and theirs is not None:
            found["y_difference"] = difference(theirs.y, ours.y)
            found["x_difference"] = None if theirs.x is None or ours.x is None else difference(theirs.x, ours.x)
        if ours is not None and y is not None:
            found["torch_drift"] = difference(ours.y, y)
        if theirs is not None and theirs.x is not None and y is not None:
            found["runtime_drift"] = difference(theirs.y, y)
        return found

    def outputs(self) -> tuple[OutputComparison, ...]:
        """Each output of the file beside the module's, in order."""
        exact = () if self._exact is None else self._exact.outputs
        theirs = () if self._seen is None else self._seen.outputs
        names = [value.name or "" for value in self._model.graph.outputs]
        sides = [
            Sides(_at(self._ours.outputs, i), _at(theirs, i), _at(exact, i), functools.partial(self._moves, i))
            for i in range(len(names))
        ]
        return tuple(map(compare_output, names, sides))

    def _moves(self, index: int) -> list[np.ndarray]:
        return [outputs[index] for outputs in self._moved if index < len(outputs)]

    @functools.cached_property
    def _moved(self) -> Sequence[tuple[np.ndarray, ...]]:
        """The runs with moved weights: by the eps of the coarsest type in the file or the module."""
        arrays = (*self._ours.outputs, *(() if self._seen is None else self._seen.outputs))
        kinds = {array.dtype.name for array in arrays if array is not None}
        kinds |= {match.x_type for match in find_rms_norms(self._model) if isinstance(match, Match)}
        kinds |= {str(p.dtype).removeprefix("torch.") for p in self._module.parameters()}
        return self._run.moved(max(float(dtypes.finfo(k).eps) for k in kinds & set(dtypes.FLOAT_TYPES) or {"float32"}))


def _at(values: Sequence[np.ndarray | None], index: int) -> np.ndarray | None:
    return values[index] if index < len(values) else None
