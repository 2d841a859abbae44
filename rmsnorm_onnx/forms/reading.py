"""What the forms share: how a native node is read, and how a site's inputs are written."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import onnx_ir as ir

from rmsnorm_onnx.body import Body
from rmsnorm_onnx.constants import stored
from rmsnorm_onnx.inference import Dims, declared
from rmsnorm_onnx.site import DeclineCode, Declined, Match
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.view import onnx_op
from rmsnorm_onnx.writer import Writer, like


class TypeView(Protocol):
    """What is known of the types and shapes of a graph's values."""

    def dtype(self, value: ir.Value) -> str | None:
        """The value's float type by name; None for another type or an unknown one."""

    def shape(self, value: ir.Value) -> tuple[int | str | None, ...] | None:
        """The value's dimensions; None for an unknown rank."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The meaning of a native node.

    Attributes:
        spec: Its mathematics.
        x: The value that is normalised, before a residual is added.
        gain: The gain; None without one.
        bias: The bias; None without one.
        residual: The value that the node adds to x first; None without one.
        notes: What a reader should know, each one sentence.
        rounding_changes: Roundings of the node that the spec cannot say, each one sentence.
    """

    spec: RMSNormSpec
    x: ir.Value
    gain: ir.Value | None = None
    bias: ir.Value | None = None
    residual: ir.Value | None = None
    notes: tuple[str, ...] = ()
    rounding_changes: tuple[str, ...] = ()


class Form(Protocol):
    """One way to write a norm in ONNX; each is a module."""

    NAME: str

    def refusal(self, match: Match, opset: int) -> str | None:
        """Why this form cannot write a site exactly, in one sentence; None when it can."""

    def rounding_change(self, match: Match) -> str | None:
        """A rounding to a narrower type that this form would move, add or remove, in one sentence; else None."""

    def write(self, match: Match, writer: Writer) -> ir.Value:
        """Writes a site that it has no refusal for and returns the new result, of the output's type and shape."""


class Unreadable(Exception):
    """A native node that its own definition does not allow, or that cannot be read from what is known.

    Args:
        reason: One sentence.
        code: The kind of reason.
    """

    def __init__(self, reason: str, code: DeclineCode = DeclineCode.INVALID) -> None:
        """Holds the reason."""
        super().__init__(reason)
        self.code = code

    def declined(self, node: ir.Node) -> Declined:
        """The reason as a site that was declined."""
        return Declined(self.code, f"{node.op_type}: {self}", node)


def attribute(node: ir.Node, name: str, kind: ir.AttributeType, default: Any = None) -> Any:
    """The value of an attribute of a native node.

    Raises:
        Unreadable: it is absent without a default, of another type, or refers to the enclosing function's.
    """
    found = node.attributes.get(name)
    if found is None:
        if default is None:
            raise Unreadable(f"the attribute {name} is missing")
        return default
    if found.type != kind:
        raise Unreadable(f"the attribute {name} is {found.type.name}, and it must be {kind.name}")
    if found.is_ref():
        raise Unreadable(f"the attribute {name} is set by the callers of the function around it", DeclineCode.EPSILON)
    return found.value


def value_input(node: ir.Node, index: int, name: str) -> ir.Value:
    """An input that must be there."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise Unreadable(f"the input {name} is missing")
    return value


def float_type(value: ir.Value, types: TypeView, name: str) -> str:
    """The float type of an input."""
    dtype = types.dtype(value)
    if dtype is None:
        raise Unreadable(f"the type of {name} is unknown, or no float type", DeclineCode.TYPE)
    return dtype


def body_of(match: Match, opset: int, *, gain_attribute: bool = False) -> Body:
    """What a site's body depends on."""
    return Body.of(
        match.spec,
        x_type=match.x_type,
        gain_type=match.gain_type,
        bias_type=match.bias_type,
        opset=opset,
        gain_attribute=gain_attribute,
        scalar_gain=known_dims(match.gain, match.gain_dims) == (),
    )


def gain_input(match: Match) -> ir.Value | None:
    """The gain, also where it is a tensor attribute of the node: then a loose value, which `Writer.op` attaches."""
    if match.gain is None and match.spec.has_gain and "gain" in match.node.attributes:
        return ir.val("gain", const_value=attribute(match.node, "gain", ir.AttributeType.TENSOR))
    return match.gain


def constant_gain(match: Match) -> ir.TensorProtocol | None:
    """The gain's numbers, where they are a constant that nothing can override; reads the weight."""
    gain = gain_input(match)
    if gain is None or gain.is_graph_input():
        return None
    node = gain.producer()
    held = stored(node) if node is not None and onnx_op(node) == "Constant" else gain.const_value
    return None if held is None else ir.tensor(held.numpy(), dtype=held.dtype)


def norm_input(match: Match, writer: Writer) -> ir.Value:
    """x, with its residual added where the site has one."""
    if match.residual is None:
        return match.x
    writer.residual_sum = like(writer.op("Add", match.x, match.residual), match.x, match.x_type)
    return writer.residual_sum


def result(match: Match, value: ir.Value) -> ir.Value:
    """The new result with the old one's type and shape."""
    return like(value, match.output, match.spec.resolve(match.x_type).result_type)


def known_dims(value: ir.Value | None, proven: Dims | None) -> Dims | None:
    """The dimensions of what a site reads: proven, else declared or stored; None where they are unknown."""
    if proven is not None or value is None:
        return proven
    if value.shape is not None:
        return declared(value)
    node = value.producer()
    tensor = stored(node) if node is not None and onnx_op(node) == "Constant" else value.const_value
    return None if tensor is None else tuple(tensor.shape.numpy())
