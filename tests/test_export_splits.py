"""torch.split, split_with_sizes and chunk become one Split with the parts that torch makes, in every type and opset."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from export_kit import run
from torch import nn

import rmsnorm_onnx
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.models import tiny

SEQUENCES = {"SplitToSequence", "SequenceAt"}

CUTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "equal parts": lambda x: torch.split(x, 5, dim=-1),
    "a smaller last part": lambda x: torch.split(x, 6, dim=-1),
    "a part of one": lambda x: torch.split(x, 9, dim=2),
    "sizes": lambda x: torch.split(x, [3, 7], dim=-1),
    "one part": lambda x: torch.split(x, 10, dim=-1),
    "chunks": lambda x: x.chunk(3, dim=-1),
    "fewer chunks than asked": lambda x: torch.chunk(x[..., :5], 4, dim=-1),
    "computed sizes": lambda x: torch.split(x, [2, x.shape[1] - 2], dim=1),
    "unsafe parts": lambda x: torch.unsafe_split(x, 6, dim=-1),
    "unsafe sizes": lambda x: torch.unsafe_split_with_sizes(x, [3, 7], dim=-1),
    "unsafe chunks": lambda x: torch.unsafe_chunk(x, 3, dim=-1),
    "a dimension that torch fixes": lambda x: torch.split(x, 1, dim=0),
}


class Cut(nn.Module):
    """Gives the parts, each times its place, so that none can stand for another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.cut = CUTS[name]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part * (2.0**index) for index, part in enumerate(self.cut(x)))


def check(name: str, opset: int, dtype: str) -> None:
    """Exports, and compares the parts to the bit at another length than the example's; bfloat16 is only checked."""
    module = Cut(name)
    model = export(module, torch.randn(2, 6, 10), opset=opset, dtype=dtype, route="dynamo").model
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert SEQUENCES.isdisjoint(node.op_type for node in model.graph)
    if dtype == "bfloat16":
        return
    x = np.random.default_rng(5).standard_normal((2, 8, 10)).astype(dtype)
    wanted = [part.numpy() for part in module(torch.from_numpy(x))]
    got = run(model, x)
    assert len(got) == len(wanted)
    assert all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", CUTS)
def test_parts(name: str) -> None:
    """Every way to cut gives torch's parts, of torch's sizes, at other sizes than the example's too."""
    check(name, 18, "float32")


@pytest.mark.parametrize(("name", "opset"), [("equal parts", 13), ("a smaller last part", 17), ("computed sizes", 13)])
def test_parts_below_opset_18(name: str, opset: int) -> None:
    """Split has no num_outputs there: the sizes are in the file, and the parts are the same."""
    check(name, opset, "float32")


@pytest.mark.parametrize("opset", [18, 24])
@pytest.mark.parametrize("name", ["equal parts", "sizes", "chunks", "unsafe parts"])
def test_parts_in_bfloat16(name: str, opset: int) -> None:
    """ONNX's full check takes the file: no sequence of bfloat16 is in it."""
    check(name, opset, "bfloat16")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23, 24, onnx.defs.onnx_opset_version()])
@pytest.mark.parametrize("name", CUTS)
def test_parts_matrix(name: str, opset: int, dtype: str) -> None:
    """The same at each opset, in each type."""
    check(name, opset, dtype)


class Half(nn.Module):
    """Cuts a dimension of the run into parts of a size that is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.split(x, x.shape[1] // 2, dim=1)[0]


def test_a_file_that_the_check_refuses_has_a_note() -> None:
    """ONNX cuts no bfloat16 into a sequence: the file is made, and said to be refused."""
    result = export(Half(), torch.randn(2, 6, 4), dtype="bfloat16", route="dynamo")
    [note] = [note for note in result.notes if "onnx's full check refuses the file" in note]
    assert "unsupported type: tensor(bfloat16)" in note


def test_a_part_of_a_computed_size_stays_torchs_sequence() -> None:
    """How many parts there are is then known at run time only; the file runs as torch translates it."""
    model = export(Half(), torch.randn(2, 6, 4), route="dynamo").model
    assert {node.op_type for node in model.graph} >= SEQUENCES
    x = np.random.default_rng(6).standard_normal((2, 8, 4)).astype("float32")
    [half] = run(model, x)
    assert half.tobytes() == x[:, :4].tobytes()


@pytest.mark.parametrize(
    ("name", "opset"),
    [
        ("phi3", 24),
        ("gru", 24),
        pytest.param("glm4", 18, marks=pytest.mark.full),
        pytest.param("glm4", 24, marks=pytest.mark.full),
        pytest.param("phi3", 18, marks=pytest.mark.full),
    ],
)
def test_models_that_split_in_bfloat16(name: str, opset: int) -> None:
    """Phi-3, GLM 4 and a recurrent cell pass ONNX's full check in bfloat16, with every norm rewritten."""
    built = tiny.build(name, "bfloat16")
    result = export(built.module, built.args, opset=opset)
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert (result.report.rewritten, result.report.declined) == (result.report.found, 0)
    assert len(rmsnorm_onnx.find_rms_norms(result.model)) == result.report.found > 0
