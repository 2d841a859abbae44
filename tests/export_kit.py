"""What the exporters' tests share: torch.nn.RMSNorm in its variants, their specs, rows that show faults, a runner."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import nn

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.exporters import ExportResult, export
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.spec import RMSNormSpec, preset

D = 48
SHAPES = {
    "weight": (D,),
    "eps_none": (D,),
    "no_weight": (D,),
    "two_dims": (3, D),
    "three_dims": (2, 3, D),
    "tiny_epsilon": (D,),
}
EPSILONS = {"eps_none": None, "tiny_epsilon": 1e-9}
DTYPES = ("float16", "bfloat16", "float32", "float64")


class InOut(nn.Module):
    """A module of any type behind float64 inputs and outputs, which numpy and onnxruntime can both hold."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.dtype)).to(torch.float64)


def norm(variant: str, dtype: str) -> nn.RMSNorm:
    """A seeded torch.nn.RMSNorm with a gain that is not one."""
    torch.manual_seed(0)
    module = nn.RMSNorm(SHAPES[variant], eps=EPSILONS.get(variant, 1e-6), elementwise_affine=variant != "no_weight")
    if module.weight is not None:
        with torch.no_grad():
            module.weight.add_(0.3 * torch.randn(SHAPES[variant]))
    return module.to(getattr(torch, dtype))


def spec_of(variant: str, dtype: str) -> RMSNormSpec:
    """What that module computes, with torch's default epsilon for the type."""
    wide = "float64" if dtype == "float64" else "float32"
    epsilon = EPSILONS.get(variant, 1e-6)
    return preset(
        "torch",
        axes=tuple(range(-len(SHAPES[variant]), 0)),
        epsilon=float(dtypes.finfo(wide).eps) if epsilon is None else epsilon,
        has_gain=variant != "no_weight",
        statistic_type=wide,
        factor_type=wide,
        normalized_type=wide,
        gain_type=wide,
    )


def rows(shape: tuple[int, ...]) -> np.ndarray:
    """[5, 4, *shape] with a zero row, a huge row, a tiny row and one whose mean square is near epsilon."""
    x = np.random.default_rng(3).standard_normal((5, 4, *shape))
    x[0, 0] = 0.0
    x[1, 0] *= 8000.0
    x[2, 0] *= 1e-5
    x[3, 0] *= 1e-3
    return x


def run(model: ir.Model, *feeds: np.ndarray) -> list[np.ndarray]:
    """Check a model fully and run it in onnxruntime, inputs in order."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], feeds, strict=True)))


def check(variant: str, dtype: str, opset: int, route: str = "dynamo") -> ExportResult:
    """Export, run on another batch and sequence than the example's, and hold both to the float64 reference."""
    module, kind = norm(variant, dtype), dtypes.numpy_dtype(dtype)
    wrapped = InOut(module, getattr(torch, dtype))
    result = export(
        wrapped, torch.randn(2, 3, *SHAPES[variant], dtype=torch.float64), opset=opset, fuse=False, route=route
    )
    assert result.model.opset_imports[""] == result.opset == opset
    x = rows(SHAPES[variant])
    [y] = run(result.model, x)
    gain = None if module.weight is None else module.weight.detach().double().numpy().astype(kind)
    spec, x = spec_of(variant, dtype), x.astype(kind)
    exact, bound = reference(spec, x, gain), error_bound(spec, x, gain)
    assert np.all(np.abs(y - exact) <= bound)
    assert np.all(np.abs(wrapped(torch.from_numpy(x.astype(np.float64))).detach().numpy() - exact) <= bound)
    assert not y[0, 0].any() and np.abs(y[3, 0]).max() > 0.1
    return result
