"""The traps of the recogniser: what looks like a norm and is none, and what is one and does not look like it.

Each trap was seen in the wild. The models are one norm as text, with the trap written into it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from kit import NORM, edit, parse, parse_half, proto
from sites import find, one, refused

from rmsnorm_onnx import Declined, find_rms_norms, fuse
from rmsnorm_onnx.site import DeclineCode

SQUARE = edit(NORM, "float[N,4]", "float[4,4]")
NO_KEEPDIMS = ("ReduceMean (sq, last)", "ReduceMean <keepdims = 0> (sq, last)")


def test_01_keepdims_zero_on_a_square_input() -> None:
    """Trap 1: with keepdims=0 on a square input the statistic broadcasts over columns: declined."""
    refused(edit(SQUARE, *NO_KEEPDIMS), DeclineCode.SHAPE, "keepdims")


def test_01_keepdims_zero_before_a_reciprocal() -> None:
    """Trap 1: the same by a Reciprocal and a Mul."""
    text = edit(SQUARE, *NO_KEEPDIMS, "n = Div (x, rms)", "inv = Reciprocal (rms)\n n = Mul (x, inv)")
    refused(text, DeclineCode.SHAPE)


def test_02_rank_one() -> None:
    """Trap 2: for x of rank 1 both factors of the last Mul have rank 1; the gain is the one that is not x."""
    match = one(edit(NORM, "float[N,4]", "float[4]"))
    assert match.x.name == "x" and match.gain is not None and match.gain.name == "w"


def test_02_rank_one_with_the_gain_first() -> None:
    """Trap 2: the same with the gain as the left operand, and fed."""
    text = edit(NORM, "float[N,4] x)", "float[4] x, float[4] w)", "float[N,4] y", "float[4] y")
    text = edit(text, ", float[4] w = {1.0, 0.5, 2.0, -1.0}", "", "Mul (n, w)", "Mul (w, n)")
    match = one(text)
    assert match.x.name == "x" and match.gain is not None and match.gain.name == "w"


@pytest.mark.parametrize("dims", ["N,S", "5,4"])
def test_03_gain_that_widens_x(dims: str) -> None:
    """Trap 3: x [B,S,1] times a gain of [8] grows: the norm ends before it."""
    text = edit(NORM, "float[N,4] x", f"float[{dims},1] x", "float[N,4] y", f"float[{dims},8] y")
    text = edit(text, "float[4] w = {1.0, 0.5, 2.0, -1.0}", "float[8] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}")
    match = one(text)
    assert not match.spec.has_gain and match.output.name == "n"


def test_03_gain_with_a_further_leading_axis() -> None:
    """Trap 3: a gain of higher rank than x widens it too."""
    text = edit(NORM, "float[N,4] x", "float[3,4] x", "float[N,4] y", "float[1,3,4] y")
    text = edit(text, "float[4] w = {1.0, 0.5, 2.0, -1.0}", "float[1,1,4] w = {1.0, 0.5, 2.0, -1.0}")
    match = one(text)
    assert not match.spec.has_gain and match.output.name == "n"


@pytest.mark.parametrize(
    "changes",
    [
        ("float[4] w = {1.0, 0.5, 2.0, -1.0}", "float[1,1,1] w = {2.0}"),
        (
            "float[4] w = {1.0, 0.5, 2.0, -1.0}",
            "float[1,1,1] w = {2.0}",
            "n = Div (x, rms)\n y = Mul (n, w)",
            "f = Div (w, rms)\n y = Mul (x, f)",
        ),
        ("float two", "float[1,1,1] two"),
        ("float eps", "float[1,1,1] eps"),
        ("float eps", "float[1,1,1] h = {0.5}, float eps", "Sqrt (me)", "Pow (me, h)"),
    ],
    ids=["gain", "gain in the factor", "square", "epsilon", "root"],
)
def test_03_scalar_of_higher_rank(changes: tuple[str, ...]) -> None:
    """Trap 3: a constant of one element whose rank is above x's raises the rank of the result: no norm goes past it."""
    matches, _ = find(parse(edit(NORM, "float[N,4] y", "float[1,N,4] y", *changes)))
    assert all(changes[1].startswith("float[1,1,1] w") and m.output.name == "n" for m in matches)


