"""Seeded inputs for one norm: the rows that show what goes wrong with norms, in the shapes that its graph takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.spec import RMSNormSpec

ROWS = ("random", "zero", "huge", "tiny", "near epsilon", "constant", "one large element", "random")
"""What the rows are, in order; more of them are random."""


def concrete_shape(dims: Dims, symbols: dict[str, int]) -> tuple[int, ...]:
    """A shape with numbers for its symbols: 2, 3, 4 and so on, so that no two axes are mistaken for each other.

    Args:
        dims: As the graph declares them; None is a dimension without a name.
        symbols: What earlier shapes took; new ones are added.

    >>> concrete_shape(("batch", None, 8), {})
    (2, 3, 8)
    """
    shape = []
    for i, dim in enumerate(dims):
        key = f"\0{i} of {dims}" if dim is None else dim
        shape.append(key if isinstance(key, int) else symbols.setdefault(key, 2 + len(symbols)))
    return tuple(shape)


def fewer_rows(shape: tuple[int, ...], axes: Sequence[int], limit: int) -> tuple[int, ...]:
    """The shape with its largest batch dimensions made smaller, until there are at most `limit` rows.

    >>> fewer_rows((32, 100, 8), (-1,), 64)
    (32, 2, 8)
    """
    dims = list(shape)
    rows = [i for i in range(len(dims)) if i - len(dims) not in axes]
    for i in sorted(rows, key=lambda i: -dims[i]):
        others = math.prod(dims[j] for j in rows if j != i)
        dims[i] = min(dims[i], max(1, limit // others))
    return tuple(dims)


@dataclasses.dataclass(frozen=True, slots=True)
class RowKinds:
    """The rows for one spec.

    Attributes:
        spec: The norm.
        x_type: x's type.
        shape: x's shape.
    """

    spec: RMSNormSpec
    x_type: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements are normalised together."""
        return math.prod(self.shape[a] for a in self.spec.axes)

    def batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Arrays of the shape and type that hold all kinds of rows between them.

        Without an epsilon there is no row of zeros: a graph computes 0 / 0 there.
        """
        kinds = [k for k in ROWS if k != "zero" or self.spec.epsilon > 0]
        axes = self.spec.axes
        batch = [n for i, n in enumerate(self.shape) if i - len(self.shape) not in axes]
        count = math.prod(batch)
        if count == 0 or self.size == 0:
            raise ValueError(f"x of shape {list(self.shape)} has no elements")
        total = math.ceil(len(kinds) / count) * count
        kinds += ["random"] * (total - len(kinds))
        rows = np.stack([self._row(kind, rng) for kind in kinds]).astype(dtypes.numpy_dtype(self.x_type))
        inner = [self.shape[a] for a in axes]
        stacks = rows.reshape(-1, *batch, *inner)
        return [np.moveaxis(s, range(-len(axes), 0), axes) for s in stacks]

    def _row(self, kind: str, rng: np.random.Generator) -> np.ndarray:
        row = rng.uniform(-1.0, 1.0, self.size)
        if kind == "constant":
            return np.full(self.size, rng.uniform(1.0, 2.0))
        if kind == "one large element":
            row[rng.integers(self.size)] = 100.0
        return row * {"zero": 0.0, "huge": self.huge, "tiny": self.tiny, "near epsilon": self.near}.get(kind, 1.0)

    @property
    def huge(self) -> float:
        """A quarter of what the type, and a sum of squares in float32 (or a wider statistic), can hold."""
        statistic = dtypes.wider("float32", self.spec.resolve(self.x_type).statistic_type)
        sum_limit = math.sqrt(float(dtypes.finfo(statistic).max) / self.size)
        return min(float(dtypes.finfo(self.x_type).max), sum_limit) / 4

    @property
    def near(self) -> float:
        """Elements whose mean square is about epsilon where it is inside the root, else whose root is."""
        epsilon = self.spec.epsilon
        rms = math.sqrt(epsilon) if self.spec.epsilon_placement == "inside" else epsilon
        return max(rms * math.sqrt(3.0) or 1e-3, 4 * float(dtypes.finfo(self.x_type).smallest_subnormal))

    @property
    def tiny(self) -> float:
        """A hundredth of that."""
        return max(self.near / 100, 4 * float(dtypes.finfo(self.x_type).smallest_subnormal))
