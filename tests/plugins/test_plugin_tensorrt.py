"""The plugin in real TensorRTs: lean TensorRT's registry, and TensorRT-RTX's parser and builder. Neither needs a GPU.

TensorRT-RTX makes no promise about plugins; it is a test bench. Its builder calls a plugin's methods for types, shapes,
formats and storage, and none that needs a device. Each case is a process of its own: failures in there end it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from kernel_build import native
from onnx import helper, numpy_helper
from trt_registry import TRIALS

import rmsnorm_onnx
from rmsnorm_onnx.forms.plugin import FIELDS

HERE = Path(__file__).parent
DTYPES = ("float32", "float16", "bfloat16")
TENSORRT_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}
ARCHITECTURES = ("80", "89", "120")  # of those that the plugin is built for, these are TensorRT-RTX's


def package(name: str) -> Path:
    """A package's folder. Skips the test where it is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{name} is not installed; it has builds for Linux on x86-64 alone")
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def library() -> Path:
    """The plugin as CMake builds it."""
    package("kernel_lens")
    return native(("90",))[0] / "plugins" / "tensorrt" / "librmsnorm_onnx_plugin.so"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where libtensorrt_rtx.so is found: the package has it with a version in its name only."""
    folder = tmp_path_factory.mktemp("rtx")
    (folder / "libtensorrt_rtx.so").symlink_to(package("tensorrt_rtx_libs") / "libtensorrt_rtx.so.1")
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}


def registry(bindings: str, library: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What a registry makes of the library, with the log under "log"."""
    command = [sys.executable, str(HERE / "trt_registry.py"), bindings, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


def assert_makes_plugins(report: dict[str, Any]) -> None:
    """One creator with all fields, good fields make plugins, and bad ones none, with a line that names the field."""
    assert report["added"] == 1 and report["left"] == 0
    assert report["fields"] == [*FIELDS, "gain"]
    assert report["made"] == {name: name.startswith("good") for name in TRIALS}
    for name in TRIALS:
        lines = [
            line for line in report["log"].splitlines() if f"RMSNorm: {name}: field {name.split()[0]}: it " in line
        ]
        assert len(lines) == (0 if name.startswith("good") else 1)


def test_the_registry_of_tensorrt_11(library: Path) -> None:
    """Lean TensorRT 11 loads the library, finds the creator, and makes plugins of good fields only."""
    package("tensorrt_lean_bindings")
    report = registry("tensorrt_lean_bindings", library)
    assert report["version"].startswith("11.")
    assert_makes_plugins(report)


def test_the_registry_of_tensorrt_rtx(library: Path, environment: dict[str, str]) -> None:
    """So does TensorRT-RTX."""
    assert_makes_plugins(registry("tensorrt_rtx_bindings", library, environment))


class Llama(torch.nn.Module):
    """Rounded to x's type before the gain."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(d))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x).to(x.dtype)


class Gemma(Llama):
    """(1 + w) in float32, rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((1 + self.weight.float()) * self.scaled(x)).to(x.dtype)


class Block(torch.nn.Module):
    """A transformer's block with one norm of each kind."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.first, self.second = Llama(d), Gemma(d)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = torch.nn.Linear(d, 64, bias=False), torch.nn.Linear(64, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        weights = torch.softmax(self.q(h) @ self.k(h).transpose(-1, -2) / 6, -1)
        x = x + self.o(weights @ self.v(h))
        return x + self.down(torch.nn.functional.silu(self.up(self.second(x))))


@functools.cache
def block(dtype: str, form: str = "plugin", gain_attribute: bool = False) -> bytes:
    """The block, exported and its norms rewritten to a form."""
    torch.manual_seed(0)
    module = Block().to(getattr(torch, dtype)).eval()
    x = torch.randn(2, 5, 32).to(getattr(torch, dtype))
    plain = rmsnorm_onnx.export(module, (x,), fuse=False).model
    model, report = rmsnorm_onnx.fuse(plain, form=form, gain_attribute=gain_attribute)
    assert [site.form for site in report.sites] == [form] * 2
    assert report.sites[0].spec != report.sites[1].spec
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else serialized(model)


def serialized(model: Any) -> bytes:
    """The bytes of an onnx_ir model."""
    import onnx_ir as ir

    return ir.to_proto(model).SerializeToString()


def build(data: bytes, folder: Path, environment: dict[str, str], library: Path | None, *sm: str) -> dict[str, Any]:
    """What TensorRT-RTX makes of a file."""
    path = folder / "model.onnx"
    path.write_bytes(data)
    command = [sys.executable, str(HERE / "trt_build.py"), "tensorrt_rtx_bindings", str(library or ""), str(path), *sm]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def assert_built(report: dict[str, Any], dtype: str, *sm: str) -> None:
    """Two plugins in the network and in each engine, which stores their fields."""
    assert report["parsed"], report["errors"] + report["log"]
    assert report["kinds"].count("PLUGIN_V3") == 2 and "REDUCE" not in report["kinds"]
    assert report["outputs"] == [f"DataType.{TENSORRT_TYPES[dtype]}"]
    assert list(report["engines"]) == list(sm)
    for made in report["engines"].values():
        own = [name for name, kind in made["layers"] if kind == "custom_layer"]
        assert len(own) == 2 and all("/RMSNorm" in name for name in own)
        plan = bytes.fromhex(made["plan"])
        assert all(name.encode() in plan for name in FIELDS)


def test_an_exported_block_becomes_an_engine(library: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Two specs in one file, exported, rewritten, parsed and built: each norm is one layer, the plugin."""
    assert_built(build(block("float16"), tmp_path, environment, library, "89"), "float16", "89")


@pytest.mark.full
@pytest.mark.parametrize("gain_attribute", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_of_every_type_and_architecture(
    dtype: str, gain_attribute: bool, library: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The same in three types for three architectures, with gains as inputs and as fields."""
    data = block(dtype, gain_attribute=gain_attribute)
    assert_built(build(data, tmp_path, environment, library, *ARCHITECTURES), dtype, *ARCHITECTURES)


@pytest.mark.parametrize("form", ("function", "onnx"))
def test_other_forms_build_as_before(form: str, library: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """A file of another form has the same layers with the library loaded as without."""
    data = block("float16", "function") if form == "function" else standard()
    loaded = build(data, tmp_path, environment, library, "89")
    plain = build(data, tmp_path, environment, None, "89")
    assert loaded["parsed"] and "PLUGIN_V3" not in loaded["kinds"]
    assert loaded["kinds"] == plain["kinds"]
    assert loaded["engines"]["89"]["layers"] == plain["engines"]["89"]["layers"] != []


def standard() -> bytes:
    """A file with ONNX's own RMSNormalization."""
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["b", "s", 32]) for n in "xy")
    gain = numpy_helper.from_array(np.ones(32, np.float32), "gain")
    node = helper.make_node("RMSNormalization", ["x", "gain"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [gain])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11).SerializeToString()


def damaged(change: dict[str, Any]) -> bytes:
    """The block with other attributes in its first norm; None takes one out."""
    model = onnx.load_from_string(block("float32"))
    node = next(n for n in model.graph.node if n.op_type == "RMSNorm")
    kept = [a for a in node.attribute if a.name not in change]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(helper.make_attribute(k, v) for k, v in change.items() if v is not None)
    return model.SerializeToString()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"epsilon": None}, "field epsilon: it is missing; write it as one float"),
    "integer": ({"epsilon": 1}, "field epsilon: it is INT32[1]; write it as one float"),
    "out of range": ({"axes": [1]}, "field axes: it holds 1, and axes are counted from the last"),
    "unknown type": (
        {"result_type": "float64"},
        "field result_type: it is float64, and TensorRT has no float64 plugins",
    ),
    "gain of integers": (
        {"gain": np.ones(32, np.int32)},
        "field gain: it is INT32[32]; write it as a tensor of float32",
    ),
}


