"""Norms among gates, heads and groups: what stands beside a norm and does not belong to it.

Each module holds its norms as parts of class `families.Norm`, in the order in which they run; what else it computes (a
gate, a gain that varies over groups, a modulation by an activation) stays outside them. This module needs torch;
`variants` imports it on demand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm_onnx.models.families import BareNorm, HeliumNorm, LlamaNorm, Norm, WideNorm
from rmsnorm_onnx.spec import RMSNormSpec


class WideHeliumNorm(HeliumNorm):
    """The gain cast to float32, and the result left in float32, for a gate to be multiplied in."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide(result_type="float32")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(torch.float32) * wide


class GateAfterNorm(nn.Module):
    """A norm, then times silu(gate) in float32: Qwen3-Next, Qwen 3.5, OLMo-Hybrid. x and gate: [B, S, d]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = LlamaNorm(d)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (self.norm(x) * F.silu(gate.to(torch.float32))).to(x.dtype)


class WideGateAfterNorm(nn.Module):
    """A norm that stays in float32, times sigmoid(gate), rounded at last: Kimi Linear, Bailing hybrid."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = WideHeliumNorm(d)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (self.norm(x) * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


class GateBeforeNorm(nn.Module):
    """silu(gate) first, then a norm of each group: Mamba 2, Zamba 2, Bamba, Nemotron-H, Granite 4.

    The gain spans the groups and is multiplied in after they are joined and rounded, so the norm itself has none.
    """

    def __init__(self, d: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.norm = WideNorm(d // groups)
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32) * F.silu(gate.to(torch.float32))
        *rows, d = wide.shape
        y = self.norm(wide.view(*rows, self.groups, d // self.groups)).view(*rows, d)
        return self.weight * y.to(x.dtype)


class GroupGainNorm(nn.Module):
    """A norm of each group, a gain [groups, d / groups] on it, then the gate: Falcon-H1.

    The gain varies over the groups, which are no normalised axis, so the norm itself has none.
    """

    def __init__(self, d: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.norm = WideNorm(d // groups)
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        batch, length, d = x.shape
        split = (self.groups, d // self.groups)
        y = self.weight.view(split) * self.norm(x.to(torch.float32).view(batch, length, *split))
        return (y.view(batch, length, d) * F.silu(gate.to(torch.float32))).to(x.dtype)


class HeadNorms(nn.Module):
    """A norm of each head's queries and of its keys, before they are transposed: Qwen 3, Gemma 3, OLMoE's relatives.

    q and k: [B, S, heads * d]; both results are [B, heads, S, d].
    """

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_norm: Norm = LlamaNorm(d)
        self.k_norm: Norm = LlamaNorm(d)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (x.view(*x.shape[:-1], self.heads, -1) for x in (q, k))
        return self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)


class ModulatedNorm(nn.Module):
    """A norm without a gain, modulated by activations: the adaptive norms of diffusion transformers.

    x: [B, S, d], scale and shift: [B, d]. They vary with the input, so they are no gain and no bias.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = BareNorm(d)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]
