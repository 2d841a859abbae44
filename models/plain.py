"""Tiny models beside the large libraries: plain torch modules, x-transformers' forms, and a recurrent cell."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import MissingDependencyError
from rmsnorm_onnx.models.design import HIDDEN, Design, sequence_values

if TYPE_CHECKING:
    import torch


def _mlp() -> torch.nn.Module:
    """torch.nn.RMSNorm in three variants: an epsilon, torch's default epsilon, and no gain."""
    from torch import nn

    return nn.Sequential(
        nn.RMSNorm(HIDDEN, eps=1e-6),
        nn.Linear(HIDDEN, 128),
        nn.RMSNorm(128),
        nn.GELU(),
        nn.Linear(128, HIDDEN),
        nn.RMSNorm(HIDDEN, eps=1e-5, elementwise_affine=False),
    )


def _x_transformers() -> torch.nn.Module:
    """An encoder layer with each of x-transformers' three forms: a gain of one number, of d numbers, and none."""
    try:
        from x_transformers import Encoder
    except ImportError as error:
        raise MissingDependencyError("x_transformers", "building x-transformers", "x-transformers") from error
    from torch import nn

    forms = ("use_scalenorm", "use_rmsnorm", "use_simple_rmsnorm")
    return nn.Sequential(*(Encoder(dim=HIDDEN, depth=1, heads=4, attn_dim_head=16, **{form: True}) for form in forms))


def _gru() -> torch.nn.Module:
    """A GRU that normalises its state before each step; the steps are a scan, and the norm stands in its body."""
    import torch
    from torch._higher_order_ops.scan import scan

    class NormalizedGRU(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(HIDDEN, eps=1e-6)
            self.cell = torch.nn.GRUCell(HIDDEN, HIDDEN)

        def step(self, state: torch.Tensor, x: torch.Tensor) -> Any:
            made = self.cell(x, self.norm(state))
            return made, made.clone()

        def forward(self, x: torch.Tensor) -> Any:
            state, states = scan(self.step, torch.zeros_like(x[:, 0]), x.transpose(0, 1))
            return states.transpose(0, 1), state

    return NormalizedGRU()


DESIGNS: Mapping[str, Design] = MappingProxyType(
    {
        "mlp": Design(source="torch.nn.RMSNorm", make=_mlp, inputs=sequence_values),
        "x-transformers": Design(
            source="x_transformers.Encoder",
            make=_x_transformers,
            inputs=sequence_values,
            trouble="its attention is an einsum, which ONNX has not in bfloat16: such a file does not pass the checker",
        ),
        "gru": Design(source="torch.nn.GRUCell and torch.nn.RMSNorm", make=_gru, inputs=sequence_values),
    }
)
"""The models of plain modules."""
