"""The command line: exit codes, pure JSON, quiet pipes, and nothing written unless it is right."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from test_modelio import external, names

import rmsnorm_onnx
from rmsnorm_onnx import cli, find, parity, passes, runtimes
from rmsnorm_onnx.consumers import CONSUMERS
from rmsnorm_onnx.errors import CheckFailedError, MissingDependencyError
from rmsnorm_onnx.forms import FORMS

NORMS = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[n, 8] x, float[8] gain) => (float[n, 8] y)
    <float two = {2}, float epsilon = {1e-6}, int64[1] last = {-1}>
{
    [square] p = Pow(x, two)  m = ReduceMean(p, last)  a = Add(m, epsilon)  r = Sqrt(a)  d = Div(x, r)
    [first] z = Mul(d, gain)
    q = Mul(z, z)  m2 = ReduceMean(q, last)  a2 = Add(m2, epsilon)  r2 = Sqrt(a2)  i2 = Reciprocal(r2)  d2 = Mul(z, i2)
    [second] y = Mul(gain, d2)
}
"""
DECLINED = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[n, 8] x) => (float[n, 8] y) <float two = {2}, float epsilon = {1e-6}, int64[1] last = {-1}>
{
    c = ReduceMean(x, last)  s = Sub(x, c)  p = Pow(s, two)  m = ReduceMean(p, last)  a = Add(m, epsilon)
    r = Sqrt(a)  [centred] y = Div(s, r)
}
"""


@pytest.fixture
def norms(tmp_path: Path) -> Path:
    """A model of two norms."""
    return written(tmp_path / "norms.onnx", NORMS)


def written(path: Path, text: str) -> Path:
    """A model on disk, from its text."""
    onnx.save(onnx.parser.parse_model(text), path)
    return path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line and gives its exit code, stdout and stderr."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def operators(path: Path) -> list[str]:
    """The operators of a file's graph."""
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def test_inspect(run: Run, norms: Path) -> None:
    """Both norms are listed by name, nothing is on stderr, and the code is 0."""
    code, out, err = run("inspect", norms)
    assert (code, err) == (0, "") and "2 found, 0 declined" in out
    assert all(name in out for name in ("first", "second", "epsilon 1e-06"))


def test_inspect_json(run: Run, norms: Path) -> None:
    """stdout is JSON and nothing else, with its version."""
    code, out, err = run("inspect", norms, "--json")
    data = json.loads(out)
    assert (code, err, data["version"], data["kind"]) == (0, "", 1, "inspection")
    assert [site["name"] for site in data["sites"]] == ["first", "second"]


def test_fuse(run: Run, norms: Path, tmp_path: Path) -> None:
    """The file that is written passes the full check and holds one node for each norm."""
    code, out, _ = run("fuse", norms, "-o", tmp_path / "out.onnx")
    assert code == 0 and "2 found, 2 rewritten for any" in out
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    assert operators(tmp_path / "out.onnx") == ["RMSNorm", "RMSNorm"]


