"""The oracle: a spec evaluated in float64, the error its rounding points allow, and the distance in ulp.

Everything here is numpy. A value is judged by its real-valued error against `reference`, either in absolute terms by
`error_bound`, element by element, or in units of the last place by `ulp_distance` and `tolerance`.

What the bounds assume of an implementation: it rounds to nearest, keeps subnormal numbers, computes in the spec's
types or in wider ones, adds up the squares in at least `LANES` partial sums, and takes roots and reciprocals within
one ulp. onnxruntime, torch and numpy do (a constant row of 65,536 costs onnxruntime about 920 ulp in float32).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.rounding import float_array, round_to, spacing, ulp_distance, unit
from rmsnorm_onnx.spec import RMSNormSpec

__all__ = ["LANES", "error_bound", "reference", "tolerance", "ulp_distance"]

Array = npt.NDArray[np.float64]

LANES = 8
"""Partial sums that an implementation is taken to keep: the narrowest vector unit in use (256 bits of float32)."""

_BOUND_ERROR = 5 * 2.0**-53
"""The relative error in evaluating `error_bound`: 1 / rms twice, of two roots and two divisions, and a product."""

_ROOT_ROUNDINGS = 7.0
# Half ulps between the mean and 1/rms, besides the rounding of 1/rms itself: epsilon and its sum, halved by the root,
# 1; a factor d**0.5 2; a root and a reciprocal that are right within one ulp 4.


def reference(
    spec: RMSNormSpec,
    x: npt.ArrayLike,
    gain: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    *,
    rounded: bool = False,
) -> Array:
    """The norm of x in float64, exact or with every rounding point of the spec applied.

    Exact: ``x / rms(x) * (gain_offset + gain) + bias`` without any rounding but float64's own; rows are scaled by a
    power of two first, so that no square overflows or vanishes.

    Rounded: the formula of `rmsnorm_onnx.spec` with each step rounded to its type, overflow to infinity included. In
    statistic_type are rounded x, each square, the mean (the sum itself is taken wide, for its order is no part of the
    spec), the sum with epsilon, the root, and 1 / root, which is then rounded to factor_type. The product x * f is
    formed in the wider of x's type and factor_type, at least in float32. Epsilon is float32's where statistic_type is
    no wider.

    A row of zeros gives zeros (plus the bias), also where epsilon is 0 and a graph computes 0 / 0: a graph gives NaN
    there.

    Args:
        spec: What to compute.
        x: [..., d], of any numpy or ml_dtypes float type; a list is float64. Its type is what "x" means in the spec.
        gain: Broadcasts against x without widening it. A gain whose shape equals the normalised dimensions is laid
            along them, also for an inner axis: [C] for axes (-3,) of [N, C, H, W]; where both readings are possible,
            this one holds. None leaves it out.
        bias: As the gain.
        rounded: Apply the rounding points.

    Returns:
        float64, of x's shape.

    Raises:
        UsageError: x is no float array, has too few axes, or a gain or bias does not fit it or the spec.

    >>> plain = RMSNormSpec(epsilon=0.0, has_gain=False)
    >>> print(np.round(reference(plain, [1.0, 2.0, 3.0]), 8))
    [0.46291005 0.9258201  1.38873015]

    The mean square of the output is q / (q + epsilon), where q is that of the input (here 14 / 3):

    >>> y = reference(plain.replace(epsilon=1.0), [1.0, 2.0, 3.0])
    >>> print(round(float(np.mean(y * y)), 8), round(14 / 3 / (14 / 3 + 1), 8))
    0.82352941 0.82352941

    Rows of equal shape around different means are told apart, which LayerNorm cannot:

    >>> print(np.round(reference(plain, [[1.0, -1.0], [3.0, 1.0]]), 4))
    [[ 1.     -1.    ]
     [ 1.3416  0.4472]]

    A half statistic overflows, as it would:

    >>> half = plain.replace(statistic_type="x", factor_type="x")
    >>> reference(half, np.array([300.0, 300.0], np.float16), rounded=True)
    array([0., 0.])
    """
    p = _prepare(spec, x, gain, bias)
    with np.errstate(all="ignore"):
        return _rounded(p) if rounded else _exact(p)


def error_bound(
    spec: RMSNormSpec, x: npt.ArrayLike, gain: npt.ArrayLike | None = None, bias: npt.ArrayLike | None = None
) -> Array:
    """How far each element may lie from `reference`, as a real number, if the spec's rounding points are honoured.

    The spec's formula is followed with intervals. With n elements under the mean, u = half of statistic_type's eps,
    and h_T(v) = half the spacing of T at v (the subnormal spacing below the normal range):

    - every square has h of its own; the mean has the relative error ``(ceil(n / LANES) + log2(LANES) + 3) * u`` of a
      blocked sum (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2), so the bound grows with n;
      the root and 1 / rms have 8 u between them, and h_factor where that type is narrower;
    - z = x * f has |x| times f's error, h of the product's type, and h_normalized where that is narrower;
    - w = offset + gain has h_gain, where there is an offset or the gain is of a wider type;
    - z * w has |z| err(w) + |w| err(z), then h of the product's type; the sum with a bias has h of that type again;
      the result has h_result where that is narrower.

    In a half type this is 1/2 ulp of the result plus the float32 part where the spec rounds once; with a rounding
    before the gain, |w| h(z) comes on top, which is |w| / 2 subnormal spacings where z is subnormal. A runtime that
    leaves a rounding out is closer to the exact value and so is within too. Where the statistic may overflow, zero is
    within, for that is what 1 / inf makes of a row. The bound is infinite where 1 / rms or the result may overflow,
    and where the exact value is not finite.

    Args:
        spec: As in `reference`.
        x: As in `reference`.
        gain: As in `reference`.
        bias: As in `reference`.

    Returns:
        float64, of x's shape.

    >>> x = np.array([1.0, 2.0, 3.0], np.float16)
    >>> y = reference(RMSNormSpec(has_gain=False), x)
    >>> print(np.round(error_bound(RMSNormSpec(has_gain=False), x) / np.spacing(y.astype(np.float16)), 2))
    [0.5 0.5 0.5]
    """
    p = _prepare(spec, x, gain, bias)
    with np.errstate(all="ignore"):
        return _bound(p)


def tolerance(spec: RMSNormSpec, dtype: str, size: int) -> float:
    """The largest `error_bound` over all inputs in the normal range, in whole ulps of the result's type.

    The relative errors of `error_bound`'s steps are multiplied up and counted in u_R, half of the result type's eps,
    for an ulp is at least that share of a value; the steps that round the result itself cost half an ulp. With u_T for
    half of T's eps and S for statistic_type::

        [((1 + 8 u_S) / sqrt(1 - g) + c) * product of (1 + u) - 1] / u_R  +  sum of u / 2 u_R
        g = (ceil(size / LANES) + log2(LANES) + 7) u_S, and 2 u_S more where x is cast to a narrower S
        c: what float64 costs: the reference's own error, and 5 u in the evaluation of `error_bound`
        product: over factor_type and normalized_type where they narrow, the type of x * f, an offset's gain_type
        sum: over the product with the gain and the sum with the bias, in product_type, and the result's own rounding

    rounded up to whole ulps. So float16 and bfloat16 have 1 where the spec rounds once and 2 where it rounds before
    the gain, while the float32 part stays below half an ulp (about 60,000 elements in float16); float32 grows by
    size / 16, as a constant row shows: its roundings all go the same way.

    It holds for |value - reference| over the spacing at the largest of |reference|, |z * w| and |bias|, where
    mean(x^2) + epsilon, z and the result are normal numbers, the gain and bias are of the types they are used in, and
    nothing overflows. So near below a power of two that the error reaches beyond it, the spacing is that above it.

    Args:
        spec: The norm.
        dtype: x's type by name.
        size: The number of elements that share one statistic.

    Returns:
        ulps; infinite where the sum of squares has no correct digit left (a long row in a half statistic).

    Raises:
        UsageError: no such type, or no elements.

    >>> once, twice = RMSNormSpec(normalized_type="float32", gain_type="float32"), RMSNormSpec()
    >>> tolerance(once, "float16", 4096), tolerance(twice, "bfloat16", 4096), tolerance(twice, "float32", 64)
    (1.0, 2.0, 19.0)
    """
    if size < 1:
        raise UsageError(f"size must be at least 1, got {size!r}")
    r = spec.resolve(dtype)
    result, statistic = unit(r.result_type), unit(r.statistic_type)
    cast = 0.0 if dtypes.holds(r.statistic_type, dtype) else statistic
    low = (1 - (_mean_roundings(min(size, spec.leading or size)) + 4) * statistic) * (1 - cast) ** 2
    if low <= 0.0:
        return math.inf
    product = spec.product_type(dtype)
    before = _normalizing_types(r, dtype)
    after = [product] * (r.has_gain + r.has_bias) + [r.result_type] * (not dtypes.holds(r.result_type, product))
    if not after:
        after.append(before.pop())
    factor = [] if dtypes.holds(r.factor_type, r.statistic_type) else [r.factor_type]
    offset = [r.gain_type] if r.gain_offset else []
    growth = math.prod(1 + unit(name) for name in factor + before + offset)
    growth *= (1 + (_ROOT_ROUNDINGS + 1) * statistic) / math.sqrt(low) + _reference_error(size) + _BOUND_ERROR
    return float(
        math.ceil((growth - 1 + r.has_bias * unit("float64") + sum(unit(name) for name in after) / 2) / result)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """Checked inputs in float64: x [..., d], w and bias broadcasting against it; r is the spec with types resolved."""

    r: RMSNormSpec
    x_type: str
    product: str
    x: Array
    gain: Array | None
    gain_type: str
    bias: Array | None
    bias_type: str

    @property
    def epsilon(self) -> float:
        return float(np.float32(self.r.epsilon)) if dtypes.holds("float32", self.r.statistic_type) else self.r.epsilon

    def counted(self) -> Array:
        """The elements under the mean."""
        return self.x if self.r.leading is None else self.x[..., : self.r.leading]

    def mean(self, values: Array) -> Array:
        return np.asarray(np.mean(values, axis=self.r.axes, keepdims=True))

    def zero_rows(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.all(self.x == 0, axis=self.r.axes, keepdims=True))


def _prepare(spec: RMSNormSpec, x: npt.ArrayLike, gain: npt.ArrayLike | None, bias: npt.ArrayLike | None) -> _Prepared:
    array, x_type = float_array(x, "x")
    if array.ndim < -spec.axes[0]:
        raise UsageError(f"x of shape {list(array.shape)} has no axis {spec.axes[0]}")
    if 0 in (array.shape[a] for a in spec.axes) or (spec.leading or 0) > array.shape[-1]:
        raise UsageError(
            f"x of shape {list(array.shape)} has too few elements for a mean over {spec.leading or 'axes'}"
        )
    g, gain_type = _parameter(spec, array.shape, gain, "gain", spec.has_gain)
    b, bias_type = _parameter(spec, array.shape, bias, "bias", spec.has_bias)
    r, product = spec.resolve(x_type), spec.product_type(x_type)
    return _Prepared(r, x_type, product, array.astype(np.float64), g, gain_type, b, bias_type)


def _parameter(
    spec: RMSNormSpec, shape: tuple[int, ...], value: npt.ArrayLike | None, what: str, expected: bool
) -> tuple[Array | None, str]:
    """A gain or bias in float64, laid out to broadcast against x, and its type's name."""
    if value is None:
        return None, "float64"
    if not expected:
        raise UsageError(f"a {what} was given, but the spec has none (has_{what} is False)")
    array, name = float_array(value, what)
    dims = tuple(shape[a] for a in spec.axes)
    if array.shape == dims:
        array = array.reshape(dims + (1,) * (-spec.axes[-1] - 1))
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"a {what} of shape {list(array.shape)} does not broadcast to x of shape {list(shape)}")
    return array.astype(np.float64), name


