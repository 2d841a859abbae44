"""The oracle: what RMSNorm is, what its rounding points allow, and how distances are counted."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.oracle import error_bound, reference, tolerance, ulp_distance
from rmsnorm_onnx.rounding import round_to, spacing
from rmsnorm_onnx.spec import PLACEMENTS, RMSNormSpec

PLAIN = RMSNormSpec(epsilon=0.0, has_gain=False)
ONCE = RMSNormSpec(normalized_type="float32", gain_type="float32")
TWICE = RMSNormSpec()
GRAPH_TYPES = ("float16", "bfloat16", "float32", "float64")

rows = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-100, 100).filter(lambda v: not 0 < abs(v) < 1e-3))
nonzero_rows = rows.filter(lambda x: bool(np.any(x)))


def layer_norm(x: np.ndarray) -> np.ndarray:
    """LayerNorm without epsilon, to compare with."""
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True)))


@given(nonzero_rows, st.floats(1e-6, 100.0))
def test_mean_square_of_the_output(x: np.ndarray, epsilon: float) -> None:
    """The output's mean square is q / (q + epsilon)."""
    q = np.mean(x * x)
    assert math.isclose(np.mean(reference(PLAIN.replace(epsilon=epsilon), x) ** 2), q / (q + epsilon), rel_tol=1e-12)


@given(nonzero_rows, st.floats(1e-3, 1e3))
def test_scale_invariance(x: np.ndarray, scale: float) -> None:
    """Scaling a row changes nothing without epsilon, and nothing visible where epsilon is negligible."""
    np.testing.assert_allclose(reference(PLAIN, scale * x), reference(PLAIN, x), rtol=1e-12)
    tiny = PLAIN.replace(epsilon=1e-30)
    np.testing.assert_allclose(reference(tiny, scale * x), reference(tiny, x), rtol=1e-12)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_scale_invariance_is_lost_at_epsilons_size(placement: str) -> None:
    """A row as small as epsilon comes out smaller than the same row a thousand times larger."""
    spec = PLAIN.replace(epsilon=1e-3, epsilon_placement=placement)
    small, large = (np.sqrt(np.mean(reference(spec, s * np.array([1.0, -2.0, 3.0])) ** 2)) for s in (1e-4, 10.0))
    assert small < 0.9 < 0.99 < large <= 1.0


@given(nonzero_rows, st.floats(1e-2, 1e2))
def test_negative_scale_flips_the_sign(x: np.ndarray, scale: float) -> None:
    """The norm is odd: a negative scale gives the negated output."""
    np.testing.assert_allclose(reference(PLAIN, -scale * x), -reference(PLAIN, x), rtol=1e-12)


