"""One node each: operators whose versions lie between opsets 11 and the newest, with inputs that show a difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

_RNG = np.random.default_rng(7)


@dataclasses.dataclass(frozen=True)
class Case:
    """A node: its operator, the opset that it is written for, its inputs (None leaves one out), its attributes.

    Inputs from `constants` on are initializers, as exporters write axes and sizes. `rank` is the first output's, where
    onnx does not infer it; `oldest` the first opset that it can be moved
    to, `newest` the last that onnxruntime has a kernel for.
    """

    op: str
    opset: int
    inputs: tuple[np.ndarray | None, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    constants: int = 99
    rank: int = 0
    oldest: int = 13
    newest: int = 99

    def __str__(self) -> str:
        first = next(i for i in self.inputs if i is not None) if self.inputs else np.zeros(0)
        told = ",".join(f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.GraphProto))
        return f"{self.op}-{self.opset}-{first.dtype}-{told}"[:80]

    def model(self, *, dynamic: bool = False) -> onnx.ModelProto:
        """The node as a model, its shapes known or not; its outputs are y0, y1 and so on."""
        names = ["" if array is None else f"x{i}" for i, array in enumerate(self.inputs)]
        node = helper.make_node(self.op, names, [f"y{i}" for i in range(self.outputs)], name="the_node")
        node.attribute.extend(helper.make_attribute(k, v) for k, v in self.attributes.items())
        graph = onnx.GraphProto(name="one", node=[node])
        for name, array, index in zip(names, self.inputs, range(99), strict=False):
            if array is None:
                continue
            if index >= self.constants:
                graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
            else:
                shape = [f"{name}_{d}" for d in range(array.ndim)] if dynamic else array.shape
                graph.input.append(helper.make_tensor_value_info(name, _type(array), shape))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        for output in inferred.graph.output:
            tensor = output.type.tensor_type
            tensor.elem_type = tensor.elem_type or _type(self.inputs[0])
            if not tensor.HasField("shape"):  # the full check wants a rank of outputs
                tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in range(self.rank))
        return inferred

    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs by name."""
        return {f"x{i}": np.asarray(a) for i, a in enumerate(self.inputs) if a is not None and i < self.constants}


def _type(array: np.ndarray) -> int:
    return TensorProto.STRING if array.dtype.kind == "O" else helper.np_dtype_to_tensor_dtype(array.dtype)