@pytest.mark.parametrize("shape", ["N,S,4", "S,1", "S,4", "N,1,4"])
def test_04_multiplier_that_is_no_gain(shape: str) -> None:
    """Trap 4: a multiplier of x's full shape, or along the sequence, is no gain: the match ends before it."""
    text = edit(NORM, "float[N,4] x)", f"float[N,S,4] x, float[{shape}] w)", "float[N,4] y", "float[N,S,4] y")
    match = one(edit(text, ", float[4] w = {1.0, 0.5, 2.0, -1.0}", ""))
    assert not match.spec.has_gain and match.gain is None and match.output.name == "n"


@pytest.mark.parametrize("exponent", ["3.0", "2.5", "4.0"])
def test_05_exponent_that_is_no_square(exponent: str) -> None:
    """Trap 5: another exponent than 2 is declined."""
    refused(edit(NORM, "float two = {2.0}", f"float two = {{{exponent}}}"), DeclineCode.EXPONENT)


def test_05_exponent_that_is_an_input() -> None:
    """Trap 5: an exponent known only at run time is declined."""
    text = edit(NORM, "float[N,4] x)", "float[N,4] x, float two)", "float two = {2.0}, ", "")
    refused(text, DeclineCode.EXPONENT)


def test_05_exponent_that_can_be_overridden() -> None:
    """Trap 5: an exponent with a default that a caller may override is known only at run time too."""
    refused(edit(NORM, "float[N,4] x)", "float[N,4] x, float two)"), DeclineCode.EXPONENT)


def test_06_mean_of_another_tensor() -> None:
    """Trap 6: the mean square of z divides x: declined."""
    text = edit(NORM, "float[N,4] x)", "float[N,4] x, float[N,4] z)", "Pow (x, two)", "Pow (z, two)")
    refused(text, DeclineCode.NUMERATOR)


def test_06_product_of_two_tensors() -> None:
    """Trap 6: the mean of x * z is no mean square."""
    text = edit(NORM, "float[N,4] x)", "float[N,4] x, float[N,4] z)", "Pow (x, two)", "Mul (x, z)")
    matches, _ = find(parse(text))
    assert not matches


SUM = ("ReduceMean (sq, last)", "ReduceSum (sq, last)")


def test_07_sum_in_place_of_a_mean() -> None:
    """Trap 7: an L2 norm leaves 1/sqrt(d): the coefficient is not 1."""
    refused(edit(NORM, *SUM), DeclineCode.COEFFICIENT)


def test_07_sum_with_the_root_of_d() -> None:
    """Trap 7: x * sqrt(d) over the root of a sum is a norm whose epsilon is the graph's over d."""
    text = edit(NORM, *SUM, "n = Div (x, rms)", "l2 = Div (x, rms)\n n = Mul (l2, rootd)")
    match = one(edit(text, "float two = {2.0}", "float two = {2.0}, float rootd = {2.0}"))
    assert match.spec.epsilon == pytest.approx(float(np.float32(1e-6)) / 4, rel=1e-12)
    assert match.spec.has_gain


def test_07_mean_times_a_constant() -> None:
    """Trap 7: a mean doubled, or halved, is not a mean."""
    text = edit(NORM, "me = Add (ms, eps)", "m2 = Mul (ms, two)\n me = Add (m2, eps)")
    matches, declined = find(parse(text))
    assert not matches and declined[0].code is DeclineCode.COEFFICIENT


