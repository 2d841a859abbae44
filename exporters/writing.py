"""Builders: how the norm's operators are written into torch's two exporters, through the calls that `body.emit` makes.

`op.Mul(a, b)` adds a node and returns its output. `TypedOps` writes for torch.onnx's translations and gives each value
its type and shape, since torch sets them on a translation's results only and proofs need them all; `SymbolicOps` writes
for the TorchScript exporter, which infers them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


class TypedOps:
    """Writes through an onnxscript opset; knows the operators of a norm's body, and their types and shapes.

    Args:
        opset: The onnxscript opset to write with.
    """

    def __init__(self, opset: Any) -> None:
        self._opset = opset

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        def call(*inputs: Any, **attributes: Any) -> Any:
            value = getattr(self._opset, op_type)(*inputs, **attributes)
            if op_type == "Constant":
                dtype, shape = attributes["value"].dtype, list(attributes["value"].shape)
            else:
                dtype = ir.DataType(attributes["to"]) if op_type == "Cast" else inputs[0].dtype
                shape = _shape(op_type, inputs, attributes)
            value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
            return value

        return call


def _shape(op_type: str, inputs: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
    """The output's dimensions; elementwise operators take the wider of each two, which are equal or 1."""
    dims = list(inputs[0].shape)
    if op_type == "ReduceMean":
        axes = attributes["axes"] if "axes" in attributes else _numbers(inputs[1])
        return [1 if i - len(dims) in axes else dim for i, dim in enumerate(dims)]
    if op_type == "Slice":
        [end], [axis] = _numbers(inputs[2]), _numbers(inputs[3])
        return [end if i - len(dims) == axis else dim for i, dim in enumerate(dims)]
    for value in inputs[1:]:
        other = list(value.shape)
        longest = max(len(dims), len(other))
        pairs = zip([1] * (longest - len(dims)) + dims, [1] * (longest - len(other)) + other, strict=True)
        dims = [b if a == 1 else a for a, b in pairs]
    return dims


def _numbers(value: Any) -> list[int]:
    tensor = value.producer().attributes["value"].as_tensor()
    return [int(number) for number in tensor.numpy().reshape(-1)]


class SymbolicOps:
    """Writes through the graph of a TorchScript symbolic function.

    Args:
        graph: The first argument of the symbolic function.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        def call(*inputs: Any, **attributes: Any) -> Any:
            return self._graph.op(op_type, *inputs, **dict(_torch_attribute(k, v) for k, v in attributes.items()))

        return call


def _torch_attribute(name: str, value: Any) -> tuple[str, Any]:
    """An attribute under the name that bears its kind, as TorchScript's graphs take it."""
    import torch

    if isinstance(value, ir.TensorProtocol):
        return f"{name}_t", torch.from_numpy(np.array(value.numpy()))
    return f"{name}_i", [int(v) for v in value] if isinstance(value, Sequence) else int(value)
