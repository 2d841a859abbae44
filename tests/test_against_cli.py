"""`verify --against torch` on the command line: exit codes, JSON, the plot, and what goes with it."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import onnx
import pytest
from kit import NORM, proto
from nets import Residual, bare_net, example, exported, seeded
from test_cli import Run, run  # noqa: F401  (a fixture)

from rmsnorm_onnx import modelio

NET = """
    import sys
    sys.path.insert(0, {tests!r})
    from nets import Residual, bare_net, example, seeded

    def make():
        return seeded(Residual), example()

    def other():
        return seeded(Residual, seed=1), example()

    def changed():
        module = seeded(Residual)
        module.layers[0].weight.data[0, 0] += 0.5
        return module, example()

    def bare():
        return bare_net(), example()

    def empty():
        return seeded(Residual), example()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Residual's files and the callables that give it."""
    place = tmp_path_factory.mktemp("against")
    modelio.save(exported(Residual), place / "net.onnx")
    modelio.save(exported(Residual, "bfloat16"), place / "half.onnx")
    modelio.save(exported(bare_net), place / "bare.onnx")
    (place / "net.py").write_text(textwrap.dedent(NET).format(tests=str(Path(__file__).parent)))
    return place


def test_done(run: Run, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """All holds: exit 0, pure JSON on stdout, and a plot that is a picture of some size."""
    from matplotlib.image import imread

    plot = tmp_path / "drift.png"
    command = ("verify", folder / "net.onnx", f"{folder}/net.py:make", "--against", "torch", "--json", "--strict")
    code, out, err = run(*command, "--plot", plot)
    data = json.loads(out)
    assert (code, err, data["kind"], data["within"]) == (0, "", "torch-parity", 3)
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = imread(plot)
    assert min(picture.shape[:2]) > 500 and picture.min() < 0.3 < 0.9 < picture.max()
    assert [p.name for p in tmp_path.iterdir()] == ["drift.png"]


def test_the_wrong_module(run: Run, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """Another module's weights are exit 1; the table says so, and the plot is drawn all the same."""
    plot = tmp_path / "drift.svg"
    code, out, _ = run("verify", folder / "net.onnx", f"{folder}/net.py:other", "--against", "torch", "--plot", plot)
    assert code == 1 and "last: its gain is not the module's: 64 of 64 elements" in out
    assert "0 within, 3 beyond" in out and "another gain" in out
    text = plot.read_text()
    assert text.startswith("<?xml") and "</svg>" in text


def test_one_by_one(run: Run, folder: Path) -> None:  # noqa: F811
    """In bfloat16 the norms run alone: exit 0, or 1 under --strict, since the whole file did not run."""
    command = ("verify", folder / "half.onnx", f"{folder}/net.py:make", "--against", "torch", "--dtype", "bfloat16")
    code, out, _ = run(*command)
    assert code == 0 and "norms run one by one: no bfloat16 kernel for MatMul(" in out and "within alone" in out
    assert run(*command, "--strict")[0] == 1


def test_keyword_inputs(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Where a callable gives options too, its keyword inputs are the module's."""
    from rmsnorm_onnx.exporters import source

    given = seeded(Residual), (), {"kwargs": {"x": example()[0]}}
    monkeypatch.setattr(source, "resolve", lambda _: given)
    code, out, err = run("verify", folder / "net.onnx", "net.py:make", "--against", "torch")
    assert (code, err) == (0, "") and "3 within" in out


@pytest.mark.parametrize("name", ["drift.jpg", "drift", "drift.png.txt"])
def test_unknown_extensions(run: Run, tmp_path: Path, name: str) -> None:  # noqa: F811
    """A plot's extension is looked at before anything else: exit 2, though there is no model either."""
    code, out, err = run("verify", "none.onnx", "none.py:make", "--against", "torch", "--plot", tmp_path / name)
    assert (code, out) == (2, "") and err.rstrip().endswith("its extension must be one of .png, .svg, .pdf")
    assert not list(tmp_path.iterdir())


def test_no_matplotlib(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Without matplotlib a plot is exit 4 with the pip command, before any work."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = tmp_path / "drift.pdf"
    code, out, err = run("verify", "none.onnx", "none.py:make", "--against", "torch", "--plot", plot)
    assert (code, out) == (4, "") and not plot.exists()
    assert err == "rmsnorm-onnx: the plot needs matplotlib: pip install 'rmsnorm_onnx[plot]'\n"


def test_a_module_without_the_flag(run: Run, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """What is written as a module is, where no such file is, is not called a missing file: the flag is named."""
    for original in (f"{folder}/net.py:make", "package.module:make", "nowhere.py:make"):
        code, out, err = run("verify", folder / "net.onnx", original)
        assert (code, out) == (2, "")
        assert (
            err == f"rmsnorm-onnx: {original} is no ONNX file; add --against torch to compare with a PyTorch module\n"
        )
    assert run("verify", folder / "net.onnx", tmp_path / "absent.onnx")[0] == 3


def test_a_pattern_that_matches_nothing(run: Run, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """A misspelt pattern is exit 2 with the closest names, and no plot is drawn."""
    command = ("verify", folder / "net.onnx", f"{folder}/net.py:make", "--against", "torch", "--only", "norm.1")
    code, out, err = run(*command, "--plot", tmp_path / "drift.png")
    assert (code, out) == (2, "") and not list(tmp_path.iterdir())
    assert err == "rmsnorm-onnx: no norm matches 'norm.1'; the closest are norms.1, norms.0\n"


def test_another_weight(run: Run, folder: Path) -> None:  # noqa: F811
    """A weight outside the norms that is not the module's is exit 1, and the line says how far the output is off."""
    code, out, _ = run("verify", folder / "net.onnx", f"{folder}/net.py:changed", "--against", "torch")
    assert code == 1 and "3 within, 0 beyond, 0 not measured on both sides; 1 wrong beside the norms" in out
    assert "ulp from float64, and PyTorch " in out and "so another weight, or another computation" in out


@pytest.mark.parametrize("builder", ["bare", "empty"])
def test_no_norm(run: Run, folder: Path, tmp_path: Path, builder: str) -> None:  # noqa: F811
    """No norm in the file or in the module is told, exit 1, with or without a plot, of which there is then none."""
    name = {"bare": "net.onnx", "empty": "bare.onnx"}[builder]
    words = {"bare": "no norm was found in the module", "empty": "no norm was found in the file"}[builder]
    plot = tmp_path / "drift.png"
    for flags in ([], ["--plot", plot]):
        code, out, _ = run("verify", folder / name, f"{folder}/net.py:{builder}", "--against", "torch", *flags)
        assert code == 1 and words in out
    assert plot.exists() == (builder == "bare")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plot", "x.png"], "--plot goes with --against torch only"),
        (["--dtype", "float16"], "--dtype goes with --against torch only"),
        (["--against", "torch"], "--against torch needs the module after MODEL"),
        (["net.py:make", "--against", "torch", "--seed", "1"], "--seed does not go with --against torch"),
    ],
)
def test_what_goes_together(run: Run, flags: list[Any], words: str) -> None:  # noqa: F811
    """Flags of the other kind of original are usage errors, not ignored."""
    code, out, err = run("verify", "model.onnx", *flags)
    assert (code, out) == (2, "") and words in err


def test_against_onnx_is_the_default(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Without --against, and with --against onnx, the original is a file, as ever."""
    onnx.save(proto(NORM), tmp_path / "norm.onnx")
    plain = run("verify", tmp_path / "norm.onnx", tmp_path / "norm.onnx", "--json")
    named = run("verify", tmp_path / "norm.onnx", tmp_path / "norm.onnx", "--json", "--against", "onnx")
    assert plain == named and json.loads(plain[1])["kind"] == "parity" and plain[0] == 0


def test_a_plot_that_fails_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plot is written whole or not at all: when the drawing breaks, what was there stays."""
    from matplotlib.figure import Figure
    from nets import example, seeded

    from rmsnorm_onnx import plot, verify_torch
    from rmsnorm_onnx.errors import UsageError

    report = verify_torch(folder / "net.onnx", seeded(Residual), example())
    target = tmp_path / "drift.png"
    target.write_bytes(b"before")

    def broken(self: Figure, name: Path, **_: Any) -> None:
        Path(name).write_bytes(b"half a pic")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(UsageError, match="No space left on device"):
        plot.draw(report, target)
    assert target.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder.png", "it is a folder; name a file"),
        ("folder", "it is a folder; name a file"),
        ("absent/drift.png", "does not exist; create it"),
        ("file/drift.png", "is no folder; name another place"),
        (".png", "its extension must be one of"),
        ("drift.", "its extension must be one of"),
        ("locked/drift.png", "locked is not writable; name another place"),
    ],
)
def test_plots_at_odd_places(
    run: Run,  # noqa: F811
    tmp_path: Path,
    name: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no plot can go it is one line and exit 2, before any work, and nothing is written."""
    import os

    for folder in ("folder.png", "folder", "locked"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").chmod(0o500)
    genuine = os.access
    # The superuser may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and genuine(path, mode))
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("verify", "none.onnx", "none.py:make", "--against", "torch", "--plot", tmp_path / name)
    assert (code, out) == (2, "") and err.count("\n") == 1 and words in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plot_without_a_name(run: Run) -> None:  # noqa: F811
    """An empty name is said to be empty."""
    code, out, err = run("verify", "none.onnx", "none.py:make", "--against", "torch", "--plot", "")
    assert (code, out, err) == (2, "", "rmsnorm-onnx: the output's name is empty; name a file\n")
