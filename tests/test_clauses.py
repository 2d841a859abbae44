"""Every clause of the proof is needed: without it, a graph that is no norm is claimed as one.

Each case is a graph that one clause alone stands against, and the clause by its place. With the clause the graph is
judged rightly; with the clause removed, the same judgement fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import NORM, edit, parse
from sites import find, one, refused

import rmsnorm_onnx
from rmsnorm_onnx.errors import SpecError
from rmsnorm_onnx.site import DeclineCode


@dataclasses.dataclass(frozen=True)
class Clause:
    """A clause of the proof, and a judgement that needs it.

    Attributes:
        place: The module and function that hold the clause.
        judge: Raises if a graph is judged wrongly.
        satisfied: What the clause answers when it is content; it answers so to everything once it is removed.
    """

    place: str
    judge: Callable[[], object]
    satisfied: Any = True


def _widening() -> None:
    """A gain of eight times a value of one: the norm ends before it."""
    text = edit(NORM, "float[N,4] x", "float[N,1] x", "float[N,4] y", "float[N,2] y", "float[4] w", "float[2] w")
    match = one(edit(text, "{1.0, 0.5, 2.0, -1.0}", "{1.0, 0.5}"))
    assert match.output.name == "n" and not match.spec.has_gain


def _gain_along_the_sequence() -> None:
    """A multiplier of another axis than the normalised one is no gain."""
    text = edit(
        NORM, "float[N,4]", "float[N,3,4]", "float[4] w = {1.0, 0.5, 2.0, -1.0}", "float[3,1] w = {1.0, 0.5, 2.0}"
    )
    assert not one(text).spec.has_gain


def _statistic_that_widens() -> None:
    """An epsilon of full shape whose extent is not x's makes a result that is wider than x."""
    text = edit(NORM, "float[N,4] x", "float[1,4] x", "float[N,4] y", "float[2,4] y")
    text = edit(text, "float eps = {1e-6}", "float[2,1] eps = {1e-6, 1e-6}")
    matches, declined = find(parse(text))
    assert not matches and declined


CLAUSES = {
    "axis": Clause(
        "squares.proves_axes",
        lambda: refused(
            edit(NORM, "float[N,4]", "float[N,3,2,4]", "int64[1] last = {-1}", "int64[2] last = {-3, -1}"),
            DeclineCode.AXES,
        ),
    ),
    "exponent": Clause(
        "squares.proves_exponent", lambda: refused(edit(NORM, "two = {2.0}", "two = {4.0}"), DeclineCode.EXPONENT)
    ),
    "exponent: of what may be 0": Clause(
        "algebra.proves_no_cancelling",
        lambda: refused(
            edit(NORM, "n = Div (x, rms)", "d = Mul (rms, x)\n xx = Mul (x, x)\n n = Div (xx, d)"), DeclineCode.EXPONENT
        ),
    ),
    "coefficient": Clause(
        "claims.proves_coefficient",
        lambda: refused(edit(NORM, "ReduceMean (sq", "ReduceSum (sq"), DeclineCode.COEFFICIENT),
    ),
    "shape: the gain widens": Clause("claims.proves_extent", _widening, satisfied=None),
    "shape: the gain's axes": Clause("claims.proves_extent", _gain_along_the_sequence, satisfied=None),
    "shape: the statistic widens": Clause("algebra.proves_fit", _statistic_that_widens),
    "shape: the statistic's axes": Clause(
        "algebra.proves_alignment",
        lambda: refused(
            edit(NORM, "float[N,4]", "float[4,4]", "ReduceMean (", "ReduceMean <keepdims = 0> ("), DeclineCode.SHAPE
        ),
    ),
    "type": Clause(
        "algebra.proves_type",
        lambda: refused(
            edit(NORM, "me =", "i = Cast <to = 6> (ms)\n f = Cast <to = 1> (i)\n me =", "Add (ms", "Add (f"),
            DeclineCode.TYPE,
        ),
    ),
}


@contextlib.contextmanager
def removed(clause: Clause, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recogniser without a clause, in every module that has taken its name."""
    module, name = clause.place.split(".")
    importlib.import_module(f"rmsnorm_onnx.{module}")
    original = getattr(importlib.import_module(f"rmsnorm_onnx.{module}"), name)
    with monkeypatch.context() as patch:
        for holder in ("algebra", "chain", "claims", "find", "placement", "squares", "tail"):
            held = importlib.import_module(f"rmsnorm_onnx.{holder}")
            if getattr(held, name, None) is original:
                patch.setattr(held, name, lambda *args: clause.satisfied)
        yield


@pytest.mark.parametrize("name", CLAUSES)
def test_a_clause_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is judged rightly with the clause, and wrongly without it."""
    clause = CLAUSES[name]
    clause.judge()
    with removed(clause, monkeypatch), pytest.raises((AssertionError, SpecError)):
        clause.judge()
    clause.judge()


def test_every_clause_has_its_case() -> None:
    """Each function that is marked as a clause of the proof is among the cases, and so are all five kinds."""
    marked = set()
    for path in pathlib.Path(rmsnorm_onnx.__file__).parent.glob("*.py"):
        lines = path.read_text().splitlines()
        for line, following in itertools.pairwise(lines):
            if line.startswith("def ") and "PROOF CLAUSE" in following:
                marked.add(f"{path.stem}.{line.removeprefix('def ').split('(')[0]}")
    assert marked == {clause.place for clause in CLAUSES.values()}
    assert {name.split(":")[0] for name in CLAUSES} == {"shape", "coefficient", "axis", "exponent", "type"}