def _exact(p: _Prepared) -> Array:
    z = p.x * _factor(p)
    z = np.where(p.zero_rows(), 0.0, z)
    y = z if p.gain is None else z * (p.r.gain_offset + p.gain)
    return y if p.bias is None else y + p.bias


def _factor(p: _Prepared) -> Array:
    """1 / rms, exact; each row is scaled by a power of two near its largest element or epsilon's size."""
    e, inside = p.r.epsilon, p.r.epsilon_placement == "inside"
    values = p.counted()
    size = np.maximum(np.max(np.abs(values), axis=p.r.axes, keepdims=True), math.sqrt(e) if inside else e)
    _, power = np.frexp(size)
    m = p.mean(np.ldexp(values, -power) ** 2)
    if inside:
        root = np.sqrt(m + np.ldexp(e, -2 * power))
    else:
        root, small = np.sqrt(m), np.ldexp(e, -power)
        root = root + small if p.r.epsilon_placement == "outside" else np.maximum(root, small)
    return np.asarray(np.ldexp(1.0 / root, -power))


def _root(p: _Prepared, m: Array, rounding: str = "float64") -> Array:
    """The root with epsilon in its place; each step is rounded to a type."""
    if p.r.epsilon_placement == "inside":
        return round_to(np.sqrt(round_to(m + p.epsilon, rounding)), rounding)
    root = round_to(np.sqrt(m), rounding)
    return round_to(root + p.epsilon if p.r.epsilon_placement == "outside" else np.maximum(root, p.epsilon), rounding)