def bad_tensor(value: Any) -> Any:
    """An attribute's value; arrays become tensors."""
    return numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value


def assert_refused(name: str, library: Path, environment: dict[str, str], folder: Path) -> None:
    """The parser fails, and TensorRT's own log has the plugin's line, with the node's name."""
    change, words = BAD[name]
    report = build(damaged({k: bad_tensor(v) for k, v in change.items()}), folder, environment, library)
    assert not report["parsed"]
    (line,) = [text for text in report["log"] if text.startswith("rmsnorm_onnx RMSNorm: ")]
    assert words in line and "/RMSNorm" in line.split(": ")[1]


def test_wrong_fields_fail_at_parse(library: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """A node without epsilon does not parse, and the log says what to write."""
    assert_refused("missing", library, environment, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", BAD)
def test_every_wrong_field_fails_at_parse(
    name: str, library: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Fields that are missing, mistyped or out of range."""
    assert_refused(name, library, environment, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("change", ({"has_gain": 0}, {"has_bias": 1}, {"leading": 33}, {"axes": [-4]}))
def test_a_node_that_does_not_fit_its_tensors(
    change: dict[str, Any], library: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Fields that are good by themselves and do not fit the node's tensors make no engine, and the log says why."""
    report = build(damaged(change), tmp_path, environment, library, "89")
    lines = [text for text in report["log"] if text.startswith("rmsnorm_onnx RMSNorm: ")]
    assert lines and any(
        w in lines[0] for w in ("its fields ask for", "field leading: it is 33", "field axes: it begins")
    )
    assert not report["parsed"] or report["engines"]["89"]["plan"] == ""
