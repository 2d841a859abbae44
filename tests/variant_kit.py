"""What the tests of variants share: many variants as one module, so that one export holds them all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.models.variants import VARIANTS, Built, Part, variant
from rmsnorm_onnx.oracle import error_bound
from rmsnorm_onnx.site import DeclineCode, Declined, Match
from rmsnorm_onnx.spec import RMSNormSpec


class Collection(nn.Module):
    """Variants side by side, each with inputs and an output of its own; the last output of those that give several."""

    def __init__(self, built: Sequence[Built]) -> None:
        super().__init__()
        self.variants = nn.ModuleList([b.module for b in built])
        self.counts = [len(b.args) for b in built]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, at = [], 0
        for module, count in zip(self.variants, self.counts, strict=True):
            y = module(*inputs[at : at + count])
            outputs.append(y[0] + y[1] if isinstance(y, tuple) else y)
            at += count
        return tuple(outputs)


def collect(names: Sequence[str], dtype: str, d: int = 64) -> tuple[Collection, tuple[torch.Tensor, ...], list[Built]]:
    """The variants of these names as one module, its example inputs, and the variants."""
    built = [variant(name, dtype, d) for name in names]
    return Collection(built).eval(), tuple(a for b in built for a in b.args), built


def numpy_of(tensor: torch.Tensor | None) -> np.ndarray | None:
    """A tensor as numpy, bfloat16 too."""
    if tensor is None:
        return None
    name = str(tensor.dtype).removeprefix("torch.")
    array = tensor.detach().double().numpy()
    return array.astype(np.float32).astype(dtypes.numpy_dtype(name)) if name == "bfloat16" else array.astype(name)


def torch_of(array: np.ndarray) -> torch.Tensor:
    """The inverse."""
    return torch.from_numpy(array.astype(np.float64)).to(getattr(torch, array.dtype.name))


def parameters(part: Part) -> tuple[np.ndarray | None, np.ndarray | None]:
    """A norm's gain and bias."""
    return numpy_of(part.module.weight), numpy_of(part.module.bias)


def rows(part: Part, shape: Sequence[int], batch: Sequence[int] = (3, 5)) -> np.ndarray:
    """One x that holds rows of every kind: of `shape`, with other sizes for the axes of `batch` that are no channel."""
    changed = [*shape]
    for axis, size in enumerate(batch):
        if axis - len(shape) not in part.spec.axes:
            changed[axis] = size
    (x,) = RowKinds(part.spec, part.x_type, tuple(changed)).batches(np.random.default_rng(0))
    return x


def beyond(y: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> int:
    """How many elements lie beyond their bounds, NaNs included."""
    with np.errstate(invalid="ignore"):
        return int(np.sum(~((np.abs(y.astype(np.float64) - exact) <= bound) | np.isinf(bound))))


def bound_of(spec: RMSNormSpec, x: np.ndarray, part: Part) -> np.ndarray:
    """The error bound of a norm with its own gain and bias."""
    return error_bound(spec, x, *parameters(part))


def canonical(sites: Sequence[Match | Declined]) -> list[tuple[str, RMSNormSpec]]:
    """What was found: the type and the canonical spec of each match."""
    return [(s.x_type, s.spec.canonical(s.x_type)) for s in sites if isinstance(s, Match)]


def expected(built: Sequence[Built]) -> list[tuple[str, RMSNormSpec]]:
    """What there is to be found."""
    return [(p.x_type, p.spec.canonical(p.x_type)) for b in built for p in b.parts]


def declined(sites: Sequence[Match | Declined]) -> list[DeclineCode]:
    """The codes of what was declined."""
    return [s.code for s in sites if isinstance(s, Declined)]


def expected_codes(names: Sequence[str]) -> list[DeclineCode]:
    """The codes that variants are declined with."""
    return [code for name in names for code in VARIANTS[name].declined]


def is_unsaid(name: str, dtype: str, d: int = 64) -> bool:
    """Whether a variant rounds in this type where no spec says so.

    The paper's count ** -0.5 is a constant of the graph, and exact only for a count with a whole root.
    """
    if dtype not in ("float16", "bfloat16"):
        return False
    counts = {"zhang2019": d, "zhang2019, bias": d, "prmsnorm": d // 4}
    return VARIANTS[name].unsaid or (name in counts and math.isqrt(counts[name]) ** 2 != counts[name])
