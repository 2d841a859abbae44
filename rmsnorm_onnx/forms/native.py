"""What the two native operators, RMSNormalization and SimplifiedLayerNormalization, have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.body import Body, arithmetic, cast, weight
from rmsnorm_onnx.body import refusal as body_refusal
from rmsnorm_onnx.constants import stored
from rmsnorm_onnx.forms.reading import Unreadable, attribute, constant_gain
from rmsnorm_onnx.site import DeclineCode, Match
from rmsnorm_onnx.view import onnx_op
from rmsnorm_onnx.writer import Writer

Shape = tuple[int | str | None, ...]

_STASH_TYPES = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


def refusal(match: Match, opset: int, operator: str) -> str | None:
    """Why neither operator says what the site's spec says, in one sentence; None when both do."""
    reason = body_refusal(match.spec, match.x_type, opset)
    if reason is not None:
        return reason
    spec = match.spec.canonical(match.x_type)
    if spec.axes[-1] != -1:
        return f"{operator} normalises trailing axes only, and this norm is over axis {spec.axes[0]} alone"
    if spec.leading is not None:
        return f"{operator} takes the mean over whole rows, and this norm over their first {spec.leading} elements"
    if spec.epsilon_placement != "inside":
        return f"{operator} adds epsilon inside the root, and this norm has it {spec.epsilon_placement}"
    if spec.factor_type != spec.statistic_type:
        return f"{operator} does not round 1 / rms, and this norm rounds it to {spec.factor_type}"
    if spec.statistic_type == "float64" and float(np.float32(spec.epsilon)) != spec.epsilon:
        return f"{operator} holds epsilon as float32, and this norm is in float64 with {spec.epsilon!r}"
    return None


def attributes(match: Match) -> dict[str, Any]:
    """The attributes of the node, each written even where it is the default."""
    spec = match.spec.resolve(match.x_type)
    stash_type = int(dtypes.ir_dtype(spec.statistic_type))
    return {"axis": spec.axes[0], "epsilon": spec.epsilon, "stash_type": stash_type}


def scale_input(match: Match, writer: Writer, body: Body, gain: ir.Value, dtype: str) -> ir.Value:
    """offset + gain, formed in gain_type, as the scale of a node that has no offset: in the node's type.

    Where the gain is a constant so is the scale, with the roundings that the operators would make.
    """
    spec = body.spec
    held = constant_gain(match) if spec.gain_offset else None
    if held is None:
        return cast(writer.ops, weight(writer.ops, body, gain), spec.gain_type, dtype)
    formed, at = dtypes.numpy_dtype(spec.gain_type), dtypes.numpy_dtype(arithmetic(spec.gain_type))
    with np.errstate(over="ignore"):  # a sum beyond the type is infinite, as the operators would make it
        total = held.numpy().astype(formed).astype(at) + np.asarray(spec.gain_offset, at)
        return writer.constant(total.astype(formed), dtype)


def read_axes(node: ir.Node, shape: Shape | None) -> tuple[int, ...]:
    """The normalised axes that `axis` names: it and all after it; -1 by default."""
    axis = int(attribute(node, "axis", ir.AttributeType.INT, -1))
    if shape is None and axis >= 0:
        raise Unreadable(f"axis {axis} counts from the front, and the rank of x is unknown", DeclineCode.SHAPE_UNKNOWN)
    rank = len(shape) if shape is not None else -axis
    if not -rank <= axis < rank:
        raise Unreadable(f"axis {axis} is outside x, which has rank {rank}")
    return tuple(range(axis if axis < 0 else axis - rank, 0))


def read_epsilon(node: ir.Node, default: float) -> float:
    """Epsilon as the node holds it."""
    epsilon = float(attribute(node, "epsilon", ir.AttributeType.FLOAT, float(np.float32(default))))
    if not (np.isfinite(epsilon) and epsilon >= 0):
        raise Unreadable(f"epsilon is {epsilon!r}; it must be finite and not negative", DeclineCode.EPSILON)
    return epsilon


def read_stash_type(node: ir.Node) -> str:
    """The float type that stash_type names; float32 by default."""
    number = int(attribute(node, "stash_type", ir.AttributeType.INT, 1))
    if number not in _STASH_TYPES:
        raise Unreadable(f"stash_type {number} is no float type that a statistic is computed in")
    return _STASH_TYPES[number]


def check_scale(shape: Shape | None, x_shape: Shape | None, normalized: int, name: str) -> None:
    """Raises unless the scale provably broadcasts to x: never of higher rank, each dimension 1 or x's."""
    if shape is None:
        raise Unreadable(f"the shape of the {name} is unknown: infer shapes first", DeclineCode.SHAPE_UNKNOWN)
    if x_shape is None:
        if len(shape) > normalized:
            raise Unreadable("the shape of x is unknown: infer shapes first", DeclineCode.SHAPE_UNKNOWN)
        return
    if len(shape) > len(x_shape):
        raise Unreadable(f"the {name} has rank {len(shape)}, more than x's {len(x_shape)}")
    for theirs, ours in zip(reversed(shape), reversed(x_shape), strict=False):
        if isinstance(theirs, int) and isinstance(ours, int) and theirs not in (1, ours):
            raise Unreadable(f"the {name}'s shape {list(shape)} does not broadcast to x's {list(x_shape)}")


def is_one(scale: ir.Value) -> bool:
    """Whether a scale is 1 everywhere, as it is written for norms without a gain; reads no other weight.

    A scalar constant, or one of any shape that is filled with it: torch writes ConstantOfShape or Expand.
    """
    node = scale.producer()
    kind = onnx_op(node)
    if node is not None and kind in ("Cast", "Identity", "Expand") and node.inputs[0] is not None:
        return is_one(node.inputs[0])
    if node is not None and kind == "ConstantOfShape":
        fill = node.attributes.get("value")
        return fill is not None and not fill.is_ref() and bool(np.all(fill.as_tensor().numpy() == 1))
    if scale.is_graph_input() or scale.shape is None or scale.shape.rank() > 1:
        return False
    if scale.shape.rank() == 1 and scale.shape[0] != 1:
        return False
    tensor = stored(node) if kind == "Constant" and node is not None else scale.const_value
    return tensor is not None and bool(np.all(tensor.numpy() == 1))


def gain_type_name(x_type: str, scale_type: str) -> str:
    """The scale's type as the spec says it."""
    return "x" if scale_type == x_type else scale_type
