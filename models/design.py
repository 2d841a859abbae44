"""How one tiny model is made: `Design`, and the inputs and wrappers that designs share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import MissingDependencyError

if TYPE_CHECKING:
    import torch

VOCABULARY = 99
HIDDEN = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What inputs of one size are drawn from.

    Attributes:
        batch: The batch.
        sequence: The length, of tokens, frames or steps; a model of fixed size leaves it unused.
        generator: A seeded generator.
        dtype: The type of the values, a torch.dtype.
    """

    batch: int
    sequence: int
    generator: torch.Generator
    dtype: Any

    def ids(self) -> torch.Tensor:
        """Token ids [batch, sequence]."""
        import torch

        return torch.randint(0, VOCABULARY, (self.batch, self.sequence), generator=self.generator)

    def values(self, *shape: int) -> torch.Tensor:
        """Standard normal values [batch, *shape]."""
        import torch

        return torch.randn(self.batch, *shape, generator=self.generator).to(self.dtype)


def token_ids(draw: Inputs) -> tuple[torch.Tensor, ...]:
    """One text."""
    return (draw.ids(),)


def sequence_values(draw: Inputs) -> tuple[torch.Tensor, ...]:
    """Values [batch, sequence, 64]."""
    return (draw.values(draw.sequence, HIDDEN),)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """One tiny model, not built yet.

    Attributes:
        source: Where its architecture is from.
        make: Builds it, drawing its weights from torch's generator.
        inputs: Makes its inputs.
        dynamic: The dynamic dimensions of each input, where `export`'s default (the first two) does not fit.
        wide: Patterns of the names of norms that get float32 in a model of a half type.
        sites: At how many places a norm stands in an export, where it is not one.
        trouble: What an export of it has to know: a setting that the plain route needs, or a size that is fixed.
    """

    source: str
    make: Callable[[], torch.nn.Module]
    inputs: Callable[[Inputs], tuple[torch.Tensor, ...]] = token_ids
    dynamic: tuple[tuple[int, ...], ...] | None = None
    wide: tuple[str, ...] = ()
    sites: Mapping[str, int] = dataclasses.field(default_factory=dict)
    trouble: str = ""


def hidden_states(model: Any, **options: Any) -> torch.nn.Module:
    """A transformers model as a function from token ids to its last hidden state."""
    import torch

    class Encoder(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.model(input_ids=ids, **options)[0]

    return Encoder()


def transformers() -> Any:
    """The transformers package, told that it is offline.

    Raises:
        MissingDependencyError: it is not installed.
    """
    # Nothing is fetched here, and transformers need not ask whether it could be.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", "building this model", "rmsnorm_onnx[transformers]") from error
    return transformers
