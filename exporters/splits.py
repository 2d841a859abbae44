"""How torch's split is written in ONNX: one `Split`, where torch's translation makes a sequence of tensors.

ONNX's full check refuses a sequence of bfloat16, and few runtimes take sequences at all. How many parts there are is
known wherever sizes are listed, which may be computed ones, or a static dimension is cut into parts of a static size;
elsewhere it stays torch's sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """The rows of torch.onnx.export's `custom_translation_table` for split, split_with_sizes and chunk.

    Decompositions write the unsafe forms of these (for a GRU cell's gates), whose parts are the same.

    Args:
        opset: The opset to write, 18 or newer.
    """
    import onnxscript
    import torch

    op = onnxscript.values.Opset("", opset)

    def split(self: Any, split_size: Any, dim: int = 0) -> Any:
        sizes = _equal_sizes(_size(self, dim), split_size)
        return op.SplitToSequence(self, split_size, axis=dim) if sizes is None else _split(op, self, sizes, dim)

    def split_with_sizes(self: Any, split_sizes: Sequence[Any], dim: int = 0) -> Any:
        return _split(op, self, split_sizes, dim)

    def chunk(self: Any, chunks: int, dim: int = 0) -> Any:
        size = _size(self, dim)
        sizes = None if size is None else _equal_sizes(size, -(-size // chunks))
        if sizes is None:  # as torch translates it
            return op.Identity(self) if chunks == 1 else op.Split(self, axis=dim, num_outputs=chunks)
        return _split(op, self, sizes, dim)

    aten = torch.ops.aten
    return {
        aten.split.Tensor: split,
        aten.unsafe_split.Tensor: split,
        aten.split_with_sizes.default: split_with_sizes,
        aten.unsafe_split_with_sizes.default: split_with_sizes,
        aten.chunk.default: chunk,
        aten.unsafe_chunk.default: chunk,
    }


def _size(value: Any, dim: int) -> int | None:
    """The size of a dimension; None where it is not static."""
    size = None if value.shape is None else value.shape[dim]
    if size is None or isinstance(size, int):
        return size
    # torch names a dynamic dimension that the module turned out to fix by its size.
    return int(size.value) if size.value is not None and size.value.isdecimal() else None


def _equal_sizes(size: int | None, part: Any) -> list[int] | None:
    """The sizes of parts of which the last takes what is left, as torch.split has them; None where they are not static.

    >>> _equal_sizes(10, 4), _equal_sizes(0, 4), _equal_sizes(None, 4)
    ([4, 4, 2], [0], None)
    """
    if size is None or not isinstance(part, int):
        return None
    if size == 0 or part == 0:
        return [size]
    return [min(part, size - start) for start in range(0, size, part)]


def _split(op: Any, value: Any, sizes: Sequence[Any], dim: int) -> Sequence[Any]:
    """The parts, of sizes that are numbers or values of the graph."""
    if len(sizes) == 1:
        return [op.Identity(value)]
    parts: Sequence[Any] = op.Split(value, _vector(op, sizes), axis=dim, num_outputs=len(sizes))
    # The exporter asks for the attribute to know how many outputs there are; beside the sizes ONNX forbids it.
    producer = parts[0].producer()
    producer.attributes.pop("num_outputs")
    return parts


def _vector(op: Any, sizes: Sequence[Any]) -> Any:
    """The sizes as one int64 vector."""
    if all(isinstance(size, int) for size in sizes):
        return op.Constant(value=ir.tensor(np.array(sizes, dtype=np.int64)))
    one = op.Constant(value=ir.tensor(np.array([1], dtype=np.int64)))
    pieces = [
        op.Constant(value=ir.tensor(np.array([size], dtype=np.int64)))
        if isinstance(size, int)
        else op.Reshape(size, one)
        for size in sizes
    ]
    return op.Concat(*pieces, axis=0)
