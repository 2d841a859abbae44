"""What follows the product with the gain and still belongs to the norm: its rounding, a bias, the result's rounding."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.claims import Claim, Claims, Gain
from rmsnorm_onnx.copies import Copies
from rmsnorm_onnx.functions import DOMAIN
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.view import Ref, View

_Use = tuple[ir.Node, tuple[ir.Node, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Tail:
    """The end of a norm.

    Attributes:
        root: The last value that belongs to it.
        gain: The gain, split into offset and weight where the spec's types can say so.
        bias: The bias before casts that lose nothing.
        product_type: What the product with the gain is rounded to before a bias.
        result_type: The root's type.
    """

    root: Ref
    gain: Gain | None
    bias: Ref | None
    product_type: str
    result_type: str

    def gain_type(self, normalized: str) -> str:
        """The spec's gain_type, so that wider(normalized_type, gain_type) is what the product is rounded to."""
        if self.gain is None:
            return self.product_type
        own = self.gain.formed_in or self.product_type
        if self.gain.offset or _says(self, dtypes.wider(normalized, own)):
            return own
        return self.product_type


def _says(tail: Tail, formed: str) -> bool:
    """Whether a product formed in a type gives the same number as the graph's.

    It does in the graph's own type; in a wider one when the result is rounded to the graph's right away; and in a half
    type that the result is rounded to, for the product of two values of one half type is exact in float32.
    """
    if formed == tail.product_type:
        return True
    if tail.bias is not None:
        return False
    if dtypes.holds(formed, tail.product_type):
        return tail.result_type == tail.product_type
    return formed == tail.result_type and not dtypes.holds(formed, "float32")


def leaves_own(inside: tuple[ir.Node, ...], now: tuple[ir.Node, ...]) -> bool:
    """Whether a chain of calls has left a function of ours: its node is the norm, whatever stands around it."""
    own = next((i for i, call in enumerate(inside) if call.domain == DOMAIN), None)
    return own is not None and now[: own + 1] != inside[: own + 1]


def sole_user(view: View, ref: Ref) -> _Use | None:
    """The one node that reads the numbers of a value which is no output, or None."""
    users = [user for user in view.users(ref) if reads_numbers(view, user, ref)]
    return users[0] if len(users) == 1 and not view.is_model_output(ref) else None


def reads_numbers(view: View, user: _Use, ref: Ref) -> bool:
    """Whether a node reads a value for more than its shape or its type."""
    node, calls = user
    return node.op_type != "Shape" and not (node.op_type == "CastLike" and view.input(node, calls, 0) != ref)


class Tails:
    """Follows products of a view to where their norms end."""

    def __init__(self, view: View, shapes: Shapes) -> None:
        self._view = view
        self._shapes = shapes
        self._copies = Copies(view, shapes)

    def follow(self, claims: Claims, claim: Claim, normalized: str, product_type: str) -> Tail | None:
        """The end of a claimed norm; None where a type is unknown.

        Args:
            claims: What is a bias of this norm.
            claim: The norm up to its product.
            normalized: The spec's normalized_type, by name.
            product_type: The type of the node that multiplies by the gain.
        """
        result_type = self._shapes.float_type(claim.root)
        if result_type is None:
            return None
        tail = Tail(claim.root, claim.gain, None, product_type, result_type)
        tip = claim.root
        for _ in range(8):
            user = sole_user(self._view, tip)
            found = None if user is None else self._next(claims, tail, tip, user, normalized)
            if found is None:
                break
            tip, tail = found
        gain = tail.gain
        if gain is not None and gain.offset:
            formed = dtypes.wider(normalized, gain.formed_in or tail.product_type)
            if not _says(tail, formed):  # the sum is then the gain: only its own type says how it is multiplied
                whole = Gain(gain.factor, 0.0, self._shapes.float_type(gain.factor), gain.factor)
                return dataclasses.replace(tail, gain=whole)
        return tail

    def _next(self, claims: Claims, tail: Tail, tip: Ref, user: _Use, normalized: str) -> tuple[Ref, Tail] | None:
        """(value to go on from, tail so far) after the only node that reads `tip`; None where the norm has ended."""
        node, calls = user
        out = Ref(node.outputs[0], calls)
        out_type = self._shapes.float_type(out)
        if leaves_own(tip.calls, calls) or out_type is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Add":
            return self._biased(claims, tail, tip, node, out, out_type)
        if node.op_type in ("Cast", "CastLike") and not dtypes.holds(out_type, tail.result_type):
            return self._rounded(tail, out, out_type, normalized)
        if self._copies.passed(node, out) == tip and dtypes.holds(out_type, tail.result_type):
            return out, tail  # changes no number; it stays outside unless something of the norm follows
        return None

    def _rounded(self, tail: Tail, out: Ref, out_type: str, normalized: str) -> tuple[Ref, Tail] | None:
        if tail.result_type != tail.product_type or not dtypes.holds(tail.result_type, out_type):
            return None  # a second rounding, of one half type to the other
        rounded = dataclasses.replace(tail, root=out, result_type=out_type)
        own = None if tail.gain is None else tail.gain.formed_in
        formed = out_type if own is None else dtypes.wider(normalized, own)
        exact = tail.gain is None or (formed == out_type and not dtypes.holds(formed, "float32"))
        if tail.bias is None and exact:  # the rounding of the product; a bias may still follow
            rounded = dataclasses.replace(rounded, product_type=out_type)
        return out, rounded

    def _biased(
        self, claims: Claims, tail: Tail, tip: Ref, node: ir.Node, out: Ref, out_type: str
    ) -> tuple[Ref, Tail] | None:
        if tail.bias is not None or tail.result_type != tail.product_type:
            return None
        others = [r for r in self._view.inputs(node, out.calls) if r is not None and r != tip]
        if len(others) != 1 or not claims.proves_bias(others[0], node):
            return None
        bias = claims.widened(others[0])
        if out_type == tail.product_type:
            return out, dataclasses.replace(tail, root=out, bias=bias)
        # A half sum formed in float32 between a Cast up and a Cast down: it rounds as one in the half type.
        user = sole_user(self._view, out)
        if user is None or user[0].op_type != "Cast" or self._shapes.float_type(bias) != tail.product_type:
            return None
        down = Ref(user[0].outputs[0], user[1])
        if self._shapes.float_type(down) != tail.product_type:
            return None
        return down, dataclasses.replace(tail, root=down, bias=bias)
