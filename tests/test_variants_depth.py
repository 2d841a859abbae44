"""Fifty norms in a row: what each rounds may add up, and nothing else may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.models.families import LlamaNorm, Norm, OlmoNorm
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.rounding import round_to

DEPTH, D, ROWS = 50, 64, 32
NARROWER = {"float32": "bfloat16", "float16": "bfloat16", "bfloat16": "float8_e4m3fn"}


class Chain(nn.Module):
    """Norms of a type with an orthogonal matrix between them, so that no step undoes another; float64 in and out.

    The matrix is applied in float64 and its result rounded to the type, so that all that adds up is the norms' own.
    """

    def __init__(self, kind: type[Norm], dtype: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dtype = getattr(torch, dtype)
        self.norms = nn.ModuleList([kind(D) for _ in range(DEPTH)])
        for norm in self.norms:
            norm.weight.data = (1.0 + 0.1 * torch.randn(D, generator=generator)).to(self.dtype)
        q, _ = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))
        self.register_buffer("mix", q)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = norm(torch.matmul(x, self.mix).to(self.dtype)).double()
        return x


def walk(chain: Chain, x: np.ndarray, dtype: str, rounding: str | None, *, twice: str | None = None) -> np.ndarray:
    """The chain in float64: exact, or rounded to `rounding` between the norms and inside them as their specs say.

    `twice` is one more type that each norm's result is rounded to: what an implementation may not do.
    """
    mix = chain.mix.numpy()
    for norm in chain.norms:
        spec, gain = norm.spec(dtype), norm.weight.detach().double().numpy()
        x = x @ mix
        if rounding is None:
            x = reference(spec, x, gain)
            continue
        x = round_to(x, rounding)
        narrow = dtypes.numpy_dtype(dtype)
        x = reference(spec, x.astype(narrow), gain.astype(narrow), rounded=True)
        x = x if twice is None else round_to(x, twice)
    return x


def rms(values: np.ndarray) -> float:
    """The root mean square over all elements."""
    return float(np.sqrt(np.mean(values * values)))


def allowance(chain: Chain, x: np.ndarray, dtype: str) -> float:
    """How far the last norm alone may be off, as a root mean square over all elements."""
    norm, kind = chain.norms[-1], dtypes.numpy_dtype(dtype)
    gain = norm.weight.detach().double().numpy().astype(kind)
    return rms(error_bound(norm.spec(dtype), (x @ chain.mix.numpy()).astype(kind), gain))


@pytest.mark.parametrize(
    ("kind", "dtype", "opset"),
    [
        (LlamaNorm, "bfloat16", 18),
        pytest.param(OlmoNorm, "float16", 23, marks=pytest.mark.full),
        pytest.param(LlamaNorm, "float32", 18, marks=pytest.mark.full),
        pytest.param(LlamaNorm, "float16", 18, marks=pytest.mark.full),
        pytest.param(OlmoNorm, "bfloat16", 18, marks=pytest.mark.full),
        pytest.param(OlmoNorm, "float32", 23, marks=pytest.mark.full),
    ],
)
def test_fifty_norms_do_not_drift(kind: type[Norm], dtype: str, opset: int, tmp_path: Path) -> None:
    """Rewritten norms in a row end no further from float64 than the specs' own rounding points take them.

    Criterion: with e the exact chain, r the chain of `reference(..., rounded=True)` and y what onnxruntime gives,
    rms(y - e) <= rms(r - e) + b, where b is the root mean square of the last norm's error bound. Why: each step adds
    an error of its own and carries the earlier ones on by the same factors in both chains (a gain near 1, an
    orthogonal matrix, 1 / rms near 1), so that two chains that round at the same points have errors of one size,
    though not the same errors; an implementation that rounds less has smaller ones. What two such sums of 50 errors
    over 2,048 elements differ by is far below one step's bound, so b is what is allowed for it; and a chain that
    rounds once more in each step lies beyond it, as is asserted.
    """
    chain = Chain(kind, dtype).eval()
    x = np.random.default_rng(0).standard_normal((ROWS, D))
    result = export(chain, torch.from_numpy(x), opset=opset, dynamic_shapes={}, output=tmp_path / "m.onnx")
    assert (result.report.found, result.report.rewritten) == (DEPTH, DEPTH)
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x})

    exact, rounded = walk(chain, x, dtype, None), walk(chain, x, dtype, dtype)
    limit = rms(rounded - exact) + allowance(chain, exact, dtype)
    assert rms(y - exact) <= limit
    assert limit < rms(walk(chain, x, dtype, dtype, twice=NARROWER[dtype]) - exact)
    assert limit < 0.2 * rms(exact)
