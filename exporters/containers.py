"""What the lists, dictionaries, sets and deques of a module hold, to undo what a run of its forward changes in them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_KINDS = (list, dict, set, collections.deque)


@dataclasses.dataclass(frozen=True)
class Container:
    """One container and what it held.

    Attributes:
        name: Of the attribute that leads to it, in full.
        value: The container.
        held: Its elements then; of a dictionary its pairs.
    """

    name: str
    value: Any
    held: tuple[Any, ...]

    def is_as_it_was(self) -> bool:
        """Whether it holds the same objects, in the same order where it has one."""
        now = [*map(id, flat(self.value, elements(self.value)))]
        then = [*map(id, flat(self.value, self.held))]
        return sorted(now) == sorted(then) if isinstance(self.value, set) else now == then

    def restore(self) -> None:
        """Put the elements back; the container stays the same object."""
        self.value.clear()
        (self.value.extend if isinstance(self.value, list | collections.deque) else self.value.update)(self.held)


def elements(value: Any) -> tuple[Any, ...]:
    """The elements of a container; of a dictionary its pairs."""
    return tuple(value.items()) if isinstance(value, dict) else tuple(value)


def flat(value: Any, held: tuple[Any, ...]) -> tuple[Any, ...]:
    """The objects among a container's elements: keys and values of a dictionary."""
    return tuple(part for pair in held for part in pair) if isinstance(value, dict) else held


def containers(module: torch.nn.Module) -> Iterator[Container]:
    """The containers of a module, of its parts and of their classes, nested ones too; torch's own are left out.

    So are those of the process: module globals, closures, and the insides of other objects.
    """
    import torch

    own = {*vars(torch.nn.Module()), *vars(torch.nn.Module)}
    seen: set[int] = set()
    for name, part in module.named_modules():
        classes = [
            kind for kind in type(part).__mro__ if issubclass(kind, torch.nn.Module) and kind is not torch.nn.Module
        ]
        attributes = {key: value for kind in reversed(classes) for key, value in vars(kind).items()} | vars(part)
        for key, value in attributes.items():
            if key not in own and not key.startswith("__"):
                yield from _nested(f"{name}.{key}" if name else key, value, seen)


def _nested(name: str, value: Any, seen: set[int]) -> Iterator[Container]:
    if not isinstance(value, (*_KINDS, tuple)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, _KINDS):
        yield Container(name, value, elements(value))
    for element in value.values() if isinstance(value, dict) else tuple(value):
        yield from _nested(name, element, seen)
