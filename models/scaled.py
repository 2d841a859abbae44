"""RMSNorms spelled as an L2 norm times sqrt(d), and RMSNorms over channels: one torch module for each way.

The L2 norm's lower limit is 1e-12 in F.normalize. As a limit of rms it is 1e-12 / sqrt(d), and 0 in float16. This
module needs torch; `variants` imports it on demand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm_onnx.models.families import Norm
from rmsnorm_onnx.rounding import round_to
from rmsnorm_onnx.spec import RMSNormSpec


class ScaledNorm(Norm):
    """F.normalize over the last axis, times sqrt(d), times g or 1 + g, everything in x's type.

    x-transformers' RMSNorm, ScaleNorm and SimpleRMSNorm.

    Args:
        d: The size of the last axis.
        gain: "axes" for a gain of d elements, "scalar" for one of one element (ScaleNorm), "none".
        offset: Whether 1 is added to the gain.
    """

    def __init__(self, d: int, gain: str = "axes", offset: bool = False) -> None:
        super().__init__(d, eps=1e-12, gain=False)
        if gain != "none":
            self.weight = nn.Parameter(torch.ones(1 if gain == "scalar" else d))
        self.offset = offset
        self.scale = d**0.5

    def spec(self, x_type: str) -> RMSNormSpec:
        limit = float(round_to(self.eps, x_type)) / self.scale
        half = self._half(x_type, epsilon_placement="clamp", gain_offset=1.0 if self.offset else 0.0)
        return half.replace(epsilon=limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.normalize(x, dim=-1) * self.scale
        if self.weight is None:
            return y
        return y * (self.weight + 1.0 if self.offset else self.weight)


class ClampedNorm(Norm):
    """x times sqrt(d) / max(L2 norm, machine epsilon): ZAYA's queries and keys. Everything is in x's type."""

    def __init__(self, d: int) -> None:
        super().__init__(d, gain=False)
        self.scale = d**0.5

    def spec(self, x_type: str) -> RMSNormSpec:
        limit = float(torch.finfo(getattr(torch, x_type)).eps) / self.scale
        return self._half(x_type, epsilon_placement="clamp").replace(epsilon=limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(x.dtype).eps
        return x * (self.scale / x.norm(p=2, dim=-1, keepdim=True).clamp_min(limit))


class ClampedRootNorm(Norm):
    """max(rms, epsilon) in float32, rounded before the gain: a clamp in place of a sum, at the root."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return RMSNormSpec(**self._fields(), epsilon_placement="clamp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        rms = wide.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(self.eps)
        return self.weight * (wide / rms).to(x.dtype)


class _ChannelNorm(Norm):
    """A norm over axis 1 of `rank` axes; its gain and bias are [C, 1, ...]."""

    def __init__(self, channels: int, rank: int, *, eps: float = 1e-6, bias: bool = False, ones: bool = True) -> None:
        super().__init__(channels, eps=eps, gain=False)
        self.rank = rank
        shape = (channels, *(1,) * (rank - 2 if ones else 0))
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "axes": (1 - self.rank,)}


class ChannelNorm(_ChannelNorm):
    """The mean square over the channels of NCHW, everything in x's type, the gain reshaped: timm's RmsNorm2d."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__(channels, 4, eps=eps, ones=False)

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._half(x_type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(torch.mean(x.pow(2), dim=1, keepdim=True) + self.eps)
        return x * self.weight.reshape(1, -1, 1, 1)


class WideChannelNorm(ChannelNorm):
    """The same in float32 and rounded once: timm's RmsNorm2dFp32."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(torch.mean(wide.pow(2), dim=1, keepdim=True) + self.eps)
        return (y * self.weight.float().reshape(1, -1, 1, 1)).to(x.dtype)


class ScaledChannelNorm(_ChannelNorm):
    """F.normalize over the channels times sqrt(C) times g, plus b, in x's type: denoising-diffusion-pytorch.

    Also diffusers' VAEs in float32.
    """

    def __init__(self, channels: int, rank: int = 4, bias: bool = True) -> None:
        super().__init__(channels, rank, eps=1e-12, bias=bias)
        self.scale = channels**0.5

    def spec(self, x_type: str) -> RMSNormSpec:
        limit = float(round_to(self.eps, x_type)) / self.scale
        return self._half(x_type, epsilon_placement="clamp").replace(epsilon=limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.normalize(x, dim=1) * self.scale * self.weight
        return y if self.bias is None else y + self.bias


class RoundedChannelNorm(_ChannelNorm):
    """F.normalize in float32, rounded to x's type, then times sqrt(C), the gain, and plus a bias.

    diffusers' VAEs: Wan, Qwen-Image, HunyuanVideo 1.5 (with a bias, or 0), Kandinsky 6 (without).
    """

    def __init__(self, channels: int, bias: bool = False) -> None:
        super().__init__(channels, 5, eps=1e-12, bias=bias)
        self.scale = channels**0.5

    def spec(self, x_type: str) -> RMSNormSpec:
        limit = float(round_to(self.eps, "float32")) / self.scale
        return RMSNormSpec(**{**self._fields(), "epsilon": limit}, epsilon_placement="clamp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.normalize(x.float(), dim=1).to(x.dtype) * self.scale * self.weight
        return y if self.bias is None else y + self.bias