@given(hnp.arrays(np.float64, st.integers(2, 20), elements=st.floats(0.5, 10)), st.floats(1.5, 10), st.data())
def test_scaling_one_coordinate_moves_all(x: np.ndarray, scale: float, data: st.DataObject) -> None:
    """All elements share one statistic, so that a larger coordinate makes all others smaller and itself larger."""
    i = data.draw(st.integers(0, x.size - 1))
    moved = x.copy()
    moved[i] *= scale
    change = reference(PLAIN, moved) - reference(PLAIN, x)
    assert change[i] > 0 and np.all(np.delete(change, i) < 0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("x_type", ["float32", "float16", "bfloat16"])
def test_zero_row_gives_zero(placement: str, epsilon: float, rounded: bool, x_type: str) -> None:
    """A row of zeros stays zero in every placement, also with epsilon 0, and its neighbour is left alone."""
    x = np.array([[0.0, 0.0], [1.0, 1.0]]).astype(dtypes.numpy_dtype(x_type))
    y = reference(PLAIN.replace(epsilon=epsilon, epsilon_placement=placement), x, rounded=rounded)
    np.testing.assert_allclose(y, [[0, 0], [1, 1]], rtol=1e-7)


@given(st.floats(1e-3, 1e3), st.integers(1, 50), st.sampled_from([-1.0, 1.0]))
def test_constant_vector_does_not_vanish(value: float, d: int, sign: float) -> None:
    """A constant row becomes its sign, where LayerNorm would make it zero."""
    np.testing.assert_allclose(reference(PLAIN, np.full(d, sign * value)), sign, rtol=1e-12)


def test_told_apart_where_layer_norm_cannot() -> None:
    """[1, -1] and [3, 1] differ by their mean alone: LayerNorm maps them to one row, RMSNorm to two."""
    a, b = np.array([1.0, -1.0]), np.array([3.0, 1.0])
    np.testing.assert_array_equal(layer_norm(a), layer_norm(b))
    assert np.max(np.abs(reference(PLAIN, a) - reference(PLAIN, b))) > 0.3


@given(nonzero_rows)
def test_mean_square_is_variance_plus_squared_mean(x: np.ndarray) -> None:
    """mean(x^2) = variance + mean^2: the statistic that 1 / rms shows is not the variance."""
    i = int(np.argmax(np.abs(x)))
    mean_square = (x[i] / reference(PLAIN, x)[i]) ** 2
    assert math.isclose(mean_square, np.var(x) + np.mean(x) ** 2, rel_tol=1e-9)


def test_leading_elements_alone_make_the_statistic() -> None:
    """pRMSNorm normalises all elements by the root mean square of the first ones."""
    np.testing.assert_allclose(reference(PLAIN.replace(leading=2), [3.0, 3.0, 12.0]), [1, 1, 4])


def test_gain_offset_and_bias() -> None:
    """The result is z * (offset + gain) + bias."""
    spec = RMSNormSpec(epsilon=0.0, gain_offset=1.0, has_bias=True)
    np.testing.assert_allclose(reference(spec, [2.0, -2.0], [0.5, 1.0], [10.0, 20.0]), [11.5, 18.0])


def test_gain_of_the_normalised_shape_lies_along_an_inner_axis() -> None:
    """[C] belongs to the channels of NCHW, also where W = C; [C, 1, 1] says the same."""
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 3))
    gain, spec = np.array([1.0, 2.0, 3.0]), RMSNormSpec(axes=(-3,))
    expected = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * gain[:, None, None]
    np.testing.assert_allclose(reference(spec, x, gain), expected, rtol=1e-12)
    np.testing.assert_allclose(reference(spec, x, gain[:, None, None]), expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_exact_reference_neither_overflows_nor_vanishes(scale: float) -> None:
    """Rows at the ends of float64's range are normalised all the same."""
    np.testing.assert_allclose(reference(PLAIN, scale * np.array([1.0, -1.0])), [1.0, -1.0], rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: reference(PLAIN, np.array([1, 2])), "x must be of a float type, got int64"),
        (lambda: reference(RMSNormSpec(axes=(-2, -1)), np.ones(3)), "has no axis -2"),
        (lambda: reference(PLAIN, np.ones((2, 0))), "too few elements"),
        (lambda: reference(PLAIN.replace(leading=4), np.ones(3)), "too few elements for a mean over 4"),
        (lambda: reference(PLAIN, np.ones(3), np.ones(3)), "has_gain is False"),
        (lambda: reference(TWICE, np.ones(3), None, np.ones(3)), "has_bias is False"),
        (lambda: reference(TWICE, np.ones((2, 3)), np.ones(2)), "gain of shape [2] does not broadcast to x"),
        (lambda: reference(TWICE, np.ones((2, 1)), np.ones(3)), "gain of shape [3] does not broadcast to x"),
        (lambda: tolerance(TWICE, "float32", 0), "size must be at least 1"),
        (lambda: ulp_distance(np.array([1]), np.array([1.0])), "value must be of a float type"),
    ],
)
def test_errors_name_what_is_wrong(call: object, words: str) -> None:
    """Each unusable argument is refused with its name and its shape or type."""
    with pytest.raises(UsageError) as caught:
        call()  # type: ignore[operator]
    assert words in str(caught.value)


# Rounding and distances


@pytest.mark.parametrize("name", dtypes.FLOAT_TYPES)
def test_round_to_is_the_nearest_number(name: str) -> None:
    """A rounded value is a number of the type, and none of its neighbours lies nearer."""
    info = dtypes.finfo(name)
    top = min(float(info.max), 1e30)
    v = np.random.default_rng(1).uniform(0.6, 1.0, 500) * np.geomspace(float(info.smallest_normal) or 1e-30, top, 500)
    got = round_to(v, name)
    np.testing.assert_array_equal(got.astype(dtypes.numpy_dtype(name)).astype(np.float64), got)
    assert np.all(np.abs(got - v) <= spacing(v, name) / 2)


def test_round_to_rounds_once() -> None:
    """A value just above a bfloat16 tie goes up, though a cast by way of float32 would lose the difference."""
    v = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8])
    assert v.astype(ml_dtypes.bfloat16).astype(float).tolist() == [1.0, 1.0]
    assert round_to(v, "bfloat16").tolist() == [1 + 2**-7, 1.0]