@pytest.mark.parametrize(
    "changes",
    [
        ("float eps = {1e-6}", "float[1] eps = {1e-6}"),
        ("Add (ms, eps)", "Add (eps, ms)"),
        ("float eps = {1e-6}", "float16 half = {17}", "me =", "eps = Cast <to = 1> (half)\n me ="),
    ],
    ids=["one element", "first operand", "float16"],
)
def test_08_epsilons_that_are_accepted(changes: tuple[str, ...]) -> None:
    """Trap 8: epsilon as a float16 constant, as the first operand, and of shape [1] is a number like any other."""
    match = one(edit(NORM, *changes))
    stored = float(np.uint16(17).view(np.float16)) if "half" in str(changes) else float(np.float32(1e-6))
    assert match.spec.epsilon == stored


def test_08_epsilon_that_is_a_vector() -> None:
    """Trap 8: an epsilon for each column is declined."""
    text = edit(NORM, "float eps = {1e-6}", "float[4] eps = {1e-6, 1.0, 0.5, 0.1}")
    refused(text, DeclineCode.EPSILON)


def test_08_epsilon_that_is_an_input() -> None:
    """Trap 8: an epsilon known only at run time is declined."""
    text = edit(NORM, "float[N,4] x)", "float[N,4] x, float eps)", ", float eps = {1e-6}", "")
    refused(text, DeclineCode.EPSILON, "run time")


def test_08_negative_epsilon() -> None:
    """Trap 8: a negative epsilon makes a NaN of a small row; no spec holds it."""
    refused(edit(NORM, "eps = {1e-6}", "eps = {-1e-6}"), DeclineCode.EPSILON)


@pytest.mark.parametrize("epsilon", ["1e-8", "1e-12"])
def test_09_tiny_epsilon(epsilon: str) -> None:
    """Trap 9: an epsilon of 1e-8 and below survives to the last bit."""
    match = one(edit(NORM, "eps = {1e-6}", f"eps = {{{epsilon}}}"))
    assert match.spec.epsilon == float(np.float32(epsilon))


@pytest.mark.parametrize("axis", ["-1", "1"])
@pytest.mark.parametrize("attributes", ["", "<keepdims = 1>", "<keepdims = 1, noop_with_empty_axes = 0>"])
def test_10_defaults_left_out(axis: str, attributes: str) -> None:
    """Trap 10: defaults said or left unsaid, and an axis counted from either end, are one match."""
    text = edit(NORM, "last = {-1}", f"last = {{{axis}}}", "ReduceMean (", f"ReduceMean {attributes} (")
    assert one(text).spec == one(NORM).spec


def test_12_no_casts_in_a_float16_graph() -> None:
    """Trap 12: a graph that squares in float16 is recorded as such, with a note that says what overflows."""
    match = one(parse_half(NORM))
    assert match.spec.resolve("float16").statistic_type == "float16" and match.x_type == "float16"
    assert any("float16" in note for note in match.notes)


@pytest.mark.parametrize("name", ["n", "rms", "ms", "sq"])
def test_13_interior_value_is_an_output(name: str) -> None:
    """Trap 13: a norm is found although its normalised value, root or mean square is read elsewhere."""
    shape = "N,1" if name in ("rms", "ms") else "N,4"
    match = one(edit(NORM, "=> (float[N,4] y)", f"=> (float[N,4] y, float[{shape}] {name})"))
    assert match.output.name == "y" and match.spec.has_gain


@pytest.mark.parametrize(
    "changes",
    [
        # an epsilon that widens the squeezed statistic
        ("float eps = {1e-6}", "float[2,3] eps = {1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6}", "float[4,3,4]", "float[1,3,4]"),
        # a shape that is not x's, though its value is
        ("u = Unsqueeze (rms, last)", "u0 = Unsqueeze (rms, last)\n wide = Mul (x, one)\n s = Shape (wide)\n"
         " u = Expand (u0, s)", "float eps", "float[1,1,1,1] one = {1.0}, float eps"),
    ],
)  # fmt: skip
def test_03_a_statistic_that_widens_x(changes: tuple[str, ...]) -> None:
    """Trap 3: a statistic of another shape than x's rows widens x, also while its reduced axis is absent."""
    text = edit(NORM, "float[N,4]", "float[4,3,4]", "ReduceMean (sq, last)", "ReduceMean <keepdims = 0> (sq, last)")
    text = edit(text, "n = Div (x, rms)", "u = Unsqueeze (rms, last)\n n = Div (x, u)")
    one(text)
    matches, declined = find(parse(edit(text, *changes), check=False))
    assert not matches and [d.code for d in declined] == [DeclineCode.SHAPE]