def _rounded(p: _Prepared) -> Array:
    r, statistic = p.r, p.r.statistic_type
    m = round_to(p.mean(round_to(round_to(p.counted(), statistic) ** 2, statistic)), statistic)
    f = round_to(round_to(1.0 / _root(p, m, statistic), statistic), r.factor_type)
    z = np.where(p.zero_rows(), 0.0, p.x * f)
    for name in _normalizing_types(r, p.x_type):
        z = round_to(z, name)
    if p.gain is not None:
        z = round_to(z * round_to(r.gain_offset + round_to(p.gain, r.gain_type), r.gain_type), p.product)
    if p.bias is not None:
        z = round_to(z + round_to(p.bias, p.product), p.product)
    return round_to(z, r.result_type)


def _mean_roundings(n: int) -> float:
    """Half ulps in a mean of n squares: each square 1, LANES partial sums and their sum, 1 / n and its product 2."""
    return math.ceil(n / LANES) + math.log2(LANES) + 3.0


def _reference_error(n: int) -> float:
    """The relative error of `reference` itself: numpy's pairwise sum of n squares, and at most 16 steps more."""
    return (math.log2(n) + 16.0) * unit("float64")


def _normalizing_types(r: RMSNormSpec, x_type: str) -> list[str]:
    """The types that x * f is rounded to, in order: the one it is formed in, and normalized_type where it narrows.

    It is formed in the wider of x's type and the factor's, in float32 at least: a product of two halves is exact there.
    """
    factor = r.statistic_type if dtypes.holds(r.factor_type, r.statistic_type) else r.factor_type
    formed = dtypes.wider("float32", dtypes.wider(x_type, factor))
    return [formed] if dtypes.holds(r.normalized_type, formed) else [formed, r.normalized_type]


