"""RMSNorms over the trailing axes, one torch module for each way in which model families compute them.

Each class rounds where its sources do, and says so: `spec` is what it computes for inputs of a type. The sources are
classes of transformers unless another package is named. This module needs torch; `variants` imports it on demand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.rounding import round_to
from rmsnorm_onnx.spec import RMSNormSpec, leading_count, preset


class Norm(nn.Module):
    """A norm that says what it computes.

    Attributes:
        shape: The sizes of the axes that share one statistic.
        eps: Epsilon as it is given.
        weight: The gain; None without one.
        bias: The bias; None without one.
        reads: The type of its inputs in a model of type `x_type`; "x" for that type itself.
    """

    reads = "x"

    def __init__(self, *shape: int, eps: float = 1e-6, gain: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.eps = eps
        self.register_parameter("weight", nn.Parameter(torch.ones(shape)) if gain else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape)) if bias else None)

    def spec(self, x_type: str) -> RMSNormSpec:
        """What it computes for inputs of a float type, given by name."""
        raise NotImplementedError

    def _fields(self) -> dict[str, Any]:
        """The fields of the spec that do not depend on where it rounds."""
        axes = tuple(range(-len(self.shape), 0))
        has = {"has_gain": self.weight is not None, "has_bias": self.bias is not None}
        return {"axes": axes, "epsilon": float(self.eps), **has}

    def _wide(self, **changes: Any) -> RMSNormSpec:
        """All of it in float32, rounded once."""
        return preset("torch", **{**self._fields(), **changes})

    def _half(self, x_type: str, **changes: Any) -> RMSNormSpec:
        """All of it in x's own type, epsilon too: 1e-8 is 0 in float16."""
        fields = {**self._fields(), "statistic_type": "x", "factor_type": "x", **changes}
        return RMSNormSpec(**{**fields, "epsilon": float(round_to(fields["epsilon"], x_type))})