@pytest.mark.parametrize("name", dtypes.FLOAT_TYPES)
def test_neighbours_are_one_ulp_apart(name: str) -> None:
    """In every float type, 1 and the number above it are one ulp apart, and half an ulp is reported as half."""
    eps = float(dtypes.finfo(name).eps)
    above = np.array([1.0 + eps]).astype(dtypes.numpy_dtype(name))
    assert ulp_distance(above, [1.0]).tolist() == [1.0]
    if name != "float64":  # whose half ulps no reference can hold
        assert ulp_distance(above, [1.0 + eps / 2]).tolist() == [0.5]


def test_ulp_distance_at_the_edges() -> None:
    """Subnormals count in their own spacing; infinities and NaNs are near only to themselves."""
    inf, nan = np.inf, np.nan
    value = np.array([2.0**-24, 0.0, inf, inf, -inf, inf, nan, nan, 1.0, 65504.0], np.float16)
    want = np.array([0.0, 2.0**-25, inf, 70000.0, inf, 1.0, nan, 1.0, nan, 70000.0])
    assert ulp_distance(value, want).tolist() == [1.0, 0.5, 0.0, 0.0, inf, inf, 0.0, inf, inf, 140.5]
    assert float(ulp_distance(np.float32(1.0), 1.0)) == 0.0


# The bound


def drawn_inputs(data: st.DataObject, x_type: str, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [3, size], gain and bias [size] of one type; rows of different scale."""
    rng, dtype = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))), dtypes.numpy_dtype(x_type)
    scales = np.array([data.draw(st.sampled_from([1e-3, 0.1, 1.0, 30.0])) for _ in range(3)])[:, None]
    x = rng.normal(size=(3, size)) * scales
    return x.astype(dtype), rng.normal(1, 0.5, size).astype(dtype), rng.normal(size=size).astype(dtype)


types = st.sampled_from(["x", "float32"])
specs = st.builds(
    RMSNormSpec,
    epsilon=st.sampled_from([0.0, 1e-6, 1e-3]),
    epsilon_placement=st.sampled_from(PLACEMENTS),
    gain_offset=st.sampled_from([0.0, 1.0]),
    has_bias=st.booleans(),
    statistic_type=types,
    factor_type=types,
    normalized_type=types,
    gain_type=types,
    result_type=types,
)


@given(specs, st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.integers(1, 64), st.data())
@settings(max_examples=300, deadline=None)
def test_rounded_reference_is_within_the_bound(spec: RMSNormSpec, x_type: str, size: int, data: st.DataObject) -> None:
    """The spec's own roundings never exceed the bound that is derived from them."""
    x, gain, bias = drawn_inputs(data, x_type, size)
    args = (x, gain, bias if spec.has_bias else None)
    error = np.abs(reference(spec, *args, rounded=True) - reference(spec, *args))
    bound = error_bound(spec, *args)
    assert np.all((error <= bound) | np.isinf(bound))


def test_tolerance_covers_what_the_bound_itself_rounds() -> None:
    """In float64 the bound is evaluated in the type that it is of, which costs a fraction of an ulp."""
    rng = np.random.default_rng(0)
    x, gain = rng.normal(size=(3, 103)) * 1e-3, rng.normal(1, 0.5, 103)
    spec = RMSNormSpec(epsilon=0.0, statistic_type="x", factor_type="x")
    bound = error_bound(spec, x, gain)
    assert np.all(
        bound <= tolerance(spec, "float64", 103) * spacing(np.abs(reference(spec, x, gain)) + bound, "float64")
    )


@given(specs, st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.integers(1, 300), st.data())
@settings(max_examples=300, deadline=None)
def test_tolerance_covers_the_bound(spec: RMSNormSpec, x_type: str, size: int, data: st.DataObject) -> None:
    """Where everything is normal, the bound is no more than `tolerance` spacings."""
    x, gain, bias = drawn_inputs(data, x_type, size)
    r = spec.resolve(x_type)
    gain, bias = (a.astype(dtypes.numpy_dtype(t)) for a, t in ((gain, r.gain_type), (bias, spec.product_type(x_type))))
    without = spec.replace(has_bias=False)
    exact, gz = reference(spec, x, gain, bias if spec.has_bias else None), reference(without, x, gain)
    bound = error_bound(spec, x, gain, bias if spec.has_bias else None)
    z = reference(spec.replace(has_gain=False, gain_offset=0.0, has_bias=False), x)
    normal = float(max(dtypes.finfo(t).smallest_normal for t in (r.statistic_type, r.normalized_type, r.result_type)))
    square = np.mean(x.astype(float) ** 2, -1, keepdims=True)
    in_range = (np.abs(z) > normal) & (np.abs(gz) > normal) & (square > 4 * normal) & np.isfinite(bound)
    in_range &= square * size < float(dtypes.finfo(r.statistic_type).max) / 2
    where = np.maximum(np.maximum(np.abs(exact), np.abs(gz)), np.abs(bias.astype(float)) * spec.has_bias)
    allowed = tolerance(spec, x_type, size) * spacing(where + bound, r.result_type)
    assert np.all((bound <= allowed) | ~in_range)


@pytest.mark.parametrize("x_type", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 64, 4096, 32768])
def test_half_types_have_one_and_two_ulps(x_type: str, size: int) -> None:
    """A half type has 1 ulp where the spec rounds once, 2 where it rounds before the gain, and a half factor 1 more."""
    factor = TWICE.replace(factor_type="x")
    assert [tolerance(s, x_type, size) for s in (ONCE, PLAIN, TWICE, factor)] == [1.0, 1.0, 2.0, 3.0]


