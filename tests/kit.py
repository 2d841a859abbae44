"""What the recogniser's tests share: models as text, a terse graph builder, and a formula of its own."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

NUMPY = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "bool": np.dtype(np.bool_),
}
ONNX = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
}
NORM = """
m (float[N,4] x) => (float[N,4] y)
<float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}, float[4] w = {1.0, 0.5, 2.0, -1.0}>
{
 sq = Pow (x, two)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 n = Div (x, rms)
 y = Mul (n, w)
}"""
LAST = np.iinfo(np.int64).max


def ir_version(opset: int) -> int:
    """The IR version an exporter would write for this opset, at least 8, where functions begin."""
    return max(8, helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))


def parse(
    text: str, *, opset: int = 18, check: bool = True, functions: str = "", **initializers: np.ndarray
) -> ir.Model:
    """A model from the text of its graph; keyword arrays become initializers.

    The text is what stands after the header: `m (float[N,4] x) => (float[N,4] y) { ... }`.
    """
    return ir.from_proto(proto(text, opset=opset, check=check, functions=functions, **initializers))


def proto(
    text: str, *, opset: int = 18, check: bool = True, functions: str = "", **initializers: np.ndarray
) -> onnx.ModelProto:
    """As `parse`, as a ModelProto."""
    domains = ', "local": 1' if functions else ""
    header = f'<ir_version: {ir_version(opset)}, opset_import: ["": {opset}{domains}]>'
    model = onnx.parser.parse_model("\n".join([header, textwrap.dedent(text), textwrap.dedent(functions)]))
    model.graph.initializer.extend(tensor(name, array) for name, array in initializers.items())
    if check:
        onnx.checker.check_model(model, full_check=True)
    return model


def edit(text: str, *changes: str) -> str:
    """A text with changes made, given as old and new in turn; each old one must be there."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, f"{old!r} is not in {text}"
        text = text.replace(old, new)
    return text


_CONSTANT = re.compile(r"float(\[[\d,]*\])? (\w+) = \{([^}]*)\}(, )?")


def parse_half(text: str, dtype: str = "float16", **kw: Any) -> ir.Model:
    """As `parse`, with every float type and constant of the text in another type."""
    held = {}
    for dims, name, numbers, _ in _CONSTANT.findall(text):
        shape = [int(n) for n in dims.strip("[]").split(",") if n]
        held[name] = np.asarray([float(n) for n in numbers.split(",")]).reshape(shape).astype(NUMPY[dtype])
    return parse(_CONSTANT.sub("", text).replace(", >", ">").replace("float", dtype), **kw, **held)


def tensor(name: str, array: Any) -> onnx.TensorProto:
    """A TensorProto of a numpy or ml_dtypes array."""
    return ir.to_proto(ir.tensor(np.asarray(array), name=name))


def formula(spec: Any, x: np.ndarray, gain: np.ndarray | None = None, bias: np.ndarray | None = None) -> np.ndarray:
    """An RMSNorm in float64 without any rounding, written from the definition."""
    x = np.asarray(x).astype(np.float64)
    part = x[..., : spec.leading] if spec.leading else x
    mean = np.mean(part * part, axis=tuple(spec.axes), keepdims=True)
    if spec.epsilon_placement == "inside":
        root = np.sqrt(mean + spec.epsilon)
    elif spec.epsilon_placement == "outside":
        root = np.sqrt(mean) + spec.epsilon
    else:
        root = np.maximum(np.sqrt(mean), spec.epsilon)
    y = x / root
    if gain is not None:
        y = y * (spec.gain_offset + np.asarray(gain).astype(np.float64))
    return y if bias is None else y + np.asarray(bias).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class V:
    """A value under construction: its name, type and shape (numbers and symbols)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)


def broadcast(*shapes: Sequence[int | str]) -> tuple[int | str, ...]:
    """The shape that shapes broadcast to, symbols being sizes other than 1."""
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in column if n != 1), 1) for column in zip(*padded, strict=True))


class Graph:
    """Collects the nodes of one scope: `y = g.op("Mul", a, b)`; types and shapes are carried along.

    With `functions`, every operator becomes a call of a local function of its own, as torchlib writes models.
    """

    def __init__(self, opset: int, parent: Graph | None = None, *, constants: bool = False) -> None:
        self.opset = opset
        self.parent = parent
        self.constants = constants  # a function body has no initializers
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[V] = []
        self.per_operator = parent.per_operator if parent else False
        self.functions: list[onnx.FunctionProto] = parent.functions if parent else []
        self._counter: list[int] = parent._counter if parent else [0]

    def name(self, hint: str) -> str:
        self._counter[0] += 1
        return f"{hint.lower()}_{self._counter[0]}"

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> V:
        value = V(name, dtype, tuple(shape))
        self.inputs.append(value)
        return value

    def constant(self, array: Any, dtype: str, *, how: str = "initializer", name: str | None = None) -> V:
        """A constant, as an `initializer`, a Constant `node`, or a node with a `float` attribute."""
        name = name or self.name("c")
        data = np.asarray(array).astype(NUMPY[dtype])
        value = V(name, dtype, data.shape)
        if how == "initializer" and not self.constants:
            self.initializers.append(tensor(name, data))
        elif how == "float":
            self.nodes.append(helper.make_node("Constant", [], [name], value_float=float(data)))
        else:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor("", data)))
        return value

    def ints(self, *numbers: int, how: str = "initializer") -> V:
        return self.constant(np.asarray(numbers, np.int64), "int64", how=how)

    def op(
        self,
        op_type: str,
        *inputs: V | None,
        shape: Sequence[int | str] | None = None,
        dtype: str | None = None,
        name: str | None = None,
        unused: Sequence[str] = (),
        **attributes: Any,
    ) -> V:
        """One node, of the first input's type and the broadcast shape; `unused` are further outputs."""
        present = [v for v in inputs if v is not None]
        out = V(
            name or self.name(op_type),
            dtype or present[0].dtype,
            tuple(shape if shape is not None else broadcast(*(v.shape for v in present))),
        )
        names = [v.name if v is not None else "" for v in inputs]
        if self.per_operator and op_type not in ("Constant", "Shape"):
            from library import operator_function

            node = operator_function(self, op_type, names, [out.name, *unused], attributes)
        else:
            node = helper.make_node(op_type, names, [out.name, *unused], **attributes)
        node.name = f"n_{out.name}"
        self.nodes.append(node)
        return out

    def cast(self, x: V, dtype: str) -> V:
        return self.op("Cast", x, dtype=dtype, to=ONNX[dtype])

    def graph(self, outputs: Sequence[V], name: str = "graph") -> onnx.GraphProto:
        info = [
            [helper.make_tensor_value_info(v.name, ONNX[v.dtype], v.shape) for v in vs] for vs in (self.inputs, outputs)
        ]
        return helper.make_graph(self.nodes, name, info[0], info[1], self.initializers)

    def model(self, outputs: Sequence[V], domains: Sequence[str] = ()) -> onnx.ModelProto:
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in domains)]
        return helper.make_model(
            self.graph(outputs), opset_imports=opsets, functions=self.functions, ir_version=ir_version(self.opset)
        )


def model_bytes(model: ir.Model) -> bytes:
    """A model's bytes, the same for the same model."""
    return ir.to_proto(model).SerializeToString(deterministic=True)
