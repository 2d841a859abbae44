"""Nodes that are a norm by their operator: read by their forms, or named as what they are."""

from __future__ import annotations

import onnx_ir as ir

from rmsnorm_onnx.forms import FORMS, Reading
from rmsnorm_onnx.functions import DOMAIN
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import DeclineCode, Declined, node_name
from rmsnorm_onnx.view import Ref, View

_OTHER_NORMS = {
    "LayerNormalization": (DeclineCode.LAYER_NORM, "is LayerNorm, which subtracts the mean"),
    "SkipLayerNormalization": (DeclineCode.LAYER_NORM, "is LayerNorm after a residual, which subtracts the mean"),
    "EmbedLayerNormalization": (DeclineCode.LAYER_NORM, "is LayerNorm of an embedding, which subtracts the mean"),
    "GroupNormalization": (DeclineCode.OTHER_NORM, "is GroupNorm, which subtracts each group's mean"),
    "GroupNorm": (DeclineCode.OTHER_NORM, "is GroupNorm, which subtracts each group's mean"),
    "InstanceNormalization": (DeclineCode.OTHER_NORM, "is InstanceNorm, which subtracts each channel's mean"),
}


class _Types:
    """The types and shapes of values in one chain of calls, as the forms ask for them."""

    def __init__(self, view: View, shapes: Shapes, calls: tuple[ir.Node, ...]) -> None:
        self._view, self._shapes, self._calls = view, shapes, calls

    def dtype(self, value: ir.Value) -> str | None:
        ref = self._view.resolve(Ref(value, self._calls))
        return None if ref is None else self._shapes.float_type(ref)

    def shape(self, value: ir.Value) -> Dims | None:
        ref = self._view.resolve(Ref(value, self._calls))
        return None if ref is None else self._shapes.shape(ref)


class Native:
    """Reads single nodes."""

    def __init__(self, view: View, shapes: Shapes) -> None:
        self._view = view
        self._shapes = shapes
        self._readers = [form.read for form in FORMS.values() if hasattr(form, "read")]

    def read(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> Reading | Declined | None:
        """What a node is by its operator alone; None when its operator is no norm."""
        if node.op_type in _OTHER_NORMS and node.domain in ("", "ai.onnx", "com.microsoft"):
            code, what = _OTHER_NORMS[node.op_type]
            return Declined(code, f"{node_name(node)} {what}", node)
        if "Norm" not in node.op_type:
            return None
        types = _Types(self._view, self._shapes, calls)
        for reader in self._readers:
            found: Reading | Declined | None = reader(node, types)
            if found is not None:
                return found
        if node.domain == DOMAIN and self._view.function_of(node) is None:
            reason = f"the function of {node_name(node)} is not in the file, so that what it computes is unknown"
            return Declined(DeclineCode.INVALID, reason, node)
        return None
