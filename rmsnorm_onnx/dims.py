"""Dimensions: which are proven equal, and the shapes of values that are made of several."""

from __future__ import annotations

from collections.abc import Sequence

from rmsnorm_onnx.inference import Dim, Dims


def same_dim(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are proven equal: equal numbers, or one symbol."""
    return a is not None and a == b


def same_shape(a: Dims | None, b: Dims | None) -> bool:
    """Whether two shapes are proven equal."""
    return a is not None and b is not None and len(a) == len(b) and all(map(same_dim, a, b))


def _broadcast_dim(a: Dim, b: Dim) -> Dim:
    if same_dim(a, b) or b == 1:
        return a
    if a == 1:
        return b
    for dim in (a, b):  # a number above 1 wins over whatever broadcasts with it
        if isinstance(dim, int):
            return dim
    return None


def broadcast(shapes: Sequence[Dims | None]) -> Dims | None:
    """The numpy broadcast of shapes, with unknown dimensions as None."""
    known = [s for s in shapes if s is not None]
    if not known or len(known) != len(shapes):
        return None
    rank = max(map(len, known))
    result: list[Dim] = [1] * rank
    for shape in known:
        padded = (1,) * (rank - len(shape)) + shape
        result = [_broadcast_dim(a, b) for a, b in zip(result, padded, strict=True)]
    return tuple(result)


def matrix_product(shapes: Sequence[Dims | None]) -> Dims | None:
    """The shape of a MatMul of two values of rank 2 or more."""
    a, b = shapes if len(shapes) == 2 else (None, None)
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    rows = broadcast([a[:-2], b[:-2]])
    return None if rows is None else (*rows, a[-2], b[-1])


def concatenated(shapes: Sequence[Dims | None], axis: int) -> Dims | None:
    """The shape of a Concat; along the axis it is known where all of its parts are numbers."""
    known = [s for s in shapes if s is not None]
    if not known:
        return None
    rank = len(known[0])
    if any(len(s) != rank for s in known) or not -rank <= axis < rank:
        return None
    # Whatever the others are, they agree with the known ones in every other dimension.
    columns = [next((s[i] for s in known if s[i] is not None), None) for i in range(rank)]
    parts = [s[axis] for s in known]
    whole = len(known) == len(shapes) and all(isinstance(part, int) for part in parts)
    columns[axis] = sum(part for part in parts if isinstance(part, int)) if whole else None
    return tuple(columns)
