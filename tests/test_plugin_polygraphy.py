"""plugins/tensorrt/pattern.py in Polygraphy's own tools: norms are found, and become nodes that the check passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from form_kit import SPECS, Site, write

from rmsnorm_onnx import RMSNormSpec, plugin
from rmsnorm_onnx.forms.plugin import FIELDS

pytest.importorskip("polygraphy", reason="Polygraphy is not installed (tests/no-deps.txt)")
pytest.importorskip("onnx_graphsurgeon", reason="onnx-graphsurgeon is not installed (tests/no-deps.txt)")

PLUGINS = Path(__file__).parents[1] / "plugins"
MAIN = "from polygraphy.tools import main; main()"


def polygraphy(tool: str, folder: Path, *more: str) -> str:
    """What one of Polygraphy's plugin tools says of model.onnx."""
    command = [sys.executable, "-c", MAIN, "plugin", tool, "model.onnx", "--plugin-dir", str(PLUGINS), *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("form", ["primitive", "function"])
def test_match_and_replace(form: str, tmp_path: Path) -> None:
    """Each norm that the plugin computes becomes one node of it, with its own spec; one that it refuses stays."""
    names = ("outside", "bias", "no gain", "double statistic")
    onnx.save(write([Site(SPECS[name]) for name in names], form, 18), tmp_path / "model.onnx")
    assert "{'tensorrt': 3}" in polygraphy("list", tmp_path)
    polygraphy("match", tmp_path, "-o", "config.yaml")
    assert "replaced 3 instances" in polygraphy("replace", tmp_path, "--config", "config.yaml", "-o", "replaced.onnx")
    replaced = onnx.load(tmp_path / "replaced.onnx")
    onnx.checker.check_model(replaced)
    report = plugin.check(tmp_path / "replaced.onnx")
    assert report.ok and [node.ours for node in report.nodes] == [True] * 3
    nodes = {n.output[0]: n for n in replaced.graph.node if any(a.name == "plugin_version" for a in n.attribute)}
    for index, name in enumerate(names[:3]):
        held = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[f"y{index}"].attribute}
        values = {k: v.decode() if isinstance(v, bytes) else v for k, v in held.items() if k in FIELDS}
        values |= {"axes": tuple(values["axes"]), "leading": values["leading"] or None}
        values |= {k: bool(values[k]) for k in ("has_gain", "has_bias")}
        assert RMSNormSpec(**values).canonical("float32") == SPECS[name].canonical("float32")
