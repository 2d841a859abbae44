"""Small constants of a model: scalars and integer lists, folded where exporters compute them.

Weights are never read: a tensor kept in external data is looked at only while it is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16)
import numpy as np
import onnx_ir as ir

from rmsnorm_onnx.view import Ref, View

_EXTERNAL_LIMIT = 4096  # elements of an external tensor that may be read; a gain or a weight matrix is not read
_FOLD_DEPTH = 8
_UNKNOWN_DIM = -(10**9)  # stands in a folded shape vector for an unknown dimension; numbers below it for symbols


_STORED = ("value", "value_float", "value_int", "value_floats", "value_ints")


class Scalar(NamedTuple):
    """One number of a graph, as stored, with the numpy dtype that holds it."""

    value: float
    dtype: np.dtype[Any]


_UNARY: dict[str, Callable[[Any], Any]] = {
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Neg": np.negative,
    "Abs": np.abs,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
}
_SAME = ("Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand")
_FOLDED = frozenset({*_SAME, "Cast", "CastLike", "Gather", "Concat", "ConstantOfShape", "Slice", "Range"})


_MOVES = frozenset({*_SAME, "Gather", "Concat", "Slice"})


class Constants:
    """Reads and folds small constants of a view."""

    def __init__(
        self,
        view: View,
        shape_of: Callable[[Ref], tuple[Any, ...] | None],
        dtype_of: Callable[[Ref], ir.DataType | None],
    ) -> None:
        self._view = view
        self._shape_of = shape_of
        self._dtype_of = dtype_of
        self._memo: dict[Ref, np.ndarray[Any, Any] | None] = {}
        self._depth = 0
        self._symbols: list[str] = []  # the dimensions that marks below _UNKNOWN_DIM stand for

    def overridable(self, ref: Ref) -> bool:
        """Whether a caller may replace the value at run time: an initializer that is also a graph input."""
        value = ref.value
        return value.is_graph_input() and value.is_initializer() and (self._view.model.ir_version or 4) >= 4

    def tensor(self, ref: Ref) -> ir.TensorProtocol | None:
        """The tensor of an initializer or a Constant node, unread."""
        value = ref.value
        if value.is_initializer():
            return None if self.overridable(ref) else value.const_value
        node = value.producer()
        if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            return None
        for name in _STORED:
            if name in node.attributes:
                attr = self._view.attribute(node, ref.calls, name)
                return None if attr is None else attribute_tensor(attr)
        return None

    def uniform(self, ref: Ref | None) -> Scalar | None:
        """The one number that a constant of any shape repeats, or None."""
        if ref is None:
            return None
        array = self._filled(ref)
        array = self._array(ref) if array is None else array
        if array is None or array.size == 0 or bool(np.any(self._marks(array))):
            return None
        first = array.reshape(-1)[:1]
        if array.size > 1 and not bool(np.all(array == first)):
            return None
        return Scalar(float(first.astype(np.float64)[0]), array.dtype)

    def _filled(self, ref: Ref) -> np.ndarray[Any, Any] | None:
        """What ConstantOfShape fills its output with, whatever the shape."""
        node = ref.value.producer()
        if node is None or node.op_type != "ConstantOfShape" or node.domain not in ("", "ai.onnx"):
            return None
        attr = self._view.attribute(node, ref.calls, "value")
        return np.zeros(1, np.float32) if attr is None else attr.as_tensor().numpy().reshape(-1)

    def scalar(self, ref: Ref | None) -> Scalar | None:
        """A constant of one element, or None."""
        if ref is None:
            return None
        tensor = self.tensor(ref)
        if tensor is not None and tensor.size != 1:
            return None
        array = self._array(ref)
        return self.uniform(ref) if array is not None and array.size == 1 else None

    def integers(self, ref: Ref | None) -> tuple[int, ...] | None:
        """A constant integer vector (axes, a shape), or None."""
        dims = self.dims(ref)
        if dims is None:
            return None
        numbers = tuple(d for d in dims if isinstance(d, int))
        return numbers if len(numbers) == len(dims) else None

    def dims(self, ref: Ref | None) -> tuple[int | str | None, ...] | None:
        """An integer vector of which some elements may be dimensions of shapes: symbols, or None where unknown."""
        array = None if ref is None else self._array(ref)
        if array is None or array.dtype.kind not in "iu":
            return None
        flat = array.reshape(-1)
        return tuple(
            self._dimension(int(v)) if mark else int(v) for v, mark in zip(flat, self._marks(flat), strict=True)
        )

    def _marks(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which elements stand for a dimension known only at run time."""
        if array.dtype.kind != "i":
            return np.zeros(array.shape, np.bool_)
        return (array <= _UNKNOWN_DIM) & (array >= _UNKNOWN_DIM - len(self._symbols))

    def _mark(self, dim: int | str | None) -> int:
        if dim is None or isinstance(dim, int):
            return _UNKNOWN_DIM if dim is None else dim
        if dim not in self._symbols:
            self._symbols.append(dim)
        return _UNKNOWN_DIM - 1 - self._symbols.index(dim)

    def _dimension(self, mark: int) -> str | None:
        return None if mark == _UNKNOWN_DIM else self._symbols[_UNKNOWN_DIM - 1 - mark]

    def _array(self, ref: Ref) -> np.ndarray[Any, Any] | None:
        if ref in self._memo:
            return self._memo[ref]
        if self._depth >= _FOLD_DEPTH:
            return None
        self._memo[ref] = None  # what a cycle gives
        self._depth += 1
        self._memo[ref] = self._compute(ref)
        self._depth -= 1
        return self._memo[ref]

    def _compute(self, ref: Ref) -> np.ndarray[Any, Any] | None:
        tensor = self.tensor(ref)
        if tensor is not None:
            return _read(tensor)
        node = ref.value.producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Shape":
            return self._shape(node, ref.calls)
        if node.op_type == "Size":
            return self._size(node, ref.calls)
        fold = _UNARY.get(node.op_type) or _BINARY.get(node.op_type)
        if fold is None and node.op_type not in _FOLDED:
            return None
        return self._fold(node, ref)

    def _fold(self, node: ir.Node, ref: Ref) -> np.ndarray[Any, Any] | None:
        inputs: list[np.ndarray[Any, Any] | None] = []
        for index in range(1 if node.op_type in (*_SAME, "Cast", "CastLike") else len(node.inputs)):
            source = self._view.input(node, ref.calls, index)
            inputs.append(None if source is None else self._array(source))
            if inputs[-1] is None and source is not None:
                return None
        if not inputs or inputs[0] is None:
            return None
        kind, first = node.op_type, inputs[0]
        marked = any(i is not None and bool(np.any(self._marks(i))) for i in inputs)
        if marked and kind not in _MOVES and not (kind == "Cast" and _is_wide(_cast_target(self._view, node, ref))):
            return None  # a dimension known only at run time is no number to compute with
        if kind in ("Gather", "Slice") and any(i is not None and bool(np.any(self._marks(i))) for i in inputs[1:]):
            return None  # nor is it an index or a bound
        with np.errstate(all="ignore"):
            if kind in _UNARY and first.dtype.kind != "i":
                return np.asarray(_UNARY[kind](first)).astype(first.dtype)
            if kind in _BINARY:
                second = inputs[1] if len(inputs) > 1 else None
                return None if second is None else _binary(kind, first, second)
            if kind == "CastLike":
                return self._cast_like(node, ref, first)
            if kind == "Cast":
                dtype = _cast_target(self._view, node, ref)
                return None if dtype is None or dtype == ir.DataType.STRING else first.astype(dtype.numpy())
            if kind in _SAME:
                return self._same(kind, first, ref)
            if kind == "Range":
                return _range(inputs)
        return _gather_like(self._view, node, ref, inputs)

    def _cast_like(self, node: ir.Node, ref: Ref, first: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        target = self._view.input(node, ref.calls, 1)
        dtype = None if target is None else self._dtype_of(target)
        return None if dtype is None or dtype == ir.DataType.STRING else first.astype(dtype.numpy())

    def _same(self, kind: str, first: np.ndarray[Any, Any], ref: Ref) -> np.ndarray[Any, Any] | None:
        if kind == "Expand" and first.size == 1:  # whatever its target, one number repeated
            shape = self._shape_of(ref)
            if shape is None or not all(isinstance(d, int) for d in shape) or math.prod(shape) > _EXTERNAL_LIMIT:
                return None
            return np.broadcast_to(first, shape)
        if kind == "Expand":
            return None
        shape = self._shape_of(ref)
        known = shape is not None and all(isinstance(d, int) for d in shape) and math.prod(shape) == first.size
        return first.reshape(shape) if known and shape is not None else first

    def _shape(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> np.ndarray[Any, Any] | None:
        source = self._view.input(node, calls, 0)
        shape = None if source is None else self._shape_of(source)
        if shape is None or node.attributes.get("start") or node.attributes.get("end"):
            return None
        # What is known at run time only is kept as a mark, so that what is put together from it still folds.
        return np.array([self._mark(d) for d in shape], dtype=np.int64)

    def _size(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> np.ndarray[Any, Any] | None:
        source = self._view.input(node, calls, 0)
        shape = None if source is None else self._shape_of(source)
        numbers = [d for d in shape or () if isinstance(d, int)]
        return None if shape is None or len(numbers) < len(shape) else np.array(math.prod(numbers), dtype=np.int64)


def _read(tensor: ir.TensorProtocol) -> np.ndarray[Any, Any] | None:
    if tensor.dtype == ir.DataType.STRING:
        return None
    if isinstance(tensor, ir.ExternalTensor) and tensor.size > _EXTERNAL_LIMIT:
        return None
    return tensor.numpy()


def stored(node: ir.Node) -> ir.TensorProtocol | None:
    """What a Constant holds, unread.

    onnx_ir's `get_const_tensor` gives the tensor another name, and it may be the caller's.
    """
    for name, attr in node.attributes.items():
        if name in _STORED:
            return None if attr.is_ref() else attribute_tensor(attr)
    return None


def attribute_tensor(attr: ir.Attr) -> ir.TensorProtocol | None:
    """The tensor that a number, a list of numbers or a tensor attribute stands for; None for text."""
    if attr.type == ir.AttributeType.TENSOR:
        return attr.as_tensor()
    if attr.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
        return ir.tensor(np.asarray(attr.value, dtype=np.float32))
    if attr.type in (ir.AttributeType.INT, ir.AttributeType.INTS):
        return ir.tensor(np.asarray(attr.value, dtype=np.int64))
    return None


def _cast_target(view: View, node: ir.Node, ref: Ref) -> ir.DataType | None:
    attr = view.attribute(node, ref.calls, "to")
    return None if attr is None else ir.DataType(attr.as_int())


def _is_wide(dtype: ir.DataType | None) -> bool:
    """Whether a type holds every dimension and every mark that stands for one."""
    return dtype in (ir.DataType.INT64, ir.DataType.INT32)


def _binary(kind: str, first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    if first.size * second.size > _EXTERNAL_LIMIT:
        return None
    if first.dtype.kind in "iu" and kind == "Div":  # ONNX truncates, as // does where nothing is negative
        whole = second.dtype.kind in "iu" and bool(np.all(first >= 0)) and bool(np.all(second > 0))
        return np.asarray(first // second).astype(first.dtype) if whole else None
    if first.dtype.kind in "iu" and kind == "Pow":
        return None
    result = _BINARY[kind](first, second.astype(first.dtype) if kind == "Pow" else second)
    return np.asarray(result).astype(first.dtype)


def _range(bounds: list[np.ndarray[Any, Any] | None]) -> np.ndarray[Any, Any] | None:
    """The integers of a Range, as ONNX's own body of a norm lists the axes from one to the rank."""
    numbers = [int(b.reshape(-1)[0]) for b in bounds if b is not None and b.dtype.kind in "iu" and b.size == 1]
    if len(numbers) != 3 or numbers[2] == 0 or len(range(*numbers)) > _EXTERNAL_LIMIT:
        return None
    return np.arange(*numbers, dtype=np.int64)


def _gather_like(
    view: View, node: ir.Node, ref: Ref, inputs: list[np.ndarray[Any, Any] | None]
) -> np.ndarray[Any, Any] | None:
    """Gather, Concat, Slice and ConstantOfShape of integer vectors: how exporters read one dimension of a shape."""
    first = inputs[0]
    if first is None or first.dtype.kind not in "iu":
        return None
    if node.op_type == "Gather" and len(inputs) > 1 and inputs[1] is not None and first.ndim == 1:
        inside = bool(np.all((inputs[1] >= -first.size) & (inputs[1] < first.size)))
        return np.asarray(first[inputs[1]]) if inside else None
    if node.op_type == "Concat" and all(i is not None and i.ndim == 1 for i in inputs):
        return np.concatenate([i for i in inputs if i is not None])
    if node.op_type == "Slice" and first.ndim == 1 and len(inputs) in (3, 4) and all(i is not None for i in inputs):
        start, end = (int(i.reshape(-1)[0]) for i in inputs[1:3] if i is not None)
        return first[start:end]
    if node.op_type == "ConstantOfShape" and bool(np.all(first >= 0)) and math.prod(first) <= _EXTERNAL_LIMIT:
        attr = view.attribute(node, ref.calls, "value")
        fill = np.zeros(1, np.float32) if attr is None else attr.as_tensor().numpy()
        return np.broadcast_to(fill.reshape(()), tuple(int(d) for d in first))
    return None
