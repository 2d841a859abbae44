"""What a value is a copy of, or the leading part of: the operators that change no number."""

from __future__ import annotations

import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.algebra import proves_fit, takes_all
from rmsnorm_onnx.dims import same_shape
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.view import Ref, View


class Copies:
    """Looks through operators that change no number."""

    def __init__(self, view: View, shapes: Shapes) -> None:
        self._view = view
        self._shapes = shapes

    def passed(self, node: ir.Node, ref: Ref) -> Ref | None:
        """The input of an operator that changes no number: Identity, a float Cast, a no-op Reshape, Slice, Expand."""
        source = self._view.input(node, ref.calls, 0)
        if source is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type in ("Cast", "CastLike"):
            floats = self._shapes.float_type(source) is not None and self._shapes.float_type(ref) is not None
            return source if floats else None
        if node.op_type == "Identity":
            return source
        if node.op_type == "Mul":
            return self.times_one(node, ref)
        if node.op_type == "Slice":
            return source if takes_all(self._view, self._shapes, node, ref) else None
        if node.op_type in ("Reshape", "Expand"):
            same = same_shape(self._shapes.shape(source), self._shapes.shape(ref))
            return source if same else None
        return None

    def times_one(self, node: ir.Node, ref: Ref) -> Ref | None:
        """What a multiplication by 1 leaves alone, as torchlib's alpha does."""
        first, second = self._view.input(node, ref.calls, 0), self._view.input(node, ref.calls, 1)
        for value, one in ((first, second), (second, first)):
            number = self._shapes.constants.scalar(one)
            if value is not None and one is not None and number is not None and number.value == 1.0:
                shape, other = self._shapes.shape(value), self._shapes.shape(one)
                return value if other == () or (shape is not None and proves_fit(other, shape)) else None
        return None

    def peel(self, ref: Ref, *, even: bool = False) -> Ref:
        """The value before every operator that loses nothing (and before Abs and Neg, under an even power)."""
        for _ in range(16):
            node = ref.value.producer()
            if node is None:
                return ref
            source = self.passed(node, ref)
            if source is None and even and node.op_type in ("Abs", "Neg") and node.domain == "":
                source = self._view.input(node, ref.calls, 0)
            if source is None or not self._lossless(source, ref):
                return ref
            ref = source
        return ref

    def _lossless(self, source: Ref, result: Ref) -> bool:
        before, after = self._shapes.float_type(source), self._shapes.float_type(result)
        return before == after or (before is not None and after is not None and dtypes.holds(after, before))

    def leading_part(self, ref: Ref) -> tuple[Ref, int] | None:
        """(whole value, count) where ref is the first `count` elements of its last axis, by Slice or Split."""
        node = ref.value.producer()
        shape = self._shapes.shape(ref)
        if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in ("Slice", "Split", "SequenceAt"):
            return None
        if node.op_type == "SequenceAt":
            return self._first_of_sequence(node, ref)
        source = self._view.input(node, ref.calls, 0)
        whole = None if source is None else self._shapes.shape(source)
        if source is None or whole is None:
            return None
        if node.op_type == "Split":
            axis = integer(self._view, node, ref.calls, "axis", 0) % len(whole)
            count = None if shape is None else shape[-1]
            first = axis == len(whole) - 1 and ref.value.index() == 0
            return (source, count) if first and isinstance(count, int) and count > 0 else None
        window = self._shapes.slice_window(node, ref.calls, len(whole))
        if window is None or set(window) != {len(whole) - 1}:
            return None
        start, end = window[len(whole) - 1]
        size = whole[-1]
        if start != 0 or (end < 0 and not isinstance(size, int)):
            return None
        if isinstance(size, int):
            end = len(range(*slice(start, end).indices(size)))
        return (source, end) if 0 < end < 2**31 - 1 and size != end else None

    def _first_of_sequence(self, node: ir.Node, ref: Ref) -> tuple[Ref, int] | None:
        """The same of SequenceAt(SplitToSequence(whole, sizes), 0), which is how torch.split is exported."""
        sequence = self._view.input(node, ref.calls, 0)
        position = self._shapes.constants.integers(self._view.input(node, ref.calls, 1))
        split = None if sequence is None else sequence.value.producer()
        if sequence is None or split is None or split.op_type != "SplitToSequence" or position != (0,):
            return None
        source = self._view.input(split, sequence.calls, 0)
        sizes = self._shapes.constants.integers(self._view.input(split, sequence.calls, 1))
        whole = None if source is None else self._shapes.shape(source)
        if source is None or whole is None or not sizes:
            return None
        axis = integer(self._view, split, sequence.calls, "axis", 0) % len(whole)
        return (source, sizes[0]) if axis == len(whole) - 1 and sizes[0] > 0 else None


def integer(view: View, node: ir.Node, calls: tuple[ir.Node, ...], name: str, default: int) -> int:
    """An integer attribute as the view resolves it."""
    attr = view.attribute(node, calls, name)
    return default if attr is None else attr.as_int()
