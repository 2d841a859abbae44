"""`plugin path`, `plugin build` and `plugin trtexec`: where the library is, what a build lacks, where it is used."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from form_kit import SPECS, Site, write
from test_cli import Run, run  # noqa: F401

from rmsnorm_onnx import plugin
from rmsnorm_onnx.errors import CheckFailedError, PluginError, UsageError
from rmsnorm_onnx.plugin import compilation, library

ROOT = Path(__file__).parents[1]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No library anywhere: an empty cache and a package without one; the package's folder."""
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_PACKAGE", package)
    return package


def put(path: Path) -> Path:
    """A file that stands for a library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"library")
    return path


def test_the_order_of_places(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache, before it the package, before that the environment's file."""
    with pytest.raises(PluginError, match=r"plugin build.*RMSNORM_ONNX_PLUGIN"):
        plugin.library_path()
    assert plugin.find_library() is None
    cached = put(tmp_path / "cache" / "rmsnorm_onnx" / library.NAME)
    assert plugin.library_path() == cached
    packaged = put(nowhere / "lib" / library.NAME)
    assert plugin.library_path() == packaged
    named = put(tmp_path / "mine.so")
    monkeypatch.setenv(library.VARIABLE, str(named))
    assert plugin.library_path() == named
    named.unlink()
    with pytest.raises(PluginError, match=r"mine\.so, which is no file"):
        plugin.library_path()


