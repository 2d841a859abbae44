"""Small PyTorch modules whose norms are written in every way, and their files."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from rmsnorm_onnx import export

WIDTH = 64


class LlamaNorm(nn.Module):
    """Rounds to its input's type before the gain, as Llama's does."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width).uniform_(0.5, 1.5))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class Residual(nn.Module):
    """Two blocks, each a norm and a linear layer around a residual, and a norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(LlamaNorm() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last = LlamaNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.last(x)


class Shared(nn.Module):
    """One norm that is called twice, in another order than its results are used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaNorm()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = self.norm(a), self.norm(b)
        return 2.0 * second + first


class Inline(nn.Module):
    """A norm by F.rms_norm, and one by hand, in the body of a module that does more."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.hand = Hand()
        self.gain = nn.Parameter(torch.empty(WIDTH).uniform_(0.5, 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hand(nn.functional.rms_norm(self.lift(x), (WIDTH,), self.gain, 1e-5).tanh())


class Hand(nn.Module):
    """A norm by hand between other work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1.0
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).sin()


def bare_net() -> nn.Module:
    """A module without a norm."""
    return nn.Linear(WIDTH, WIDTH).eval()


def seeded(kind: type[nn.Module], seed: int = 0) -> Any:
    """A module with seeded weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind().eval()


def example(count: int = 1, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Seeded inputs [2, 5, width]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(2, 5, WIDTH, generator=generator) for _ in range(count))


def exported(kind: type[nn.Module], dtype: str = "float32", count: int = 1, **options: Any) -> ir.Model:
    """The file of a seeded module."""
    return export(seeded(kind), example(count), dtype=dtype, dynamic_shapes={}, **options).model
