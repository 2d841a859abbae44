"""What is kept of a foreign exporter's message: its first sentences in one line, and all of it in the cause."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.exporters.steps import shortened

ADVICE = (
    "TORCH_LOGS",
    "TORCHDYNAMO",
    "more information",
    "stack trace",
    "File ",
    "https://",
    "draft_export",
    "Size-like",
)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.abs().max().item()) + 1]


@pytest.mark.parametrize("module", [Branching(), Reading()])
def test_torch_export(module: nn.Module) -> None:
    """A long message keeps its type, its first sentence and the user's line; the cause has what was left out."""
    with pytest.raises(ExportError) as caught:
        export(module, (torch.randn(4, 4),), route="dynamo")
    text = str(caught.value)
    assert text.startswith("torch.export failed: GuardOnDataDependentSymNode: Could not ") and "data-dependent" in text
    assert text.endswith(")") and "(at test_export_words.py:" in text and len(text) < 250
    assert not [words for words in ADVICE if words in text]
    cause = caught.value.__cause__
    assert cause is not None and "TORCH_LOGS" in str(cause)


def test_notes_are_short() -> None:
    """The note of a route that failed before another one succeeded is of the same kind."""

    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0], -1).t().view(-1) if torch.compiler.is_exporting() else x * 2

    (note,) = (n for n in export(Sorted(), (torch.randn(3, 4),)).notes if "failed" in n)
    assert note.startswith("the route dynamo failed: torch.export failed: ") and "\n" not in note
    assert not [words for words in ADVICE if words in note] and len(note) < 450


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("one line, as it is", "one line, as it is"),
        ("", ""),
        (
            "Dynamic control flow is not supported at the moment. Please use torch.cond to capture it. For more "
            'information about this error, see: https://pytorch.org/docs/x\n\nfrom user code:\n   File "n.py", line 3',
            "Dynamic control flow is not supported at the moment. Please use torch.cond to capture it.",
        ),
        (
            'Constraints violated (b)! For more information, run with TORCH_LOGS="+dynamic".\n'
            "  - You marked b as dynamic but your code specialized it to be a constant (4).\n\n"
            "Suggested fixes:\n  b = 4\n",
            "Constraints violated (b)! You marked b as dynamic but your code specialized it to be a constant (4). "
            "Suggested fixes: b = 4",
        ),
        ("\x1b[31mred\x1b[0m words\nTraceback (most recent call last):\n  File x", "red words"),
        ("x" * 1000, "x" * 397 + "..."),
        ("First. " + "Second sentence of many words. " * 50, "First. " + "Second sentence of many words. " * 7),
    ],
)
def test_what_is_kept(text: str, kept: str) -> None:
    """Sentences of substance stay in order, advice on logs, code, traces and colours go, and there is an end."""
    assert shortened(text) == kept.strip()
