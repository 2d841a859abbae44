"""What the variants' exports taught the recogniser, as the smallest graphs, each beside one that is damaged."""

from __future__ import annotations

import numpy as np
import pytest
from kit import edit, parse

from rmsnorm_onnx import Declined, Match, find_rms_norms

# 48 ** 0.5 = 6.928203 is rounded in float16, and a gain of one element follows.
SCALED = """
m (float16[N,48] x) => (float16[N,48] y)
<int64[1] last = {-1}>
{
 l = ReduceL2 <keepdims = 1> (x, last)
 n = Div (x, l)
 s = Mul (n, root)
 y = Mul (s, g)
}"""

# What `x.view(b, s, 4, -1)` becomes: the last size follows from the others, one of which has a name only.
HEADS = """
m (float[B,S,64] x, float[C,S,64] other) => (float[B,S,4,16] y)
<int64 zero = {0}, int64 one = {1}, int64[1] front = {0}, int64[1] heads = {4}, int64[1] rest = {-1},
 float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}>
{
 shape = Shape (x)
 b = Gather (shape, zero)
 s = Gather (shape, one)
 bb = Unsqueeze (b, front)
 ss = Unsqueeze (s, front)
 target = Concat <axis = 0> (bb, ss, heads, rest)
 h = Reshape (x, target)
 sq = Pow (h, two)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 n = Div (h, rms)
 y = Mul (n, w)
}"""
GAIN = np.linspace(0.5, 1.5, 16, dtype=np.float32)


def half(value: float) -> np.ndarray:
    """A number rounded to float16."""
    return np.asarray(value, np.float16)


def test_a_scalar_gain_beside_a_rounded_root() -> None:
    """A gain of one element is found although the constant that makes a mean of the sum is rounded; that is listed."""
    (site,) = find_rms_norms(parse(SCALED, root=half(48**0.5), g=half(1.25).reshape(1)))
    assert isinstance(site, Match) and site.gain is not None and site.gain.name == "g" and site.output.name == "y"
    assert "the constant 6.9282 stands in the graph rounded to float16, as 6.92969" in site.rounding_changes


def test_a_constant_that_is_no_rounded_root() -> None:
    """The next float16 beside that root is another factor: neither it nor the gain is claimed."""
    (site,) = find_rms_norms(parse(SCALED, root=np.nextafter(half(48**0.5), half(9)), g=half(1.25).reshape(1)))
    assert isinstance(site, Declined) and site.code.value == "coefficient"


def test_heads_split_by_a_computed_shape() -> None:
    """A Reshape to dimensions taken from x's own shape: the size of a head is known, and so is the gain."""
    (site,) = find_rms_norms(parse(HEADS, w=GAIN))
    assert isinstance(site, Match) and site.spec.axes == (-1,) and site.gain is not None and site.gain.name == "w"


@pytest.mark.parametrize(
    "change",
    [
        ("shape = Shape (x)", "shape = Shape (other)"),
        ("b = Gather (shape, zero)", "b = Gather (shape, one)"),
        ("bb = Unsqueeze (b, front)", "b2 = Add (b, one)\n bb = Unsqueeze (b2, front)"),
        ("bb = Unsqueeze (b, front)", "b2 = Mul (b, one)\n bb = Unsqueeze (b2, front)"),
    ],
    ids=["another shape", "another dimension", "a sum", "a product"],
)
def test_heads_split_by_another_shape(change: tuple[str, str]) -> None:
    """From other dimensions the size of a head does not follow: the norm is found without a gain on it."""
    (site,) = find_rms_norms(parse(edit(edit(HEADS, *change), "float[B,S,4,16] y", "float[P,Q,R,T] y"), w=GAIN))
    assert isinstance(site, Match) and site.gain is None and site.output.name == "n"


def test_a_dimension_is_no_number() -> None:
    """A size known only at run time, cast to a float, is neither an epsilon nor a count."""
    computed = " d = Slice (shape, front, heads)\n ff = Cast <to = 1> (d)\n me = Add (ms, ff)"
    text = edit(HEADS, " me = Add (ms, eps)", computed)
    text = edit(text, "int64[1] heads = {4}", "int64[1] heads = {4}, int64[1] until = {1}")
    (site,) = find_rms_norms(parse(edit(text, "Slice (shape, front, heads)", "Slice (shape, front, until)"), w=GAIN))
    assert isinstance(site, Declined) and site.code.value == "epsilon"


# The size of another input, known at run time only, is an index here, and a bound.
PICKED = """
m (float[3,12] x, float[K] other) => (float[A,B] y)
<int64[1] last = {-1}, int64[1] second = {1}, int64[1] far = {9}, int64[2] counts = {12, 5}, int64[3] some = {-1, 0, 1},
 int64[3] sizes = {-1, 3, 4}, float two = {2.0}, float eps = {1e-5}>
{
 size = Shape (other)
 %s
 sq = Pow (h, two)
 %s
 me = Add (ms, eps)
 rms = Sqrt (me)
 y = Div (h, rms)
}"""


@pytest.mark.parametrize(
    ("before", "statistic", "code"),
    [
        (
            "k = Gather (counts, size) h = Identity (x)",
            "f = Cast <to = 1> (k) t = ReduceSum (sq, last) ms = Div (t, f)",
            "numerator",
        ),
        ("h = Identity (x)", "axis = Gather (some, size) ms = ReduceMean (sq, axis)", "axes"),
        ("t = Slice (sizes, size, far) h = Reshape (x, t)", "ms = ReduceMean (sq, second)", "shape-unknown"),
        ("t = Slice (sizes, last, size) h = Reshape (x, t)", "ms = ReduceMean (sq, second)", "shape-unknown"),
    ],
)
def test_a_run_time_size_is_no_index(before: str, statistic: str, code: str) -> None:
    """A Gather or Slice at a place that only the run knows gives nothing to prove an axis or a count with."""
    (site,) = find_rms_norms(parse(PICKED % (before, statistic)))
    assert isinstance(site, Declined), site
    assert site.code.value == code
