"""`verify_torch` judges a file as a whole: its outputs beside PyTorch's own error, and the norms that it lacks."""

from __future__ import annotations

import itertools
from typing import Any

import nets
import numpy as np
import onnx_ir as ir
import pytest
import torch
from nets import LlamaNorm, Residual, Shared, example, exported, seeded
from torch import nn

from rmsnorm_onnx import export, find_rms_norms, verify_torch
from rmsnorm_onnx.comparison import TorchParityReport
from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.models import tiny


def measured(module: nn.Module, other: nn.Module, args: tuple[torch.Tensor, ...]) -> TorchParityReport:
    """The file of one module beside another one."""
    return verify_torch(export(module, args, dynamic_shapes={}).model, other, args)


class Tail(Residual):
    """Residual with something after its last norm."""

    def __init__(self, tail: Any) -> None:
        super().__init__()
        self.tail = tail

    def forward(self, x: torch.Tensor) -> Any:
        return self.tail(super().forward(x))


def tailed(tail: Any) -> nn.Module:
    """A seeded Tail."""
    return seeded(lambda: Tail(tail))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_changed_weight_outside_the_norms(dtype: str) -> None:
    """One element of a linear layer that is not the module's is a fault of the output, beyond what is allowed."""
    module, other = seeded(Residual), seeded(Residual)
    with torch.no_grad():
        other.layers[1].weight[3, 5] += 0.5
    model = export(module, example(), dtype=dtype, dynamic_shapes={}).model
    assert verify_torch(model, module, example(), dtype=dtype).ok
    report = verify_torch(model, other, example(), dtype=dtype)
    (output,) = report.outputs
    assert all(norm.ok for norm in report.norms) and not report.ok and not report.faults
    (fault,) = output.faults
    assert fault.startswith(f"output {output.name}: the file is ") and "ulp from float64, and PyTorch " in fault
    assert output.runtime_ulp > output.allowed_ulp > 16 * output.torch_ulp > 0


def test_another_architecture() -> None:
    """The same norms and weights around another activation: each norm holds on its own x, the output does not."""
    report = measured(tailed(nn.functional.gelu), tailed(nn.functional.silu), example())
    assert not report.ok and all(norm.ok for norm in report.norms)
    assert "another computation outside the norms" in report.outputs[0].faults[0]


def test_the_allowed_error_is_that_of_pytorch() -> None:
    """What an output may be off by is 16 times PyTorch's own error and 4 ulp, where that is enough."""
    (output,) = verify_torch(exported(Residual), seeded(Residual), example()).outputs
    assert output.allowed_ulp == pytest.approx(16 * output.torch_ulp + 4, rel=1e-12)
    assert output.runtime_ulp <= output.allowed_ulp


class Tie(nn.Module):
    """A norm, and an answer that jumps where the sum of what it gives crosses a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.norm = LlamaNorm()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        over = y.sum(-1, keepdim=True) > self.limit
        return torch.where(over, y, -y), over


def test_a_near_tie_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that one rounding of a weight sends to the other side is not the file's fault; a clear one is."""
    from rmsnorm_onnx import observation

    module, (x,) = seeded(lambda: Tie(0.0)), example()  # type: ignore[arg-type]
    with torch.no_grad():
        sums = module.norm(x).double().sum(-1).flatten()
    genuine = observation.observe

    def flipped(*given: Any) -> observation.Observation:
        seen = genuine(*given)
        values, over = (np.array(o) for o in seen.outputs)
        values[0, 0], over[0, 0] = -values[0, 0], ~over[0, 0]
        return observation.Observation((values, over), seen.values, seen.unchanged, seen.optimised)

    for limit, good in ((float(sums[0]), True), (float(sums[0]) - 1.0, False)):
        module = seeded(lambda limit=limit: Tie(limit))  # type: ignore[misc, arg-type]
        model = export(module, (x,), dynamic_shapes={}).model
        assert verify_torch(model, module, (x,)).ok
        with monkeypatch.context() as patch:
            patch.setattr(observation, "observe", flipped)
            report = verify_torch(model, module, (x,))
        assert report.ok == good
        assert [bool(output.faults) for output in report.outputs] == [not good] * 2
    assert report.outputs[1].faults[0].endswith("1 of 10 elements are not the module's")


