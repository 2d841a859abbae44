"""One model through the whole chain: find, compare with PyTorch's norms, rewrite, verify, save, load, run.

Every number in a `Row` is measured here; what cannot be measured says why.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import dtypes, modelio, sessions
from rmsnorm_onnx.errors import MissingDependencyError
from rmsnorm_onnx.exporters import ExportResult, export
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.models.inventory import Norm, parameters
from rmsnorm_onnx.models.inventory import run as run_norm
from rmsnorm_onnx.models.tiny import TinyModel
from rmsnorm_onnx.oracle import reference, ulp_distance
from rmsnorm_onnx.parity import ParityReport, verify
from rmsnorm_onnx.passes import fuse
from rmsnorm_onnx.report import FusionReport, describe
from rmsnorm_onnx.runtimes import missing_kernels
from rmsnorm_onnx.site import DeclineCode, Declined, Match

_BATCH, _SEQUENCE = 3, 5  # other than the example's, so that a baked-in dimension fails


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model, from PyTorch to a runtime.

    Attributes:
        model: Its name.
        opset: Its opset.
        dtype: The type of its norms.
        expected: At how many places PyTorch has norms.
        found: How many were found in the graph.
        declined: How many candidates were declined.
        reasons: The codes of their reasons, each with its count.
        layer_norms: How many norms subtract the mean, and so were to be declined with that reason.
        differences: Norms that were found with another spec than their module's, or not found, or claimed though they
            subtract the mean, each one sentence.
        specs: What the norms are, in words, with their numbers.
        held: How many of the norms that were found stay as they are, for a rewrite would move a rounding.
        forms: The forms that were written.
        torch_ulp: PyTorch's worst distance from float64 over all norms; None where there is no PyTorch model or norm.
        ulp: The worst distance of a rewritten norm, run alone; NaN where there is none.
        tolerance: The ulps that its spec allows.
        within: Whether every norm but those that were held was rewritten and run, each element within its bound.
        valid: Whether the file passes onnx's full check.
        loads: Whether onnxruntime loads and runs the whole file.
        why: Why not.
        output: The outputs' largest difference from PyTorch's, or from the original file's; None unless it loads.
        allowed: What `output` may be; None where nothing defines it.
        route: How it was exported.
        file: The file written.
        notes: What a reader should know, each one sentence.
        sites: Each site as the parity report has it.
    """

    model: str
    opset: int
    dtype: str
    expected: int
    found: int
    declined: int
    differences: tuple[str, ...]
    specs: tuple[str, ...]
    forms: tuple[str, ...]
    torch_ulp: float | None
    ulp: float
    tolerance: float
    within: bool
    valid: bool
    loads: bool
    why: str
    output: float | None
    allowed: float | None
    route: str
    file: str
    reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layer_norms: int = 0
    held: int = 0
    notes: tuple[str, ...] = ()
    sites: tuple[Mapping[str, Any], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all norms were found as they are, are within their bounds, and the file loads if it can anywhere."""
        complete = self.found == self.expected and not self.differences and self.within and self.valid
        close = self.output is None or self.allowed is None or self.output <= self.allowed
        return complete and close and (self.loads or self.why.startswith(_NO_KERNEL))

    def to_json(self) -> dict[str, Any]:
        """The row as JSON-ready data."""
        return {**dataclasses.asdict(self), "ok": self.ok}


_NO_KERNEL = "no kernel: "


def measure_tiny(tiny: TinyModel, opset: int, folder: Path) -> Row:
    """Export a tiny model at one opset, rewrite its norms, and measure everything that `Row` holds."""
    exported = export(tiny.module, tiny.args, opset=opset, dynamic_shapes=tiny.dynamic_shapes, fuse=False)
    return dataclasses.replace(measure_export(tiny, exported, folder), torch_ulp=torch_ulp(tiny))


Compare: TypeAlias = Callable[[Sequence[Match | Declined], Sequence[Norm]], tuple[str, ...]]
"""How what was found differs from the modules, each difference one sentence."""


def measure_export(tiny: TinyModel, exported: ExportResult, folder: Path, compare: Compare | None = None) -> Row:
    """Rewrite the norms of an export of a tiny model, and measure all but PyTorch's own distance.

    Args:
        tiny: The model.
        exported: Its export, with norms that are plain operators.
        folder: Where the rewritten file is written to.
        compare: `differences`, or another way to tell which site is which norm.
    """
    original, opset = exported.model, exported.opset
    sites = find_rms_norms(original)
    fused, report = fuse(original)
    path = folder / f"{tiny.name}-{tiny.dtype}-opset{opset}.onnx"
    modelio.save(fused, path)
    inputs = tiny.inputs(_BATCH, _SEQUENCE, seed=1)
    feeds = [_numpy(t) if t.is_floating_point() else t.numpy() for t in inputs]
    outcome = Outcome.of(path, fused, feeds)
    return Row(
        model=tiny.name,
        opset=opset,
        dtype=tiny.dtype,
        expected=sum(norm.sites for norm in tiny.norms),
        layer_norms=len(tiny.layer_norms),
        differences=(*(compare or differences)(sites, tiny.norms), *claimed(sites, tiny.layer_norms)),
        torch_ulp=None,
        output=None if outcome.outputs is None else _difference(outcome.outputs, tiny.module(*inputs)),
        allowed=None,
        route=exported.route,
        notes=exported.notes,
        **common(sites, report, verify(fused, original), outcome, path),
    )


def common(
    sites: Sequence[Match | Declined], report: FusionReport, parity: ParityReport, outcome: Outcome, path: Path
) -> dict[str, Any]:
    """The fields of a row that do not depend on where the model came from."""
    matches = _matches(sites)
    rewritten = {(s.scope, s.name) for s in report.sites if s.action == "rewritten"}
    run = [s for s in parity.sites if (s.scope, s.name) in rewritten]
    held = sum(bool(m.rounding_changes) for m in matches)
    worst = max(run, key=lambda s: s.ulp or 0.0, default=None)
    words = collections.Counter(describe(m.spec, m.x_type) for m in matches)
    return {
        "found": len(matches),
        "declined": len(sites) - len(matches),
        "reasons": dict(collections.Counter(s.code.value for s in sites if isinstance(s, Declined))),
        "specs": tuple(f"{count} x {text}" for text, count in words.items()),
        "forms": tuple(sorted({s.form for s in report.sites if s.action == "rewritten" and s.form})),
        "ulp": float("nan") if worst is None or worst.ulp is None else worst.ulp,
        "tolerance": float("nan") if worst is None else worst.tolerance,
        "held": held,
        "within": len(run) == report.rewritten == len(matches) - held and all(s.within for s in run),
        "valid": outcome.valid,
        "loads": outcome.outputs is not None,
        "why": outcome.why,
        "file": path.name,
        "sites": tuple(s.to_json() for s in parity.sites),
    }


def differences(sites: Sequence[Match | Declined], norms: Sequence[Norm]) -> tuple[str, ...]:
    """How what was found differs from the modules: each site is held to the module that it was traced in.

    Inside a loop torch.onnx leaves no trace of modules; such a site is held to a norm of its spec that is still to be
    found.
    """
    missing = {norm.name: norm for norm in norms}
    left = {norm.name: norm.sites for norm in norms}
    lines = []
    for site in sorted(_matches(sites), key=lambda match: match.module is None):
        norm = missing.get(site.module or _untraced(site, missing))
        if norm is None:
            lines.append(f"{site.name} is no norm of the model, or one more of its module")
            continue
        left[norm.name] -= 1
        if not left[norm.name]:
            del missing[norm.name]
        if not _same(site, norm):
            said, meant = describe(site.spec, site.x_type), describe(norm.spec, norm.x_type)
            lines.append(f"{norm.name} was found as: {said}; it is: {meant}")
    return (*lines, *(f"{name} was not found" for name in missing))


def claimed(sites: Sequence[Match | Declined], layer_norms: Sequence[str]) -> tuple[str, ...]:
    """What was made of norms that subtract the mean, other than declining them for that."""
    found = {site.module for site in _matches(sites)}
    declined = {s.module for s in sites if isinstance(s, Declined) and s.code is DeclineCode.LAYER_NORM}
    lines = [f"{name} subtracts the mean, and was taken for an RMSNorm" for name in layer_norms if name in found]
    return (*lines, *(f"{name} was not declined as a LayerNorm" for name in layer_norms if name not in declined))


def _matches(sites: Sequence[Match | Declined]) -> list[Match]:
    return [site for site in sites if isinstance(site, Match)]


def _untraced(site: Match, missing: Mapping[str, Norm]) -> str:
    return next((name for name, norm in missing.items() if _same(site, norm)), "")


def _same(site: Match, norm: Norm) -> bool:
    return site.x_type == norm.x_type and site.spec.canonical(norm.x_type) == norm.spec.canonical(norm.x_type)


def torch_ulp(tiny: TinyModel) -> float | None:
    """PyTorch's own worst distance from the float64 reference, over the rows that sites are verified on.

    None for a model without norms.
    """
    import torch

    worst = None
    for norm in tiny.norms:
        gain, bias = (None if p is None else _numpy(p) for p in parameters(tiny.module, norm))
        rows = RowKinds(norm.spec, norm.module_type, norm.x_shape(2, 4))
        for x in rows.batches(np.random.default_rng(0)):
            with torch.no_grad():
                given = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, norm.module_type))
                y = run_norm(tiny.module, norm, given)
            exact = reference(norm.spec, x, gain, bias)
            worst = max(worst or 0.0, float(np.max(ulp_distance(_numpy(y), exact))))
    return worst


def _numpy(tensor: Any) -> np.ndarray:
    """A tensor of a float type up to float32 as numpy, bfloat16 too."""
    name = str(tensor.dtype).removeprefix("torch.")
    array: np.ndarray = tensor.detach().float().numpy().astype(dtypes.numpy_dtype(name))
    return array


def _difference(outputs: Sequence[np.ndarray], made: Any) -> float:
    """The largest difference of a file's outputs from the tensor, or the tensors, that a module made."""
    tensors = made if isinstance(made, tuple) else (made,)
    pairs = zip(outputs, tensors, strict=True)
    return max(float(np.max(np.abs(o.astype(np.float64) - t.detach().double().numpy()))) for o, t in pairs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What onnx and onnxruntime say of a file.

    Attributes:
        valid: Whether it passes the full check.
        outputs: Its outputs; None where it does not load or run.
        why: Why not.
    """

    valid: bool
    outputs: list[np.ndarray] | None
    why: str = ""

    @classmethod
    def of(cls, path: Path, model: ir.Model, inputs: Sequence[np.ndarray]) -> Outcome:
        """Check a file fully, load it in onnxruntime's CPU provider, and run it on inputs in the graph's order."""
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            return cls(valid=False, outputs=None, why=f"the checker refuses it: {_one_line(error)}")
        try:
            return cls(valid=True, outputs=run(path, inputs))
        except MissingDependencyError:
            raise
        except Exception as error:  # onnxruntime raises a class for each of its status codes
            gaps = missing_kernels(model)
            if not gaps:
                return cls(valid=True, outputs=None, why=_one_line(error))
            kinds = sorted({gap.type for gap in gaps if "float" in gap.type}) or sorted({gap.type for gap in gaps})
            named = ", ".join(sorted({gap.op for gap in gaps}))
            return cls(valid=True, outputs=None, why=f"{_NO_KERNEL}{'/'.join(kinds)} {named}")


def run(path: Path, inputs: Sequence[np.ndarray], *, optimise: bool = True) -> list[np.ndarray]:
    """Run a file in onnxruntime on the CPU, inputs in the graph's order, the graph optimised first or as it is."""
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise MissingDependencyError("onnxruntime", "running a model", "rmsnorm_onnx[onnxruntime]") from error
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures are raised too
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {i.name: sessions.ort_value(value) for i, value in zip(session.get_inputs(), inputs, strict=True)}
    results = session.run_with_ort_values([o.name for o in session.get_outputs()], given)
    return [sessions.array(value) for value in results]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
