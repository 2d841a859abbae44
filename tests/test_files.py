"""Where an output may go, what it never replaces, and what is there when its writer is interrupted."""

import os
import socket
import stat
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from test_modelio import WEIGHTS, external, model, names, weights

from rmsnorm_onnx import modelio
from rmsnorm_onnx.errors import UsageError


def test_the_output_is_no_data_file_of_the_model(tmp_path: Path) -> None:
    """The only copy of the weights is not written over, by its name, by a link, or as it would be after copying."""
    loaded = modelio.load(external(tmp_path / "in"))
    data = (tmp_path / "in" / "weights.bin").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "in" / "weights.bin")
    (tmp_path / "out").mkdir()
    before = names(tmp_path)
    for target in ("in/weights.bin", "link", "out/weights.bin"):
        with pytest.raises(UsageError, match=r"cannot write .*weights.*; name another file"):
            modelio.save(loaded, tmp_path / target)
        assert names(tmp_path) == before and (tmp_path / "in" / "weights.bin").read_bytes() == data
    (tmp_path / "out" / "weights.bin").write_bytes(b"another's")
    with pytest.raises(UsageError, match="a copy of the model's weights goes there"):
        modelio.save(loaded, tmp_path / "out" / "weights-1.bin")
    assert names(tmp_path / "out") == ["weights.bin"]


def test_an_output_that_is_no_regular_file(tmp_path: Path) -> None:
    """A pipe and a socket stay what they are."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, kind in (("pipe", stat.S_ISFIFO), ("socket", stat.S_ISSOCK)):
            with pytest.raises(UsageError, match="it is no regular file"):
                modelio.save(ir.from_proto(model()), tmp_path / name)
            assert kind((tmp_path / name).stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["pipe", "socket"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_written_through(tmp_path: Path, exists: bool) -> None:
    """The link stays and its target becomes the model; the data goes where the link's readers look for it."""
    (tmp_path / "store").mkdir()
    (tmp_path / "links").mkdir()
    if exists:
        (tmp_path / "store" / "real.onnx").write_bytes(b"old")
    link = tmp_path / "links" / "model.onnx"
    link.symlink_to("../store/real.onnx")
    modelio.save(modelio.load(external(tmp_path / "in")), link)
    assert link.is_symlink() and names(tmp_path / "store") == ["real.onnx"]
    assert names(tmp_path / "links") == ["model.onnx", "weights.bin"]
    np.testing.assert_array_equal(weights(link), WEIGHTS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "name is empty"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null byte"),
        ("absent/", "a folder"),
        ("loop", "symbolic links"),
        ("plain/model.onnx", "no folder"),
    ],
)
def test_output_names_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    """Each is a usage error of one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match=words) as caught:
        modelio.save(ir.from_proto(model()), name)
    assert "\n" not in str(caught.value) and sorted(os.listdir(tmp_path)) == ["loop", "plain"]


class Stop(BaseException):
    """What a signal raises."""


@pytest.mark.parametrize("after", [False, True])
def test_an_interruption_around_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Before the model is in its place nothing stays, not even a folder; after it the model keeps its data."""
    loaded = modelio.load(external(tmp_path / "in", "deep/weights.bin"))
    out = tmp_path / "out"
    out.mkdir()
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).suffix != ".onnx":
            real(source, target)
            return
        if after:
            real(source, target)
        raise Stop

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Stop):
        modelio.save(loaded, out / "model.onnx")
    if after:
        assert names(out) == ["deep/weights.bin", "model.onnx"]
        np.testing.assert_array_equal(weights(out / "model.onnx"), WEIGHTS)
    else:
        assert os.listdir(out) == []
