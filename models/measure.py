"""One model through the whole chain: find, compare with PyTorch's norms, rewrite, verify, save, load, run.

Every number in a `Row` is measured here; what cannot be measured says why.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import dtypes, modelio
from rmsnorm_onnx.errors import MissingDependencyError
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.models.inventory import Norm
from rmsnorm_onnx.models.tiny import TinyModel
from rmsnorm_onnx.oracle import reference, ulp_distance
from rmsnorm_onnx.parity import ParityReport, verify
from rmsnorm_onnx.passes import fuse
from rmsnorm_onnx.report import FusionReport, describe
from rmsnorm_onnx.runtimes import missing_kernels
from rmsnorm_onnx.site import Declined, Match

_BATCH, _SEQUENCE = 3, 5  # other than the example's, so that a baked-in dimension fails


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model, from PyTorch to a runtime.

    Attributes:
        model: Its name.
        opset: Its opset.
        dtype: The type of its norms.
        expected: How many norms PyTorch has.
        found: How many were found in the graph.
        declined: How many candidates were declined.
        differences: Norms that were found with another spec than their module's, or not found, each one sentence.
        specs: What the norms are, in words, with their numbers.
        forms: The forms that were written.
        torch_ulp: PyTorch's worst distance from float64 over all norms; None where there is no PyTorch model.
        ulp: The worst distance of a rewritten norm, run alone.
        tolerance: The ulps that its spec allows.
        within: Whether every norm was run and each of its elements is within its bound.
        valid: Whether the file passes onnx's full check.
        loads: Whether onnxruntime loads and runs the whole file.
        why: Why not.
        output: The whole output's largest difference from PyTorch's, or from the original file's; None unless it loads.
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
    exported = export(tiny.module, tiny.args, opset=opset, fuse=False)
    original = exported.model
    sites = find_rms_norms(original)
    fused, report = fuse(original)
    path = folder / f"{tiny.name}-{tiny.dtype}-opset{opset}.onnx"
    modelio.save(fused, path)
    inputs = tiny.inputs(_BATCH, _SEQUENCE, seed=1)
    feeds = [_numpy(t, tiny.dtype) if t.is_floating_point() else t.numpy() for t in inputs]
    outcome = Outcome.of(path, fused, feeds)
    return Row(
        model=tiny.name,
        opset=opset,
        dtype=tiny.dtype,
        expected=len(tiny.norms),
        differences=differences(sites, tiny.norms),
        torch_ulp=torch_ulp(tiny),
        output=None if outcome.outputs is None else _difference(outcome.outputs[0], tiny.module(*inputs)),
        allowed=None,
        route=exported.route,
        notes=exported.notes,
        **common(sites, report, verify(fused, original), outcome, path),
    )


def common(
    sites: Sequence[Match | Declined], report: FusionReport, parity: ParityReport, outcome: Outcome, path: Path
) -> dict[str, Any]:
    """The fields of a row that do not depend on where the model came from."""
    matches = [s for s in sites if isinstance(s, Match)]
    worst = max(parity.sites, key=lambda s: s.ulp or 0.0, default=None)
    words = collections.Counter(describe(m.spec, m.x_type) for m in matches)
    return {
        "found": len(matches),
        "declined": len(sites) - len(matches),
        "specs": tuple(f"{count} x {text}" for text, count in words.items()),
        "forms": tuple(sorted({s.form for s in report.sites if s.action == "rewritten" and s.form})),
        "ulp": float("nan") if worst is None or worst.ulp is None else worst.ulp,
        "tolerance": float("nan") if worst is None else worst.tolerance,
        "within": bool(parity.sites) and all(s.within for s in parity.sites) and report.rewritten == len(matches),
        "valid": outcome.valid,
        "loads": outcome.outputs is not None,
        "why": outcome.why,
        "file": path.name,
        "sites": tuple(s.to_json() for s in parity.sites),
    }


def differences(sites: Sequence[Match | Declined], norms: Sequence[Norm]) -> tuple[str, ...]:
    """How what was found differs from the modules: each site is held to the module that it was traced in."""
    missing = {norm.name: norm for norm in norms}
    lines = []
    for site in sites:
        if not isinstance(site, Match):
            continue
        norm = missing.pop(site.module or "", None)
        if norm is None:
            lines.append(f"{site.name} is no norm of the model, or the second of its module")
        elif site.x_type != norm.x_type or site.spec.canonical(norm.x_type) != norm.spec.canonical(norm.x_type):
            said, meant = describe(site.spec, site.x_type), describe(norm.spec, norm.x_type)
            lines.append(f"{norm.name} was found as: {said}; it is: {meant}")
    return (*lines, *(f"{name} was not found" for name in missing))


def torch_ulp(tiny: TinyModel) -> float:
    """PyTorch's own worst distance from the float64 reference, over the rows that sites are verified on."""
    import torch

    worst = 0.0
    for norm in tiny.norms:
        assert norm.shape is not None
        module = tiny.module.get_submodule(norm.name)
        gain = None
        if norm.spec.has_gain:
            gain = _numpy(module.weight, norm.x_type)
        rows = RowKinds(norm.spec, norm.x_type, (2, 4, *norm.shape))
        for x in rows.batches(np.random.default_rng(0)):
            with torch.no_grad():
                y = module(torch.from_numpy(x.astype(np.float32)).to(getattr(torch, norm.x_type)))
            distance = ulp_distance(_numpy(y, norm.x_type), reference(norm.spec, x, gain))
            worst = max(worst, float(np.max(distance)))
    return worst


def _numpy(tensor: Any, name: str) -> np.ndarray:
    """A tensor of a float type up to float32 as numpy, bfloat16 too."""
    array: np.ndarray = tensor.detach().float().numpy().astype(dtypes.numpy_dtype(name))
    return array


def _difference(output: np.ndarray, tensor: Any) -> float:
    return float(np.max(np.abs(output.astype(np.float64) - tensor.detach().double().numpy())))


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
    outputs: list[np.ndarray] = session.run(
        None, dict(zip([i.name for i in session.get_inputs()], inputs, strict=True))
    )
    return outputs


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