def test_tolerance_grows_with_the_row_in_float32() -> None:
    """float32 is granted size / 16 ulps for its sum, and a half statistic none that it cannot keep."""
    assert 256 < tolerance(TWICE, "float32", 4096) < 280
    assert tolerance(TWICE.replace(leading=64), "float32", 4096) == tolerance(TWICE, "float32", 64)
    assert tolerance(TWICE.replace(statistic_type="x"), "float16", 65536) == math.inf


def test_subnormal_normalised_value() -> None:
    """Below the normal range the bound is |g| / 2 subnormal spacings and half an ulp of the result."""
    x = np.array([2.0**-20, 1.0], np.float16)
    tiny, gain = 2.0**-24, np.array([4096.0, 1.0], np.float16)
    y, bound = reference(TWICE, x, gain), error_bound(TWICE, x, gain)
    expected = 4096 * tiny / 2 + spacing(y, "float16")[0] / 2
    assert expected < bound[0] < 1.001 * expected


def test_bound_where_a_half_statistic_overflows() -> None:
    """Squares of 300 overflow float16: zero is within such a spec, and not within one that squares in float32."""
    x = np.full((1, 4), 300.0, np.float16)
    half = PLAIN.replace(statistic_type="x", factor_type="x")
    overflown = reference(half, x, rounded=True)
    assert np.all(overflown == 0)
    error = np.abs(overflown - reference(half, x))
    assert np.all(error <= error_bound(half, x)) and np.all(error > 1000 * error_bound(PLAIN, x))


def test_bound_is_infinite_where_the_result_may_overflow() -> None:
    """A result near the top of float16 may round to infinity, and then no distance is too large."""
    x, gain = np.array([1.0, 1.0], np.float16), np.array([65504.0, 60000.0], np.float16)
    assert np.isinf(error_bound(TWICE.replace(epsilon=0.0), x, gain)).tolist() == [True, False]


def test_bound_tells_one_rounding_from_two() -> None:
    """A gain applied after a rounding breaks the bound of a spec that rounds once, somewhere in a long row."""
    rng = np.random.default_rng(2)
    x, gain = rng.normal(size=(8, 256)).astype(np.float16), rng.normal(1, 0.3, 256).astype(np.float16)
    twice = reference(TWICE, x, gain, rounded=True)
    ratio = np.abs(twice - reference(ONCE, x, gain)) / error_bound(ONCE, x, gain)
    assert np.max(ratio) > 1.5
    assert np.all(np.abs(twice - reference(TWICE, x, gain)) <= error_bound(TWICE, x, gain))


@pytest.mark.parametrize("wrong", [1e-6, 2e-5])
@pytest.mark.parametrize("x_type", ["float32", "float16"])
def test_bound_shows_a_wrong_epsilon(wrong: float, x_type: str) -> None:
    """A row whose mean square is near epsilon leaves the bound by far when epsilon is another."""
    x = (np.random.default_rng(3).normal(size=(1, 4096)) * 3e-3).astype(x_type)
    error = np.abs(reference(ONCE.replace(epsilon=wrong), x) - reference(ONCE, x))
    assert np.max(error / error_bound(ONCE, x)) > 50
