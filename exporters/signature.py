"""`Signature`: what a text model takes and gives as an ONNX graph, with the field's names for its dimensions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from rmsnorm_onnx.errors import ExportError

if TYPE_CHECKING:
    import torch

# torch makes a size of 1 static and may tie equal sizes together, so all of these differ.
BATCH, SEQUENCE, TARGET_SEQUENCE = 2, 7, 5

TEXT: Mapping[int, str] = MappingProxyType({0: "batch", 1: "sequence"})
"""The dimensions of token ids and of a mask over them."""

_SYMBOL = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph.

    Attributes:
        name: Its name.
        dims: The names of its dynamic dimensions by axis.
    """

    name: str
    dims: Mapping[int, str]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """How a model is called.

    Attributes:
        forward: A function of tensors, in place of the model's own forward.
        args: Example inputs, nested as `forward` takes them; their leaves are the graph's inputs in order.
        inputs: The graph's inputs.
        outputs: The graph's outputs.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """The dynamic dimensions as torch.export takes them, nested as `args`."""
        import torch
        from torch.utils import _pytree as pytree

        dims = [dict.fromkeys(port.dims, torch.export.Dim.AUTO) for port in self.inputs]
        shapes: tuple[Any, ...] = pytree.tree_unflatten(dims, pytree.tree_structure(self.args))
        return shapes


def text_signature(model: Any) -> Signature:
    """input_ids and attention_mask to logits, or to last_hidden_state of a model without a head.

    An encoder-decoder takes decoder_input_ids too.
    """
    import torch

    own = type(model).forward
    ids = example_ids(model, BATCH, SEQUENCE)
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    inputs = (Port("input_ids", TEXT), Port("attention_mask", TEXT))
    if model.config.is_encoder_decoder:
        target = {0: "batch", 1: "decoder_sequence"}

        def translate(input_ids: Any, attention_mask: Any, decoder_input_ids: Any) -> Any:
            texts = {"input_ids": input_ids, "decoder_input_ids": decoder_input_ids}
            return own(model, **texts, attention_mask=attention_mask, use_cache=False)[0]

        args = (ids, mask, example_ids(model, BATCH, TARGET_SEQUENCE))
        return Signature(translate, args, (*inputs, Port("decoder_input_ids", target)), (Port(_head(model), target),))

    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def read(input_ids: Any, attention_mask: Any) -> Any:
        return own(model, input_ids=input_ids, attention_mask=attention_mask, **options)[0]

    with torch.no_grad():
        rank = read(ids, mask).dim()
    return Signature(read, (ids, mask), inputs, (Port(_head(model), TEXT if rank > 2 else {0: "batch"}),))


def example_ids(model: Any, batch: int, sequence: int) -> torch.Tensor:
    """Token ids of the model's vocabulary, the same each time."""
    import torch

    size = model.config.get_text_config().vocab_size
    return torch.randint(0, size, (batch, sequence), generator=torch.Generator().manual_seed(0))


def _head(model: Any) -> str:
    """What the first output is: a bare model is the trunk that its relatives put their heads on."""
    return "last_hidden_state" if model.base_model is model else "logits"


def name_ports(model: ir.Model, signature: Signature) -> None:
    """Give a graph's inputs and outputs, in order, the signature's names.

    Raises:
        ExportError: the graph has others than the signature.
    """
    for what, values, ports in (
        ("inputs", model.graph.inputs, signature.inputs),
        ("outputs", model.graph.outputs, signature.outputs),
    ):
        if len(values) != len(ports):
            names = [value.name for value in values]
            raise ExportError(f"the exporter wrote the {what} {names}; {[port.name for port in ports]} was asked for")
        for value, port in zip(values, ports, strict=True):
            value.name = port.name


def name_symbols(model: ir.Model, names: Mapping[str, str]) -> None:
    """Give symbolic dimensions other names, in all values of a model and in the expressions that they are part of."""
    values = [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)] if names else []
    for value in values:
        sizes = [size if isinstance(size, int) else size.value for size in value.shape or ()]
        said = [_SYMBOL.sub(lambda m: names.get(m[0], m[0]), s) if isinstance(s, str) else s for s in sizes]
        if said != sizes:
            value.shape = ir.Shape(said)  # a shape of its own: torch shares some between values, and freezes them


def name_dimensions(model: ir.Model, signature: Signature, said: Sequence[str] = ()) -> tuple[str, ...]:
    """Give the dynamic dimensions of a graph the signature's names, in all of its values.

    Args:
        model: The model.
        signature: Its signature.
        said: Notes that there are already.

    Returns:
        One note for each dimension that was to be dynamic and is fixed, and is not noted yet.
    """
    names: dict[str, str] = {}
    notes = []
    for value, port in zip(model.graph.inputs, signature.inputs, strict=True):
        for axis, name in port.dims.items():
            size = None if value.shape is None else value.shape[axis]
            if isinstance(size, int) and not any(f"dimension {axis} of input {port.name} is fixed" in s for s in said):
                notes.append(f"dimension {axis} ({name}) of input {port.name} is fixed at {size} by the exporter")
            elif size is not None and not isinstance(size, int) and size.value is not None:
                names.setdefault(size.value, name)
    name_symbols(model, names)
    for value, port in zip(model.graph.outputs, signature.outputs, strict=False):  # a caller may name none
        for axis, name in port.dims.items():
            if value.shape is not None and not isinstance(value.shape[axis], int):
                value.shape[axis] = name
    return tuple(notes)
