"""Types and shapes of values, as far as a proof needs them.

A declared shape is completed by the rules of the operators that norms are made of, and where that is not enough by
onnx's own shape inference, run once over the graph without its weights.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.constants import Constants
from rmsnorm_onnx.dims import broadcast, concatenated, matrix_product
from rmsnorm_onnx.inference import NATIVE_NORMS, Dim, Dims, Info, declared, infer
from rmsnorm_onnx.view import Ref, View

_MAX_DEPTH = 40  # operators followed by rule; further back, onnx infers the whole graph at once

_SAME_SHAPE = frozenset(
    {"Identity", "Cast", "CastLike", "Sqrt", "Reciprocal", "Neg", "Abs", "Exp", "Log", "Clip", "Sign"}
    | {"Sigmoid", "Tanh", "Relu", "Erf", "Gelu", "Softmax", "Dropout", "Floor", "Ceil", "Round", "Not"}
    | {"LpNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization"}
)
_BROADCAST = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "PRelu", "Mod"})
_LOGICAL = frozenset(
    {
        "And",
        "Or",
        "Xor",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Where",
        "BitwiseAnd",
        "BitwiseOr",
    }
)  # they broadcast too, and give another type than their first input's
_REDUCE = frozenset(
    {"ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceL1", "ReduceMax", "ReduceMin", "ReduceProd"}
)


class Shapes:
    """Answers "which shape, which float type" for any Ref of a view."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.constants = Constants(view, self.shape, self.dtype)
        self._memo: dict[Ref, Dims | None] = {}
        self._types: dict[Ref, ir.DataType | None] = {}
        self._depth = 0
        self._inferred: dict[ir.Value, Info] | None = None
        self._bodies: dict[tuple[ir.Node, ...], dict[ir.Value, Info]] = {}
        self._signatures: dict[tuple[object, ...], dict[ir.Value, Info]] = {}

    def dtype(self, ref: Ref) -> ir.DataType | None:
        """The element type of a resolved Ref, or None when it is unknown."""
        if ref not in self._types:
            if self._depth > _MAX_DEPTH:
                return ref.value.dtype or self._infer(ref)[0]
            self._types[ref] = ref.value.dtype  # a cycle ends here
            self._depth += 1
            try:
                self._types[ref] = self._dtype(ref)
            finally:
                self._depth -= 1
        return self._types[ref]

    def float_type(self, ref: Ref) -> str | None:
        """The float type's name, or None when the type is unknown or no float that norms are computed in."""
        return dtypes.float_name(self.dtype(ref))

    def shape(self, ref: Ref) -> Dims | None:
        """The shape of a resolved Ref, its dimensions as far as they are known; None when the rank is unknown."""
        if ref in self._memo:
            return self._memo[ref]
        if self._depth > _MAX_DEPTH:
            said = declared(ref.value)
            return said if said is not None else self._infer(ref)[1]
        self._memo[ref] = declared(ref.value)  # a cycle ends here
        self._depth += 1
        try:
            self._memo[ref] = self._shape(ref)
        finally:
            self._depth -= 1
        return self._memo[ref]

    def _dtype(self, ref: Ref) -> ir.DataType | None:
        value, node = ref.value, ref.value.producer()
        if value.const_value is not None:
            return value.const_value.dtype
        if node is not None and node.op_type == "Cast" and node.domain == "":
            attr = self._view.attribute(node, ref.calls, "to")
            return None if attr is None else ir.DataType(attr.as_int())
        if value.dtype is not None and not ref.calls:
            return value.dtype  # in a function body, a declared type says nothing of this call
        known = node is not None and (node.domain in ("", "ai.onnx") or node.op_type in NATIVE_NORMS)
        found = self._from_inputs(node, ref) if node is not None and known else None
        return found if found is not None else value.dtype or self._infer(ref)[0]

    def _from_inputs(self, node: ir.Node, ref: Ref) -> ir.DataType | None:
        """Types that follow from an operator: elementwise operators and reductions keep their first input's."""
        if node.op_type == "Constant":
            tensor = self.constants.tensor(ref)
            return None if tensor is None else tensor.dtype
        if node.op_type == "Shape":
            return ir.DataType.INT64
        if node.op_type in NATIVE_NORMS and ref.value.index() not in (0, NATIVE_NORMS[node.op_type]):
            return None
        keeps = node.op_type in NATIVE_NORMS or node.op_type in _SAME_SHAPE | _BROADCAST | _REDUCE or node.op_type in (
            "Reshape", "Unsqueeze", "Squeeze", "Expand", "Slice", "Split", "Transpose", "MatMul", "Gemm", "Concat",
        )  # fmt: skip
        if not keeps:
            return None
        index = 1 if node.op_type == "CastLike" else 0
        source = self._view.input(node, ref.calls, index)
        return None if source is None else self.dtype(source)

    def _shape(self, ref: Ref) -> Dims | None:
        said = declared(ref.value)
        if said is not None and not ref.calls and None not in said:
            return said
        node = ref.value.producer()
        if ref.value.const_value is not None and node is None:
            return tuple(ref.value.const_value.shape)  # type: ignore[arg-type]
        known = node is not None and (node.domain in ("", "ai.onnx") or node.op_type in NATIVE_NORMS)
        ruled = self._rule(node, ref) if node is not None and known else None
        if ruled is None and (said is None or ref.calls):
            ruled = self._infer(ref)[1]
        if ruled is None or said is None or len(ruled) != len(said):
            return ruled if ruled is not None else said
        return tuple(d if r is None else r for r, d in zip(ruled, said, strict=True))

    def _rule(self, node: ir.Node, ref: Ref) -> Dims | None:
        kind, view = node.op_type, self._view
        if kind == "Constant":
            tensor = self.constants.tensor(ref)
            return None if tensor is None else tuple(tensor.shape)  # type: ignore[arg-type]
        inputs = view.inputs(node, ref.calls)
        if not inputs or inputs[0] is None:
            return None
        if kind in _BROADCAST or kind in _LOGICAL:
            return broadcast([None if r is None else self.shape(r) for r in inputs])
        if kind in ("MatMul", "Concat"):
            shapes = [None if r is None else self.shape(r) for r in inputs]
            axis = self._view.attribute(node, ref.calls, "axis")
            return matrix_product(shapes) if kind == "MatMul" else concatenated(shapes, axis.as_int() if axis else 0)
        first = self.shape(inputs[0])
        if first is None and kind not in ("Reshape", "Expand"):
            return None
        if kind in _SAME_SHAPE or kind in NATIVE_NORMS:
            return first if ref.value.index() in (0, NATIVE_NORMS.get(kind)) else None
        if kind in _REDUCE and first is not None:
            return self._reduced(node, ref, first)
        return self._movement(node, ref, inputs, first)

    def _reduced(self, node: ir.Node, ref: Ref, first: Dims) -> Dims | None:
        axes = reduction_axes(self, node, ref.calls, len(first))
        if axes is None:
            return None
        keep = self._view.attribute(node, ref.calls, "keepdims")
        if keep is None or keep.as_int():
            return tuple(1 if i in axes else d for i, d in enumerate(first))
        return tuple(d for i, d in enumerate(first) if i not in axes)

    def _movement(self, node: ir.Node, ref: Ref, inputs: list[Ref | None], first: Dims | None) -> Dims | None:
        kind = node.op_type
        if kind in ("Unsqueeze", "Squeeze") and first is not None:
            axes = self.axes_of(node, ref.calls)
            return None if axes is None else _unsqueezed(first, axes) if kind == "Unsqueeze" else _squeezed(first, axes)
        if kind == "Transpose" and first is not None:
            perm = self._view.attribute(node, ref.calls, "perm")
            order = tuple(reversed(range(len(first)))) if perm is None else tuple(perm.as_ints())
            return tuple(first[i] for i in order) if sorted(order) == list(range(len(first))) else None
        if kind == "Slice" and first is not None:
            return self._sliced(node, ref, first)
        if kind == "Split" and first is not None:
            return self._split(node, ref, first)
        if kind in ("Reshape", "Expand") and len(inputs) > 1:
            if kind == "Expand" and inputs[1] is not None:
                whole = self._shape_source(inputs[1])
                if whole is not None:
                    return broadcast([first, self.shape(whole)])
            target = self.constants.dims(inputs[1])
            if target is None:  # where only its length is known, so is the rank
                length = None if inputs[1] is None else self.shape(inputs[1])
                if length is None or len(length) != 1 or not isinstance(length[0], int):
                    return None
                target = (None,) * length[0]
            if kind == "Expand":
                return broadcast([first, target]) if first is not None else None
            allow_zero = self._view.attribute(node, ref.calls, "allowzero")
            return _reshaped(first, target, bool(allow_zero and allow_zero.as_int()))
        return None

    def _shape_source(self, target: Ref) -> Ref | None:
        """The value whose whole shape a shape vector is, where it is one."""
        node = target.value.producer()
        if node is None or node.op_type != "Shape" or node.domain not in ("", "ai.onnx") or node.attributes:
            return None
        return self._view.input(node, target.calls, 0)

    def _sliced(self, node: ir.Node, ref: Ref, first: Dims) -> Dims | None:
        window = self.slice_window(node, ref.calls, len(first))
        if window is None:
            return None
        dims = list(first)
        for axis, (start, end) in window.items():
            size = first[axis]
            if isinstance(size, int):
                dims[axis] = len(range(*slice(start, end).indices(size)))
            elif not (start == 0 and end >= 2**31 - 1):
                dims[axis] = None
        return tuple(dims)

    def slice_window(self, node: ir.Node, calls: tuple[ir.Node, ...], rank: int) -> dict[int, tuple[int, int]] | None:
        """axis -> (start, end) of a Slice with constant bounds and steps of 1; axes are not negative."""
        bounds = [self.constants.integers(self._view.input(node, calls, i)) for i in (1, 2)]
        if bounds[0] is None or bounds[1] is None:
            return None
        given = [self._view.input(node, calls, i) for i in (3, 4)]
        axes = tuple(range(len(bounds[0]))) if given[0] is None else self.constants.integers(given[0])
        steps = (1,) * len(bounds[0]) if given[1] is None else self.constants.integers(given[1])
        if axes is None or steps is None or any(s != 1 for s in steps):
            return None
        if not all(-rank <= a < rank for a in axes):
            return None
        return {a % rank: (s, e) for a, s, e in zip(axes, bounds[0], bounds[1], strict=False)}

    def _split(self, node: ir.Node, ref: Ref, first: Dims) -> Dims | None:
        attr = self._view.attribute(node, ref.calls, "axis")
        axis = (0 if attr is None else attr.as_int()) % len(first)
        sizes = self.split_sizes(node, ref.calls)
        index, whole = ref.value.index() or 0, first[axis]
        if sizes is not None:
            size: Dim = sizes[index] if index < len(sizes) else None
        elif isinstance(whole, int):  # equal parts, the last one smaller
            part = -(-whole // len(node.outputs))
            size = min(part, whole - part * index)
        else:
            size = None
        return (*first[:axis], size, *first[axis + 1 :])

    def split_sizes(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> tuple[int, ...] | None:
        """The constant sizes of a Split's parts; None for equal parts, or where they are known only at run time."""
        attr = self._view.attribute(node, calls, "split")
        if attr is not None:
            return tuple(attr.as_ints())
        return self.constants.integers(self._view.input(node, calls, 1))

    def attribute(self, node: ir.Node, calls: tuple[ir.Node, ...], name: str) -> ir.Attr | None:
        """A node's attribute as the view resolves it."""
        return self._view.attribute(node, calls, name)

    def axes_of(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> tuple[int, ...] | None:
        """The constant axes of a Squeeze, Unsqueeze or reduction, from its attribute or its second input."""
        attr = self._view.attribute(node, calls, "axes")
        if attr is not None:
            return tuple(attr.as_ints())
        return self.constants.integers(self._view.input(node, calls, 1))

    def _infer(self, ref: Ref) -> Info:
        if not ref.calls:
            if self._inferred is None:
                self._inferred = {}
                self._inferred = infer(self._view.model, self._view.model.graph)
            return self._inferred.get(ref.value, (None, None))
        if ref.calls not in self._bodies:
            self._bodies[ref.calls] = {}
            function = self._view.function_of(ref.calls[-1])
            if function is not None:
                self._bodies[ref.calls] = self._body(function, self._arguments(function, ref.calls))
        return self._bodies[ref.calls].get(ref.value, (None, None))

    def _body(self, function: ir.Function, arguments: dict[ir.Value, Info]) -> dict[ir.Value, Info]:
        """What is inferred in a function's body, once for calls with arguments of one kind."""
        key = (function.identifier(), tuple(arguments.items()))
        if key not in self._signatures:
            self._signatures[key] = infer(self._view.model, function.graph, arguments)
        return self._signatures[key]

    def _arguments(self, function: ir.Function, calls: tuple[ir.Node, ...]) -> dict[ir.Value, Info]:
        arguments: dict[ir.Value, Info] = {}
        for index, value in enumerate(function.inputs):
            source = self._view.input(calls[-1], calls[:-1], index)
            if source is not None:
                arguments[value] = (self.dtype(source), self.shape(source))
        return arguments


def reduction_axes(shapes: Shapes, node: ir.Node, calls: tuple[ir.Node, ...], rank: int) -> tuple[int, ...] | None:
    """The axes of a reduction, not negative and ascending; None when they are known only at run time."""
    axes = shapes.axes_of(node, calls)
    if axes is None:
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            return None
        axes = ()
    if not axes:
        noop = shapes.attribute(node, calls, "noop_with_empty_axes")
        return None if noop is not None and noop.as_int() else tuple(range(rank))
    wrapped = {a + rank if a < 0 else a for a in axes}
    return tuple(sorted(wrapped)) if all(0 <= a < rank for a in wrapped) else None


def _unsqueezed(shape: Dims, axes: tuple[int, ...]) -> Dims | None:
    rank = len(shape) + len(axes)
    wrapped = {a + rank if a < 0 else a for a in axes}
    if len(wrapped) != len(axes) or not all(0 <= a < rank for a in wrapped):
        return None
    rest = iter(shape)
    return tuple(1 if i in wrapped else next(rest) for i in range(rank))


def _squeezed(shape: Dims, axes: tuple[int, ...]) -> Dims | None:
    wrapped = {a + len(shape) if a < 0 else a for a in axes}
    if any(not 0 <= a < len(shape) or shape[a] != 1 for a in wrapped):
        return None
    return tuple(d for i, d in enumerate(shape) if i not in wrapped)


def _reshaped(first: Dims | None, target: Dims, allow_zero: bool) -> Dims:
    dims: list[Dim] = []
    for i, d in enumerate(target):
        if d == 0 and not allow_zero:
            dims.append(first[i] if first is not None and i < len(first) else None)
        else:
            dims.append(d)
    if dims.count(-1) == 1:
        dims[dims.index(-1)] = _remainder(first, [d for d in dims if d != -1])
    return tuple(dims)


def _remainder(first: Dims | None, others: list[Dim]) -> Dim:
    """The -1 of a Reshape: what is left of the input once each of the other dimensions is taken out."""
    if first is None:
        return None
    rest = list(first)
    for d in [d for d in others if isinstance(d, str)]:
        if d not in rest:
            return None
        rest.remove(d)
    symbols = [d for d in rest if not isinstance(d, int)]
    if None in others or len(symbols) > 1:
        return None
    have = math.prod(d for d in rest if isinstance(d, int))
    want = math.prod(d for d in others if isinstance(d, int))
    if symbols:
        return symbols[0] if have == want else None
    return have // want if want and have % want == 0 else None
