"""The public surface, pinned: names, signatures, and what an import costs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rmsnorm_onnx

README = Path(__file__).parents[1] / "README.md"
SURFACE = {
    *("find_rms_norms", "fuse", "Match", "Declined", "FuseRMSNorm", "RMSNormSpec"),
    *("reference", "ulp_distance", "tolerance", "verify", "verify_torch", "export"),
}


def test_names() -> None:
    """Exactly these names are public, each importable, each with a docstring."""
    assert set(rmsnorm_onnx.__all__) == SURFACE
    assert set(dir(rmsnorm_onnx)) >= SURFACE
    for name in SURFACE:
        assert getattr(rmsnorm_onnx, name).__doc__, name


def test_star_import() -> None:
    """`import *` brings the surface and nothing else."""
    names: dict[str, object] = {}
    exec("from rmsnorm_onnx import *", names)
    assert names.keys() - {"__builtins__"} == SURFACE


@pytest.mark.parametrize(
    "name", ["exporters.export_transformers", "exporters.export_keras", "spec.preset", "opsets.convert", "models"]
)
def test_modules_after_the_plain_import(name: str) -> None:
    """The names that the README writes out are there after `import rmsnorm_onnx`, in a fresh process."""
    code = f"import rmsnorm_onnx; rmsnorm_onnx.{name}; print('{name.split('.')[0]}' in dir(rmsnorm_onnx))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "True"


def test_the_readme_names_what_is_there() -> None:
    """Every dotted name of the package in the README is one that a plain import reaches."""
    names = set(re.findall(r"\brmsnorm_onnx((?:\.[a-z_]+)+)", README.read_text())) - {".py"}
    assert {".spec.preset", ".opsets.convert", ".exporters.export_keras"} <= names
    code = "import rmsnorm_onnx\n" + "\n".join(f"rmsnorm_onnx{name}" for name in sorted(names))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_plugin_module() -> None:
    """`rmsnorm_onnx.plugin` is there without an import of its own, with these names."""
    code = "import rmsnorm_onnx; print(*rmsnorm_onnx.plugin.__all__, callable(rmsnorm_onnx.plugin.check))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    names = ("build", "build_engine", "check", "command_lines", "compare_engines", "find_library", "library_path")
    assert shown.split() == [*names, "True"]


def test_unknown_name() -> None:
    """A misspelt name is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="no attribute 'fuze'"):
        rmsnorm_onnx.fuze  # noqa: B018


def test_fuse_signature() -> None:
    """The parameters that users rely on keep their names, order of kinds and defaults."""
    parameters = inspect.signature(rmsnorm_onnx.fuse).parameters
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    assert kinds.pop("model") == inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}
    defaults = {name: parameters[name].default for name in ("consumer", "form", "allow_rounding_change", "verify")}
    assert defaults == {"consumer": "any", "form": None, "allow_rounding_change": False, "verify": False}


@pytest.mark.parametrize(
    ("function", "leading"),
    [
        ("find_rms_norms", ["model"]),
        ("reference", ["spec", "x", "gain", "bias", "rounded"]),
        ("ulp_distance", ["value", "reference"]),
        ("tolerance", ["spec", "dtype", "size"]),
        ("verify", ["model", "original", "seed"]),
        ("verify_torch", ["model", "module", "args"]),
        ("export", ["source", "args"]),
    ],
)
def test_other_signatures(function: str, leading: list[str]) -> None:
    """The other functions' first parameters."""
    assert list(inspect.signature(getattr(rmsnorm_onnx, function)).parameters)[: len(leading)] == leading


def test_the_import_is_light() -> None:
    """Neither the package nor the command line's parser loads a framework, a runtime or onnx."""
    code = """if True:
        import sys, rmsnorm_onnx.cli
        rmsnorm_onnx.cli._parser()
        heavy = {"torch", "onnxruntime", "onnxscript", "transformers", "tensorrt", "onnx", "onnx_ir", "rich", "numpy"}
        print(sorted(heavy & sys.modules.keys()))
    """
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


def test_finding_needs_no_runtime() -> None:
    """Finding and rewriting load neither torch nor onnxruntime nor transformers."""
    code = """if True:
        import sys
        from rmsnorm_onnx import FuseRMSNorm, find_rms_norms
        print(sorted({"torch", "onnxruntime", "transformers", "tensorrt"} & sys.modules.keys()))
    """
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == "[]"


def test_a_program_of_torch() -> None:
    """`fuse(torch.onnx.export(...))` gives an ONNXProgram that can be called, and leaves the one it was given alone."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8, eps=1e-5))
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    program = torch.onnx.export(module, (x,), dynamo=True, opset_version=18, verbose=False)
    before = program.model_proto
    fused, report = rmsnorm_onnx.fuse(program)
    assert type(fused) is type(program) and (report.found, report.rewritten) == (1, 1)
    assert [node.op_type for node in fused.model.graph].count("RMSNorm") == 1
    assert program.model_proto == before
    torch.testing.assert_close(fused(x)[0], module(x))