def _f(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.asarray(_RNG.standard_normal(shape), dtype=dtype)


def _p(*shape: int) -> np.ndarray:
    return np.abs(_f(*shape)) + np.float32(0.1)


def _i(*values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _same() -> Iterator[Case]:
    """Steps that only add types, between 13 and the newest."""
    x = _f(2, 3, 4)
    for name in (
        "Relu",
        "Sin",
        "Cos",
        "Tan",
        "Asinh",
        "Atan",
        "Cosh",
        "Sinh",
        "Elu",
        "HardSigmoid",
        "LeakyRelu",
        "Selu",
    ):
        yield Case(name, 18, (x,))
    for name in (
        "Softplus",
        "Softsign",
        "ThresholdedRelu",
        "Round",
        "Identity",
        "IsNaN",
        "Flatten",
        "Transpose",
        "Celu",
    ):
        yield Case(name, 18, (x,))
    for name in ("Acos", "Asin", "Atanh"):
        yield Case(name, 18, (np.tanh(x),))
    yield Case("Acosh", 18, (_p(2, 3) + 1,))
    for name in ("Add", "Sub", "Mul", "Div", "PRelu"):
        yield Case(name, 18, (x, _p(3, 1)))
    for dtype in ("float16", "float64", "int64"):
        yield Case("Add", 18, (_f(2, 3).astype(dtype), _f(3).astype(dtype)))
    yield Case("Relu", 18, (_f(3, 4, dtype="float16"),))
    yield Case("Pow", 18, (_p(2, 3), np.float32(2.5)))
    yield Case("Pow", 18, (_p(2, 3), _i(2)))
    for name in ("GreaterOrEqual", "LessOrEqual", "Equal"):
        yield Case(name, 18, (np.round(x), np.round(_f(4))))
    yield Case("Where", 18, (x > 0, x, np.float32(7)))
    yield Case("CumSum", 18, (x, np.array(1, np.int32)))
    yield Case("Cast", 18, (x * 3,), {"to": TensorProto.FLOAT16})
    yield Case("Cast", 18, (x * 3,), {"to": TensorProto.INT32})
    yield Case("Constant", 18, (), {"value": onnx.numpy_helper.from_array(x)})
    yield Case("Constant", 18, (), {"value_ints": [1, 2]})
    yield Case(
        "ConstantOfShape", 18, (_i(2, 3),), {"value": onnx.numpy_helper.from_array(np.array([5], np.float32))}, rank=2
    )
    yield Case("IsInf", 18, (np.array([1, np.inf, -np.inf], np.float32),))
    for name in ("Squeeze", "Unsqueeze"):
        yield Case(name, 18, (_f(1, 3, 1), _i(0)), constants=1)
    yield Case("Size", 18, (x,))
    yield Case("ScatterElements", 18, (x, _i([[1]]), np.ones((1, 1, 1), np.float32)), {"axis": 1})
    yield Case("ScatterElements", 18, (x, _i([[1]]), np.ones((1, 1, 1), np.float32)), {"reduction": "none"})
    yield Case("ScatterND", 18, (_f(4, 3), _i([1], [3]), _f(2, 3)))
    yield Case("Pad", 18, (_f(2, 3), _i(0, 1, 1, 0), np.float32(2)), {"mode": "constant"}, constants=1)
    yield Case("Pad", 18, (_f(4, 5), _i(0, 1, 1, 0)), {"mode": "reflect"}, constants=1)
    yield Case("OneHot", 18, (_i(1, 2), np.array(4, np.int64), np.array([0, 1], np.float32)))
    yield Case("TopK", 18, (x, _i(2)), {"axis": 1}, outputs=2)
    yield Case("Compress", 18, (_f(4, 2), np.array([True, False, True, True])), {"axis": 0})
    yield Case("Range", 18, (np.float32(0), np.float32(2), np.float32(0.3)))
    yield Case("Range", 18, (np.array(3, np.int64), np.array(-2, np.int64), np.array(-2, np.int64)))
    yield Case("Mod", 18, (np.array([-7, 7, 5]), np.array([3, -3, 5])))
    yield Case("Mod", 18, (_f(5) * 9, _f(5)), {"fmod": 1})
    yield Case("Einsum", 18, (_f(2, 3), _f(3, 4)), {"equation": "ij,jk->ik"})
    yield Case("Unique", 18, (_i(3, 1, 3, 2),), outputs=4)
    yield Case("ReverseSequence", 18, (_f(4, 2), _i(3, 4)))
    yield Case("EyeLike", 18, (_f(3, 4),), {"k": 1})
    yield Case("BitShift", 18, (np.array([1, 2], np.uint8), np.array([3, 1], np.uint8)), {"direction": "LEFT"})
    yield Case("BatchNormalization", 18, (_f(2, 3, 4), _f(3), _f(3), _f(3), _p(3)))
    yield Case("Dropout", 18, (x,))


def _nets() -> Iterator[Case]:
    """Operators of convolutional and recurrent networks, and quantisation."""
    image = _f(1, 4, 6, 6)
    yield Case("Conv", 18, (image, _f(2, 4, 3, 3)), {"pads": [1, 1, 1, 1]}, rank=4)
    yield Case("ConvTranspose", 18, (image, _f(4, 2, 3, 3)), rank=4)
    yield Case("MaxPool", 18, (image,), {"kernel_shape": [2, 2]}, outputs=2)
    yield Case("AveragePool", 18, (image,), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]})
    yield Case("LpPool", 18, (image,), {"kernel_shape": [2, 2]})
    for name in ("GlobalAveragePool", "GlobalMaxPool"):
        yield Case(name, 18, (image,))
    yield Case("InstanceNormalization", 18, (image, _f(4), _f(4)))
    yield Case("LpNormalization", 18, (image,), {"axis": 1})
    yield Case("DepthToSpace", 18, (image,), {"blocksize": 2})
    yield Case("SpaceToDepth", 18, (image,), {"blocksize": 2})
    yield Case("Resize", 18, (image, None, np.array([1, 1, 2, 2], np.float32)), {"mode": "linear"}, constants=1)
    boxes = np.array([[0.5, 0.5, 4.2, 4.7]], np.float32)
    attributes = {"output_height": 2, "output_width": 2, "coordinate_transformation_mode": "output_half_pixel"}
    yield Case("RoiAlign", 18, (image, boxes, _i(0)), attributes, newest=21)
    yield Case("GRU", 18, (_f(3, 2, 4), _f(1, 15, 4), _f(1, 15, 5)), {"hidden_size": 5}, outputs=2)
    yield Case("LSTM", 18, (_f(3, 2, 4), _f(1, 20, 4), _f(1, 20, 5)), {"hidden_size": 5}, outputs=3)
    yield Case("RNN", 18, (_f(3, 2, 4), _f(1, 5, 4), _f(1, 5, 5)), {"hidden_size": 5}, outputs=2)
    zero, scale = np.array([3, 5, 7], np.uint8), _p(3)
    yield Case("QuantizeLinear", 18, (_f(2, 3), scale, zero), {"axis": 1}, newest=24)
    yield Case("QuantizeLinear", 21, (_f(2, 3), np.array(0.1, np.float32), np.array(9, np.uint8)), newest=24)
    yield Case(
        "DequantizeLinear", 18, (np.arange(6, dtype=np.uint8).reshape(2, 3), scale, zero), {"axis": 1}, newest=24
    )


