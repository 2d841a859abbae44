"""What the exporter refuses: each failure is one line that names its step, and leaves nothing behind."""

from __future__ import annotations

import logging
import warnings

import onnx
import pytest
import torch
from torch import nn

from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import export


@pytest.mark.parametrize("opset", [12, 7, onnx.defs.onnx_opset_version() + 1])
def test_opset_out_of_reach(opset: int) -> None:
    """An opset that cannot be written is a usage error that names the limit, before any work is done."""
    with pytest.raises(UsageError, match=f"opset {opset} is (older than 13|newer than {opset - 1})"):
        export(nn.RMSNorm(48), torch.randn(2, 3, 48), opset=opset)


def test_another_opset_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """When torch.onnx writes another opset than the one asked for, the export fails and writes nothing."""
    genuine = torch.onnx.export

    def other(*args, opset_version: int, **kwargs):
        return genuine(*args, opset_version=18, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", other)
    with pytest.raises(ExportError, match="wrote opset 18, not 20"):
        export(nn.Linear(4, 4), torch.randn(2, 4), opset=20, output=tmp_path / "m.onnx", fuse=False)
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Untranslatable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x).real


@pytest.mark.parametrize(
    ("module", "step", "traced"),
    [(Branching(), "torch.export failed: ", False), (Untranslatable(), "translation to ONNX failed: ", True)],
)
def test_failures_name_their_step(module: nn.Module, step: str, traced: bool, tmp_path, capfd) -> None:
    """A failure names the step of each route taken and the exporter's words in one line, and writes nothing."""
    with pytest.raises(ExportError) as caught:
        export(module, torch.randn(4, 4), output=tmp_path / "m.onnx")
    message = str(caught.value)
    assert message.startswith(step) and len(message) > len(step) + 20 and "\n" not in message
    # the other route's reason comes second; where values decide what is computed, nothing is traced
    assert ("; torchscript: TorchScript tracing failed: " in message) == traced
    assert caught.value.__cause__ is not None
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_unusable_arguments_are_found_first(tmp_path) -> None:
    """An output without a folder, an unknown type, consumer or form are refused before the export starts."""
    with pytest.raises(UsageError, match="its folder does not exist"):
        export(Branching(), torch.randn(4, 4), output=tmp_path / "no" / "m.onnx")
    with pytest.raises(UsageError, match="use one of float32, float16, bfloat16"):
        export(Branching(), torch.randn(4, 4), dtype="half")
    with pytest.raises(UsageError, match="no consumer 'me'"):
        export(Branching(), torch.randn(4, 4), consumer="me")
    with pytest.raises(UsageError, match="no form 'layer'"):
        export(Branching(), torch.randn(4, 4), form="layer")


@pytest.mark.parametrize("fails", [False, True])
def test_module_and_process_are_left_as_they_were(fails: bool, capfd) -> None:
    """Training modes, log levels and warning filters are restored after success and failure, and nothing is printed."""
    module = nn.Sequential(nn.RMSNorm(48), nn.Dropout(), Branching() if fails else nn.Identity())
    module[1].eval()
    logger = logging.getLogger("torch.onnx")
    before = (logger.level, list(warnings.filters), torch.is_grad_enabled(), torch.get_default_dtype())
    try:
        export(module, torch.randn(2, 3, 48), fuse=False)
    except ExportError:
        assert fails
    else:
        assert not fails
    assert (logger.level, list(warnings.filters), torch.is_grad_enabled(), torch.get_default_dtype()) == before
    assert [part.training for part in module] == [True, False, True] and module.training
    assert capfd.readouterr() == ("", "")


def test_arguments_that_are_no_tuple() -> None:
    """A dictionary of inputs is a usage error, before its keys are taken for tensors."""
    with pytest.raises(UsageError, match="tuple of tensors"):
        export(nn.RMSNorm(8), {"x": torch.randn(2, 8)})


@pytest.mark.parametrize("inputs", [{"args": None}, {"args": (), "kwargs": {"y": torch.randn(2, 8)}}])
def test_arguments_that_forward_does_not_take(inputs: dict[str, object]) -> None:
    """Inputs that do not fit forward are a usage error, before a route is tried."""
    with pytest.raises(UsageError, match="the example inputs do not fit forward"):
        export(nn.RMSNorm(8), **inputs)


@pytest.mark.parametrize(
    "names",
    [
        {"input_names": ["same"], "output_names": ["same"]},
        {"input_names": ["weight"]},
        {"input_names": [""]},
        {"input_names": "ids"},
        {"output_names": ["y", "z"]},
    ],
)
def test_names_that_cannot_be(names: dict[str, list[str]]) -> None:
    """Doubled, empty, borne or surplus names are usage errors, not invalid files."""
    with pytest.raises(UsageError, match="name"):
        export(nn.RMSNorm(8), (torch.randn(2, 8),), **names)


def test_what_is_no_module() -> None:
    """A function is a usage error."""
    with pytest.raises(UsageError, match="no module"):
        export(lambda x: x, (torch.randn(2, 8),))
