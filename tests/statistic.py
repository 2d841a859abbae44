"""The mean square and 1/rms of a spelling: the squares, reductions, epsilons and roots of the generator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from kit import NUMPY, Graph, V

if TYPE_CHECKING:
    from emit import Norm

HALF_EPSILONS = {"float16": (1e-5, 1e-3, 0.01), "bfloat16": (1e-6, 1e-5, 0.01)}
EPSILONS = (1e-5, 1e-6, 1e-8, 2.0**-23, 1e-3)


def statistic(norm: Norm, g: Graph, h: V) -> V:
    """The mean square of h, or its sum or root sum where the plan counts elsewhere."""
    plan = norm.plan
    h = _leading(norm, g, h)
    square = plan["square"]
    if square.startswith("Reduce"):
        reduced = _reduce(norm, g, square, h)
    else:
        h = norm.noop(g, "square", _square(norm, g, h))
        reduced = _reduce(norm, g, "ReduceMean" if plan["count"] == "mean" else "ReduceSum", h)
    if plan["kept at"] == "mean":
        reduced = _keep(norm, g, reduced)
    n = math.sqrt(norm.count) if square == "ReduceL2" else norm.count
    if plan["count"] == "divided by d":
        reduced = g.op("Div", reduced, g.constant(n, norm.statistic, how=norm._how()))
    elif plan["count"] == "times 1/d":
        share = g.constant(1 / n, norm.statistic, how=norm._how())
        reduced = g.op("Mul", *norm.choose((reduced, share), (share, reduced)))
    reduced = norm.noop(g, "mean", reduced)
    return g.cast(reduced, norm.x_type) if plan["casts"] == "mean rounded" else reduced


def _leading(norm: Norm, g: Graph, h: V) -> V:
    if norm.leading is None:
        return h
    d = int(h.shape[-1])
    shape = (*h.shape[:-1], norm.leading)
    if norm.plan["leading"] == "slice":
        end = norm.leading if norm.choose(True, False) else norm.leading - d
        return g.op("Slice", h, g.ints(0), g.ints(end), g.ints(norm.choose(-1, h.rank - 1)), shape=shape)
    sizes = (norm.leading, d - norm.leading)
    rest = [g.name("rest")]
    if g.opset < 13:
        return g.op("Split", h, shape=shape, unused=rest, axis=-1, split=list(sizes))
    return g.op("Split", h, g.ints(*sizes), shape=shape, unused=rest, axis=norm.choose(-1, h.rank - 1))


def _square(norm: Norm, g: Graph, h: V) -> V:
    square = norm.plan["square"]
    if square == "mul":
        return g.op("Mul", h, h)
    if square.startswith("pow int"):
        two = g.constant(2, square.removeprefix("pow "), how=norm._how())
    elif square == "pow cast":
        other = norm.choose(*(t for t in ("float16", "float32", "int64") if t != h.dtype))
        two = g.cast(g.constant(2, other, how=norm._how()), h.dtype)
    else:
        shape = norm.choose((), (), (1,))
        two = g.constant(np.full(shape, 2.0), h.dtype, how=norm._how())
    return g.op("Pow", h, two, shape=h.shape)


def _reduce(norm: Norm, g: Graph, op_type: str, h: V) -> V:
    positive = norm.plan["axis"] == "positive"
    axes = [a + h.rank if positive else a for a in norm.axes]
    keep = norm.plan["keepdims"] == "1"
    dims = {a % h.rank for a in norm.axes}
    full = tuple(1 if i in dims else n for i, n in enumerate(h.shape))
    shape = full if keep else tuple(n for i, n in enumerate(h.shape) if i not in dims)
    attributes: dict[str, Any] = {"keepdims": int(keep)} if not keep or norm.choose(True, False) else {}
    if norm.plan["axes"] == "attribute":
        return g.op(op_type, h, shape=shape, axes=axes, **attributes)
    how = "node" if norm.plan["axes"] == "constant" else "initializer"
    return g.op(op_type, h, g.ints(*axes, how=how), shape=shape, **attributes)


def _keep(norm: Norm, g: Graph, value: V) -> V:
    """Puts the reduced axes back."""
    rank = value.rank + len(norm.axes)
    dims = sorted(a % rank for a in norm.axes)
    left = iter(value.shape)
    shape = tuple(1 if i in dims else next(left) for i in range(rank))
    if norm.plan["keepdims"] == "0, Unsqueeze":
        axes = dims if norm.plan["axis"] == "positive" else list(norm.axes)
        if g.opset < 13:
            return g.op("Unsqueeze", value, shape=shape, axes=axes)
        return g.op("Unsqueeze", value, g.ints(*axes, how=norm._how()), shape=shape)
    known = [n if isinstance(n, int) else None for n in shape]
    # A zero copies the dimension at its own place, so it serves in front of the axes that come back.
    target = [0 if i < dims[0] and n is None else n for i, n in enumerate(known)]
    if None in target:
        target[target.index(None)] = -1
    return g.op("Reshape", value, g.ints(*(-1 if n is None else n for n in target)), shape=shape)


def _epsilon(norm: Norm, g: Graph, value: V) -> V:
    """Draws epsilon, writes it as the plan spells it, and notes what it is once d is divided out."""
    dtype, spelling = norm.root_type, norm.plan["epsilon spelling"]
    choice = norm.choose(*HALF_EPSILONS.get(dtype, EPSILONS))
    if spelling == "cast float16" or (spelling.startswith("cast") and dtype == "float16"):
        choice = norm.choose(*HALF_EPSILONS["float16"])
    source = dtype
    if spelling == "cast float16":
        source = "float16"
    elif spelling.startswith("cast"):
        source = norm.choose(*(t for t in ("float32", "float64", "float16") if t != dtype))
    elif spelling == "float":
        source = "float32"
    shape = {"[1]": (1,), "full shape": value.shape}.get(spelling, ())
    how = {"initializer": "initializer", "constant": "node", "float": "float", "cast constant": "node"}
    stored = np.full(shape, choice).astype(NUMPY[source])
    epsilon = g.constant(stored, source, how=how.get(spelling, norm._how()))
    if source != dtype or spelling.startswith("cast"):
        epsilon = g.cast(epsilon, dtype)
    held = float(stored.astype(NUMPY[dtype]).flat[0])
    if "sqrt" in norm.plan["count"]:
        held /= norm.count if norm.plan["epsilon"] == "inside" else math.sqrt(norm.count)
    norm.exact = (
        "sqrt" not in norm.plan["count"] and norm.plan["count"] != "times 1/d" and norm.plan["square"] != "ReduceL2"
    )
    norm.epsilon = held
    return epsilon


def _with_epsilon(norm: Norm, g: Graph, value: V, *, at_root: bool) -> V:
    kind = norm.plan["epsilon"]
    if kind == "absent" or (kind == "inside") == at_root:
        return value
    epsilon = _epsilon(norm, g, value)
    if kind == "clamp by Clip":
        return g.op("Clip", value, epsilon)
    operands = (epsilon, value) if norm.plan["epsilon side"] == "left" else (value, epsilon)
    return g.op("Add" if kind in ("inside", "outside") else "Max", *operands)


def factor(norm: Norm, g: Graph, mean: V) -> tuple[V, bool]:
    """1/rms and False, or rms and True where the plan divides by it."""
    plan, root = norm.plan, norm.plan["root"]
    value = _with_epsilon(norm, g, mean, at_root=False)
    if root == "Pow(-0.5)":
        value = g.op("Pow", value, g.constant(-0.5, value.dtype, how=norm._how()))
    elif root == "Sqrt(Reciprocal)":
        value = g.op("Sqrt", g.op("Reciprocal", value))
    else:
        if root == "Pow(0.5), Div":
            value = g.op("Pow", value, g.constant(0.5, value.dtype, how=norm._how()))
        elif plan["square"] != "ReduceL2":
            value = g.op("Sqrt", value)
        value = _with_epsilon(norm, g, value, at_root=True)
    if plan["kept at"] == "root":
        value = _keep(norm, g, value)
    value = norm.noop(g, "root", value)
    if root == "Sqrt, Reciprocal":
        value = g.op("Reciprocal", value)
    elif root == "1/Sqrt":
        value = g.op("Div", g.constant(1.0, value.dtype, how=norm._how()), value)
    if plan["kept at"] == "factor":
        value = _keep(norm, g, value)
    if plan["casts"] in ("factor rounded", "root rounded"):
        value = g.cast(value, norm.x_type)
    if plan["expand"] != "none":
        value = _expand(norm, g, value)
    return value, root.endswith("Div")


def _expand(norm: Norm, g: Graph, value: V) -> V:
    if norm.plan["expand"] == "Shape":
        target = g.op("Shape", norm.x, shape=(norm.x.rank,), dtype="int64")
    else:
        target = g.ints(*(int(n) for n in norm.shape))
    return g.op("Expand", value, target, shape=norm.shape)
