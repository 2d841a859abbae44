"""The command line with its streams closed, full or left, and interrupted."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from test_cli import Run, norms, operators, run
from test_modelio import names

from rmsnorm_onnx import modelio

__all__ = ["norms", "run"]  # fixtures


def in_bash(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A line of bash in which "$@" is the command."""
    words = [sys.executable, "-m", "rmsnorm_onnx.cli", *map(str, arguments)]
    return subprocess.run(["bash", "-o", "pipefail", "-c", command, "bash", *words], capture_output=True, text=True)


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_a_report_that_nobody_takes(norms: Path, tmp_path: Path, json_: list[str]) -> None:
    """A closed or full stdout is exit 1 and one line that says what was written; a reader that stops is no error."""
    for n, (command, words) in enumerate(
        [('"$@" >&-', "it is closed"), ('"$@" >/dev/full', "No space left on device")]
    ):
        output = tmp_path / f"{n}.onnx"
        done = in_bash(command, "fuse", norms, "-o", output, *json_)
        assert done.returncode == 1
        assert done.stderr == f"rmsnorm-onnx: cannot write to stdout: {words}; {output} was written\n"
        assert operators(output) == ["RMSNorm", "RMSNorm"]
    done = in_bash('"$@" | true', "inspect", norms, *json_)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_and_full_stderr(norms: Path, tmp_path: Path) -> None:
    """The work is done and the exit code tells; with every stream closed, the file's descriptor is none of theirs."""
    assert "2 found" in in_bash('"$@" 2>&-', "inspect", norms).stdout
    for command in ('"$@" 2>&-', '"$@" 2>/dev/full'):
        done = in_bash(command, "inspect", "absent.onnx")
        assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert in_bash('"$@" <&- >&- 2>&-', "fuse", norms, "-o", tmp_path / "out.onnx").returncode == 1
    assert operators(tmp_path / "out.onnx") == ["RMSNorm", "RMSNorm"]


def test_help_that_nobody_takes() -> None:
    """A full disk is exit 1 and one line for the help too."""
    done = in_bash('"$@" >/dev/full', "--help")
    assert (done.returncode, done.stderr) == (1, "rmsnorm-onnx: cannot write to stdout: No space left on device\n")


def test_a_stdout_of_few_characters(norms: Path) -> None:
    """What an ASCII stdout cannot show is escaped, and the JSON is the same."""
    proto = onnx.load(norms)
    next(n for n in proto.graph.node if n.name == "first").name = "größe 😀"
    onnx.save(proto, norms)
    done = in_bash('PYTHONIOENCODING=ascii "$@"', "inspect", norms, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["sites"][0]["name"] == "größe 😀"
    assert "gr\\u00f6\\u00dfe" in in_bash('PYTHONIOENCODING=ascii "$@"', "inspect", norms).stdout


def test_stdout_is_the_output(norms: Path, tmp_path: Path) -> None:
    """The file that stdout goes to is not replaced by the model."""
    done = in_bash(f'"$@" > {tmp_path / "both"}', "fuse", norms, "-o", tmp_path / "both")
    assert done.returncode == 2 and "the report on stdout goes there" in done.stderr
    assert (tmp_path / "both").read_bytes() == b""


@pytest.fixture
def foreground() -> Iterator[None]:
    """SIGINT as a shell leaves it for what it runs in the foreground; in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(("name", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.parametrize("when", ["during", "after"])
def test_signals(
    run: Run, norms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, word: str, when: str
) -> None:
    """While a file is written nothing stays, after it the file does, and the one line is true either way."""
    output = tmp_path / "out.onnx"
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def interrupt(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = real(*arguments)
            signal.raise_signal(getattr(signal, name))
            return result

        return call

    if when == "during":
        monkeypatch.setattr(modelio, "_write", interrupt(modelio._write))
    else:
        monkeypatch.setattr(modelio, "save", interrupt(modelio.save))
    got, out, err = run("fuse", norms, "-o", output)
    said = "nothing was written" if when == "during" else f"{output} was written"
    assert (got, out, err) == (code, "", f"rmsnorm-onnx: {word}; {said}\n")
    assert names(tmp_path) == (["norms.onnx"] if when == "during" else ["norms.onnx", "out.onnx"])
    assert {s: signal.getsignal(s) for s in before} == before
