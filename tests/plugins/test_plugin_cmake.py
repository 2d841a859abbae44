"""How the plugin is built, and what comes of it: headers, exports, installation, pip's switch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kernel_build import ROOT, cmake, native, nvcc, run
from plugin_build import TENSORRT, tensorrt_include

PROJECT = f"""
cmake_minimum_required(VERSION 3.24)
project(search LANGUAGES NONE)
include({TENSORRT}/FindTensorRTHeaders.cmake)
if(TensorRTHeaders_FOUND)
  get_target_property(folder TensorRT::Headers INTERFACE_INCLUDE_DIRECTORIES)
  message(STATUS "FOUND ${{TensorRTHeaders_VERSION}} ${{folder}}")
else()
  message(STATUS "PROBLEM ${{TensorRTHeaders_PROBLEM}}")
endif()
"""
VERSION = {
    "enterprise": "#define TRT_MAJOR_ENTERPRISE 11\n#define TRT_MINOR_ENTERPRISE 1\n"
    "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n",
    "plain": "#define NV_TENSORRT_MAJOR 10 //!< TensorRT major version.\n#define NV_TENSORRT_MINOR 0 //!< minor\n",
    "old": "#define NV_TENSORRT_MAJOR 8 //!< TensorRT major version.\n#define NV_TENSORRT_MINOR 6 //!< minor\n",
}


def headers(folder: Path, version: str) -> Path:
    """A folder that looks like TensorRT's headers."""
    folder.mkdir(parents=True)
    (folder / "NvInferRuntime.h").write_text("")
    (folder / "NvInferVersion.h").write_text(version)
    return folder


def configured(folder: Path, project: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A project configured in its folder, on a system that has no TensorRT of its own."""
    (folder / "CMakeLists.txt").write_text(project)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TENSORRT_")}
    system = ["-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF", "-DCMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH=OFF"]
    system.append("-DCMAKE_MAKE_PROGRAM=/bin/true")  # nothing is built
    command = [cmake(), "-S", ".", "-B", "b", *system, f"-DPython_EXECUTABLE={sys.executable}"]
    return subprocess.run([*command, *options], cwd=folder, env=kept | environment, capture_output=True, text=True)


def search(folder: Path, *options: str, **environment: str) -> str:
    """What the search says."""
    answer = configured(folder, PROJECT, *options, **environment)
    assert answer.returncode == 0, answer.stderr
    (line,) = re.findall(r"^-- ((?:FOUND|PROBLEM) .*)$", answer.stdout, re.MULTILINE)
    return str(line)


def test_named_headers_come_first(tmp_path: Path) -> None:
    """TENSORRT_INCLUDE_DIR, then TENSORRT_ROOT, from CMake before the environment, then Python's package."""
    a, b, c, d = (headers(tmp_path / n / "include", VERSION["enterprise"]) for n in "abcd")
    options = [f"-DTENSORRT_INCLUDE_DIR={a}", f"-DTENSORRT_ROOT={c.parent}"]
    environment = {"TENSORRT_INCLUDE_DIR": str(b), "TENSORRT_ROOT": str(d.parent)}
    assert search(tmp_path, *options, **environment) == f"FOUND 11.1 {a}"
    assert search(tmp_path, "-DTENSORRT_INCLUDE_DIR=", options[1], **environment) == f"FOUND 11.1 {b}"
    assert search(tmp_path, **{"TENSORRT_ROOT": str(d.parent)}) == f"FOUND 11.1 {c}"
    assert search(tmp_path, "-DTENSORRT_ROOT=", **{"TENSORRT_ROOT": str(d.parent)}) == f"FOUND 11.1 {d}"


def test_the_headers_of_a_python_package(tmp_path: Path) -> None:
    """Last, kernel-lens is looked up, and none of its code is run."""
    package = tmp_path / "site" / "kernel_lens"
    found = headers(package / "include" / "tensorrt", VERSION["plain"])
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    assert search(tmp_path, PYTHONPATH=str(package.parent)) == f"FOUND 10.0 {found}"


def test_paths_are_relative_to_where_they_are_typed(tmp_path: Path) -> None:
    """Those of an environment's Python and of a folder with the headers hold also when the build configures again."""
    found = headers(tmp_path / "site" / "kernel_lens" / "include" / "tensorrt", VERSION["plain"])
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "python").symlink_to(sys.executable)
    (found.parents[1] / "__init__.py").write_text("")
    options = ["-DPython_EXECUTABLE=env/python"]
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    assert search(tmp_path, *options, **environment) == f"FOUND 10.0 {found}"
    again = subprocess.run(
        [cmake(), "."], cwd=tmp_path / "b", env=os.environ | environment, capture_output=True, text=True
    )
    assert f"-- FOUND 10.0 {found}\n" in again.stdout, again.stdout
    assert search(tmp_path, f"-DTENSORRT_INCLUDE_DIR={found.relative_to(tmp_path)}") == f"FOUND 10.0 {found}"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("-DTENSORRT_INCLUDE_DIR=OLD", "TensorRT 8.6 in OLD is too old: the plugin needs 10 or newer"),
        ("-DTENSORRT_INCLUDE_DIR=EMPTY", "TENSORRT_INCLUDE_DIR is EMPTY, which has no NvInferRuntime.h"),
        ("-DTENSORRT_ROOT=EMPTY", "TENSORRT_ROOT is EMPTY, which has no include/NvInferRuntime.h"),
        ("-DTENSORRT_INCLUDE_DIR=NONE", "NONE has no NvInferVersion.h that names its version"),
        ("-DPython_EXECUTABLE=/bin/false", "TensorRT's headers are not found: set TENSORRT_INCLUDE_DIR or"),
    ],
)
def test_headers_that_do_not_do(option: str, words: str, tmp_path: Path) -> None:
    """Too old, absent where they were named, or nowhere: one sentence says which."""
    places = {"OLD": headers(tmp_path / "old", VERSION["old"]), "NONE": headers(tmp_path / "none", "")}
    places["EMPTY"] = tmp_path / "empty"
    places["EMPTY"].mkdir()
    for name, path in places.items():
        option, words = option.replace(f"={name}", f"={path}"), words.replace(name, str(path))
    assert search(tmp_path, option).startswith(f"PROBLEM {words}")


