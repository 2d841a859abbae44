"""Rounding to a float type, the spacing of its numbers, and distances in units of the last place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError

Array = npt.NDArray[np.float64]


def unit(name: str) -> float:
    """Half of a type's eps: the largest relative error of one rounding."""
    return float(dtypes.finfo(name).eps) / 2


def float_array(value: npt.ArrayLike, what: str) -> tuple[npt.NDArray[Any], str]:
    """An array of a float type and that type's name; a list is float64.

    Raises:
        UsageError: another type; the message names the argument as `what`.
    """
    array = value if isinstance(value, np.ndarray | np.generic) else np.asarray(value, np.float64)
    if array.dtype.name not in dtypes.FLOAT_TYPES:
        raise UsageError(f"{what} must be of a float type, got {array.dtype.name}; use one of {dtypes.FLOAT_TYPES}")
    return np.asarray(array), array.dtype.name


def ulp_distance(value: npt.ArrayLike, reference: npt.ArrayLike) -> Array:
    """|value - reference| over the spacing of value's type at the reference; real-valued.

    Below the normal range the spacing is the subnormal one. Two NaNs, and an infinity against a reference that is
    infinite or rounds to it in value's type, are 0 apart; any other NaN or infinity is infinitely far.

    Args:
        value: Of any numpy or ml_dtypes float type, which is the type whose ulps are counted.
        reference: float64, broadcasting against it.

    Returns:
        float64, of the broadcast shape.

    Raises:
        UsageError: value is no float array.

    >>> ulp_distance(np.array([1.0, 0.0, np.inf], np.float16), np.array([1.0 + 2**-11, 2**-25, 1e6]))
    array([0.5, 0.5, 0. ])
    """
    array, name = float_array(value, "value")
    got, want = np.broadcast_arrays(array.astype(np.float64), np.asarray(reference, np.float64))
    with np.errstate(all="ignore"):
        same = (np.isinf(got) & (got == round_to(want, name))) | (np.isnan(got) & np.isnan(want))
        finite = np.isfinite(got) & np.isfinite(want)
        return np.where(same, 0.0, np.where(finite, np.abs(got - want) / spacing(want, name), np.inf))


def spacing(value: npt.ArrayLike, name: str) -> Array:
    """The distance between neighbouring numbers of a float type at |value|; at least its smallest subnormal.

    >>> spacing([1.0, 1.99, 2.0], "bfloat16")
    array([0.0078125, 0.0078125, 0.015625 ])
    """
    info = dtypes.finfo(name)
    smallest = float(info.smallest_subnormal)
    _, exponent = np.frexp(np.clip(np.abs(np.asarray(value, np.float64)), smallest, float(info.max)))
    return np.asarray(np.maximum(np.ldexp(float(info.eps), exponent - 1), smallest))


def round_to(value: npt.ArrayLike, name: str) -> Array:
    """float64 values rounded to the nearest number of a float type, ties to even; overflow is that of its cast.

    >>> round_to([1 + 2**-8 + 2**-40, 1e39], "bfloat16")
    array([1.0078125,       inf])
    """
    wide, dtype = np.asarray(value, np.float64), dtypes.numpy_dtype(name)
    with np.errstate(all="ignore"):
        if name not in ("float16", "float32", "float64"):
            # ml_dtypes casts by way of float32, which rounds twice: settle on the type's own grid first.
            step = spacing(wide, name)
            wide = np.where(np.isfinite(wide), np.rint(wide / step) * step, wide)
        return np.asarray(wide.astype(dtype).astype(np.float64))
