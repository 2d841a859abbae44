"""What is shipped, and what the repository promises about setting itself up."""

import importlib
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rmsnorm_onnx.runtimes import packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_top_level_folders_are_in_the_package() -> None:
    """exporters/ and models/ import as parts of rmsnorm_onnx, from this checkout."""
    for name in ("exporters", "models"):
        module = importlib.import_module(f"rmsnorm_onnx.{name}")
        assert Path(module.__file__).parent == ROOT / name


def test_the_wheel(tmp_path: Path) -> None:
    """The wheel holds the three folders, the plugin's sources, the licence and the command, and fits every platform."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-q",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    files = zipfile.ZipFile(wheel).namelist()
    sources = (
        "CMakeLists.txt",
        "plugins/kernels/plan.cpp",
        "plugins/tensorrt/plugin.cpp",
        "plugins/tensorrt/exports.map",
    )
    modules = ("cli.py", "forms/onnx.py", "exporters/torch.py", "models/__init__.py", "py.typed")
    for wanted in (*modules, *(f"plugin/source/{name}" for name in sources)):
        assert f"rmsnorm_onnx/{wanted}" in files
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert not any(name.startswith(("tests", "benchmarks", "exporters", "models")) for name in files)
    entry_points = next(name for name in files if name.endswith("entry_points.txt"))
    assert "rmsnorm-onnx = rmsnorm_onnx.cli:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_doctor_knows_what_is_declared() -> None:
    """Every dependency and every extra's package is listed by `doctor`, with the version that is declared."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    declared = {str(Requirement(line)) for line in (*PROJECT["project"]["dependencies"], *itertools.chain(*extras))}
    listed = {p.install.removeprefix("pip install ").strip("'"): p for p in packages()}
    assert declared <= {str(Requirement(line)) for line in listed}
    for line, package in listed.items():
        assert Requirement(line).name == package.name and package.purpose


def test_the_readme_names_every_extra() -> None:
    """The README's line on installing has each extra of pyproject.toml."""
    (line,) = re.findall(r"`pip install \.`.*?(?=\n\n)", (ROOT / "README.md").read_text(), re.DOTALL)
    assert set(re.findall(r"`\[(\w+)\]`", line)) == set(PROJECT["project"]["optional-dependencies"])


def pinned() -> list[Requirement]:
    """The lines of requirements.txt that apply here."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    read = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [r for r in read if r.marker is None or r.marker.evaluate()]


def test_requirements_pin_everything_that_is_declared() -> None:
    """Every line of requirements.txt is one exact version, and every dependency and extra has one."""
    assert all([s.operator for s in r.specifier] == ["=="] for r in pinned())
    extras = dict(PROJECT["project"]["optional-dependencies"])
    del extras["tensorrt"]  # NVIDIA's own index has what it fetches; the tests build with TensorRT-RTX
    declared = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["build-system"]["requires"],
        *itertools.chain(*extras.values()),
    ]
    names = {canonicalize_name(r.name): r.specifier for r in pinned()}
    for wanted in map(Requirement, declared):
        (version,) = names[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version.version), wanted


def test_installed_versions_are_the_pinned_ones() -> None:
    """The tests run on the versions that requirements.txt names."""
    for requirement in pinned():
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), requirement


@pytest.mark.parametrize("target", ["demo", "test", "test-all", "bench"])
def test_every_target_sets_itself_up(tmp_path: Path, target: str) -> None:
    """In a fresh checkout each target makes the environment first, from the pinned list."""
    plan = subprocess.run(
        ["make", "-n", f"VENV={tmp_path / 'venv'}", target], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    steps = [plan.index(words) for words in ("-m venv", "-r requirements.txt", "-e .", "python")]
    assert steps[:3] == sorted(steps[:3])


def test_ci_runs_everything() -> None:
    """CI is `make test-all`, which is `make test` and the rest, and says what `make test` leaves out."""
    run = ROOT / ".ci" / "run"
    assert run.stat().st_mode & 0o111 and "make test-all" in run.read_text()
    plan = subprocess.run(["make", "-n", "test-all"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    parts = ["ruff check", "ruff format --check", "-m mypy", '-m "not full"', "left out", "--collect-only", "-m full"]
    places = [plan.rindex(part) if part == "-m full" else plan.index(part) for part in parts]
    assert places == sorted(places)
