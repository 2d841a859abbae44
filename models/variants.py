"""`VARIANTS`: one small torch module for each way in which RMSNorms are computed, and for what merely looks like one.

`variant("llama", "float16")` builds a seeded module with gains that are not 1, its example inputs, and what its norms
compute: the spec of each, rounding points included. Look-alikes come with the codes that they are declined with.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import MissingDependencyError, UsageError
from rmsnorm_onnx.site import DeclineCode
from rmsnorm_onnx.spec import RMSNormSpec

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
"""The types that variants are exported in."""

_Shapes = tuple[tuple[int, ...], ...]


def _rows(d: int) -> _Shapes:
    return ((2, 3, d),)


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table.

    Attributes:
        families: Who computes it so, in words.
        build: From d to a module with its parameters as they are initialised.
        shapes: From d to the shapes of its inputs.
        keeps_gain: Whether its weights stay in float32 in a model of a half type.
        unsaid: Whether in half types it, or the graph that torch writes, rounds where no field of a spec says so: its
            norms are found with a list of rounding changes, and rewritten on request only.
        declined: The codes of what is declined in an export of it, in the order of the graph.
    """

    families: str
    build: Callable[[int], torch.nn.Module]
    shapes: Callable[[int], _Shapes] = _rows
    keeps_gain: bool = False
    unsaid: bool = False
    declined: tuple[DeclineCode, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One norm of a built variant.

    Attributes:
        name: Its qualified name in the module; "" where it is the module itself.
        module: The norm, a `families.Norm`.
        spec: What it computes for inputs of `x_type`.
        x_type: The type of its inputs.
    """

    name: str
    module: Any
    spec: RMSNormSpec
    x_type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A variant, ready to be exported.

    Attributes:
        module: The seeded module, in inference mode.
        args: Example inputs of its type.
        parts: Its norms, in the order in which they run.
    """

    module: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    parts: tuple[Part, ...]


def variant(name: str, dtype: str = "float32", d: int = 64, seed: int = 0) -> Built:
    """Builds a variant.

    Args:
        name: A key of `VARIANTS`.
        dtype: The type of its weights and inputs: one of `DTYPES`, or "float64".
        d: The size of the axis that is normalised, or divided into groups of d / 4; a multiple of 16.
        seed: Of weights and inputs.

    Raises:
        UsageError: no such variant, or no such type.
        MissingDependencyError: torch is not installed.

    >>> built = variant("gemma", "bfloat16")
    >>> built.args[0].shape, built.parts[0].spec.gain_offset
    (torch.Size([2, 3, 64]), 1.0)
    """
    if name not in VARIANTS or dtype not in (*DTYPES, "float64"):
        raise UsageError(f"no variant {name!r} in {dtype!r}; there are {', '.join(VARIANTS)} in {', '.join(DTYPES)}")
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "building a variant", "rmsnorm_onnx[torch]") from error

    row, kind = VARIANTS[name], getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = row.build(d)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    module = (module if row.keeps_gain else module.to(kind)).eval()
    args = tuple(torch.randn(shape, generator=generator).to(kind) for shape in row.shapes(d))
    return Built(module, args, tuple(_parts(module, dtype)))


def _parts(module: torch.nn.Module, dtype: str) -> Iterator[Part]:
    for name, part in module.named_modules():
        if isinstance(part, _families().Norm):
            x_type = dtype if part.reads == "x" else part.reads
            yield Part(name, part, part.spec(x_type), x_type)


# The classes need torch as soon as they are defined; the table does not.


def _families() -> Any:
    return importlib.import_module("rmsnorm_onnx.models.families")


def _scaled() -> Any:
    return importlib.import_module("rmsnorm_onnx.models.scaled")


def _gated() -> Any:
    return importlib.import_module("rmsnorm_onnx.models.gated")


def _lookalikes() -> Any:
    return importlib.import_module("rmsnorm_onnx.models.lookalikes")


def _gate(d: int) -> _Shapes:
    return (2, 3, d), (2, 3, d)


def _image(d: int) -> _Shapes:
    return ((2, d, 3, 5),)


def _video(d: int) -> _Shapes:
    return ((2, d, 2, 3, 5),)


