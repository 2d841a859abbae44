"""What the plugin commands say beside faults: notes, descriptions of other plugins, usage errors."""

from __future__ import annotations

from pathlib import Path

import onnx
from form_kit import SPECS, Site, write
from plugin_kit import good, norm, set_field
from test_cli import Run, run  # noqa: F401
from test_plugin_foreign import foreign

from rmsnorm_onnx import plugin
from rmsnorm_onnx.plugin import compilation


def test_an_attribute_that_is_no_field() -> None:
    """A misspelt attribute beside all right ones is a note that names it."""
    model = good()
    set_field(norm(model), "epsilonn", 1.0)
    report = plugin.check(model)
    assert report.ok and "'epsilonn' is no field" in report.notes[0]


def test_the_defaults_of_another_plugin() -> None:
    """A plugin of version 1 and namespace "" needs neither attribute: they are TensorRT's defaults."""
    model = foreign(plugin_version=None, plugin_namespace=None)
    assert plugin.check(model, op="FastRMSNorm", namespace="", version="1").ok
    assert not plugin.check(model, op="FastRMSNorm", namespace="", version="2").ok


def test_another_plugin_of_our_operators_name() -> None:
    """A node that says another plugin's namespace is held to the description; one of ours is checked as ours, noted."""
    model = foreign(domain="rmsnorm_onnx", imports=["rmsnorm_onnx"])
    norm_node = model.graph.node[0]
    norm_node.op_type = "RMSNorm"
    report = plugin.check(model, op="RMSNorm", domain="rmsnorm_onnx", namespace="acme", version="1")
    assert report.ok and [n.ours for n in report.nodes] == [False]
    report = plugin.check(good(), op="RMSNorm", namespace="acme")
    assert [n.ours for n in report.nodes] == [True] and "namespace 'acme'" in report.notes[0]


def test_no_plugin_node(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """A model without a plugin node is a note on stderr, and exit 0."""
    path = tmp_path / "model.onnx"
    onnx.save(write([Site(SPECS["llama"])], "primitive", 18), path)
    code, _, err = run("plugin", "check", path)
    assert code == 0 and err == f"note: no plugin node in {path}\n"


def test_a_shape_twice(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """One input given two --shape flags is a usage error that says how three are given."""
    path = tmp_path / "model.onnx"
    onnx.save(write([Site(SPECS["llama"])], "primitive", 18), path)
    code, _, err = run("plugin", "trtexec", path, "--shape", "x0=1x2x16", "--shape", "x0=2x2x16")
    assert code == 2 and "given twice" in err and "'x0'" in err


def test_nvcc_is_quoted() -> None:
    """Of CMake's long error the compiler's own line is shown."""
    lines = ["CMake Error at CMakeTestCUDACompiler.cmake:103 (message):", "a", "b", "c", "d", "e"]
    assert compilation._first_error([*lines, "  nvcc fatal   : Unsupported gpu architecture 'compute_10'"]) == (
        "nvcc fatal : Unsupported gpu architecture 'compute_10'"
    )
    assert compilation._first_error(lines).startswith("CMake Error at")


def test_one_value_as_x_and_as_gain() -> None:
    """A gain that is x itself is a note."""
    model = good()
    del model.functions[:]
    norm(model).input[1] = norm(model).input[0]
    assert any("both x and its gain" in note for note in plugin.check(model).notes)


def test_text_that_is_no_text(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """A field that is not UTF-8 is a fault, and nothing but the fault is said."""
    model = good()
    set_field(norm(model), "epsilon_placement", b"\xff\xfe")
    onnx.save(model, tmp_path / "model.onnx")
    code, out, err = run("plugin", "check", tmp_path / "model.onnx")
    assert (code, err) == (1, "") and "epsilon_placement: it is b'\\xff\\xfe'" in out
