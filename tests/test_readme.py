"""The README: its generated tables are what the code says and measures, and its commands run.

`python tests/test_readme.py` writes the tables anew.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import transformers
from checkpoints import SMALL
from consumer_kit import table as cells
from productions import FIELDS
from test_roundings import table as roundings

from rmsnorm_onnx import Declined, RMSNormSpec, find_rms_norms
from rmsnorm_onnx.consumers import TABLE, Rule
from rmsnorm_onnx.plugin.engine import installed
from rmsnorm_onnx.site import DeclineCode
from rmsnorm_onnx.spec import PRESETS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SECTION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\nm (float[N,4] x{more}) => (float[{out}] result)\n'
BODY = """<float two = {{2.0}}, int64[1] last = {{-1}}, float eps = {{{eps}}}, float[4] w = {{1.0, 2.0, 3.0, 4.0}}> {{
 {before}
 squared = Pow ({x}, {two})
 mean_square = {reduce} (squared, last)
 shifted = Add (mean_square, {epsilon})
 root = Sqrt (shifted)
 {divide}
 result = Mul (normalized, w)
}}"""


def norm(
    *,
    more: str = "",
    out: str = "N,4",
    before: str = "",
    x: str = "x",
    two: str = "two",
    reduce: str = "ReduceMean",
    eps: str = "1e-6",
    epsilon: str = "eps",
    divide: str = "normalized = Div (x, root)",
) -> str:
    """A plain norm as text, with one part changed."""
    body = BODY.format(eps=eps, before=before, x=x, two=two, reduce=reduce, epsilon=epsilon, divide=divide.format(x=x))
    return HEAD.format(more=more, out=out) + body


EXAMPLES: Mapping[DeclineCode, str] = {
    DeclineCode.LAYER_NORM: norm(
        before="mean = ReduceMean (x, last)\n centred = Sub (x, mean)",
        x="centred",
        divide="normalized = Div (centred, root)",
    ),
    DeclineCode.OTHER_NORM: """<ir_version: 8, opset_import: ["" : 18]>
        m (float[N,2,8] x) => (float[N,2,8] result) <float[2] w = {1.0, 1.0}, float[2] b = {0.0, 0.0}> {
        result = InstanceNormalization (x, w, b) }""",
    DeclineCode.EXPONENT: norm(before="three = Constant <value = float {3.0}> ()", two="three"),
    DeclineCode.COEFFICIENT: norm(reduce="ReduceSum"),
    DeclineCode.EPSILON: norm(more=", float e", epsilon="e"),
    DeclineCode.NUMERATOR: norm(more=", float[N,4] z", divide="normalized = Div (z, root)"),
    DeclineCode.AXES: norm(more=", int64[1] axes").replace("(squared, last)", "(squared, axes)"),
    DeclineCode.SHAPE: norm(reduce="ReduceMean <keepdims = 0>", out="4,4").replace("[N,4]", "[4,4]"),
    DeclineCode.SHAPE_UNKNOWN: norm(more=", float[N,4] a", before="unknown = custom.Operator (a)", x="unknown")
    .replace("Div (x", "Div (unknown")
    .replace('["" : 18]', '["" : 18, "custom" : 1]'),
    DeclineCode.TYPE: norm().replace(
        "root = Sqrt (shifted)",
        "whole = Cast <to = 7> (shifted)\n widened = Cast <to = 1> (whole)\n root = Sqrt (widened)",
    ),
    DeclineCode.INTERIOR: """<ir_version: 11, opset_import: ["" : 23]>
        m (float[N,4] x, float[4] w) => (float[N,4] result, float[N,4] normalized)
        <float two = {2.0}, int64[1] last = {-1}, float eps = {1e-5}> {
        result = RMSNormalization (x, w) squared = Pow (x, two) mean_square = ReduceMean (squared, last)
        shifted = Add (mean_square, eps) root = Sqrt (shifted) normalized = Div (x, root) }""",
    DeclineCode.LIMIT: norm().replace(
        "result = Mul", "\n".join(f" other{i} = Mul (normalized, w)" for i in range(4100)) + "\n result = Mul"
    ),
    DeclineCode.UNUSED: """<ir_version: 8, opset_import: ["" : 18]>
        m (float[N,4] x) => (float[N,1] mean_square) <float two = {2.0}, int64[1] last = {-1}> {
        squared = Pow (x, two) mean_square = ReduceMean (squared, last) }""",
    DeclineCode.MISMATCH: """<ir_version: 8, opset_import: ["" : 18, "rmsnorm_onnx" : 1]>
        m (float[N,4] x) => (float[N,4] result) { result = rmsnorm_onnx.RMSNorm <epsilon = 1e-5, axis = -1> (x) }
        <opset_import: ["" : 18], domain: "rmsnorm_onnx"> RMSNorm <epsilon, axis> (x) => (result) {
        two = Constant <value = float {2.0}> () last = Constant <value_ints = [-1]> ()
        eps = Constant <value = float {1e-3}> () squared = Pow (x, two) mean_square = ReduceMean (squared, last)
        shifted = Add (mean_square, eps) root = Sqrt (shifted) result = Div (x, root) }""",
    DeclineCode.INVALID: """<ir_version: 11, opset_import: ["" : 23]>
        m (float[N,4] x, float[2,N,4] w) => (float[2,N,4] result) { result = RMSNormalization (x, w) }""",
}
"""A small model for each code, with one look-alike."""


def example(code: DeclineCode) -> Declined:
    """The one site that is declined in a code's example."""
    model = ir.from_proto(onnx.parser.parse_model(EXAMPLES[code]))
    (site,) = [s for s in find_rms_norms(model) if isinstance(s, Declined)]
    return site