PLUGIN = f"""
cmake_minimum_required(VERSION 3.24)
project(plugin LANGUAGES NONE)
add_subdirectory({TENSORRT} p)
"""


def asked(folder: Path, value: str, *options: str, **environment: str) -> tuple[bool, str]:
    """Whether the plugin's own folder is configured without headers, and what the user sees beside the status lines."""
    option = f"-DRMSNORM_ONNX_TENSORRT={value}"
    answer = configured(folder, PLUGIN, option, "-DPython_EXECUTABLE=/bin/false", *options, **environment)
    return answer.returncode == 0, " ".join(answer.stderr.split())


@pytest.mark.parametrize("variable", ("TENSORRT_ROOT", "TENSORRT_INCLUDE_DIR"))
@pytest.mark.parametrize("by_environment", (False, True))
def test_a_named_folder_without_headers_is_an_error(variable: str, by_environment: bool, tmp_path: Path) -> None:
    """Whoever names a folder asks for the plugin: it is not left out, and the line names the folder and the mend."""
    options = [] if by_environment else [f"-D{variable}=/nowhere"]
    environment = {variable: "/nowhere"} if by_environment else {}
    done, said = asked(tmp_path, "AUTO", *options, **environment)
    assert not done and f"{variable} is /nowhere, which has no" in said
    assert "Name another folder, or leave the plugin out: -DRMSNORM_ONNX_TENSORRT=OFF" in said


def test_a_named_folder_with_old_headers_is_an_error(tmp_path: Path) -> None:
    """So is one whose headers are those of TensorRT 8."""
    old = headers(tmp_path / "old", VERSION["old"])
    done, said = asked(tmp_path, "AUTO", f"-DTENSORRT_INCLUDE_DIR={old}")
    assert not done and "TensorRT 8.6 in" in said and "is too old" in said


