"""Float types by name, and how they relate to numpy's, ml_dtypes' and ONNX's.

A type is named as numpy and ml_dtypes name it: ``float32``, ``float16``, ``bfloat16``, ``float8_e4m3fn``.
"""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import onnx_ir as ir

from rmsnorm_onnx.errors import SpecError

_ML_DTYPES = (
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
)

FLOAT_TYPES: tuple[str, ...] = ("float16", "float32", "float64", *_ML_DTYPES)
"""Every float type that numpy and ml_dtypes know, by name."""

_IR: dict[ir.DataType, str] = {
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.FLOAT: "float32",
    ir.DataType.DOUBLE: "float64",
}


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a float type's name.

    >>> numpy_dtype("bfloat16").itemsize
    2

    Raises:
        SpecError: the name is no float type.
    """
    if name not in FLOAT_TYPES:
        raise SpecError(f"{name!r} is no float type; use one of {', '.join(FLOAT_TYPES)}")
    return np.dtype(getattr(ml_dtypes, name, None) or name)


@functools.cache
def finfo(name: str) -> ml_dtypes.finfo:
    """Machine limits of a float type (eps, tiny, smallest_subnormal, max)."""
    return ml_dtypes.finfo(numpy_dtype(name))  # type: ignore[no-untyped-call]


def float_name(dtype: ir.DataType | None) -> str | None:
    """The name of an ONNX float type that norms are computed in, or None for any other type.

    >>> float_name(ir.DataType.BFLOAT16), float_name(ir.DataType.INT64)
    ('bfloat16', None)
    """
    return None if dtype is None else _IR.get(dtype)


def ir_dtype(name: str) -> ir.DataType:
    """The ONNX type of a float type's name; the inverse of `float_name`.

    Raises:
        SpecError: ONNX graphs do not compute in this type.
    """
    for dtype, known in _IR.items():
        if known == name:
            return dtype
    raise SpecError(f"no ONNX norm is computed in {name!r}; use one of {', '.join(_IR.values())}")


@functools.cache
def _range(name: str) -> tuple[int, float, float]:
    """(significand bits, smallest subnormal, largest finite) of a type."""
    info = finfo(name)
    bits = 1 - round(math.log2(float(info.eps)))
    return bits, float(info.smallest_subnormal), float(info.max)


def holds(wide: str, narrow: str) -> bool:
    """Whether every value of `narrow` is a value of `wide`, so that a cast to `wide` is exact.

    >>> holds("float32", "bfloat16"), holds("float16", "bfloat16")
    (True, False)
    """
    w, n = _range(wide), _range(narrow)
    return w[0] >= n[0] and w[1] <= n[1] and w[2] >= n[2]


def wider(a: str, b: str) -> str:
    """The narrowest type that holds both: numpy's and torch's promotion (float16 and bfloat16 meet in float32).

    >>> wider("float16", "float32"), wider("float16", "bfloat16")
    ('float32', 'float32')
    """
    if holds(a, b):
        return a
    if holds(b, a):
        return b
    return next(t for t in ("bfloat16", "float16", "float32", "float64") if holds(t, a) and holds(t, b))
