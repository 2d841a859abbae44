"""What can be exported besides a module, and the norms of a file beside their modules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.models import inventory

D = 48


class Joined(nn.Module):
    """Two inputs, of which the rows are joined."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat((a, b)), a * 2


@pytest.mark.parametrize("spelling", [lambda name: torch.export.Dim(name), lambda name: name], ids=["Dim", "name"])
def test_dimensions_keep_the_callers_names(spelling: Callable[[str], Any]) -> None:
    """By torch.export too, in outputs and in what is computed of them; torch.onnx's spelling, a name, is taken."""
    shapes = ({0: spelling("rows")}, {0: spelling("more")})
    result = export(Joined(), (torch.randn(3, 4), torch.randn(5, 4)), opset=18, dynamic_shapes=shapes)
    assert (result.route, result.notes) == ("torch.export, torch.onnx", ())
    dims = [[str(d) for d in value.shape] for value in (*result.model.graph.inputs, *result.model.graph.outputs)]
    assert dims[:2] == [["rows", "4"], ["more", "4"]] and dims[3] == ["rows", "4"]
    assert {"rows", "more"} == set(re.findall(r"[a-z]\w*", dims[2][0]))


class Scaled(nn.Module):
    """A norm without a gain, whose result the module around it multiplies."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.g = nn.RMSNorm(32, eps=eps, elementwise_affine=False)
        self.a = nn.Parameter(torch.linspace(0.5, 2, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * self.g(x)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_norm_whose_gain_is_its_parents(dtype: str) -> None:
    """It is found with that gain, and is still the norm of the module that has the epsilon."""
    result = export(nn.Sequential(nn.Linear(32, 32), Scaled()), torch.randn(2, 32), opset=18, dtype=dtype)
    [norm] = result.norms
    assert (norm.module, norm.kind, norm.epsilon, norm.same_epsilon) == ("1.g", "RMSNorm", 1e-5, True)
    assert norm.found is not None and not any("not found" in note for note in result.notes), result.notes


def test_an_exported_program_is_a_source() -> None:
    """A traced program is translated, under the caller's names; what only a module has is refused."""
    module = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-12))
    program = torch.export.export(module, (torch.randn(2, 8),))
    result = export(program, opset=21, output_names=["y"])
    [site] = result.report.sites
    assert (result.opset, site.spec.epsilon, result.model.graph.outputs[0].name) == (21, float(np.float32(1e-12)), "y")
    with pytest.raises(UsageError, match=r"dtype cannot be used here: a torch.export.Exported.* is traced already"):
        export(program, dtype="float16")


def test_an_onnx_program_is_a_source() -> None:
    """torch's own result has its norms rewritten at its own opset; an epsilon that its optimiser deleted is told."""

    class Hand(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-9)

    program = torch.onnx.export(Hand(), (torch.randn(2, 8),), dynamo=True, verbose=False, opset_version=20)
    result = export(program)
    assert (result.opset, result.report.rewritten) == (20, 1)
    assert any(note.startswith("1 norms have no epsilon") for note in result.notes)
    lowered = export(program, opset=14)
    assert lowered.route == "an ONNXProgram as it was at opset 20, lowered to 14" and lowered.report.rewritten == 1
    with pytest.raises(UsageError, match="input_names cannot be used here: an ONNXProgram is translated already"):
        export(program, input_names=["x"])


def test_an_epsilon_that_is_not_the_modules_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file whose epsilon is another than that of the module's class is not written."""
    [known] = inventory.norms(nn.Sequential(nn.RMSNorm(D, eps=1e-5)))
    other = dataclasses.replace(known, spec=known.spec.replace(epsilon=1e-3))
    monkeypatch.setattr(inventory, "norms", lambda module, **options: [other])
    with pytest.raises(ExportError, match=r"the RMSNorm 0 that it comes from has 0\.001"):
        export(nn.Sequential(nn.RMSNorm(D, eps=1e-5)), torch.randn(2, D), opset=17, output=tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


class Mine(nn.Module):
    """A norm of no known class, with an epsilon that it states and one that it uses."""

    def __init__(self, stated: float, used: float) -> None:
        super().__init__()
        self.eps, self.used = stated, used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.used)


def test_norms_are_compared_with_their_modules() -> None:
    """An unknown class is held to its eps in a note; a norm that is in no file is named."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.right, self.wrong, self.unused = Mine(1e-6, 1e-6), Mine(1e-5, 1e-6), nn.RMSNorm(D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wrong(self.right(x))

    result = export(Model(), torch.randn(2, 3, D), opset=17)
    assert [(p.module, p.kind, p.same_epsilon) for p in result.norms] == [
        ("right", "Mine", True),
        ("wrong", "Mine", False),
        ("unused", "RMSNorm", None),
    ]
    assert any("the Mine wrong that it comes from has 1e-05" in note for note in result.notes)
    assert "the RMSNorm unused was not found in the file" in result.notes
