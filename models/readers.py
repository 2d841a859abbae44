"""What each form of norm module computes: epsilon, gain and axes from the instance, rounding points from the source.

A reader takes a module and the type of its inputs and gives a `Reading`. The sources are those of torch 2.13,
transformers 5.24, diffusers 0.42, timm 1.0.31 and x-transformers 2.31.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.models.classes import classes
from rmsnorm_onnx.rounding import round_to
from rmsnorm_onnx.spec import RMSNormSpec, preset

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one module computes.

    Attributes:
        spec: For the inputs that its norm gets.
        shape: The dimensions that it normalises, where the module says; else those of its weight.
        gain: The attribute that holds the gain.
        bias: The attribute that holds the bias.
        x_type: The type that its norm gets, where it is not that of the module's own inputs.
        late_factor: A constant that the module multiplies by after it has rounded x / rms divided by it. The spec
            cannot say that rounding; the numbers differ where the factor is no power of 2, or what is rounded is
            subnormal.
        call: The module on one input, a gate left out; by default, the module itself.
    """

    spec: RMSNormSpec
    shape: tuple[int, ...] | None = None
    gain: str = "weight"
    bias: str = "bias"
    x_type: str | None = None
    late_factor: float = 1.0
    call: Callable[[Any, torch.Tensor], Any] | None = None


Reader = Callable[[Any, str], Reading]


def reader_of(kind: type) -> Reader | None:
    """The reader for a class, by its full name, so that nothing has to be imported to look for it."""
    return _READERS.get(full_name(kind))


def full_name(kind: type) -> str:
    """A class's module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _epsilon(module: Any) -> float:
    """As float32's or the half's own arithmetic gets it: the Python number."""
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


def _torch(module: Any, x_type: str) -> Reading:
    """torch.nn.RMSNorm: float32 for halves, x's own type otherwise, rounded once; eps=None is that type's epsilon."""
    wide = dtypes.wider(x_type, "float32")
    spec = preset(
        "torch",
        axes=tuple(range(-len(module.normalized_shape), 0)),
        epsilon=float(dtypes.finfo(wide).eps) if module.eps is None else float(module.eps),
        has_gain=module.weight is not None,
        statistic_type=wide,
        factor_type=wide,
        normalized_type=wide,
        gain_type=wide,
    )
    return Reading(spec=spec, shape=tuple(module.normalized_shape))


def _torch_functional(module: Any, x_type: str) -> Reading:
    """VibeVoice's last layer, which calls F.rms_norm itself: the norm has no module of its own."""
    import torch

    def call(module: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=module.rms_norm_eps)

    spec = preset("torch", epsilon=float(module.rms_norm_eps), has_gain=False)
    return Reading(spec=spec, shape=(module.linear_2.in_features,), call=call)


def _llama(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("llama", epsilon=_epsilon(module)))


def _olmo(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("llama", epsilon=_epsilon(module), normalized_type="float32"))


def _helium(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("torch", epsilon=_epsilon(module)))


def _gemma(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("gemma", epsilon=_epsilon(module)))


def _gemma4(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("torch", epsilon=_epsilon(module), has_gain=module.with_scale))


def _t5(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("t5", epsilon=_epsilon(module)))


def _bare(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("torch", epsilon=_epsilon(module), has_gain=False))


def _rounded_factor(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("llama", epsilon=_epsilon(module), has_gain=False, factor_type="x"))


def _gate_first(module: Any, x_type: str) -> Reading:
    """The norm's input is the product with the gate, in float32; the gain lies along all groups, so it is outside."""
    groups = module.weight.numel() // module.group_size
    spec = preset(
        "llama",
        epsilon=_epsilon(module),
        has_gain=groups == 1,
        normalized_type=x_type,
        gain_type=x_type,
        result_type=x_type,
    )

    def call(module: Any, x: torch.Tensor) -> Any:
        if groups == 1:
            return module(x)
        bare = _with(module, weight=_ones_like(module.weight))
        return bare(x.reshape(*x.shape[:-2], -1, module.weight.numel())).reshape(x.shape)

    return Reading(spec=spec, shape=(int(module.group_size),), x_type="float32", call=call)


def _gate_last(module: Any, x_type: str) -> Reading:
    return Reading(spec=preset("llama", epsilon=_epsilon(module)), call=_without_gate)


def _gate_last_wide(module: Any, x_type: str) -> Reading:
    """What the norm gives goes into the gate in float32; the rounding comes after the gate."""
    wide = preset("torch", epsilon=_epsilon(module), result_type=dtypes.wider(x_type, "float32"))
    return Reading(spec=wide, call=_without_gate)


def _without_gate(module: Any, x: torch.Tensor) -> Any:
    """The module with a gate of 1 that nothing is applied to."""
    return _with(module, activation="linear")(x, _ones_like(x))


def _diffusers(module: Any, x_type: str) -> Reading:
    """diffusers' RMSNorm: T5's form with an optional gain and bias; without a gain it rounds to x's type."""
    spec = preset(
        "t5",
        epsilon=float(module.eps),
        has_gain=module.weight is not None,
        has_bias=module.bias is not None,
    )
    _check_one_axis(module.dim)
    return Reading(spec=spec, shape=tuple(module.dim))


