"""Norms that TorchScript's file hides are found by the other route."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from export_kit import run
from torch import nn

from rmsnorm_onnx.exporters import export


class Half(nn.Module):
    """A norm of one half of x, whose size a TorchScript file does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x[:, : x.shape[1] // 2])


class Grouped(nn.Module):
    """A norm over two axes that an axis is split into."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm((4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.unflatten(-1, (4, 4)))


@pytest.mark.parametrize(("module", "width"), [(Half(), 8), (Grouped(), 16)])
def test_norms_that_a_trace_loses_are_found_by_the_other_route(module: nn.Module, width: int) -> None:
    """Where TorchScript's file hides a norm or its gain, torch.export's program is lowered, and a note says why."""
    x = torch.randn(2, 6, width)
    result = export(module, x, opset=17)
    [site] = result.report.sites
    assert site.action == "rewritten" and site.spec.has_gain and "lowered to 17" in result.route
    assert [note for note in result.notes if note.startswith("not by TorchScript")]
    [y] = run(result.model, x.numpy())
    np.testing.assert_allclose(y, module(x).detach().numpy(), rtol=np.sqrt(np.finfo(np.float32).eps))
