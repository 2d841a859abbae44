"""The command line: `export`, and its words where what is named is no module."""

import json
from pathlib import Path

import onnx
import pytest
from test_cli import Run, norms, operators, run  # noqa: F401  (fixtures)

MODULE = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8, eps=1e-5)), (torch.zeros(2, 3, 8),)
def broken():
    raise ValueError("no such\\nmodel")
def other():
    return 3
class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(8, eps=1e-5)
    def forward(self, x, *, shift):
        return self.norm(x) + shift
def options():
    inputs = {"kwargs": {"shift": torch.zeros(2, 3, 8)}, "input_names": ["in", "shift"], "output_names": ["out"]}
    return Sum(), (torch.zeros(2, 3, 8),), inputs
def misspelt():
    return Sum(), (torch.zeros(2, 3, 8),), {"opset": 17}
class Hard(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x).real
def hard():
    return Hard(), (torch.zeros(4, 4),)
"""


def test_export(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """A module from a file becomes a checked model whose norm is one node; its facts are in the JSON."""
    (tmp_path / "source.py").write_text(MODULE)
    output = tmp_path / "out.onnx"
    code, out, err = run("export", f"{tmp_path / 'source.py'}:build", "-o", output, "--opset", "20", "--json")
    data = json.loads(out)
    assert (code, data["rewritten"], data["export"]["opset"]) == (0, 1, 20), err
    onnx.checker.check_model(str(output), full_check=True)
    assert operators(output).count("RMSNorm") == 1


def test_export_with_options_by_another_route(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """A callable may give keyword inputs and names; opset and route are flags, and the JSON names the route."""
    (tmp_path / "source.py").write_text(MODULE)
    output = tmp_path / "out.onnx"
    arguments = (f"{tmp_path / 'source.py'}:options", "-o", output, "--opset", "13", "--route", "torchscript", "--json")
    code, out, err = run("export", *arguments)
    data = json.loads(out)
    assert (code, data["rewritten"], data["export"]["opset"]) == (0, 1, 13), err
    assert data["export"]["route"] == "TorchScript, torch.onnx"
    graph = onnx.load(output).graph
    assert [v.name for v in (*graph.input, *graph.output)] == ["in", "shift", "out"]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("broken", 1, "ValueError: no such model"),
        ("other", 2, "returned"),
        ("misspelt", 2, "returned the option 'opset'"),
        ("hard", 1, "translation to ONNX failed: "),
    ],
)
def test_export_of_what_is_no_module(run: Run, tmp_path: Path, name: str, code: int, words: str) -> None:  # noqa: F811
    """The user's own exception is kept in one line; another result is a usage error; nothing is written."""
    (tmp_path / "source.py").write_text(MODULE)
    got, out, err = run("export", f"{tmp_path / 'source.py'}:{name}", "-o", tmp_path / "out.onnx")
    assert (got, out) == (code, "") and words in err and err.count("\n") == 1
    assert not (tmp_path / "out.onnx").exists()


def test_nothing_is_written_for_a_name_that_is_none(run: Run, norms: Path, tmp_path: Path) -> None:  # noqa: F811
    """`--explain` of an unknown name is exit 2, in fuse and in export, and exit 2 has written nothing."""
    (tmp_path / "source.py").write_text(MODULE)
    for command in (["fuse", norms], ["export", f"{tmp_path / 'source.py'}:build"]):
        code, out, err = run(*command, "-o", tmp_path / "out.onnx", "--explain", "nope")
        assert (code, out) == (2, "") and "is named 'nope'" in err
        assert not (tmp_path / "out.onnx").exists()