def _mochi(module: Any, x_type: str) -> Reading:
    """diffusers' MochiRMSNorm: x, not cast, times a float32 factor and the gain, rounded once."""
    spec = preset("torch", epsilon=float(module.eps), has_gain=module.weight is not None, gain_type="x")
    _check_one_axis(module.dim)
    return Reading(spec=spec, shape=tuple(module.dim))


def _check_one_axis(shape: Any) -> None:
    # Both take their statistic over the last axis, whatever the shape of their gain.
    assert len(shape) == 1, f"a gain of shape {tuple(shape)} over the last axis"


def _normalized(size: int, epsilon: float, **changes: Any) -> RMSNormSpec:
    """F.normalize times sqrt(d): x / max(|x|, epsilon) * sqrt(d), and |x| = sqrt(d) rms."""
    return preset("llama", epsilon=epsilon / size**0.5, epsilon_placement="clamp", **changes)


_NORMALIZE_EPSILON = 1e-12  # the default of torch.nn.functional.normalize


def _channels(module: Any, x_type: str) -> Reading:
    """The RMS_norm of diffusers' video autoencoders: F.normalize over the channels, which precede the other axes."""
    size = max(module.gamma.shape)
    first = getattr(module, "channel_first", True)
    spec = _normalized(
        size,
        _NORMALIZE_EPSILON,
        axes=(-module.gamma.dim(),) if first else (-1,),
        has_bias=getattr(module, "bias", None) is not None and not isinstance(module.bias, float),
    )
    return Reading(spec=spec, shape=(size,), gain="gamma", late_factor=size**0.5)


def _per_channel(module: Any, x_type: str) -> Reading:
    """LTX-2's PerChannelRMSNorm, over axis 1 of five; all in x's type."""
    assert module.channel_dim == 1, f"channel_dim {module.channel_dim}"
    spec = preset("llama", axes=(-4,), epsilon=float(module.eps), has_gain=False, statistic_type="x", factor_type="x")
    return Reading(spec=spec)


def _scaled(module: Any, x_type: str) -> Reading:
    """x-transformers' ScaleNorm, RMSNorm and SimpleRMSNorm: F.normalize in x's type, times sqrt(d), times a gain."""
    size = round(module.scale**2)
    has_gain = hasattr(module, "g")
    epsilon = float(round_to(_NORMALIZE_EPSILON, x_type))
    spec = _normalized(
        size,
        epsilon,
        has_gain=has_gain,
        gain_offset=float(has_gain and module.unit_offset),
        statistic_type="x",
        factor_type="x",
    )
    return Reading(spec=spec, shape=(size,), gain="g", late_factor=size**0.5)


def _timm_channels(module: Any, x_type: str) -> Reading:
    """timm's RmsNorm2d and RmsNorm2dFp32: over axis 1 of four, in x's type or in float32."""
    wide = "float32" if type(module).__name__.endswith("Fp32") else "x"
    spec = RMSNormSpec(
        axes=(-3,),
        epsilon=float(module.eps),
        has_gain=module.weight is not None,
        statistic_type=wide,
        factor_type=wide,
        normalized_type=wide,
        gain_type=wide,
    )
    return Reading(spec=spec, shape=tuple(module.normalized_shape))


def _with(module: Any, **attributes: Any) -> Any:
    """A shallow copy of a module with other attributes; the module itself stays as it is."""
    import copy

    import torch

    part = copy.copy(module)
    part._parameters = dict(module._parameters)
    for name, value in attributes.items():
        setattr(part, name, torch.nn.Parameter(value) if isinstance(value, torch.Tensor) else value)
    return part


def _ones_like(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.ones_like(tensor)


_BY_FORM: Mapping[str, Reader] = MappingProxyType(
    {
        "llama": _llama,
        "olmo": _olmo,
        "helium": _helium,
        "gemma": _gemma,
        "gemma4": _gemma4,
        "t5": _t5,
        "bare": _bare,
        "rounded_factor": _rounded_factor,
        "gate_first": _gate_first,
        "gate_last": _gate_last,
        "gate_last_wide": _gate_last_wide,
    }
)

_VIDEO = "diffusers.models.autoencoders.autoencoder_kl_"

_READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "torch.nn.modules.normalization.RMSNorm": _torch,
        "timm.layers.norm.RmsNorm": _torch,
        "timm.layers.norm.RmsNormFp32": _torch,
        "timm.layers.norm.RmsNorm2d": _timm_channels,
        "timm.layers.norm.RmsNorm2dFp32": _timm_channels,
        "diffusers.models.normalization.RMSNorm": _diffusers,
        "diffusers.models.normalization.MochiRMSNorm": _mochi,
        f"{_VIDEO}wan.WanRMS_norm": _channels,
        f"{_VIDEO}qwenimage.QwenImageRMS_norm": _channels,
        f"{_VIDEO}ltx2.PerChannelRMSNorm": _per_channel,
        "diffusers.models.autoencoders.autoencoder_kandinsky6_sr.Kandinsky6VAERMSNorm": _channels,
        "x_transformers.x_transformers.ScaleNorm": _scaled,
        "x_transformers.x_transformers.RMSNorm": _scaled,
        "x_transformers.x_transformers.SimpleRMSNorm": _scaled,
        "transformers.models.vibevoice.modeling_vibevoice.VibeVoiceDiffusionHeadFinalLayer": _torch_functional,
        **{name: reader for form, reader in _BY_FORM.items() for name in classes(form)},
    }
)
"""Readers by the class's full name."""
