"""`Job` and `Routed`: what a route is given, and what it gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from rmsnorm_onnx.errors import UsageError

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.exporters.example import Example
    from rmsnorm_onnx.exporters.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One export.

    Attributes:
        module: The module, in inference mode; None where a traced program was given.
        example: Its example inputs; None where a traced program was given.
        program: The traced program that was given.
        opset: The opset that is asked for.
        input_names: Names for the graph's inputs.
        output_names: Names for the graph's outputs.
        kept: Whether modules are registered, so that their operator is in the trace.
        state: What the module held before; None where a traced program was given.
    """

    module: torch.nn.Module | None
    example: Example | None
    program: Any
    opset: int
    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    kept: bool = False
    state: State | None = None

    @property
    def names(self) -> list[str]:
        """All names that were asked for."""
        return [*self.input_names, *self.output_names]

    def restore(self) -> None:
        """Undo what a run of the module's forward changed."""
        if self.state is not None:
            self.state.restore()

    @property
    def changed(self) -> list[str]:
        """The buffers that runs of the module's forward changed."""
        return [] if self.state is None else list(self.state.changed)

    def change_notes(self, also: Iterable[str] = ()) -> tuple[str, ...]:
        """One note for each buffer that forward changes, those that a route knows of first, and for each container."""
        refilled = () if self.state is None else self.state.refilled
        return (
            *buffer_notes([*also, *self.changed]),
            *(f"forward changes what {name} holds: the file computes with it as it was before" for name in refilled),
        )


@dataclasses.dataclass(frozen=True)
class Routed:
    """What a route made.

    Attributes:
        model: The model, its norms plain operators.
        notes: What differs from what is asked by default, each one sentence.
        baked: The dimensions of its notes that are fixed because the tracer baked them in.
    """

    model: ir.Model
    notes: tuple[str, ...] = ()
    baked: int = 0


def own_weight(model: ir.Model, name: str) -> None:
    """Give a model its own copy of a buffer that the module's forward changes."""
    value = model.graph.initializers.get(name)
    raw = None if value is None else getattr(value.const_value, "raw", None)
    if value is not None and raw is not None:
        value.const_value = ir.tensor(raw.detach().clone(), name=name)


def buffer_notes(names: Iterable[str]) -> tuple[str, ...]:
    """One note for each buffer that forward changes."""
    return tuple(
        f"forward changes the buffer {name}: the file computes with its value before the export and does not update it"
        for name in dict.fromkeys(names)
    )


def check_written_names(model: ir.Model, names: Sequence[str]) -> None:
    """A name that a weight bears, or that no input or output was left for, is a usage error."""
    borne = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    for name in names:
        if name in model.graph.initializers:
            raise UsageError(f"the name {name!r} is borne by a weight; choose another")
        if name not in borne:
            raise UsageError(f"there is no input or output left for the name {name!r}; give fewer names")
