"""The norms of a PyTorch model, by class: what an export of it must hold.

Each class has a reader in `rmsnorm_onnx.models.readers`. A class that is called an RMSNorm and has none is an error,
or is listed by `unknown`; it is never left out in silence.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.models.classes import classes
from rmsnorm_onnx.models.readers import Reading, full_name, reader_of
from rmsnorm_onnx.spec import RMSNormSpec

if TYPE_CHECKING:
    import torch

_CALLED_A_NORM = re.compile(r"rms_?norm|scale_?norm|l2_?norm", re.IGNORECASE)
_HOLDERS = (
    "transformers.models.axk2.modeling_axk2.AXK2GatedRMSNorm",
    "x_transformers.x_transformers.MultiheadRMSNorm",
    "diffusers.models.normalization.LuminaRMSNormZero",
    "diffusers.models.transformers.transformer_mochi.MochiRMSNormZero",
)
"""Classes that are called norms and hold one: the norm inside is what counts."""

_ANY_SIZE = (64,)


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """One norm of a model.

    Attributes:
        name: The qualified name of its module, or of the module that computes it where it has none of its own.
        kind: That module's class.
        spec: What it computes for inputs of `x_type`.
        x_type: The type that it gets, which is the type of its weight in a model of one type; a norm behind a gate
            may get float32.
        shape: The dimensions that it normalises; None where the module does not say (no gain and no shape).
        module_type: The type that its module gets.
        late_factor: A constant that its module multiplies by after a rounding that the spec cannot say; see `Reading`.
        sites: At how many places it stands in an export: the module's calls, those of a loop's body being one.
    """

    name: str
    kind: str
    spec: RMSNormSpec
    x_type: str
    shape: tuple[int, ...] | None
    module_type: str = ""
    late_factor: float = 1.0
    sites: int = 1

    def x_shape(self, *rows: int) -> tuple[int, ...]:
        """A shape for its inputs: the rows and its dimensions; an inner axis is axis 1, with axes of 2 behind it.

        >>> Norm("n", "N", RMSNormSpec(axes=(-3,)), "float32", (8,)).x_shape(4, 3)
        (12, 8, 2, 2)
        """
        inner = -1 - self.spec.axes[-1]
        return (*([math.prod(rows)] if inner else rows), *(self.shape or _ANY_SIZE), *[2] * inner)


def norms(module: torch.nn.Module, strict: bool = True, x_types: Mapping[str, str] | None = None) -> list[Norm]:
    """Every norm of a module tree, in the tree's order.

    Args:
        module: The tree.
        strict: Whether a class that nothing is known of is an error; else it is left out, and `unknown` has it.
        x_types: The types that modules get, by name, where they are not those of their weights: a residual stream or
            a gated value that is kept in float32.

    Raises:
        UsageError: a class is called an RMSNorm and nothing is known of its rounding points.

    >>> import torch
    >>> [(n.name, n.spec.epsilon) for n in norms(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.RMSNorm(8)))]
    [('1', 1.1920928955078125e-07)]
    """
    if strict:
        for name, kind in unknown(module):
            raise UsageError(f"{name} is a {kind}; the inventory has no reader for it")
    return [
        Norm(
            name=name,
            kind=type(part).__name__,
            spec=reading.spec,
            x_type=reading.x_type or x_type,
            shape=_shape(part, reading),
            module_type=x_type,
            late_factor=reading.late_factor,
        )
        for name, part, x_type, reading in _readings(module, x_types or {})
    ]


def unknown(module: torch.nn.Module) -> list[tuple[str, str]]:
    """The modules that are called an RMSNorm and have no reader: each one's name and its class's full name.

    >>> import torch
    >>> class MyRMSNorm(torch.nn.Module): pass
    >>> [name for name, _ in unknown(torch.nn.Sequential(MyRMSNorm(), torch.nn.RMSNorm(8)))]
    ['0']
    """
    kinds = [(name, type(part)) for name, part in module.named_modules()]
    return [
        (name, full_name(kind))
        for name, kind in kinds
        if reader_of(kind) is None and _CALLED_A_NORM.search(kind.__name__) and full_name(kind) not in _HOLDERS
    ]


def layer_norms(module: torch.nn.Module) -> list[str]:
    """The names of the modules that subtract the mean: they look like RMSNorm, and are to be left alone."""
    import torch

    known = set(classes("layer_norm"))
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.LayerNorm) or full_name(type(part)) in known
    ]


def run(module: torch.nn.Module, norm: Norm, x: torch.Tensor) -> torch.Tensor:
    """What a norm of a model makes of x, a gate left out.

    Args:
        module: The model.
        norm: One of its norms.
        x: Of the norm's `module_type`.

    Returns:
        Of x's shape. A module with a gate behind its norm hands it back in x's type, whatever the norm's result type.
    """
    part = module.get_submodule(norm.name)
    call = _reading(part, norm.module_type).call
    result: torch.Tensor = part(x) if call is None else call(part, x)
    return result


def parameters(module: torch.nn.Module, norm: Norm) -> tuple[Any, Any]:
    """The gain and the bias of a norm, as its module holds them; None for one that its spec has not."""
    part = module.get_submodule(norm.name)
    reading = _reading(part, norm.module_type)
    return (
        getattr(part, reading.gain) if norm.spec.has_gain else None,
        getattr(part, reading.bias) if norm.spec.has_bias else None,
    )


def _readings(
    module: torch.nn.Module, x_types: Mapping[str, str]
) -> Iterator[tuple[str, torch.nn.Module, str, Reading]]:
    default = next((_float_name(p) for p in module.parameters() if p.is_floating_point()), "float32")
    for name, part in module.named_modules():
        if reader_of(type(part)) is not None:
            own = next((_float_name(p) for p in part.parameters(recurse=False) if p.is_floating_point()), default)
            given = x_types.get(name, own)
            yield name, part, given, _reading(part, given)


def _reading(part: torch.nn.Module, x_type: str) -> Reading:
    reader = reader_of(type(part))
    assert reader is not None
    return reader(part, x_type)


def _shape(part: torch.nn.Module, reading: Reading) -> tuple[int, ...] | None:
    weight = getattr(part, reading.gain, None)
    if reading.shape is not None or weight is None:
        return reading.shape
    return tuple(weight.shape)


def _float_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
