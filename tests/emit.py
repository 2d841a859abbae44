"""Writes one norm into a graph as a plan says: the second half of the generator of spellings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from kit import LAST, NUMPY, Graph, V
from productions import Plan, Random

from rmsnorm_onnx.spec import RMSNormSpec

HALVES = ("float16", "bfloat16")


class Norm:
    """One norm to be emitted: its sizes and constants are drawn here, its nodes are written by `emit`."""

    def __init__(self, plan: Plan, random: Random) -> None:
        self.plan = plan
        self.random = random
        self.x_type = plan["dtype"]
        self.wide = plan["casts"] != "none"
        self.statistic = {"float32": "float64"}.get(self.x_type, "float32") if self.wide else self.x_type
        self.sizes: dict[str, int] = {}
        self.gain: V | None = None
        self.gain_value: np.ndarray | None = None
        self.bias_value: np.ndarray | None = None
        self.exact = True
        self.condition = True  # what leads to the norm, where it stands in a branch
        self._draw_shape()
        # The type in which epsilon is added and the root is taken.
        self.root_type = self.x_type if plan["casts"] == "mean rounded" else self.statistic
        self.epsilon = 0.0
        casts = plan["casts"]
        self.product = self.statistic if casts in ("last", "stays wide", "down and up", "none") else self.x_type
        self._draw_gain()

    def choose(self, *options: Any) -> Any:
        return self.random.choice(options)

    def noop(self, g: Graph, at: str, x: V) -> V:
        """A node that does nothing, if the plan has one here."""
        kind = self.plan["no-op"]
        if self.plan["no-op at"] != at:
            return x
        if kind == "Identity":
            return g.op("Identity", x)
        if kind == "Cast":
            return g.cast(x, x.dtype)
        if kind == "Slice":
            axis = self.choose(-1, 0)
            return g.op("Slice", x, g.ints(0), g.ints(LAST), g.ints(axis), shape=x.shape)
        return g.op("Reshape", x, g.ints(*self._same_shape(x)), shape=x.shape)

    def _same_shape(self, x: V) -> list[int]:
        fixed = [n if isinstance(n, int) else 0 for n in x.shape]
        return [0] * x.rank if self.choose(True, False) else fixed

    # Sizes.

    def _draw_shape(self) -> None:
        layout = self.plan["layout"]
        half = not self.wide and self.x_type in HALVES
        root_exact = half and (self.plan["square"] == "ReduceL2" or "sqrt" in self.plan["count"])
        d = self.choose(4, 16) if root_exact else self.choose(4, 6, 8, 12, 16)
        pair = (4, 4) if root_exact else self.choose((2, 3), (4, 2), (4, 4))
        lead = [self._size(i) for i in range(3)]
        self.heads = self.choose(2, 3)
        if layout == "last axis":
            self.shape = (*lead[: self.choose(1, 2, 3)], d)
            self.axes: tuple[int, ...] = (-1,)
        elif layout == "rank 1":
            self.shape, self.axes = (d,), (-1,)
        elif layout == "two axes":
            self.shape, self.axes = (*lead[: self.choose(1, 2)], *pair), (-2, -1)
        elif layout == "three axes":
            self.shape, self.axes = (lead[0], *((4, 4, 4) if root_exact else (2, 3, 2))), (-3, -2, -1)
        elif layout.startswith("channel first"):
            rank = int(layout[-3])
            self.shape = (lead[0], d, *(self.choose(2, 3, d) for _ in range(rank - 2)))
            self.axes = (1 - rank,)
        elif layout == "transpose, then per head":
            self.shape, self.axes = (lead[0], self.heads, lead[1], d), (-1,)
        else:
            self.shape, self.axes = (lead[0], lead[1], self.heads, d), (-1,)
        flat = layout in ("per head, then transpose", "transpose, then per head", "grouped")
        self.input_shape = (lead[0], lead[1], self.heads * d) if flat else self.shape
        leading = (1, 4) if root_exact and d > 4 else (1,) if root_exact else range(1, d)
        self.leading = self.choose(*leading) if self.plan["leading"] != "whole" else None
        self.count = self.leading or math.prod(int(self.shape[a]) for a in self.axes)

    def _size(self, i: int) -> int | str:
        size = self.choose(2, 3, 4)
        if self.plan["batch"] == "static":
            return size
        name = f"{'BSR'[i]}"
        self.sizes[name] = size
        return name

    # Gain and bias.

    def _draw_gain(self) -> None:
        plan, rng = self.plan, np.random.default_rng(self.random.randint(0, 2**32 - 1))
        inner = tuple(int(n) for n in self.shape[self.axes[0] :][: len(self.axes)])
        inner += (1,) * (-self.axes[-1] - 1)
        if plan["bias"] != "none":
            self.bias_value = rng.normal(0, 0.5, inner).astype(NUMPY[self.product])
        if plan["gain"] == "none":
            return
        shape = {"scalar": (), "[1]": (1,), "leading ones": (1,) * (len(self.shape) - len(inner)) + inner}
        others = [t for t in ("float16", "float32") if t != self.product]
        raw = self.choose(*others) if plan["gain form"] == "cast" else self.product
        if plan["gain form"] == "one plus" and self.product != self.x_type:
            raw = self.choose(raw, self.x_type)
        center = 0.0 if plan["gain form"] == "one plus" else 1.0
        value = rng.normal(center, 0.3, shape.get(plan["gain shape"], inner)) + 0.01
        if value.size == 1 and abs(value - center).max() < 0.05:
            value = value + 0.25  # a half type may round it to what makes no gain
        self.gain_value = np.asarray(value).astype(NUMPY[raw])
        if self.gain_value.size == 1 and self.gain_value == 1:
            self.gain_value += self.gain_value.dtype.type(0.25)  # a factor of one is no gain
        self.gain_raw = raw
        # Formed in the narrow type, it would be multiplied in the wide one: no spec says that of a rounded value.
        narrow = plan["gain form"] == "one plus" and plan["casts"] != "down and up"
        self.formed = self.choose(raw, self.product) if narrow else self.product

    def other_inputs(self) -> list[tuple[str, str, tuple[int | str, ...]]]:
        """Graph inputs beside x: the second operand that x is made of, and a gain that is fed."""
        inputs: list[tuple[str, str, tuple[int | str, ...]]] = []
        if self.plan["x"] != "input":
            inputs.append(("r", self.x_type, self.shape))
        if self.plan["gain"] == "graph input":
            assert self.gain_value is not None
            inputs.append(("gain", self.gain_raw, self.gain_value.shape))
        return inputs

    def gain_constant(self, g: Graph) -> V:
        how = "node" if self.plan["gain"] == "constant" else "initializer"
        return g.constant(self.gain_value, self.gain_raw, how=how)

    def _emit_gain(self, g: Graph) -> V:
        raw = self.gain or self.gain_constant(g)
        raw = self.noop(g, "gain", raw)
        if self.plan["gain form"] != "one plus":
            return g.cast(raw, self.product) if raw.dtype != self.product else raw
        if raw.dtype != self.formed:
            raw = g.cast(raw, self.formed)
        one = g.constant(1.0, self.formed, how=self._how())
        total = g.op("Add", *self.choose((one, raw), (raw, one)))
        return g.cast(total, self.product) if self.formed != self.product else total

    def _how(self) -> str:
        return str(self.choose("initializer", "node"))

    # The norm.

    def emit(self, g: Graph, x: V, others: Sequence[V]) -> V:
        """Writes the norm; returns the result in the layout that follows it."""
        inputs = list(others)
        x = self._into_layout(g, x)
        if self.plan["x"] != "input":
            x = g.op("Add" if self.plan["x"] == "sum" else "Mul", x, inputs.pop(0))
        if self.plan["gain"] == "graph input":
            self.gain = inputs.pop(0)
        self.x = x
        h = self.noop(g, "x", x)
        narrow = h
        if self.wide:
            h = g.cast(h, self.statistic)
        factor = self._factor(g, self._statistic(g, self.noop(g, "statistic", h)))
        numerator = self._numerator(g, narrow, h, factor[0])
        self.y = self._finish(g, numerator, *factor)
        return self._out_of_layout(g, self.y)

    def _numerator(self, g: Graph, narrow: V, h: V, factor: V) -> V:
        if self.plan["casts"] == "separate":
            h = g.cast(narrow, self.statistic)
        elif factor.dtype == self.x_type:
            h = narrow
        h = self.noop(g, "numerator", h)
        if self.plan["count"] == "x times sqrt(d)":
            h = g.op("Mul", *self.choose((h, self._root_d(g)), (h, self._root_d(g))))
        return h

    def _root_d(self, g: Graph) -> V:
        return g.constant(math.sqrt(self.count), self.statistic, how=self._how())

    def _into_layout(self, g: Graph, x: V) -> V:
        layout = self.plan["layout"]
        if self.input_shape == self.shape:
            return x
        b, s, d = x.shape[0], x.shape[1], int(self.shape[-1])
        if self.plan["target"] == "computed":
            target = self._computed_target(g, x, *self.choose((self.heads, -1), (-1, d), (self.heads, d)))
        else:
            first = 0 if isinstance(b, str) or self.choose(True, False) else b
            second = -1 if isinstance(s, str) and self.choose(True, False) else 0
            target = g.ints(first, second, self.heads, d)
        x = g.op("Reshape", x, target, shape=(b, s, self.heads, d))
        if layout == "transpose, then per head":
            x = g.op("Transpose", x, shape=self.shape, perm=[0, 2, 1, 3])
        return x

    def _computed_target(self, g: Graph, x: V, *inner: int) -> V:
        """The first two dimensions of x, taken from its shape, before given ones: what `x.view(b, s, ...)` becomes."""
        outer = []
        for axis in (0, 1):
            shape = g.op("Shape", x, shape=(x.rank,), dtype="int64")
            size = g.op("Gather", shape, g.constant(axis, "int64", how=self._how()), shape=(), axis=0)
            if g.opset < 13:
                outer.append(g.op("Unsqueeze", size, shape=(1,), axes=[0]))
            else:
                outer.append(g.op("Unsqueeze", size, g.ints(0, how=self._how()), shape=(1,)))
        return g.op("Concat", *outer, *(g.ints(n, how=self._how()) for n in inner), shape=(4,), axis=0)

    def _out_of_layout(self, g: Graph, y: V) -> V:
        if self.plan["layout"] == "per head, then transpose":
            b, s, h, d = y.shape
            return g.op("Transpose", y, shape=(b, h, s, d), perm=[0, 2, 1, 3])
        if self.plan["layout"] == "grouped":
            b, s, h, d = y.shape
            return g.op("Reshape", y, g.ints(0, 0, -1), shape=(b, s, int(h) * int(d)))
        return y

    def _finish(self, g: Graph, numerator: V, factor: V, is_root: bool) -> V:
        """x and 1/rms (or rms) to the result."""
        plan = self.plan
        gain = None if plan["gain"] == "none" else self._emit_gain(g)
        if gain is not None and plan["gain order"] == "into x":
            numerator, gain = self._multiply(g, numerator, gain), None
        if gain is not None and plan["gain order"] == "into the factor":
            factor, gain = g.op("Div", gain, factor) if is_root else self._multiply(g, factor, gain), None
            is_root = False
        if is_root:
            z = g.op("Div", numerator, factor)
        else:
            left = plan["factor side"] == "left"
            z = g.op("Mul", *((factor, numerator) if left else (numerator, factor)))
        if plan["count"] == "sqrt(d) after":
            z = g.op("Mul", *self.choose((z, self._root_d(g)), (z, self._root_d(g))))
        z = self.noop(g, "normalized", z)
        if plan["casts"] in ("before the gain", "separate", "down and up"):
            z = g.cast(z, self.x_type)
        if z.dtype != self.product:
            z = g.cast(z, self.product)
        if gain is not None:
            z = self._multiply(g, z, gain)
        if plan["bias"] != "none":
            bias = g.constant(self.bias_value, self.product, how=self._how())
            z = g.op("Add", *((bias, z) if plan["bias"] == "left" else (z, bias)))
        if plan["casts"] != "stays wide" and z.dtype != self.x_type:
            z = g.cast(z, self.x_type)
        return z

    def _multiply(self, g: Graph, value: V, gain: V) -> V:
        return g.op("Mul", *((gain, value) if self.plan["gain side"] == "left" else (value, gain)))

    def _statistic(self, g: Graph, h: V) -> V:
        from statistic import statistic

        return statistic(self, g, h)

    def _factor(self, g: Graph, mean: V) -> tuple[V, bool]:
        from statistic import factor

        return factor(self, g, mean)

    def spec(self) -> RMSNormSpec:
        """What was written."""
        plan, casts = self.plan, self.plan["casts"]
        rounds_first = casts not in ("last", "stays wide")
        placement = {"outside": "outside", "clamp by Max": "clamp", "clamp by Clip": "clamp"}.get(
            plan["epsilon"], "inside"
        )
        has_gain = plan["gain"] != "none"
        offset = has_gain and plan["gain form"] == "one plus"
        return RMSNormSpec(
            axes=self.axes,
            epsilon=self.epsilon,
            epsilon_placement=placement,  # type: ignore[arg-type]
            leading=self.leading,
            has_gain=has_gain,
            gain_offset=1.0 if offset else 0.0,
            has_bias=plan["bias"] != "none",
            statistic_type=self.statistic,
            factor_type=self.x_type if casts == "factor rounded" else self.statistic,
            normalized_type="x" if rounds_first else self.statistic,
            gain_type=self.formed if offset else self.product,
            result_type=self.statistic if casts == "stays wide" else "x",
        )
