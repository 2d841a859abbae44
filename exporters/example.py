"""`Example`: a module's example inputs, as torch.export takes them and as the flat list that a tracer takes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import UsageError

if TYPE_CHECKING:
    import torch

_DYNAMIC_DIMENSIONS = 2  # batch and sequence


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of the inputs.

    Attributes:
        name: Its name, unique in the example.
        tensor: The example.
        dynamic: The dimensions that are to be dynamic, each with the caller's name for it, or None.
    """

    name: str
    tensor: torch.Tensor
    dynamic: Mapping[int, str | None]


@dataclasses.dataclass(frozen=True)
class Example:
    """Example inputs of a module's forward.

    Attributes:
        signature: That of forward.
        args: Positional inputs: tensors, numbers, None, or structures of them.
        kwargs: Keyword inputs.
        shapes: The caller's dynamic_shapes, as torch.export takes them; None asks for batch and sequence.

    Raises:
        UsageError: the inputs do not fit forward.
    """

    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Any = None

    @functools.cached_property
    def bound(self) -> dict[str, Any]:
        """The inputs by forward's own parameter names, in their order."""
        return dict(self._bind().arguments)

    @property
    def gathers(self) -> bool:
        """Whether some keyword goes into forward's **options."""
        return any(self._is_gathered(name) and value for name, value in self.bound.items())

    @functools.cached_property
    def leaves(self) -> list[Leaf]:
        """Every tensor, in the order of the file's inputs."""
        import torch
        from torch.utils import _pytree as pytree

        found: list[Leaf] = []
        for path, value in pytree.tree_flatten_with_path(self.bound)[0]:
            if isinstance(value, torch.Tensor):
                keys = [_key(entry) for entry in path]
                named = keys[1:] if self._is_gathered(keys[0]) and len(keys) > 1 else keys
                name = _unique("_".join(map(str, named)), [leaf.name for leaf in found])
                found.append(Leaf(name, value, self._dimensions(value, keys)))
        return found

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors alone, in that order."""
        return tuple(leaf.tensor for leaf in self.leaves)

    def around(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same inputs, as args and kwargs, with other tensors in their places."""
        import torch
        from torch.utils import _pytree as pytree

        values, structure = pytree.tree_flatten(self.bound)
        pending = iter(tensors)
        values = [next(pending) if isinstance(value, torch.Tensor) else value for value in values]
        bound = self._bind()
        bound.arguments.update(pytree.tree_unflatten(values, structure))
        return bound.args, bound.kwargs

    def _bind(self) -> inspect.BoundArguments:
        try:
            return self.signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise UsageError(f"the example inputs do not fit forward: {error}; see args and kwargs") from error

    def _is_gathered(self, name: str) -> bool:
        return self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD

    def _dimensions(self, tensor: torch.Tensor, keys: list[Any]) -> dict[int, str | None]:
        if self.shapes is None:
            enough = tensor.dim() >= _DYNAMIC_DIMENSIONS
            return dict.fromkeys(range(_DYNAMIC_DIMENSIONS)) if enough else {}
        asked = self.shapes
        for depth, key in enumerate(keys):
            position = list(self.bound).index(key) if depth == 0 else key
            asked = asked.get(key) if isinstance(asked, Mapping) else _at(asked, position)
        items = asked.items() if isinstance(asked, Mapping) else enumerate(asked or ())
        return {int(axis): _dim_name(dim) for axis, dim in items if _is_dynamic(dim)}


def named_shapes(shapes: Any) -> Any:
    """Dynamic shapes with a torch.export.Dim for each name, which torch.onnx takes and torch.export does not."""
    import torch
    from torch.utils import _pytree as pytree

    made: dict[str, Any] = {}

    def dim(word: Any) -> Any:
        if not isinstance(word, str):
            return word
        return made.setdefault(word, torch.export.Dim(word)) if word.isidentifier() else torch.export.Dim.AUTO

    return pytree.tree_map(dim, shapes)


def default_shapes(value: Any) -> dict[int, Any] | None:
    """What torch.export is told of one input by default: batch and sequence are dynamic where the module allows it."""
    import torch

    if not isinstance(value, torch.Tensor) or value.dim() < _DYNAMIC_DIMENSIONS:
        return None
    # AUTO, not DYNAMIC: a dimension that the module ties to its weights is fixed, and named in the notes.
    return dict.fromkeys(range(_DYNAMIC_DIMENSIONS), torch.export.Dim.AUTO)


def _key(entry: Any) -> Any:
    """What one step of a pytree's path is called: a dictionary's key, a position, or an attribute."""
    return next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name))


def _at(asked: Any, position: Any) -> Any:
    inside = isinstance(asked, list | tuple) and isinstance(position, int) and position < len(asked)
    return asked[position] if inside else None


def _is_dynamic(dim: Any) -> bool:
    """Whether a caller's word for one dimension leaves it open: a Dim, AUTO, DYNAMIC or a name."""
    return dim is not None and not isinstance(dim, int) and "STATIC" not in repr(dim)


def _dim_name(dim: Any) -> str | None:
    name = dim if isinstance(dim, str) else getattr(dim, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else None


def _unique(wish: str, taken: Sequence[str]) -> str:
    name, number = wish, 0
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name