def _adapted() -> Iterator[Case]:
    """Steps with an adapter."""
    x = _p(2, 3, 4)
    for name in ("Mean", "Sum", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"):
        yield Case(f"Reduce{name}", 18, (x, _i(0, -1)), {"keepdims": 0}, constants=1)
        yield Case(f"Reduce{name}", 18, (x,))
        yield Case(f"Reduce{name}", 12, (x,), {"axes": [1]})
    yield Case("ReduceMax", 18, (x, _i()), {"keepdims": 1}, constants=1)
    for start, end in ((0, 2), (1, -1), (-2, 99), (2, 1), (-9, 3)):
        yield Case("Shape", 18, (x,), {"start": start, "end": end})
    yield Case("Shape", 18, (x,), {"start": 1})
    yield Case("Split", 18, (_f(2, 6),), {"num_outputs": 3, "axis": 1}, outputs=3)
    yield Case("Split", 18, (_f(7, 2),), {"num_outputs": 3}, outputs=3)
    yield Case("Split", 18, (_f(7, 2), _i(3, 4)), outputs=2, constants=1)
    yield Case("Split", 13, (_f(2, 6),), {"axis": -1}, outputs=2)
    yield Case("Reshape", 18, (x, _i(4, -1)), {"allowzero": 1}, constants=1)
    yield Case("Reshape", 18, (x, _i(4, 6)), {"allowzero": 1}, rank=2)
    yield Case("Reshape", 18, (_f(0, 3, 4), _i(3, 0, 2)), {"allowzero": 1}, rank=3)
    yield Case("Reshape", 18, (_f(0, 3, 4), _i(3, 0, 2)), {"allowzero": 1}, constants=1)
    yield Case("Reshape", 18, (x, _i(0, 12)), {"allowzero": 0}, rank=2)
    yield Case("Pad", 18, (x, _i(1, 0, 2, 1), np.array(9, np.float32), _i(-1, 0)), constants=3)
    yield Case("Pad", 18, (x, _i(1, 2), None, _i(1)), {"mode": "edge"}, constants=3)
    for upper in (0, 1):
        odd = x.copy()
        odd[0, 1, 1] = odd[0, 2, 0] = odd[0, 0, 3] = np.nan
        yield Case("Trilu", 18, (odd,), {"upper": upper})
        yield Case("Trilu", 18, (odd, np.array(-1, np.int64)), {"upper": upper})
    yield Case("CastLike", 18, (x, np.array([1], np.float16)))
    yield Case("CastLike", 18, (x, np.array([1], np.int32)))


def _older() -> Iterator[Case]:
    """From opset 11 or 12 up, where defaults and inputs changed."""
    x = _f(2, 3, 4)
    for name in ("Softmax", "LogSoftmax", "Hardmax"):
        yield Case(name, 12, (x,))
        yield Case(name, 12, (x,), {"axis": 2})
    yield Case("Split", 12, (_f(2, 6),), {"axis": 1, "split": [2, 4]}, outputs=2)
    yield Case("Split", 12, (_f(2, 6),), {"axis": 1}, outputs=2)
    yield Case("Squeeze", 12, (_f(1, 3, 1),), {"axes": [0]})
    yield Case("Squeeze", 12, (_f(1, 3, 1),), rank=1)
    yield Case("Unsqueeze", 12, (x,), {"axes": [0, -1]})
    yield Case("ReduceSum", 12, (x,), {"axes": [0, 2], "keepdims": 0})
    yield Case("Clip", 11, (x, np.float32(-0.5), np.float32(0.5)))
    yield Case("Pow", 11, (_p(3), np.float32([2, 3, 0.5])))
    yield Case("BatchNormalization", 12, (x, _f(3), _f(3), _f(3), _p(3)))
    yield Case("GridSample", 18, (_f(1, 2, 4, 4), np.tanh(_f(1, 3, 3, 2))), {"mode": "bilinear"}, oldest=16)
    attributes = {"output_height": 2, "output_width": 2}
    boxes = np.array([[0.5, 0.5, 4.2, 4.7]], np.float32)
    yield Case("RoiAlign", 12, (_f(1, 2, 6, 6), boxes, _i(0)), attributes, newest=21)
    yield Case("Dropout", 11, (x,), {"ratio": 0.3})
    names = "Abs Ceil Erf Exp Floor Log Neg Reciprocal Sigmoid Sign Sqrt Tanh NonZero"
    for name in names.split():
        yield Case(name, 12, (_p(2, 3, 4, 5),))
    yield Case("MeanVarianceNormalization", 12, (_p(2, 3, 4, 5),), {"axes": [0, 2, 3]})
    for name in ("Max", "Min", "Mean", "Sum", "Greater", "Less"):
        yield Case(name, 12, (x, _f(3, 4)))
    yield Case("MatMul", 12, (_f(2, 3), _f(3, 4)))
    yield Case("Gemm", 12, (_f(2, 3), _f(3, 4), _f(4)), {"alpha": 0.5})
    yield Case("Gather", 12, (x, _i(1, 0)), {"axis": 1})
    yield Case("GatherElements", 12, (_f(3, 3), _i([1, 0, 2])), {"axis": 0})
    yield Case("GatherND", 12, (x, _i([0, 1], [1, 2])), rank=2)
    yield Case("Concat", 12, (x, x), {"axis": -1})
    yield Case("Slice", 12, (x, _i(1), _i(3), _i(2)))
    yield Case("Tile", 12, (_f(2, 3), _i(2, 1)))
    yield Case("Expand", 12, (_f(3, 1), _i(2, 3, 4)), rank=3)
    yield Case("ArgMax", 11, (x,), {"axis": 1})
    yield Case("LRN", 12, (_f(1, 5, 3, 3),), {"size": 3})


def _defined() -> Iterator[Case]:
    """Operators that ONNX defines by a body of older ones."""
    x = _f(2, 3, 4)
    yield Case("Gelu", 20, (x,))
    yield Case("Gelu", 20, (x,), {"approximate": "tanh"})
    yield Case("HardSwish", 18, (x,))
    yield Case("Mish", 18, (x,))
    yield Case("Swish", 24, (x,), {"alpha": 1.5})
    yield Case("GroupNormalization", 21, (_f(2, 4, 3), _f(4), _f(4)), {"num_groups": 2}, rank=3)
    yield Case("RotaryEmbedding", 23, (_f(2, 4, 3, 8), _f(2, 3, 4), _f(2, 3, 4)))
    heads = (_f(2, 4, 3, 8), _f(2, 2, 3, 8), _f(2, 2, 3, 8))
    yield Case("Attention", 23, heads, {"is_causal": 1})
    yield Case("Attention", 24, (*heads, _f(3, 3)))
    yield Case("RMSNormalization", 23, (x, _f(4)), {"axis": 1, "epsilon": 1e-3})


SAME: tuple[Case, ...] = (*_same(), *_nets())
ADAPTED: tuple[Case, ...] = tuple(_adapted())
OLDER: tuple[Case, ...] = tuple(_older())
DEFINED: tuple[Case, ...] = tuple(_defined())
