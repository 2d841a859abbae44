"""The float64 run of a module, and what the rounding of a stored x hides."""

from __future__ import annotations

import nets
import numpy as np
import pytest
import torch
from kit import formula
from torch import nn

from rmsnorm_onnx import RMSNormSpec, reference, tolerance, ulp_distance
from rmsnorm_onnx.capture import capture, to_numpy
from rmsnorm_onnx.comparison import Difference, difference, ulp_of_largest
from rmsnorm_onnx.double import everything_in_double, in_double
from rmsnorm_onnx.rounding import spacing
from rmsnorm_onnx.storage import hidden_by_storage


def doubled(module: nn.Module, *args: torch.Tensor) -> np.ndarray:
    """The module's output in the float64 run."""
    double, inputs = in_double(module, args)
    with everything_in_double():
        (output,) = capture(double, inputs, {}, {}).outputs
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_in_the_code_do_not_round(dtype: torch.dtype) -> None:
    """A norm that casts to float32 and back to its input's type is the float64 formula on the same numbers."""
    module, (x,) = nets.seeded(nets.LlamaNorm).to(dtype), nets.example()
    x = x.to(dtype)
    y = doubled(module, x)
    exact = formula(RMSNormSpec(epsilon=1e-6), to_numpy(x), to_numpy(module.weight))
    bound = tolerance(RMSNormSpec(statistic_type="float64", factor_type="float64"), "float64", nets.WIDTH)
    assert y.dtype == np.float64 and float(ulp_distance(y, exact).max()) <= bound
    assert module.weight.dtype == dtype


def test_the_default_epsilon_stays_float32_s() -> None:
    """torch takes its default epsilon from the input's type; in the float64 run it stays that of the module's types."""
    x = 1e-4 * nets.example()[0]
    spec = RMSNormSpec(epsilon=2.0**-23, has_gain=False)
    y = doubled(nn.RMSNorm(nets.WIDTH, elementwise_affine=False), x)
    bound = tolerance(spec.replace(statistic_type="float64", factor_type="float64"), "float64", nets.WIDTH)
    assert float(ulp_distance(y, formula(spec, x.numpy())).max()) <= bound


class Factories(nn.Module):
    """Makes tensors of its own, in a type it names and in the default one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[-1], dtype=torch.float32) / 3
        ones = torch.full((x.shape[-1],), 0.1)
        return torch.softmax(x, -1, dtype=torch.float32) + steps * ones + torch.tensor(0.25)


def test_factories_make_float64() -> None:
    """Tensors that the code makes are computed with in float64 too."""
    (x,) = nets.example()
    wide = x.double().numpy()
    parts = np.exp(wide - wide.max(-1, keepdims=True))
    exact = parts / parts.sum(-1, keepdims=True) + np.arange(nets.WIDTH) / 3 * 0.1 + 0.25
    float32 = difference(to_numpy(Factories()(x)), exact)
    apart = difference(doubled(Factories(), x), exact)
    assert apart is not None and float32 is not None
    # A step of float64's eps for each of a handful of operations; one in float32 would be seen at once.
    assert apart.relative < 16 * np.finfo(np.float64).eps < float32.relative


class Bits(nn.Module):
    """Reads the bits of a float."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int32).float()


class InPlace(nn.Module):
    """Changes a tensor that no one converts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(nets.WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[0].add_(1.0)
        return x + self.seen[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Bits, "reads the bits of a float"), (InPlace, "changes a float32 tensor in place")],
)
def test_what_has_another_meaning_in_float64_is_refused(kind: type[nn.Module], words: str) -> None:
    """Code whose meaning the change of type would alter does not run."""
    with pytest.raises(TypeError, match=words):
        doubled(kind(), *nets.example())


def test_differences() -> None:
    """Relative differences are those of whole tensors; equal infinities are none, a NaN is an infinite one."""
    inf, nan = np.inf, np.nan
    assert difference(np.array([1.0, inf]), np.array([2.0, inf])) == Difference(0.5, 0.5)
    assert difference(np.array([nan, 1.0]), np.array([2.0, 1.0])) == Difference(inf, inf)
    assert difference(np.zeros(2), np.zeros(2)) == Difference(0.0, 0.0)
    assert difference(np.ones(2), np.zeros(2)) == Difference(inf, inf)
    assert difference(np.ones(2), np.ones(3)) is None
    assert ulp_of_largest(np.array([1.0 + 2.0**-9, 0.0], np.float16), np.array([1.0, 0.0])) == 2.0
    assert ulp_of_largest(np.array([1]), np.array([1])) is None


@pytest.mark.parametrize("placement", ["inside", "outside", "clamp"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_what_storage_hides(placement: str, scale: float) -> None:
    """No x that is stored as the same halves has a norm further away than the bound, and some come near it."""
    rng = np.random.default_rng(0)
    spec = RMSNormSpec(epsilon=1e-6, epsilon_placement=placement)  # type: ignore[arg-type]
    x = (scale * rng.standard_normal((20, 8))).astype(np.float16)
    gain = rng.uniform(-2.0, 2.0, 8)
    bound, exact = hidden_by_storage(spec, x, gain), reference(spec, x, gain)
    step = spacing(x.astype(np.float64), "float16") / 2
    nearest = 0.0
    for _ in range(300):
        moved = x.astype(np.float64) + step * rng.choice([-1.0, 1.0, 0.5, -0.5], x.shape)
        apart = np.abs(reference(spec, moved, gain) - exact)
        assert np.all(apart <= bound * (1 + 1e-12))
        nearest = max(nearest, float(np.max(apart / bound)))
    assert nearest > 0.5
