"""Tiny seeded models with the norms of their large relatives; nothing is downloaded.

`build("qwen3", "float16")` gives the same weights and inputs each time, in any process. Gains are random, so that one
that is lost or misplaced shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import MissingDependencyError, UsageError
from rmsnorm_onnx.models import plain, texts, vision
from rmsnorm_onnx.models.design import Design, Inputs
from rmsnorm_onnx.models.inventory import Norm, layer_norms, norms, parameters
from rmsnorm_onnx.site import selected

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
"""The types that the models come in."""

_DESIGNS: Mapping[str, Design] = MappingProxyType({**texts.DESIGNS, **plain.DESIGNS, **vision.DESIGNS})

NAMES = tuple(_DESIGNS)
"""The tiny models."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A model, ready to be exported.

    Attributes:
        name: As in `NAMES`.
        dtype: The type of its weights.
        source: Where its architecture is from.
        module: The model, in inference mode; its forward takes and gives tensors.
        args: Example inputs, batch 2 and length 7: token ids [2, 7], values [2, 7, 64], images or video.
        dynamic_shapes: What `export` takes for them; None is its default, batch and sequence.
        norms: Every RMSNorm that it holds.
        layer_norms: The names of its norms that subtract the mean, and so must be left alone.
        trouble: What an export of it has to know: a setting that the plain route needs, or a size that is fixed.
    """

    name: str
    dtype: str
    source: str
    module: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    dynamic_shapes: Any
    norms: tuple[Norm, ...]
    layer_norms: tuple[str, ...] = ()
    trouble: str = ""

    def inputs(self, batch: int, sequence: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Other inputs of the same kind; a model of images has no use for the length."""
        return _inputs(_DESIGNS[self.name], self.dtype, batch, sequence, seed)


def build(name: str, dtype: str = "float32", seed: int = 0) -> TinyModel:
    """A seeded model.

    Args:
        name: One of `NAMES`.
        dtype: One of `DTYPES`.
        seed: Of its weights and inputs.

    Raises:
        UsageError: no such model, or no such type.
        MissingDependencyError: torch, or the package that the model is from, is not installed.

    >>> model = build("mlp")
    >>> len(model.norms), model.module(*model.args).shape
    (3, torch.Size([2, 7, 64]))
    """
    if name not in _DESIGNS or dtype not in DTYPES:
        raise UsageError(f"no tiny model {name!r} in {dtype!r}; there are {', '.join(NAMES)} in {', '.join(DTYPES)}")
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "building a tiny model", "rmsnorm_onnx[torch]") from error

    design = _DESIGNS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = design.make()
        _randomize_gains(module)
    module = module.to(getattr(torch, dtype)).eval()
    return TinyModel(
        name=name,
        dtype=dtype,
        source=design.source,
        module=module,
        args=_inputs(design, dtype, batch=2, sequence=7, seed=seed),
        dynamic_shapes=_dynamic_shapes(design),
        norms=_norms(design, module),
        layer_norms=tuple(layer_norms(module)),
        trouble=design.trouble,
    )


def _norms(design: Design, module: torch.nn.Module) -> tuple[Norm, ...]:
    names = [name for name, _ in module.named_modules()]
    wide = {name: "float32" for name in names if selected(name, None, design.wide, ()) and design.wide}
    found = norms(module, x_types=wide)
    return tuple(dataclasses.replace(norm, sites=design.sites.get(norm.name, 1)) for norm in found)


def _inputs(design: Design, dtype: str, batch: int, sequence: int, seed: int) -> tuple[torch.Tensor, ...]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return design.inputs(Inputs(batch=batch, sequence=sequence, generator=generator, dtype=getattr(torch, dtype)))


def _dynamic_shapes(design: Design) -> Any:
    if design.dynamic is None:
        return None
    import torch

    return tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) for dims in design.dynamic)


def _randomize_gains(module: torch.nn.Module) -> None:
    """Spread every gain around what it is initialised to: 1, or 0 where 1 is added to it; and every bias around 0."""
    import torch

    for norm in norms(module):
        for parameter in parameters(module, norm):
            if parameter is not None:
                with torch.no_grad():
                    parameter.add_(0.3 * torch.randn(parameter.shape))