def test_fuse_flags_reach_the_library(run: Run, norms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag becomes the keyword that it is named after."""
    seen: dict[str, Any] = {}

    def fuse(model: str, **options: Any) -> Any:
        seen.update(options, model=model)
        return real(model)

    real = passes.fuse
    monkeypatch.setattr(passes, "fuse", fuse)
    flags = ["--for", "tensorrt:10.15", "--form", "onnx", "--allow-rounding-change", "--verify", "--gain-attribute"]
    flags += ["--opset", "21"]
    run("fuse", norms, "-o", tmp_path / "o.onnx", *flags, "--only", "a*", "--only", "b", "--skip", "c")
    assert seen == {
        "model": str(norms),
        "consumer": "tensorrt:10.15",
        "form": "onnx",
        "allow_rounding_change": True,
        "verify": True,
        "gain_attribute": True,
        "opset": 21,
        "only": ["a*", "b"],
        "skip": ["c"],
    }


def test_fuse_over_the_input(run: Run, tmp_path: Path) -> None:
    """The output may be the input, external data and all."""
    path = external(tmp_path)
    assert run("fuse", path, "-o", path)[0] == 0
    assert names(tmp_path) == ["model.onnx", "weights.bin"] and operators(path) == ["Mul", "Add"]


def test_dry_run(run: Run, norms: Path, tmp_path: Path) -> None:
    """The report is the same, and nothing is written."""
    _, out, _ = run("fuse", norms, "--dry-run", "--json")
    assert json.loads(out)["rewritten"] == 2 and names(tmp_path) == ["norms.onnx"]


def test_only_and_skip(run: Run, norms: Path) -> None:
    """Globs on the name choose sites, in both commands."""
    for flags, wanted in ((["--only", "sec*"], "second"), (["--skip", "sec*"], "first")):
        listed = json.loads(run("inspect", norms, "--json", *flags)[1])["sites"]
        assert [site["name"] for site in listed] == [wanted]
        fused = json.loads(run("fuse", norms, "--dry-run", "--json", *flags)[1])["sites"]
        assert [site["name"] for site in fused if site["action"] == "rewritten"] == [wanted]


def test_explain(run: Run, norms: Path) -> None:
    """One site in full; a name that is none is a usage error with those near it."""
    code, out, _ = run("inspect", norms, "--explain", "first")
    assert code == 0 and "name  first" in out and "second" not in out
    code, out, err = run("inspect", norms, "--explain", "fist")
    assert (code, out) == (2, "") and "near it are first" in err


def test_strict(run: Run, norms: Path, tmp_path: Path) -> None:
    """A declined candidate is exit 1 under --strict alone, and is named with its code."""
    path = written(tmp_path / "declined.onnx", DECLINED)
    code, out, _ = run("inspect", path)
    assert code == 0 and "layer-norm" in out and "1 declined" in out
    assert run("inspect", path, "--strict")[0] == 1
    assert run("fuse", path, "--dry-run", "--strict")[0] == 1
    assert run("inspect", norms, "--strict")[0] == 0


def test_verify(run: Run, norms: Path, tmp_path: Path) -> None:
    """Each norm is measured, before and after, and the JSON has its numbers."""
    run("fuse", norms, "-o", tmp_path / "out.onnx")
    code, out, _ = run("verify", tmp_path / "out.onnx", norms, "--json")
    data = json.loads(out)
    assert code == 0 and data["ok"] and [site["name"] for site in data["sites"]] == ["first", "second"]
    assert all(site["ulp"] >= 0 and site["original_ulp"] >= 0 for site in data["sites"])
    code, out, _ = run("verify", tmp_path / "out.onnx")
    assert code == 0 and "2 within, 0 beyond, 0 not run" in out


def test_fuse_verify(run: Run, norms: Path, tmp_path: Path) -> None:
    """The report has each site's measurement, and the file is written."""
    code, out, _ = run("fuse", norms, "-o", tmp_path / "out.onnx", "--verify", "--json")
    assert code == 0 and all(site["parity"]["within"] for site in json.loads(out)["sites"])
    assert (tmp_path / "out.onnx").exists()


def test_beyond_the_bound(run: Run, norms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm beyond its bound is exit 1, in verify and in fuse, and fuse writes nothing."""
    monkeypatch.setattr(parity.SiteParity, "within", property(lambda self: False))
    assert run("verify", norms)[0] == 1
    code, out, _ = run("fuse", norms, "-o", tmp_path / "out.onnx", "--verify")
    assert code == 1 and "2 beyond their bound" in out and names(tmp_path) == ["norms.onnx"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fuze"],
        ["fuse", "MODEL"],
        ["fuse", "MODEL", "-o", "x.onnx", "--dry-run"],
        ["fuse", "MODEL", "--dry-run", "--for", "nobody"],
        ["fuse", "MODEL", "--dry-run", "--form", "nothing"],
        ["fuse", "MODEL", "-o", "absent/x.onnx"],
        ["fuse", "MODEL", "-o", "."],
        ["inspect", "MODEL", "--unknown"],
        ["export", "no_colon", "-o", "x.onnx"],
        ["export", "absent.py:build", "-o", "x.onnx"],
        ["export", "absent_module:build", "-o", "x.onnx"],
        ["export", "json:dumpz", "-o", "x.onnx"],
        ["export", "json:__name__", "-o", "x.onnx"],
    ],
)
def test_usage_errors(run: Run, norms: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Exit 2, words on stderr, nothing on stdout, nothing written."""
    monkeypatch.chdir(norms.parent)
    code, out, err = run(*[norms if a == "MODEL" else a for a in arguments])
    assert (code, out) == (2, "") and "rmsnorm-onnx" in err and "Traceback" not in err
    assert names(norms.parent) == ["norms.onnx"]


@pytest.mark.parametrize("command", ["inspect", "fuse", "verify"])
@pytest.mark.parametrize("damage", ["absent", "folder", "empty", "random", "cut", "no data"])
def test_invalid_models(run: Run, tmp_path: Path, command: str, damage: str) -> None:
    """Exit 3 and exactly one line, for each command and kind of damage; nothing is written (trap 43)."""
    path = external(tmp_path / "in")
    if damage == "absent":
        path.unlink()
    elif damage == "folder":
        path = path.parent
    elif damage == "no data":
        (path.parent / "weights.bin").unlink()
    else:
        path.write_bytes({"empty": b"", "random": os.urandom(500), "cut": path.read_bytes()[:-60]}[damage])
    before = names(tmp_path)
    output = ["-o", tmp_path / "out.onnx"] if command == "fuse" else []
    code, out, err = run(command, path, *output)
    assert (code, out) == (3, "") and err.count("\n") == 1 and str(path) in err
    assert names(tmp_path) == before


def test_missing_dependency(run: Run, norms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 4, with the pip command."""

    def verify(*_: Any, **__: Any) -> None:
        raise MissingDependencyError("onnxruntime", "verify", "onnxruntime>=1.23")

    monkeypatch.setattr(parity, "verify", verify)
    code, _, err = run("verify", norms)
    assert code == 4 and err == "rmsnorm-onnx: verify needs onnxruntime: pip install 'onnxruntime>=1.23'\n"


@pytest.mark.parametrize("error", [CheckFailedError("a check\nfailed"), ZeroDivisionError("a bug")])
def test_other_errors(run: Run, norms: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A failed check and a bug of ours are exit 1 and one line; --traceback shows a bug's place."""

    def find_rms_norms(_: ir.Model) -> None:
        raise error

    monkeypatch.setattr(find, "find_rms_norms", find_rms_norms)
    code, out, err = run("inspect", norms)
    assert (code, out) == (1, "") and err.count("\n") == 1
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError):
            run("inspect", norms, "--traceback")


def test_doctor(run: Run) -> None:
    """Packages with versions or pip commands, and which form runs in which type: bfloat16 in none but three."""
    code, out, _ = run("doctor", "--json")
    data = json.loads(out)
    assert (code, data["kind"]) == (0, "doctor") and {p["name"] for p in data["packages"]} >= {"onnx", "onnxruntime"}
    assert {form: kinds["bfloat16"].startswith("runs") for form, kinds in data["forms"].items()} == {
        "function": True,
        "onnx": False,
        "contrib": True,
        "plugin": True,
        "primitive": False,
    }
    assert all(kinds["float32"] == "runs" for kinds in data["forms"].values())
    code, out, _ = run("doctor")
    assert code == 0 and "no kernel for RMSNormalization(23)" in out


def test_doctor_without_runtime(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without onnxruntime the pip command is there and nothing is claimed of forms."""
    monkeypatch.setattr(runtimes, "_version", lambda *_: None)
    monkeypatch.setattr(runtimes.importlib.util, "find_spec", lambda name: None)
    code, out, _ = run("doctor")
    assert code == 0 and "pip install 'onnxruntime>=1.23'" in out and "form " not in out
    for package in ("transformers>=5", "safetensors>=0.5", "keras>=3.9", "matplotlib>=3.8", "torch>=2.9"):
        assert f"pip install '{package}'" in out


def shell(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The installed command in a pseudo-terminal, by Debian's and macOS's `script`-free way: Python's pty."""
    code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    command = [sys.executable, "-c", code, sys.executable, "-m", "rmsnorm_onnx.cli", *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(command, check=True, capture_output=True, env={**kept, "TERM": "xterm", **environment})


def test_colour_on_a_terminal_alone(run: Run, norms: Path) -> None:
    """A terminal gets colour unless NO_COLOR is set; a pipe never does."""
    colour = b"\x1b[32m"
    assert colour in shell(["inspect", str(norms)]).stdout
    assert colour not in shell(["inspect", str(norms)], NO_COLOR="1").stdout
    assert "\x1b" not in run("inspect", norms)[1]


def test_help(run: Run) -> None:
    """Every command has help, and the exit codes are documented."""
    code, out, _ = run("--help")
    assert code == 0 and "exit codes: 0 done" in out
    for command in ("inspect", "fuse", "verify", "export", "doctor"):
        assert command in out and run(command, "--help")[0] == 0


def test_an_output_that_is_no_regular_file(run: Run, norms: Path) -> None:
    """A pipe stays a pipe, and nothing waits for a reader; exit 2 before the model is even read."""
    pipe = norms.parent / "pipe"
    os.mkfifo(pipe)
    code, out, err = run("fuse", norms, "-o", pipe)
    assert (code, out) == (2, "") and "it is no regular file" in err and pipe.is_fifo()
    assert run("fuse", "absent.onnx", "-o", pipe)[0] == 2


def test_the_output_is_the_data_file(run: Run, tmp_path: Path) -> None:
    """Exit 2, and the weights are still there."""
    path = external(tmp_path)
    data = (tmp_path / "weights.bin").read_bytes()
    code, _, err = run("fuse", path, "-o", tmp_path / "weights.bin")
    assert code == 2 and "the model's weights are kept in it" in err
    assert (tmp_path / "weights.bin").read_bytes() == data


@pytest.mark.parametrize("name", ["", "x" * 300, "absent/"])
def test_names_that_cannot_be(run: Run, norms: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Exit 2 and one line for outputs; exit 2 or 3 for models."""
    monkeypatch.chdir(norms.parent)
    for arguments, codes in ((["fuse", norms, "-o", name], (2,)), (["inspect", name], (2, 3))):
        code, out, err = run(*arguments)
        assert code in codes and out == "" and err.count("\n") == 1 and "unexpected" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version names the version, and exits with 0."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"rmsnorm-onnx {rmsnorm_onnx.__version__}\n"


@pytest.mark.parametrize("command", ["inspect", "fuse", "expand"])
def test_a_pattern_that_matches_nothing_is_a_usage_error(run: Run, norms: Path, tmp_path: Path, command: str) -> None:
    """A misspelt pattern would leave the norms as they are: exit 2, with the names that there are, nothing written."""
    output = tmp_path / "o.onnx"
    flags = [] if command == "inspect" else ["-o", output]
    code, out, err = run(command, norms, *flags, "--only", "tpyo*")
    assert (code, out) == (2, "") and err.startswith("rmsnorm-onnx: no norm matches 'tpyo*'; ")
    assert not output.exists()
    assert run(command, norms, *flags, "--only", "tpyo*", "--only", "*", "--skip", "*")[0] == 0


def test_verify_of_nothing_is_a_usage_error(run: Run, norms: Path) -> None:
    """A pattern that matches no norm would check nothing: exit 2, with the names that there are."""
    code, out, err = run("verify", norms, "--only", "tpyo*")
    assert (code, out) == (2, "") and err.startswith("rmsnorm-onnx: no norm matches 'tpyo*'; there are ")
    assert run("verify", norms, "--only", "*")[0] == 0


@pytest.mark.parametrize("command", ["fuse", "export"])
def test_help_names_every_consumer_and_form(run: Run, command: str) -> None:
    """The help text is as complete as the tables, which it does not load."""
    text = " ".join(run(command, "--help")[1].split()).replace("- ", "-")  # lines break behind hyphens
    assert all(name in text for name in (*CONSUMERS, *FORMS))