_LAYER_NORM = (DeclineCode.LAYER_NORM,)
_COEFFICIENT = (DeclineCode.COEFFICIENT,)

NORMS: Mapping[str, Variant] = MappingProxyType(
    {
        "torch": Variant("torch.nn.RMSNorm, timm", lambda d: _families().TorchNorm(d, eps=1e-6)),
        "torch, eps=None": Variant("torch.nn.RMSNorm by default", lambda d: _families().TorchNorm(d)),
        "torch, no gain": Variant(
            "torch.nn.RMSNorm without weights", lambda d: _families().TorchNorm(d, eps=1e-5, gain=False)
        ),
        "rms_norm": Variant("torch.nn.functional.rms_norm", lambda d: _families().FunctionalNorm(d, eps=1e-5)),
        "rms_norm, two axes": Variant(
            "torch.nn.functional.rms_norm over two axes",
            lambda d: _families().FunctionalNorm(4, d // 4, eps=1e-5),
            lambda d: ((2, 3, 4, d // 4),),
        ),
        "llama": Variant("Llama, Qwen, Mistral, Phi 3, Granite, GLM 4", lambda d: _families().LlamaNorm(d)),
        "llama, float32 gain": Variant(
            "those with gains kept in float32", lambda d: _families().LlamaNorm(d), keeps_gain=True
        ),
        "gemma": Variant("Gemma 1 to 3, Qwen3-Next, Qwen 3.5", lambda d: _families().GemmaNorm(d)),
        "t5": Variant("T5, mT5, UMT5, Idefics, Pix2Struct", lambda d: _families().T5Norm(d)),
        "t5, float32 gain": Variant("T5 with gains kept in float32", lambda d: _families().T5Norm(d), keeps_gain=True),
        "olmo": Variant("OLMo 2 and 3, gpt-oss", lambda d: _families().OlmoNorm(d, eps=1e-5)),
        "helium": Variant("Helium, Nemotron-H", lambda d: _families().HeliumNorm(d, eps=1e-8)),
        "moshi": Variant("Moshi, timm's RmsNormFp32", lambda d: _families().MoshiNorm(d, eps=1e-8)),
        "power": Variant("Gemma 3n and 4", lambda d: _families().PowerNorm(d)),
        "power, no gain": Variant("Gemma 3n and 4, values", lambda d: _families().PowerNorm(d, gain=False)),
        "no gain": Variant("Llama 4's L2Norm, NanoChat", lambda d: _families().BareNorm(d)),
        "factor first": Variant("DeepSeek-V4, GLM 5 Next, HY-V4", lambda d: _families().FactorNorm(d)),
        "bias": Variant("diffusers, xLSTM, equation 5 of the paper", lambda d: _families().BiasNorm(d)),
        "bias, no gain": Variant("xLSTM without weights", lambda d: _families().BiasNorm(d, gain=False)),
        "one type": Variant("ImageGPT", lambda d: _families().PlainNorm(d, eps=1e-5)),
        "gain first": Variant("Gradium", lambda d: _families().GainFirstNorm(d, eps=1e-5), unsaid=True),
        "zhang2019": Variant("the paper's own code", lambda d: _families().PaperNorm(d)),
        "zhang2019, bias": Variant("the same with its offset", lambda d: _families().PaperNorm(d, bias=True)),
        "prmsnorm": Variant("the paper's pRMSNorm", lambda d: _families().PaperNorm(d, p=0.25)),
        "prmsnorm, slice": Variant(
            "pRMSNorm of a slice of any size", lambda d: _families().PaperNorm(d, p=0.3, split=False), unsaid=True
        ),
        "normalize": Variant("x-transformers", lambda d: _scaled().ScaledNorm(d), unsaid=True),
        "normalize, 1 + g": Variant(
            "x-transformers, unit offset", lambda d: _scaled().ScaledNorm(d, offset=True), unsaid=True
        ),
        "normalize, scalar": Variant(
            "ScaleNorm of x-transformers", lambda d: _scaled().ScaledNorm(d, "scalar"), unsaid=True
        ),
        "normalize, no gain": Variant(
            "SimpleRMSNorm of x-transformers", lambda d: _scaled().ScaledNorm(d, "none"), unsaid=True
        ),
        "clamped length": Variant("ZAYA", lambda d: _scaled().ClampedNorm(d), unsaid=True),
        "clamped root": Variant("a clamp in place of the sum", lambda d: _scaled().ClampedRootNorm(d)),
        "channels": Variant("timm's RmsNorm2d", lambda d: _scaled().ChannelNorm(d), _image),
        "channels, float32": Variant("timm's RmsNorm2dFp32", lambda d: _scaled().WideChannelNorm(d), _image),
        "channels, normalize": Variant(
            "denoising-diffusion-pytorch; diffusers' VAEs in float32",
            lambda d: _scaled().ScaledChannelNorm(d),
            _image,
            unsaid=True,
        ),
        "channels, rounded": Variant(
            "Wan, Qwen-Image, HunyuanVideo 1.5",
            lambda d: _scaled().RoundedChannelNorm(d, bias=True),
            _video,
            unsaid=True,
        ),
        "channels, no bias": Variant("Kandinsky 6", lambda d: _scaled().RoundedChannelNorm(d), _video, unsaid=True),
        "heads": Variant("Qwen 3, Gemma 3", lambda d: _gated().HeadNorms(d // 4, 4), _gate),
        "gate after": Variant("Qwen3-Next, Qwen 3.5, OLMo-Hybrid", lambda d: _gated().GateAfterNorm(d), _gate),
        "gate after, float32": Variant("Kimi Linear, Bailing hybrid", lambda d: _gated().WideGateAfterNorm(d), _gate),
        "gate before": Variant(
            "Mamba 2, Zamba 2, Bamba, Nemotron-H, Granite 4", lambda d: _gated().GateBeforeNorm(d, 4), _gate
        ),
        "group gain": Variant("Falcon-H1", lambda d: _gated().GroupGainNorm(d, 4), _gate),
        "modulated": Variant(
            "adaptive norms of diffusion transformers",
            lambda d: _gated().ModulatedNorm(d),
            lambda d: ((2, 3, d), (2, d), (2, d)),
        ),
    }
)
"""What is an RMSNorm: every norm of these is found, with the spec of its part."""

LOOKALIKES: Mapping[str, Variant] = MappingProxyType(
    {
        "unbiased variance": Variant(
            "timm's SimpleNorm, Pocket TTS", lambda d: _lookalikes().UnbiasedVariance(d), declined=_LAYER_NORM
        ),
        "variance": Variant("timm's EvoNorm", lambda d: _lookalikes().BiasedVariance(d), declined=_LAYER_NORM),
        "layer norm by hand": Variant(
            "bias-free LayerNorm", lambda d: _lookalikes().HandLayerNorm(d), declined=_LAYER_NORM
        ),
        "difference of means": Variant(
            "LayerNorm with E[x^2] - E[x]^2",
            lambda d: _lookalikes().DifferenceOfMeans(d),
            declined=_LAYER_NORM * 2,
        ),
        "uncentred difference": Variant(
            "timm's EvoNorm on TPUs", lambda d: _lookalikes().UncentredDifference(d), declined=_LAYER_NORM
        ),
        "sum": Variant("Dory", lambda d: _lookalikes().SumNorm(d), declined=_COEFFICIENT),
        "length": Variant("CLIP, CLAP, ALIGN", lambda d: _lookalikes().UnitNorm(d), declined=_COEFFICIENT),
        "length, clamped": Variant("OmDet-Turbo", lambda d: _lookalikes().UnitNorm(d, 1e-12), declined=_COEFFICIENT),
        "normalize, unscaled": Variant(
            "unit vectors", lambda d: _lookalikes().NormalizedGain(d), declined=_COEFFICIENT
        ),
        "factor of another": Variant(
            "hyper-connections of HY-V4",
            lambda d: _lookalikes().FactorOfAnother(d),
            declined=(DeclineCode.NUMERATOR,),
        ),
        "layer norm": Variant("torch.nn.LayerNorm", lambda d: _lookalikes().BuiltIn(d), declined=_LAYER_NORM),
    }
)
"""What merely looks like an RMSNorm: nothing in these is claimed."""

VARIANTS: Mapping[str, Variant] = MappingProxyType({**NORMS, **LOOKALIKES})
"""All of them by name."""