def test_an_output_that_pytorch_gets_exactly() -> None:
    """Where PyTorch's own error is zero, rounding elsewhere is still no fault, and another number is one."""

    def tail(y: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(y) + 0.0 * y

    def other(y: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(y) * 1.00001

    report = measured(tailed(tail), tailed(tail), example())
    assert report.ok and report.outputs[0].torch_ulp == 0.0 and report.outputs[0].allowed_ulp == 4.0
    assert not measured(tailed(tail), tailed(other), example()).ok


def test_without_a_float64_run_the_two_sides_are_judged() -> None:
    """A module that refuses float64 is held to its own output, moved by one eps of its weights."""
    from test_against import Stubborn

    other = seeded(Stubborn)
    assert verify_torch(exported(Residual), other, example()).ok
    with torch.no_grad():
        other.layers[0].weight[3, 5] += 0.5
    report = verify_torch(exported(Residual), other, example())
    assert not report.ok and "ulp from PyTorch's, and there is no float64 run" in report.outputs[0].faults[0]


def test_another_shape() -> None:
    """An output of another shape is a fault that has both shapes."""
    report = measured(tailed(lambda y: y[:, :3]), tailed(lambda y: y), example())
    (fault,) = report.outputs[0].faults
    assert fault.endswith("has shape [2, 3, 64] in the runtime, and [2, 5, 64] in PyTorch") and not report.ok


def test_another_type() -> None:
    """A float where the module gives truth values is a fault."""
    report = measured(tailed(lambda y: y), tailed(lambda y: y > 0), example())
    assert report.outputs[0].faults[0].endswith("is float32 in the file, and bool in PyTorch") and not report.ok


@pytest.mark.parametrize(("left", "right", "counts"), [(1, 2, (2, 1)), (2, 1, (1, 2))])
def test_another_number_of_outputs(left: int, right: int, counts: tuple[int, int]) -> None:
    """An output too many or too few is a fault with both numbers."""
    module, other = (tailed(lambda y, n=n: tuple(y + i for i in range(n))) for n in (left, right))
    report = measured(module, other, example())
    (fault,) = report.faults
    assert fault.startswith(f"the module gives {counts[0]} tensors, and the file {counts[1]} outputs") and not report.ok


def test_nan_in_the_module_alone() -> None:
    """A module that gives NaN where the file is finite is a fault that is counted and named."""
    report = measured(tailed(lambda y: y.abs().log()), tailed(torch.log), example())
    (fault,) = report.outputs[0].faults
    with torch.no_grad():
        expected = int(torch.isnan(torch.log(seeded(Residual)(*example()))).sum())
    assert f": {expected} elements are NaN or infinite in PyTorch and in float64, and finite in the file" in fault
    assert not report.ok and expected > 0


def test_nan_in_the_file_alone() -> None:
    """The reverse is one too."""
    report = measured(tailed(torch.log), tailed(lambda y: y.abs().log()), example())
    assert "elements are NaN or infinite in the runtime and should be finite" in report.outputs[0].faults[0]
    assert not report.ok and report.outputs[0].nonfinite > 0


def test_nan_on_both_sides() -> None:
    """NaN in the same elements is no fault, and the others are judged; NaN throughout is not measured."""
    report = measured(tailed(torch.log), tailed(torch.log), example())
    assert report.ok and report.outputs[0].allowed_ulp is not None
    report = measured(tailed(lambda y: torch.log(-y.abs())), tailed(lambda y: torch.log(-y.abs())), example())
    assert "is NaN or infinite throughout, which shows nothing" in report.outputs[0].unrun[-1] and report.unmeasured


def without_last(model: ir.Model) -> ir.Model:
    """A copy whose last norm is gone, its x in its place."""
    changed = model.clone()
    match = find_rms_norms(changed)[-1]
    match.output.replace_all_uses_with(match.x, replace_graph_outputs=True)
    match.x.name, match.output.name = "y", "gone"
    changed.graph.remove(match.node, safe=True)
    return changed


def test_a_norm_that_the_file_lacks() -> None:
    """A norm of the module that the file has nothing for is named."""
    report = verify_torch(without_last(exported(Residual)), seeded(Residual), example())
    assert report.faults == ("last: the file has no norm for it",) and not report.ok


def test_no_norm_in_the_file() -> None:
    """A file without norms is told, with those of the module."""
    report = measured(nn.Linear(nets.WIDTH, nets.WIDTH), seeded(Residual), example())
    assert report.faults == ("no norm was found in the file; the module has norms.0, norms.1, last",)
    assert not report.ok and not report.norms


def test_no_norm_in_the_module() -> None:
    """A module without norms is told, with those of the file; LayerNorms are none."""
    other = nn.Sequential(nn.Linear(nets.WIDTH, nets.WIDTH), nn.LayerNorm(nets.WIDTH))
    report = measured(seeded(Residual), other, example())
    assert report.faults == ("no norm was found in the module; the file has norms.0, norms.1, last",) and not report.ok
    neither = nn.Linear(nets.WIDTH, nets.WIDTH)
    assert measured(neither, neither, example()).faults == (
        "no norm was found in the file; the module has none either",
    )


class Idle(Residual):
    """Has a norm that is not called, one whose result nothing uses, and a BatchNorm that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.unused, self.batch = LlamaNorm(), LlamaNorm(), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        return super().forward(self.batch(x))


def test_norms_that_change_nothing_are_not_missed() -> None:
    """A norm that is not called, or whose result goes nowhere, need not be in the file; a BatchNorm is none."""
    report = measured(seeded(Idle), seeded(Idle), example())
    assert report.ok and not report.faults and len(report.norms) == 3


class Stopping(Residual):
    """Ends before its last norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class Direct(Residual):
    """Calls its last norm's forward by name, past hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last.forward(Stopping.forward(self, x))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_that_pytorch_does_not_run(dtype: str) -> None:
    """A norm too many in the file is a fault in every type, also where the outputs cannot be compared."""
    file = export(seeded(Residual), example(), dynamic_shapes={}, dtype=dtype).model
    report = verify_torch(file, seeded(Stopping), example(), dtype=dtype)
    said = "last: the file computes it, and PyTorch does not run its module"
    assert [line for norm in report.norms for line in norm.faults if line == said] == [said] and not report.ok
    assert verify_torch(file, seeded(Direct), example(), dtype=dtype).ok


class Wrapped(nn.Module):
    """Residual under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_other_names_are_no_other_norms() -> None:
    """A file of the same model under a wrapper's names holds its norms, though the names tell nothing."""
    wrapped = seeded(Wrapped)
    assert measured(wrapped, wrapped.inner, example()).ok


def test_a_pattern_that_matches_nothing() -> None:
    """A misspelt pattern is a usage error with the closest names."""
    with pytest.raises(UsageError, match=r"no norm matches 'norm\.1'; the closest are norms\.1, norms\.0"):
        verify_torch(exported(Residual), seeded(Residual), example(), only="norm.1")
    with pytest.raises(UsageError, match=r"no norm matches 'zzz'; there are norms\.0, "):
        verify_torch(exported(Residual), seeded(Residual), example(), only="zzz")


def test_a_module_that_takes_no_hooks() -> None:
    """Inside torch's scan nothing can be watched: the error does not say that the module fails."""
    built = tiny.build("gru")
    file = export(built.module, built.args, opset=18, dynamic_shapes=built.dynamic_shapes).model
    with pytest.raises(ExportError, match=r"cannot be watched on its example inputs: .*captured completely"):
        verify_torch(file, built.module, built.args)


def test_shared_norms_are_not_missed() -> None:
    """One module under two names, or called twice, is in the file once for each call."""
    report = verify_torch(exported(Shared, count=2), seeded(Shared), example(2))
    assert report.ok and not report.faults


# Cohere and Nemotron have no norm, torch's scan (the GRU) takes no hooks, and timm needs another stand-in.
MEASURED = [name for name in tiny.NAMES if name not in ("cohere", "nemotron", "gru", "timm-vit")]


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), [*zip(MEASURED, itertools.cycle(["float32", "float16"]), strict=False)])
def test_good_files_of_every_family(name: str, dtype: str) -> None:
    """No output of a file that was exported from a tiny model is called wrong, and no norm of it is missed."""
    model = tiny.build(name, dtype)
    made = export(model.module, model.args, dynamic_shapes=model.dynamic_shapes)
    report = verify_torch(made.model, model.module, model.args)
    assert not report.faults and not [fault for output in report.outputs for fault in output.faults]