def recognised() -> list[str]:
    """What the generator of spellings draws from; the tests find every combination that is legal."""
    rows = ("square", "count", "root", "epsilon", "epsilon spelling", "casts", "keepdims", "gain", "gain shape")
    rows += ("gain form", "gain order", "bias", "leading", "layout", "no-op", "container", "dtype")
    lines = ["| part | spellings |", "|---|---|"]
    lines += [f"| {row} | {'; '.join(v for v in FIELDS[row] if v != '-')} |" for row in rows]
    return [*lines, f"| opset | {FIELDS['opset'][0]} to {FIELDS['opset'][-1]} |"]


def declined() -> list[str]:
    """Each decline code, with what is said of its example."""
    lines = ["| code | for example |", "|---|---|"]
    return lines + [f"| `{code.value}` | {example(code).reason} |" for code in DeclineCode]


def consumers() -> list[str]:
    """The table of consumers, as the code has it."""
    lines = ["| `--for` | form | when | evidence | why |", "|---|---|---|---|---|"]
    for name, rules in TABLE.items():
        lines += [f"| `{name}` | `{r.form}` | {when(r)} | {r.evidence} | {r.why} |" for r in rules]
    return lines


def when(rule: Rule) -> str:
    """What a rule is for."""
    parts = [", ".join(rule.x_types)] if rule.x_types else []
    parts += ["a gain of x's type, not offset"] if rule.bare else []
    parts += [f"{word} {'.'.join(map(str, v))}" for word, v in (("from", rule.since), ("before", rule.before)) if v]
    parts += [f"opset {rule.newest_opset} and below"] if rule.newest_opset else []
    return "; ".join(parts) or "any"


def families() -> list[str]:
    """The presets: the fields in which each differs from the default."""
    defaults = RMSNormSpec()
    lines = ["| preset | fields that differ from the default |", "|---|---|"]
    for name, spec in PRESETS.items():
        changed = [f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) != getattr(defaults, f.name)]
        lines.append(f"| `{name}` | {', '.join(f'`{f}={getattr(spec, f)!r}`' for f in changed)} |")
    return lines


SECTIONS: Mapping[str, Callable[[], list[str]]] = {
    "recognised": recognised,
    "declined": declined,
    "consumers": consumers,
    "cells": cells,
    "families": families,
    "roundings": roundings,
}


def written(text: str) -> str:
    """A README with its tables as they are now."""
    return SECTION.sub(lambda m: m[1] + "\n".join(SECTIONS[m[2]]()) + "\n" + m[3], text)


@pytest.mark.parametrize("code", DeclineCode)
def test_each_code_has_an_example(code: DeclineCode) -> None:
    """Each decline code is given for its example, which names a node."""
    site = example(code)
    assert site.code is code
    assert site.name in site.reason


def test_the_tables_are_current() -> None:
    """Every generated table of the README is what the code says now."""
    text = README.read_text()
    assert {m[2] for m in SECTION.finditer(text)} == set(SECTIONS)
    assert written(text) == text, "run python tests/test_readme.py"


def test_nothing_is_left_to_fill_in() -> None:
    """No placeholder stands in the README."""
    assert "@@" not in README.read_text()


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_python_runs(tmp_path: Path) -> None:
    """The README's Python, one block after the other, runs and gives what its comments say."""
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    done = subprocess.run([sys.executable, "-W", "ignore", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = re.findall(r"print\(.*\)  # (.*)", script.read_text())
    said = [line for line in done.stdout.splitlines() if not line.startswith("[torch.onnx]")]
    assert said == expected


def test_the_commands_run(tmp_path: Path) -> None:
    """The README's commands, on model.onnx, net.py and a checkpoint's folder, run in order and exit with 0."""
    (tmp_path / "net.py").write_text(next(block for block in blocks("python") if "def make" in block))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "my-llama")
    onnx.save(onnx.parser.parse_model(norm()), tmp_path / "model.onnx")
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("rmsnorm-onnx")]
    assert {line.split()[1] for line in commands} == {"inspect", "fuse", "verify", "export", "doctor", "plugin"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert len(commands) == len([line for block in blocks("sh") for line in block.splitlines()])
    for command in commands:
        if command.startswith("rmsnorm-onnx plugin engine") and not installed():
            continue  # TensorRT-RTX has no package here
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert (tmp_path / "trt.engine").exists() or not installed()
    assert {"fused.onnx", "net.onnx", "drift.png", "llama.onnx"} <= {path.name for path in tmp_path.iterdir()}


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