def test_13_the_interior_of_a_rewritten_norm_is_no_second_one() -> None:
    """Trap 13: what stays for other readers of the normalised value is named, and not rewritten on a second run."""
    fused, first = fuse(parse(edit(NORM, "=> (float[N,4] y)", "=> (float[N,4] y, float[N,4] n)")))
    again, second = fuse(fused)
    assert (first.rewritten, second.rewritten) == (1, 0)
    assert [s.code for s in second.sites if s.action == "declined"] == ["interior"]
    assert ir.to_proto(again) == ir.to_proto(fused)


def test_14_two_roots_on_one_reduction() -> None:
    """Trap 14: two roots with different epsilons share one reduction: both are norms."""
    text = edit(
        NORM, "=> (float[N,4] y)", "=> (float[N,4] y, float[N,4] y2)", "two = {2.0}", "two = {2.0}, float big = {0.5}"
    )
    text = edit(text, "y = Mul (n, w)", "y = Mul (n, w)\n me2 = Add (ms, big)\n rms2 = Sqrt (me2)\n y2 = Div (x, rms2)")
    matches, declined = find(parse(text))
    assert not declined
    assert {m.output.name: (m.spec.has_gain, round(m.spec.epsilon, 9)) for m in matches} == {
        "y": (True, 1e-6),
        "y2": (False, 0.5),
    }


def test_15_epsilon_outside_clamped_or_none() -> None:
    """Trap 15: epsilon outside the root, as a clamp, or absent is recorded as what it is."""
    outside = edit(NORM, "me = Add (ms, eps)\n rms = Sqrt (me)", "me = Sqrt (ms)\n rms = Add (me, eps)")
    assert one(outside).spec.epsilon_placement == "outside"
    assert one(edit(outside, "Add (me", "Max (me")).spec.epsilon_placement == "clamp"
    assert one(edit(outside, "Add (me", "Clip (me")).spec.epsilon_placement == "clamp"
    assert one(edit(NORM, "Add (ms, eps)", "Identity (ms)")).spec.epsilon == 0


def test_16_gain_plus_one() -> None:
    """Trap 16: 1 + w as an Add has offset 1 and w as its gain; folded, it is a plain gain."""
    text = edit(
        NORM, "y = Mul (n, w)", "w1 = Add (w, unit)\n y = Mul (n, w1)", "two = {2.0}", "two = {2.0}, float unit = {1.0}"
    )
    match = one(text)
    assert match.spec.gain_offset == 1 and match.gain is not None and match.gain.name == "w"
    assert one(NORM).spec.gain_offset == 0


def test_17_gain_into_the_factor_first() -> None:
    """Trap 17: the gain multiplied into 1/rms first is the same match; in float16 a moved rounding is reported."""
    text = edit(NORM, "n = Div (x, rms)\n y = Mul (n, w)", "inv = Reciprocal (rms)\n g = Mul (inv, w)\n y = Mul (x, g)")
    match = one(text)
    assert match.spec.has_gain and not match.rounding_changes
    half = one(parse_half(text))
    assert half.spec.has_gain and half.rounding_changes


def test_19_unknown_shape() -> None:
    """Trap 19: without a shape nothing is proven; the reason names the mend."""
    model = proto(NORM)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    sites = find_rms_norms(ir.from_proto(model))
    assert [s.code for s in sites if isinstance(s, Declined)] == [DeclineCode.SHAPE_UNKNOWN]
    assert len(sites) == 1 and "shape" in sites[0].reason
    assert "infer" in sites[0].reason or "export" in sites[0].reason
