"""Roundings that no field of a spec says: such a norm is kept, each of them named, until leave is given."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from kit import parse

from rmsnorm_onnx import Match, find_rms_norms, fuse

HALF = {"float16": 10, "bfloat16": 16}
TEXT = """
m ({x}[N,4] x) => ({out}[N,4] y)
<float two = {{2.0}}, int64[1] last = {{-1}}, float eps = {{1e-6}}>
{{
 h = Cast <to = 1> (x)
 sq = Pow (h, two)
 ms = ReduceMean (sq, last)
 {mean}
 me = Add (mr, eps)
 rms = Sqrt (me)
 f = Reciprocal (rms)
 {factor}
 n = Mul (h, fr)
 {normalized}
 y = Mul (nr, w)
}}"""
SAME = {"mean": "mr = Identity (ms)", "factor": "fr = Identity (f)", "normalized": "nr = Cast <to = {t}> (n)"}


def norm(x_type: str, **changed: str) -> ir.Model:
    """A norm that rounds before its gain, with one step of it written otherwise."""
    steps = {key: text.format(t=HALF[x_type]) for key, text in {**SAME, **changed}.items()}
    w = np.array([1.0, 0.5, 2.0, -1.0]).astype(ir.DataType[x_type.upper()].numpy())
    return parse(TEXT.format(x=x_type, out=x_type, **steps), w=w)


def found(model: ir.Model) -> Match:
    """Its one norm."""
    [site] = find_rms_norms(model)
    assert isinstance(site, Match), site
    return site


@pytest.mark.parametrize("x_type", HALF)
def test_the_plain_norm_has_none(x_type: str) -> None:
    """What is left out below is all that keeps the norms there."""
    assert found(norm(x_type)).rounding_changes == ()


@pytest.mark.parametrize(
    ("x_type", "changed", "what"),
    [
        ("float16", {"normalized": "nb = Cast <to = 16> (n)  nr = Cast <to = {t}> (nb)"}, "x / rms"),
        ("bfloat16", {"normalized": "nb = Cast <to = 10> (n)  nr = Cast <to = {t}> (nb)"}, "x / rms"),
        (
            "float16",
            {"normalized": "na = Cast <to = 10> (n)  nb = Cast <to = 16> (na)  nr = Cast <to = {t}> (nb)"},
            "x / rms",
        ),
        (
            "float16",
            {"factor": "fa = Cast <to = 10> (f)  fb = Cast <to = 16> (fa)  fr = Cast <to = 1> (fb)"},
            "1 / rms",
        ),
        ("float16", {"mean": "ma = Cast <to = 10> (ms)  mr = Cast <to = 1> (ma)"}, "the mean square"),
        ("bfloat16", {"mean": "ma = Cast <to = 16> (ms)  mr = Cast <to = 1> (ma)"}, "the mean square"),
        (
            "float16",
            {"mean": "ma = Cast <to = 10> (ms)  mb = Cast <to = 16> (ma)  mr = Cast <to = 1> (mb)"},
            "the mean square",
        ),
    ],
)
def test_a_rounding_on_the_way_keeps_the_norm(x_type: str, changed: dict[str, str], what: str) -> None:
    """A second half type, and a mean square that is rounded although its squares are not."""
    model = norm(x_type, **changed)
    site = found(model)
    assert site.rounding_changes and all(
        change.startswith(f"{what} is rounded to ") for change in site.rounding_changes
    )
    same, report = fuse(model)
    assert [s.action for s in report.sites] == ["kept"] and [n.op_type for n in same.graph] == [
        n.op_type for n in model.graph
    ]
    _, report = fuse(model, allow_rounding_change=True)
    [told] = report.sites
    assert told.action == "rewritten" and told.rounding_changes == site.rounding_changes


def test_squares_in_half_are_raised_and_noted() -> None:
    """Where the squares themselves are of the half type, the statistic is in half, which every form mends."""
    model = norm("float16", mean="ma = Cast <to = 10> (ms)  mr = Cast <to = 1> (ma)")
    text = TEXT.format(x="float16", out="float16", **{k: t.format(t=10) for k, t in SAME.items()})
    text = text.replace(
        "sq = Pow (h, two)\n ms = ReduceMean (sq, last)",
        "s2 = Mul (x, x)\n m2 = ReduceMean (s2, last)\n ms = Cast <to = 1> (m2)",
    )
    w = np.array([1.0, 0.5, 2.0, -1.0], np.float16)
    site = found(parse(text.replace("float two = {2.0}, ", ""), w=w))
    assert site.rounding_changes == () and site.spec.statistic_type in ("float16", "x")
    assert found(model).spec.statistic_type == "float32"