def test_the_option_without_headers(tmp_path: Path) -> None:
    """ON stops with the reason; AUTO goes on without the plugin, and warns with the reason and the mend."""
    mend = "or pip install --no-deps kernel-lens and name its Python: -DPython_EXECUTABLE=.venv/bin/python"
    reason = f"TensorRT's headers are not found: set TENSORRT_INCLUDE_DIR or TENSORRT_ROOT, {mend}"
    done, said = asked(tmp_path, "ON")
    assert not done and f"RMSNORM_ONNX_TENSORRT is ON. {reason}" in said
    done, said = asked(tmp_path, "AUTO")
    assert done and "CMake Warning" in said and f"The TensorRT plugin is left out. {reason}" in said


@pytest.mark.full
def test_the_whole_project_without_the_plugin(tmp_path: Path) -> None:
    """A wrong folder stops it; OFF configures the kernels alone."""
    assert nvcc()
    command = [cmake(), "-S", str(ROOT), "-B", str(tmp_path), "-DTENSORRT_ROOT=/nowhere"]
    wrong = subprocess.run(command, capture_output=True, text=True)
    assert wrong.returncode != 0 and "TENSORRT_ROOT is /nowhere" in " ".join(wrong.stderr.split())
    off = subprocess.run([*command, "-DRMSNORM_ONNX_TENSORRT=OFF"], capture_output=True, text=True)
    assert off.returncode == 0 and "TensorRT" not in off.stderr


@pytest.fixture(scope="module")
def folder() -> Path:
    """The project as CMake builds it, for one architecture."""
    assert tensorrt_include()
    return native(("90",))[0]


def test_the_library_exports_two_functions_and_needs_nothing_of_nvidias(folder: Path) -> None:
    """Exactly TensorRT's entry points are exported, and every symbol but the system's is inside."""
    library = str(folder / "plugins" / "tensorrt" / "librmsnorm_onnx_plugin.so")
    assert set(re.findall(r" [A-Z] (\w+)", run("nm", "-D", "--defined-only", library))) == {
        "getCreators",
        "setLoggerFinder",
    }
    needed = set(re.findall(r"NEEDED.*\[([^.\]]+)", run("readelf", "-d", library)))
    assert needed <= {"libstdc++", "libgcc_s", "libm", "libc", "ld-linux-x86-64", "libdl", "libpthread", "librt"}
    undefined = run("nm", "-DC", "--undefined-only", library)
    assert not re.search(r"nvinfer|getPluginRegistry|getLogger|\bcuda[A-Z]|rmsnorm", undefined)


def test_it_is_installed_into_the_package(folder: Path, tmp_path: Path) -> None:
    """`cmake --install` puts the plugin where the Python package has its libraries, and the kernels beside a header."""
    run(cmake(), "--install", str(folder), "--prefix", str(tmp_path))
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert "rmsnorm_onnx/lib/librmsnorm_onnx_plugin.so" in found
    assert {Path(name).name for name in found} == {
        "librmsnorm_onnx_plugin.so", "librmsnorm_onnx_kernels.so", "rmsnorm.h",
    }  # fmt: skip


def wheel(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Builds the package's wheel as pip does, with the plugin asked for."""
    assert nvcc() and cmake()
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), str(ROOT)]
    command.append("--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=90")
    asked = os.environ | {"RMSNORM_ONNX_BUILD_PLUGIN": "1", "CMAKE_BUILD_PARALLEL_LEVEL": "2"} | environment
    return subprocess.run(command, env=asked, capture_output=True, text=True)


@pytest.mark.full
def test_pip_builds_the_plugin_where_it_is_asked_for(tmp_path: Path) -> None:
    """With RMSNORM_ONNX_BUILD_PLUGIN=1 the wheel has the library inside the package, and is this platform's."""
    assert tensorrt_include()
    done = wheel(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux" in made.name
    libraries = [name for name in zipfile.ZipFile(made).namelist() if name.endswith((".so", ".a"))]  # and the sources
    assert libraries == ["rmsnorm_onnx/lib/librmsnorm_onnx_plugin.so"]


@pytest.mark.full
def test_pip_never_leaves_the_plugin_out_silently(tmp_path: Path) -> None:
    """Where it is asked for and cannot be built, there is no wheel, and the reason is told."""
    done = wheel(tmp_path, TENSORRT_ROOT="/nowhere")
    assert done.returncode != 0 and not list(tmp_path.glob("*.whl"))
    assert "TENSORRT_ROOT is /nowhere" in " ".join((done.stdout + done.stderr).split())