class TorchNorm(Norm):
    """torch.nn.RMSNorm: in float32 for halves, else in x's own type, and rounded once; eps=None is that type's epsilon.

    Also timm's RmsNorm, which calls the same function.
    """

    def __init__(self, *shape: int, eps: float | None = None, gain: bool = True) -> None:
        super().__init__(*shape, gain=False)
        self.norm = nn.RMSNorm(shape, eps=eps, elementwise_affine=gain)
        self.weight = self.norm.weight
        self.given = eps

    def spec(self, x_type: str) -> RMSNormSpec:
        wide = dtypes.wider(x_type, "float32")
        epsilon = float(dtypes.finfo(wide).eps) if self.given is None else self.given
        types = dict.fromkeys(("statistic_type", "factor_type", "normalized_type", "gain_type"), wide)
        return self._wide(epsilon=epsilon, has_gain=self.norm.weight is not None, **types)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class FunctionalNorm(Norm):
    """torch.nn.functional.rms_norm over one or more trailing axes: timm's fast_rms_norm, and custom modules."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def _normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last axis, in x's type."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class LlamaNorm(Norm):
    """Rounded to x's type, then multiplied by the gain: Llama, Qwen 2 and 3, Mistral, Phi 3, Granite, GLM 4, OLMoE.

    With a gain that is kept in float32 beside half inputs the product, and so the result, is float32.
    """

    def spec(self, x_type: str) -> RMSNormSpec:
        kept = self.weight is not None and self.weight.dtype == torch.float32
        wide = {"gain_type": "float32", "result_type": "float32"} if kept else {}
        return preset("llama", **self._fields(), **wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * _normalized(x.to(torch.float32), self.eps).to(x.dtype)


class GemmaNorm(Norm):
    """1 + w in float32, multiplied in float32 and rounded once: Gemma 1 to 3, Qwen3-Next, Qwen 3.5."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return preset("gemma", **self._fields())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _normalized(x.float(), self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class T5Norm(Norm):
    """The statistic alone in float32, the result rounded to the weight's type: T5, mT5, UMT5, Idefics, Pix2Struct.

    A weight that is kept in float32 leaves the result in float32, and nothing is rounded on the way.
    """

    def spec(self, x_type: str) -> RMSNormSpec:
        kept = self.weight.dtype == torch.float32
        wide = dict.fromkeys(("normalized_type", "gain_type", "result_type"), "float32") if kept else {}
        return preset("t5", **self._fields(), **wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            y = y.to(self.weight.dtype)
        return self.weight * y


class OlmoNorm(Norm):
    """A gain of x's type times a float32 value, rounded once: OLMo 2 and 3, gpt-oss."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * _normalized(x.to(torch.float32), self.eps)).to(x.dtype)


class HeliumNorm(Norm):
    """The gain cast to float32 first, as the left factor; rounded once: Helium, Nemotron-H."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.to(torch.float32) * _normalized(x.to(torch.float32), self.eps)).to(x.dtype)


class MoshiNorm(Norm):
    """The same with the gain as the right factor, and epsilon 1e-8: Moshi, Mimi; timm's RmsNormFp32."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (_normalized(x.float(), self.eps) * self.weight.float()).type_as(x)


class PowerNorm(Norm):
    """The root as a power of -1/2, with or without a gain: Gemma 3n and 4."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        return (y if self.weight is None else y * self.weight.float()).type_as(x)


class BareNorm(Norm):
    """No gain: Llama 4's L2Norm (which takes a mean), NanoChat, the norms without weights of diffusers' blocks."""

    def __init__(self, *shape: int, eps: float = 1e-6) -> None:
        super().__init__(*shape, eps=eps, gain=False)

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalized(x.float(), self.eps).type_as(x)


class WideNorm(BareNorm):
    """No gain, from float32 to float32 in a model of any type: the inner norm of gated and grouped ones."""

    reads = "float32"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalized(x, self.eps)


class FactorNorm(BareNorm):
    """1 / rms is rounded to x's type before it multiplies: DeepSeek-V4, GLM 5 Next, HY-V4."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._wide(factor_type="x", normalized_type="x")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class BiasNorm(Norm):
    """A gain and a bias in x's type, after the rounding to it: diffusers' RMSNorm, xLSTM; equation 5 of the paper.

    The paper is Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    def __init__(self, *shape: int, eps: float = 1e-6, gain: bool = True) -> None:
        super().__init__(*shape, eps=eps, gain=gain, bias=True)

    def spec(self, x_type: str) -> RMSNormSpec:
        return preset("llama", **self._fields())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _normalized(x.to(torch.float32), self.eps).to(x.dtype)
        return (y if self.weight is None else y * self.weight) + self.bias


class PlainNorm(Norm):
    """Everything in x's type, a division by the root, then the gain: ImageGPT."""

    def spec(self, x_type: str) -> RMSNormSpec:
        return self._half(x_type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.mean(torch.square(x), -1, keepdim=True) + self.eps) * self.weight


class GainFirstNorm(Norm):
    """The gain times x first, then the factor, all in x's type: Gradium's timestep norm.

    In a half type x times the gain is rounded before 1 / rms is multiplied in, which no spec says; x / rms alone is
    never formed.
    """

    def spec(self, x_type: str) -> RMSNormSpec:
        wide = dtypes.wider(x_type, "float32")
        return self._half(x_type, normalized_type=wide, gain_type=wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class PaperNorm(Norm):
    """Zhang and Sennrich's own code: epsilon (1e-8) outside the root, and with `p` the norm of the leading int(d * p).

    The root mean square is an L2 norm times count ** -0.5; everything is in x's type. The authors' code splits x, which
    torch.onnx writes as a sequence of tensors; `split=False` takes a slice instead.
    """

    def __init__(
        self, d: int, p: float | None = None, eps: float = 1e-8, bias: bool = False, split: bool = True
    ) -> None:
        super().__init__(d, eps=eps, bias=bias)
        self.split = split
        self.count = d if p is None else leading_count(d, p)

    def spec(self, x_type: str) -> RMSNormSpec:
        leading = None if self.count == self.shape[0] else self.count
        return self._half(x_type, epsilon_placement="outside", leading=leading)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x if self.count == x.shape[-1] else x[..., : self.count]
        if self.split and self.count < x.shape[-1]:
            part, _ = torch.split(x, [self.count, x.shape[-1] - self.count], dim=-1)
        rms = part.norm(2, dim=-1, keepdim=True) * self.count ** (-1.0 / 2)
        y = self.weight * (x / (rms + self.eps))
        return y if self.bias is None else y + self.bias
