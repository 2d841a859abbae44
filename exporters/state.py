"""`State`: what a module holds besides its weights, to undo what a run of its forward changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.exporters.containers import containers, elements

if TYPE_CHECKING:
    import torch

_OURS = ("forward", "training")
"""Attributes of a module that an export sets itself, and puts back."""


class State:
    """The buffers and attributes of a module and of its parts, as they are when this is made.

    Buffers, and tensors that are plain attributes or lie in containers, are copied, and so is what lists, dictionaries,
    sets and deques hold; of other attributes the object alone is kept.

    Args:
        module: The module; it is not changed here.

    Attributes:
        changed: The buffers, and plain tensors, that were changed whenever they were put back, by their full names.
        refilled: The attributes whose containers were.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.changed: dict[str, None] = {}
        self.refilled: dict[str, None] = {}
        self._containers = list(containers(module))
        self._parts = [(name, part, dict(vars(part)), dict(part._buffers)) for name, part in module.named_modules()]
        tensors: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for name, _, attributes, buffers in self._parts:
            for key, value in (*buffers.items(), *attributes.items()):
                if _is_plain(value):
                    full = f"{name}.{key}" if name else key
                    tensors.setdefault(id(value), (full, value, value.detach().clone()))
        for container in self._containers:
            pairs = elements(container.value)
            for value in (item for _, item in pairs) if isinstance(container.value, dict) else pairs:
                if _is_plain(value):
                    tensors.setdefault(id(value), (container.name, value, value.detach().clone()))
        self._tensors = list(tensors.values())

    def restore(self) -> None:
        """Put everything back."""
        import torch

        for name, part, attributes, buffers in self._parts:
            for key in {*buffers, *part._buffers}:
                if buffers.get(key) is not part._buffers.get(key):
                    self.changed[f"{name}.{key}" if name else key] = None
            part._buffers.clear()
            part._buffers.update(buffers)
            for key in [key for key in vars(part) if key not in attributes and key not in _OURS]:
                del vars(part)[key]
            vars(part).update({key: value for key, value in attributes.items() if key not in _OURS})
        for container in self._containers:
            if not container.is_as_it_was():
                self.refilled[container.name] = None
                container.restore()
        with torch.no_grad():
            for name, tensor, value in self._tensors:
                if not _same(tensor, value):
                    self.changed[name] = None
                    tensor.detach().copy_(value)


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors hold the same bytes: NaN is NaN, and any type will do."""
    import torch

    if one.shape != other.shape:
        return False
    first, second = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(first, second))


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor that can be copied and compared byte by byte."""
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta | value.is_quantized