def _half(value: Array, error: Array, name: str) -> Array:
    """The rounding error of a number of a type that lies within `error` of `value`.

    Half the spacing at |value|; or that above it, if the error reaches so far beyond the next power of two that a
    number other than that power is nearest. Infinite where the type may overflow.
    """
    reach, here = np.abs(value) + error, spacing(value, name)
    _, exponent = np.frexp(reach)
    crosses = reach - np.ldexp(1.0, exponent - 1) > here
    half = np.where(crosses, spacing(reach, name), here) / 2
    return np.where(reach < float(dtypes.finfo(name).max) + here / 2, half, np.inf)


def _factor_error(p: _Prepared, exact: Array) -> Array:
    """How far 1 / rms may lie from its exact value."""
    statistic, values = p.r.statistic_type, np.abs(p.counted())
    cast = 0.0 if dtypes.holds(statistic, p.x_type) else spacing(values, statistic) / 2
    n = math.prod(values.shape[a] for a in p.r.axes)
    info, relative = dtypes.finfo(statistic), _mean_roundings(n) * unit(statistic)
    tiny = float(info.smallest_subnormal)  # a square, the mean and epsilon lose half of it each below the normal range
    high = p.mean((values + cast) ** 2) * (1 + relative) + 2 * tiny
    low = p.mean(np.maximum(values - cast, 0.0) ** 2) * (1 - relative) - 2 * tiny
    high = np.where(high * n < float(info.max), high, np.inf)
    longest = 1.0 / np.maximum(_root(p, np.maximum(low, 0.0)) - tiny, 0.0)
    error = np.maximum(longest - exact, exact - 1.0 / (_root(p, high) + tiny))
    error = error + exact * _ROOT_ROUNDINGS * unit(statistic)
    error = error + _half(exact, error, statistic)
    if not dtypes.holds(p.r.factor_type, statistic):
        error = error + _half(exact, error, p.r.factor_type)
    return np.where(p.zero_rows() & (p.r.epsilon == 0), 0.0, error)


def _bound(p: _Prepared) -> Array:
    r, factor = p.r, _factor(p)
    y = np.where(p.zero_rows(), 0.0, p.x * factor)
    error = np.abs(p.x) * _factor_error(p, factor)
    for name in _normalizing_types(r, p.x_type):
        error = error + _half(y, error, name)
    if p.gain is not None:
        w = r.gain_offset + p.gain
        w_error = spacing(w, r.gain_type) / 2 if r.gain_offset else np.zeros_like(w)
        if not dtypes.holds(r.gain_type, p.gain_type):
            w_error += spacing(p.gain, r.gain_type) / 2
        error = np.abs(w) * error + (np.abs(y) + error) * w_error
        y = y * w
        error = error + _half(y, error, p.product)
    own = np.abs(y) * _reference_error(math.prod(p.x.shape[a] for a in r.axes))
    if p.bias is not None:
        error = error + (0.0 if dtypes.holds(p.product, p.bias_type) else spacing(p.bias, p.product) / 2)
        y = y + p.bias
        own = own + np.abs(y) * unit("float64")
        error = error + _half(y, error, p.product)
    if not dtypes.holds(r.result_type, p.product):
        error = error + _half(y, error, r.result_type)
    return np.where(np.isfinite(y) & np.isfinite(error), error + own, np.inf)
