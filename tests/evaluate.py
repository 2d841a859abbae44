"""A float64 evaluator of small graphs: what a graph means when nothing is rounded.

Constants count at their stored value, and what is computed from constants alone is rounded to its type, operator by
operator, because that is a constant too. Everything else is exact: a Cast between float types is the identity.
Independent of the library: claims about a graph are measured by it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

Frame = ChainMap  # ir.Value -> Cell, the innermost scope first


class Cell:
    """One computed value: its float64 (or integer) array, its ONNX type, and whether it depends on constants alone."""

    __slots__ = ("array", "constant", "dtype")

    def __init__(self, array: Any, dtype: ir.DataType, constant: bool) -> None:
        self.array = _wide(np.asarray(array))
        if constant and dtype.is_floating_point():
            self.array = self.array.astype(dtype.numpy()).astype(np.float64)
        self.dtype = dtype
        self.constant = constant


def _wide(array: np.ndarray) -> np.ndarray:
    if array.dtype == bool or np.issubdtype(array.dtype, np.integer):
        return array
    return array.astype(np.float64)


def evaluate(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[Frame]:
    """Run a model; one frame per execution of a scope (main graph, branch, iteration, function call)."""
    frames: list[Frame] = []
    run = _Run(model, frames)
    env: Frame = ChainMap({})
    for value in model.graph.inputs:
        if value.name in feeds:
            env[value] = Cell(feeds[value.name], value.dtype, False)
    with np.errstate(all="ignore"):
        run.graph(model.graph, env, {})
    return frames


class _Run:
    def __init__(self, model: ir.Model, frames: list[Frame]) -> None:
        self.functions = model.functions
        self.frames = frames
        versions = model.graph.opset_imports or model.opset_imports
        self.opset = versions.get("", 18)

    def graph(self, graph: Any, env: Frame, attributes: Mapping[str, ir.Attr]) -> list[Cell]:
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                env.maps[0].setdefault(value, Cell(value.const_value.numpy(), value.const_value.dtype, True))
        for node in graph:
            self.node(node, env, attributes)
        self.frames.append(env)
        return [env[value] for value in graph.outputs]

    def node(self, node: ir.Node, env: Frame, outer: Mapping[str, ir.Attr]) -> None:
        attributes: dict[str, ir.Attr] = {}
        for name, attribute in node.attributes.items():
            if attribute.is_ref():
                if attribute.ref_attr_name in outer:
                    attributes[name] = outer[attribute.ref_attr_name]
            else:
                attributes[name] = attribute
        cells = [None if value is None else env[value] for value in node.inputs]
        function = self.functions.get(node.op_identifier())
        if function is not None:
            inner: Frame = ChainMap({})
            inner.maps[0].update({v: c for v, c in zip(function.inputs, cells, strict=False) if c is not None})
            given = {**{a.name: a for a in function.attributes.values() if a.value is not None}, **attributes}
            results = self.graph(function, inner, given)
        elif node.op_type in ("If", "Loop", "Scan"):
            results = getattr(self, node.op_type.lower())(node, cells, env, outer)
        else:
            values = {name: attribute.value for name, attribute in attributes.items()}
            results = self.plain(node, cells, values)
        for value, cell in zip(node.outputs, results, strict=False):
            env.maps[0][value] = cell

    def plain(self, node: ir.Node, cells: list[Cell | None], attrs: dict[str, Any]) -> list[Cell]:
        # A reduced constant is no constant, so that a norm of one is judged like any other.
        constant = node.op_type not in REDUCES and all(c.constant for c in cells if c is not None)
        if node.op_type == "Constant":
            return [_constant(attrs)]
        if node.op_type in ("Cast", "CastLike"):
            dtype = ir.DataType(attrs["to"]) if node.op_type == "Cast" else cells[1].dtype
            return [Cell(_cast(cells[0], dtype), dtype, cells[0].constant)]
        arrays = [None if c is None else c.array for c in cells]
        if node.op_type in REDUCES:
            out = _reduce(REDUCES[node.op_type], arrays, attrs)
        elif node.op_type == "Split":
            parts = _split(arrays, attrs, len(node.outputs))
            return [Cell(p, cells[0].dtype, constant) for p in parts]
        else:
            out = OPERATORS[node.op_type](arrays, attrs)
        if node.op_type == "ConstantOfShape":
            return [Cell(out, attrs["value"].dtype, constant)]
        dtype = ir.DataType.INT64 if node.op_type == "Shape" else next(c.dtype for c in cells if c is not None)
        if node.op_type in ("Greater", "Less", "Equal", "Not"):
            dtype = ir.DataType.BOOL
        elif node.op_type == "Where":
            dtype = cells[1].dtype
        return [Cell(out, dtype, constant)]

    def if_(self, node: ir.Node, cells: list[Cell], env: Frame, outer: Mapping[str, ir.Attr]) -> list[Cell]:
        taken = "then_branch" if bool(np.all(cells[0].array)) else "else_branch"
        results = {
            n: self.graph(node.attributes[n].value, env.new_child(), outer) for n in ("then_branch", "else_branch")
        }
        return results[taken]

    def loop(self, node: ir.Node, cells: list[Cell], env: Frame, outer: Mapping[str, ir.Attr]) -> list[Cell]:
        body = node.attributes["body"].value
        state, scans = list(cells[2:]), []
        for i in range(int(cells[0].array) if cells[0] is not None else 3):
            inner = env.new_child()
            head = [Cell(np.int64(i), ir.DataType.INT64, False), Cell(np.bool_(True), ir.DataType.BOOL, False)]
            inner.maps[0].update(zip(body.inputs, [*head, *state], strict=True))
            results = self.graph(body, inner, outer)
            state = results[1 : 1 + len(state)]
            scans.append(results[1 + len(state) :])
        return [*state, *_stack(scans)]

    def scan(self, node: ir.Node, cells: list[Cell], env: Frame, outer: Mapping[str, ir.Attr]) -> list[Cell]:
        body = node.attributes["body"].value
        n = node.attributes["num_scan_inputs"].value
        state, rows = list(cells[: len(cells) - n]), cells[len(cells) - n :]
        scans = []
        for i in range(rows[0].array.shape[0]):
            inner = env.new_child()
            inner.maps[0].update(
                zip(body.inputs, [*state, *(Cell(r.array[i], r.dtype, False) for r in rows)], strict=True)
            )
            results = self.graph(body, inner, outer)
            state = results[: len(state)]
            scans.append(results[len(state) :])
        return [*state, *_stack(scans)]


setattr(_Run, "if", _Run.if_)


def _stack(scans: list[list[Cell]]) -> list[Cell]:
    return [Cell(np.stack([c.array for c in column]), column[0].dtype, False) for column in zip(*scans, strict=True)]


def _constant(attrs: dict[str, Any]) -> Cell:
    ((name, value),) = attrs.items()
    if name == "value":
        return Cell(value.numpy(), value.dtype, True)
    floats = name in ("value_float", "value_floats")
    array = np.asarray(value, dtype=np.float32 if floats else np.int64)
    return Cell(array, ir.DataType.FLOAT if floats else ir.DataType.INT64, True)


def _cast(cell: Cell, dtype: ir.DataType) -> np.ndarray:
    if not dtype.is_floating_point():
        return np.trunc(cell.array).astype(dtype.numpy()) if cell.dtype.is_floating_point() else cell.array
    return cell.array.astype(np.float64)


def _axes(arrays: list[np.ndarray | None], attrs: dict[str, Any], position: int = 1) -> tuple[int, ...] | None:
    if len(arrays) > position and arrays[position] is not None:
        return tuple(int(a) for a in np.ravel(arrays[position]))
    axes = attrs.get("axes")
    return None if axes is None else tuple(axes)


def _reduce(function: Callable[..., np.ndarray], arrays: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    axes = _axes(arrays, attrs)
    if not axes:
        if attrs.get("noop_with_empty_axes"):
            return arrays[0]
        axes = None
    return function(arrays[0], axis=axes, keepdims=bool(attrs.get("keepdims", 1)))


def _split(arrays: list[np.ndarray | None], attrs: dict[str, Any], n: int) -> list[np.ndarray]:
    x, axis = arrays[0], attrs.get("axis", 0)
    sizes = arrays[1] if len(arrays) > 1 and arrays[1] is not None else attrs.get("split")
    if sizes is None:
        chunk = -(-x.shape[axis] // n)
        sizes = [min(chunk, x.shape[axis] - i * chunk) for i in range(n)]
    return np.split(x, np.cumsum(np.asarray(sizes))[:-1], axis=axis)


def _slice(a: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    starts, ends = np.ravel(a[1]), np.ravel(a[2])
    axes = np.ravel(a[3]) if len(a) > 3 and a[3] is not None else np.arange(len(starts))
    steps = np.ravel(a[4]) if len(a) > 4 and a[4] is not None else np.ones(len(starts), np.int64)
    index = [slice(None)] * a[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[int(axis)] = slice(int(start), int(end), int(step))
    return a[0][tuple(index)]


def _reshape(a: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    target = [int(n) for n in np.ravel(a[1])]
    if not attrs.get("allowzero"):
        target = [a[0].shape[i] if n == 0 else n for i, n in enumerate(target)]
    return a[0].reshape(target)


def _expand(a: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    return np.broadcast_to(a[0], np.broadcast_shapes(a[0].shape, tuple(int(n) for n in a[1]))).copy()


def _clip(a: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    low = a[1] if len(a) > 1 and a[1] is not None else -np.inf
    high = a[2] if len(a) > 2 and a[2] is not None else np.inf
    return np.minimum(np.maximum(a[0], low), high)


def _unsqueeze(a: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    return np.expand_dims(a[0], _axes(a, attrs))


def _l2(x: np.ndarray, **kw: Any) -> np.ndarray:
    return np.sqrt(np.sum(x * x, **kw))


REDUCES: Mapping[str, Callable[..., np.ndarray]] = {
    "ReduceMean": np.mean,
    "ReduceSum": np.sum,
    "ReduceSumSquare": lambda x, **kw: np.sum(x * x, **kw),
    "ReduceL2": _l2,
    "ReduceL1": lambda x, **kw: np.sum(np.abs(x), **kw),
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
}


def _native(a: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    axes = tuple(range(attrs.get("axis", -1), 0))
    y = a[0] / np.sqrt(np.mean(a[0] * a[0], axis=axes, keepdims=True) + attrs.get("epsilon", 1e-5))
    return y * a[1] if len(a) > 1 and a[1] is not None else y


def _lp(a: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    norm = _l2(a[0], axis=attrs.get("axis", -1), keepdims=True)
    return np.divide(a[0], norm, out=np.zeros_like(a[0]), where=norm > 0)


OPERATORS: Mapping[str, Callable[[list[Any], dict[str, Any]], np.ndarray]] = {
    "Add": lambda a, k: a[0] + a[1],
    "Sub": lambda a, k: a[0] - a[1],
    "Mul": lambda a, k: a[0] * a[1],
    "Div": lambda a, k: a[0] / a[1],
    "Einsum": lambda a, k: np.einsum(k["equation"], *a),
    "ConstantOfShape": lambda a, k: np.full(a[0].astype(int), k["value"].numpy()[0], np.float64),
    "Pow": lambda a, k: np.power(a[0], a[1].astype(np.float64)),
    "Max": lambda a, k: np.maximum(a[0], a[1]),
    "Min": lambda a, k: np.minimum(a[0], a[1]),
    "Sqrt": lambda a, k: np.sqrt(a[0]),
    "Reciprocal": lambda a, k: 1.0 / a[0],
    "Abs": lambda a, k: np.abs(a[0]),
    "Neg": lambda a, k: -a[0],
    "Exp": lambda a, k: np.exp(a[0]),
    "Floor": lambda a, k: np.floor(a[0]),
    "Relu": lambda a, k: np.maximum(a[0], 0),
    "Sigmoid": lambda a, k: 1 / (1 + np.exp(-a[0])),
    "Tanh": lambda a, k: np.tanh(a[0]),
    "Identity": lambda a, k: a[0],
    "Where": lambda a, k: np.where(a[0], a[1], a[2]),
    "Greater": lambda a, k: a[0] > a[1],
    "Clip": _clip,
    "Slice": _slice,
    "Reshape": _reshape,
    "Expand": _expand,
    "Unsqueeze": _unsqueeze,
    "Squeeze": lambda a, k: np.squeeze(a[0], _axes(a, k)),
    "Transpose": lambda a, k: np.transpose(a[0], k.get("perm")),
    "Shape": lambda a, k: np.asarray(a[0].shape, np.int64),
    "Concat": lambda a, k: np.concatenate(a, axis=k["axis"]),
    "Gather": lambda a, k: np.take(a[0], a[1], axis=k.get("axis", 0)),
    "MatMul": lambda a, k: np.matmul(a[0], a[1]),
    "RMSNormalization": _native,
    "SimplifiedLayerNormalization": _native,
    "LpNormalization": _lp,
}
