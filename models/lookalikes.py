"""What looks like an RMSNorm and is none: each must be declined, with its reason. This module needs torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Gained(nn.Module):
    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps


class UnbiasedVariance(_Gained):
    """x over its standard deviation, without centring: timm's SimpleNorm, Pocket TTS. A variance subtracts the mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(torch.var(x, dim=-1, keepdim=True) + self.eps) * self.weight


class BiasedVariance(_Gained):
    """The same with the variance over d in place of d - 1: EvoNorm's instance deviation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.var(dim=-1, unbiased=False, keepdim=True) + self.eps).sqrt() * self.weight


class HandLayerNorm(_Gained):
    """LayerNorm without a bias, written by hand: an RMSNorm of x - mean(x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)


class DifferenceOfMeans(_Gained):
    """A variance as E[x^2] - E[x]^2, beside a centred x: the other LayerNorm by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight


class UncentredDifference(_Gained):
    """The same variance under an x that is not centred: EvoNorm's manual variance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x * x).mean(-1, keepdim=True) - (mean * mean)).clamp(0)
        return x / variance.add(self.eps).sqrt() * self.weight


class SumNorm(nn.Module):
    """A sum of squares under the root, epsilon inside: Dory's L2 norm, which keeps length 1 and not rms 1."""

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + self.eps)).type_as(x)


class UnitNorm(nn.Module):
    """x over its L2 norm, with or without a lower limit: embeddings of CLIP, CLAP and ALIGN; OmDet-Turbo."""

    def __init__(self, d: int, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.norm(p=2, dim=-1, keepdim=True)
        return x / (length if self.limit is None else length.clamp_min(self.limit))


class NormalizedGain(_Gained):
    """F.normalize times a gain, without sqrt(d): nGPT's and x-transformers' unit vectors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1) * self.weight


class FactorOfAnother(nn.Module):
    """1 / rms of x on a projection of x, not on x itself: the hyper-connections of HY-V4."""

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d, bias=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class BuiltIn(nn.Module):
    """torch.nn.LayerNorm, which torch.onnx writes as one operator."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)