def test_a_relative_cache_is_ignored(nowhere: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative XDG_CACHE_HOME is ignored, as its standard says; the home's cache is taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.cache_folder() == tmp_path / ".cache" / "rmsnorm_onnx"


def test_the_path_command(run: Run, nowhere: Path, tmp_path: Path) -> None:  # noqa: F811
    """Exit 4 with one line where there is none; the path alone where there is one, or JSON."""
    code, out, err = run("plugin", "path")
    assert (code, out) == (4, "") and len(err.splitlines()) == 1 and "plugin build" in err
    put(nowhere / "lib" / library.NAME)
    assert run("plugin", "path")[:2] == (0, f"{nowhere}/lib/{library.NAME}\n")
    data = json.loads(run("plugin", "path", "--json")[1])
    assert data == {"version": 1, "kind": "plugin-path", "path": f"{nowhere}/lib/{library.NAME}"}


def test_the_sources_of_a_checkout_or_of_the_package(nowhere: Path) -> None:
    """The checkout's sources come first; without one those in the package; without both, the message says so."""
    with pytest.raises(PluginError, match="install rmsnorm_onnx again"):
        library.source_folder()
    shipped = nowhere / "plugin" / "source"
    (shipped / "plugins" / "kernels").mkdir(parents=True)
    put(shipped / "CMakeLists.txt")
    assert library.source_folder() == shipped
    (nowhere.parent / "plugins" / "kernels").mkdir(parents=True)
    put(nowhere.parent / "CMakeLists.txt")
    assert library.source_folder() == nowhere.parent


def headers(folder: Path, version: str = "10") -> Path:
    """A folder that looks like TensorRT's headers."""
    folder.mkdir(exist_ok=True)
    (folder / "NvInferRuntime.h").write_text("")
    text = "".join(f"#define NV_TENSORRT_{part} {version}\n" for part in ("MAJOR", "MINOR"))
    (folder / "NvInferVersion.h").write_text(text)
    return folder


def test_cmake_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:  # noqa: F811
    """Without cmake: exit 4, one line, the pip command; nothing is written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run("plugin", "build", "-o", tmp_path / "lib")
    assert code == 4 and "needs cmake: pip install" in err and not (tmp_path / "lib").exists()


def test_an_old_cmake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cmake that is too old is named with its version."""
    script = tmp_path / "cmake"
    script.write_text("#!/bin/sh\necho cmake version 3.10.2\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PluginError, match=r"CMake 3\.10, too old"):
        plugin.build(tmp_path)


def only_cmake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a cmake and no CUDA."""
    script = tmp_path / "cmake"
    script.write_text("#!/bin/sh\necho cmake version 3.30.0\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compilation, "_TOOLKIT", str(tmp_path / "cuda"))


def test_nvcc_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without nvcc: the toolkit is named, and CUDA_HOME as the mend."""
    only_cmake(monkeypatch, tmp_path)
    with pytest.raises(PluginError, match=r"needs nvcc.*CUDA_HOME"):
        plugin.build(tmp_path / "lib", tensorrt_include=headers(tmp_path / "include"))
    compiler = put(tmp_path / "cuda" / "bin" / "nvcc")
    compiler.chmod(0o755)
    assert compilation._nvcc() == compiler


def test_headers_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without TensorRT's headers: the three mends; a folder that is named and has none is an error of its own."""
    monkeypatch.setattr(compilation, "_SYSTEM", ())
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    for name in ("TENSORRT_INCLUDE_DIR", "TENSORRT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    only_cmake(monkeypatch, tmp_path)
    with pytest.raises(PluginError, match=r"--tensorrt-include.*TENSORRT_ROOT.*pip install"):
        plugin.build(tmp_path / "lib")
    assert len(compilation.missing()) == 2  # nvcc too
    with pytest.raises(PluginError, match="has no NvInferRuntime"):
        plugin.build(tmp_path / "lib", tensorrt_include=tmp_path)
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    with pytest.raises(PluginError, match="include has no NvInferRuntime"):
        plugin.build(tmp_path / "lib")
    expected = headers(tmp_path / "include")
    assert compilation._headers(None) == expected


def test_no_architecture(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """What is no compute capability is a usage error that shows one."""
    code, _, err = run("plugin", "build", "--arch", "9.0", "-o", tmp_path)
    assert code == 2 and "such as 90" in err


def test_a_failed_build_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler's errors become one line, with the command; an older library stays."""
    script = tmp_path / "cmake"
    script.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo cmake version 3.30.0;; -S) ;; '
        "*) echo compiling; echo 'a.cu(3): error: x is undefined'; exit 2;; esac\n"
    )
    script.chmod(0o755)
    nvcc = put(tmp_path / "nvcc")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    older = put(tmp_path / "lib" / library.NAME)
    with pytest.raises(CheckFailedError, match=r"compiling the plugin failed: a\.cu\(3\): error.*--target") as caught:
        plugin.build(tmp_path / "lib", tensorrt_include=headers(tmp_path / "include"))
    assert "\n" not in str(caught.value) and older.read_bytes() == b"library"
    assert [path.name for path in older.parent.iterdir()] == [library.NAME]


needs_nvcc = pytest.mark.skipif(
    not (shutil.which("nvcc") and shutil.which("cmake")), reason="the plugin is built with nvcc and cmake"
)


@pytest.mark.full
@needs_nvcc
def test_headers_that_are_too_old(tmp_path: Path) -> None:
    """TensorRT 8's headers are refused by name, in one line."""
    with pytest.raises(CheckFailedError, match=r"configuring the plugin failed.*too old"):
        plugin.build(tmp_path / "lib", tensorrt_include=headers(tmp_path / "include", "8"))


@pytest.mark.full
@needs_nvcc
@pytest.mark.skipif(not any(compilation._packaged()), reason="the package with TensorRT's headers is not installed")
def test_a_build_from_the_wheel(tmp_path: Path) -> None:
    """The sources that the wheel carries build the library, which exports its two entry points and nothing else."""
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-q"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(ROOT)], check=True, capture_output=True)
    code = "from rmsnorm_onnx import plugin; print(plugin.build('lib', architectures=['89']).library)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "lib" / library.NAME
    symbols = subprocess.run(["nm", "-D", "--defined-only", made], check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1].partition("@")[0] for line in symbols.splitlines()} >= {"getCreators", "setLoggerFinder"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two plugin nodes, in a folder with a space."""
    path = tmp_path / "my models" / "norms.onnx"
    path.parent.mkdir()
    onnx.save(write([Site(SPECS["llama"]), Site(SPECS["gemma"])], "plugin", 18), path)
    return path


def test_the_lines(model: Path, nowhere: Path) -> None:
    """Every flag that the model needs: library, shapes, strong typing; quoted for a shell."""
    where = put(nowhere / "lib" / library.NAME)
    made = plugin.command_lines(model, shapes={"x0": [(1, 2, 16), (4, 2, 16), (8, 2, 16)], "x1": (5, 2, 16)})
    engine = f"{model.parent}/norms.engine"
    assert made.trtexec == (
        *("trtexec", f"--onnx={model}", f"--saveEngine={engine}", "--stronglyTyped"),
        f"--dynamicPlugins={where}",
        *("--minShapes=x0:1x2x16,x1:5x2x16", "--optShapes=x0:4x2x16,x1:5x2x16", "--maxShapes=x0:8x2x16,x1:5x2x16"),
        "--skipInference",
    )
    assert made.load == (
        *("trtexec", f"--loadEngine={engine}", f"--dynamicPlugins={where}", "--shapes=x0:4x2x16,x1:5x2x16"),
    )
    assert made.polygraphy[:2] == ("python", "-c") and f"load_library('{where}')" in made.polygraphy[2]
    assert made.polygraphy[3:] == (
        *("run", str(model), "--trt", "--strongly-typed"),
        *("--trt-min-shapes", "x0:[1,2,16]", "x1:[5,2,16]", "--trt-opt-shapes", "x0:[4,2,16]", "x1:[5,2,16]"),
        *("--trt-max-shapes", "x0:[8,2,16]", "x1:[5,2,16]", "--save-engine", engine),
    )
    assert [tuple(shlex.split(line)) for line in made.lines()] == [made.trtexec, made.load, made.polygraphy]
    assert not made.notes


def test_a_library_in_the_engine(model: Path, nowhere: Path) -> None:
    """Stored in the engine, the library is not loaded a second time; such an engine is a version-compatible one."""
    where = put(nowhere / "lib" / library.NAME)
    made = plugin.command_lines(model, serialize=True)
    assert {f"--dynamicPlugins={where}", f"--setPluginsToSerialize={where}", "--versionCompatible"} <= set(made.trtexec)
    assert not any(str(where) in word for word in made.load) and "--versionCompatible" in made.load


def test_the_loading_line_runs(model: Path, nowhere: Path, tmp_path: Path) -> None:
    """What stands in Polygraphy's place loads the library through TensorRT's registry, then runs Polygraphy."""
    where = put(nowhere / "lib" / library.NAME)
    (tmp_path / "polygraphy").mkdir()
    put(tmp_path / "polygraphy" / "__init__.py").write_text("")
    (tmp_path / "polygraphy" / "tools.py").write_text("import sys\nmain = lambda: print(*sys.argv[1:])\n")
    stand_in = "class Registry:\n    load_library = staticmethod(print)\nget_plugin_registry = Registry\n"
    (tmp_path / "tensorrt.py").write_text(stand_in)
    command = plugin.command_lines(model).polygraphy
    done = subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(where), " ".join(command[3:])], done.stderr


def test_shapes_that_were_not_said(model: Path, nowhere: Path) -> None:
    """A dimension that nobody named is guessed, one size for each symbol, and the guess is said."""
    put(nowhere / "lib" / library.NAME)
    made = plugin.command_lines(model)
    assert [p.to_json()["max"] for p in made.profiles] == [[32, 2, 16]] * 2
    assert made.notes == ("n was taken as 1, 8 and 32 (min, opt, max); name others with --shape",)


def test_without_plugin_nodes(tmp_path: Path, nowhere: Path) -> None:
    """A model without plugin nodes needs no library, fixed inputs no shapes; weak typing is said to end with 10."""
    proto = write([Site(SPECS["llama"])], "function", 18)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    onnx.save(proto, tmp_path / "model.onnx")
    made = plugin.command_lines(tmp_path / "model.onnx", precisions=["fp16"])
    assert made.library is None and made.profiles == ()
    assert made.trtexec[3:] == ("--fp16", "--skipInference") and "TensorRT 11" in made.notes[0]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": (1, 2, 16)}, "no input 'x'.*x0"),
        ({"x0": (1, 2)}, "does not fit"),
        ({"x0": (1, 3, 16)}, "does not fit"),
        ({"x0": [(4, 2, 16), (1, 2, 16), (8, 2, 16)]}, "do not grow"),
        ({"x0": [(4, 2, 16), (8, 2, 16)]}, "given 2 shapes"),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, object], words: str, model: Path, nowhere: Path) -> None:
    """A shape of no input, of another rank or size, or in the wrong order is refused by name."""
    put(nowhere / "lib" / library.NAME)
    with pytest.raises(UsageError, match=words):
        plugin.command_lines(model, shapes=shapes)  # type: ignore[arg-type]


def test_the_trtexec_command(run: Run, model: Path, nowhere: Path) -> None:  # noqa: F811
    """Exit 4 without the library; with it the lines, one each, or JSON; a shape that is none is exit 2."""
    assert run("plugin", "trtexec", model)[0] == 4
    put(nowhere / "lib" / library.NAME)
    code, out, err = run("plugin", "trtexec", model, "--shape", "x0=3x2x16", "--shape", "x1=1x2x16,2x2x16,3x2x16")
    assert (code, err) == (0, "") and [line.split()[0] for line in out.splitlines()] == ["trtexec"] * 2 + ["python"]
    data = json.loads(run("plugin", "trtexec", model, "--json")[1])
    assert data["version"] == 1 and data["lines"][0].startswith("trtexec ") and data["profiles"][0]["min"] == [1, 2, 16]
    for text in ("x0", "x0=", "x0=3x", "=3x2", "x0=axb"):
        assert run("plugin", "trtexec", model, "--shape", text)[0] == 2
