"""The norms of a PyTorch model, by class: what an export of it must hold.

Each class has one reader, which takes epsilon, gain and axes from the instance and the rounding points from the
class's source. A class that is called an RMSNorm and has no reader is an error, never left out of the count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.spec import RMSNormSpec, preset

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """One norm module.

    Attributes:
        name: Its qualified name in the model.
        kind: Its class's name.
        spec: What it computes for inputs of `x_type`.
        x_type: The type of its weight, which is the type of its inputs in a model of one type.
        shape: The dimensions that it normalises; None where the module does not say (no gain and no shape).
    """

    name: str
    kind: str
    spec: RMSNormSpec
    x_type: str
    shape: tuple[int, ...] | None


def norms(module: torch.nn.Module) -> list[Norm]:
    """Every norm of a module tree, in the tree's order.

    Raises:
        UsageError: a class is called an RMSNorm and nothing is known of its rounding points.

    >>> import torch
    >>> [(n.name, n.spec.epsilon) for n in norms(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.RMSNorm(8)))]
    [('1', 1.1920928955078125e-07)]
    """
    default = next((_float_name(p) for p in module.parameters() if p.is_floating_point()), "float32")
    found = []
    for name, part in module.named_modules():
        kind = type(part)
        reader = _READERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if reader is None:
            if "rmsnorm" in kind.__name__.lower():
                raise UsageError(
                    f"{name} is a {kind.__module__}.{kind.__qualname__}; the inventory has no reader for it"
                )
            continue
        weight = getattr(part, "weight", None)
        x_type = default if weight is None else _float_name(weight)
        shape = getattr(part, "normalized_shape", None) if weight is None else weight.shape
        found.append(
            Norm(
                name=name,
                kind=kind.__name__,
                spec=reader(part, x_type),
                x_type=x_type,
                shape=None if shape is None else tuple(shape),
            )
        )
    return found


def _float_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _torch(module: Any, x_type: str) -> RMSNormSpec:
    """torch.nn.RMSNorm: float32 for halves, x's own type otherwise, rounded once; eps=None is that type's epsilon."""
    wide = dtypes.wider(x_type, "float32")
    return preset(
        "torch",
        axes=tuple(range(-len(module.normalized_shape), 0)),
        epsilon=float(dtypes.finfo(wide).eps) if module.eps is None else float(module.eps),
        has_gain=module.weight is not None,
        statistic_type=wide,
        factor_type=wide,
        normalized_type=wide,
        gain_type=wide,
    )


def _llama(module: Any, x_type: str) -> RMSNormSpec:
    return preset("llama", epsilon=float(module.variance_epsilon))


def _gemma(module: Any, x_type: str) -> RMSNormSpec:
    return preset("gemma", epsilon=float(module.eps))


def _t5(module: Any, x_type: str) -> RMSNormSpec:
    return preset("t5", epsilon=float(module.variance_epsilon))


_READERS: Mapping[str, Callable[[Any, str], RMSNormSpec]] = MappingProxyType(
    {
        "torch.nn.modules.normalization.RMSNorm": _torch,
        "transformers.models.llama.modeling_llama.LlamaRMSNorm": _llama,
        "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": _llama,
        "transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm": _gemma,
        "transformers.models.t5.modeling_t5.T5LayerNorm": _t5,
    }
)
"""Readers by the class's full name, so that nothing has to be imported to look for it."""
