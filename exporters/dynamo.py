"""The route through torch.export and torch.onnx, without torch's optimiser (which deletes an epsilon of 1e-8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.passes import common

from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.exporters.decisions import texts_watched
from rmsnorm_onnx.exporters.example import Leaf, default_shapes, named_shapes
from rmsnorm_onnx.exporters.job import Job, Routed, check_written_names, own_weight
from rmsnorm_onnx.exporters.limits import limit_notes
from rmsnorm_onnx.exporters.signature import name_symbols
from rmsnorm_onnx.exporters.sizes import disagreement, other_inputs, outputs
from rmsnorm_onnx.exporters.steps import step

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.exporters.example import Example

ROUTE = "torch.export, torch.onnx"
"""This route in words."""

OLDEST_OPSET = 18
"""torch.onnx writes no older opset; it would answer with this one and a warning."""


def export_program(job: Job, opset: int) -> Routed:
    """Trace a module symbolically, and translate it.

    Raises:
        ExportError: a step failed.
        UsageError: a name cannot be used.
    """
    program, texts = (job.program, ()) if job.program is not None else _traced(job)
    model, decomposed = _translate(program, job, opset)
    buffers = list(dict.fromkeys([*decomposed.graph_signature.buffers_to_mutate.values(), *job.changed]))
    for name in buffers:
        own_weight(model, name)
    wished = [] if job.example is None else job.example.leaves
    fixed = fixed_dimensions(model, [list(leaf.dynamic) for leaf in wished])
    name_symbols(model, _caller_names(model, wished))
    limits = limit_notes(program, [value.name or "" for value in model.graph.inputs])
    return Routed(model, (*fixed, *limits, *texts, *job.change_notes(buffers)))


def _traced(job: Job) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """The program, and notes of where Python writes tensors as text: in torch.export that shows no values.

    Raises:
        ExportError: torch.export failed, or the program gives other results than the module where text is written.
    """
    import torch
    from torch.utils import _pytree as pytree

    assert job.module is not None and job.example is not None
    with texts_watched() as reads:
        program = _trace(job.module, job.example)
    job.restore()
    if not reads.doubts:
        return program, ()
    with step("running torch.export's program"):
        run = program.module()
        for tensors in (job.example.tensors, *other_inputs(job)):
            args, kwargs = job.example.around(tensors)
            found = [value for value in pytree.tree_leaves(run(*args, **kwargs)) if isinstance(value, torch.Tensor)]
            job.restore()
            for result, expected in zip(found, outputs(job, tensors), strict=True):
                precision = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
                wrong = disagreement(result.detach().double().cpu().numpy(), expected, precision)
                if wrong:
                    where = ", ".join(reads.texts)
                    raise ExportError(f"torch.export failed: Python decides by values written as text at {where}")
    return program, reads.doubts


def _trace(module: torch.nn.Module, example: Example) -> torch.export.ExportedProgram:
    import torch
    from torch.utils import _pytree as pytree

    with step("torch.export"):
        # torch.export takes no dynamic dimensions where forward gathers keywords; the notes then name the fixed ones.
        default = None if example.gathers else pytree.tree_map(default_shapes, example.bound)
        shapes = default if example.shapes is None else named_shapes(example.shapes) or None
        return torch.export.export(module, example.args, dict(example.kwargs), dynamic_shapes=shapes)


def _translate(program: Any, job: Job, opset: int) -> tuple[ir.Model, Any]:
    """The model, and the program as the translation has it: what forward writes in place is a result there."""
    import torch

    from rmsnorm_onnx.exporters.translations import translations

    with step("translation to ONNX"):
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            optimize=False,
            verbose=False,
            input_names=list(job.input_names) or None,
            output_names=list(job.output_names) or None,
            custom_translation_table=translations(opset, kept=job.kept),
        )
        assert exported is not None  # it writes to no file
        model: ir.Model = exported.model
        common.RemoveUnusedNodesPass()(model)
        write_numerals_as_numbers(model)
        _name_apart(model)
    check_written_names(model, job.names)
    written = model.opset_imports.get("")
    if written != opset:
        raise ExportError(f"torch.onnx wrote opset {written}, not {opset}; ask for opset {written}")
    return model, exported.exported_program


def _caller_names(model: ir.Model, leaves: Sequence[Leaf]) -> dict[str, str]:
    """The caller's names for the symbols that torch made of dynamic dimensions; a name goes to one symbol alone."""
    names: dict[str, str] = {}
    for value, leaf in zip(model.graph.inputs, leaves, strict=False):
        for axis, name in leaf.dynamic.items():
            size = None if value.shape is None else value.shape[axis]
            if name and size is not None and not isinstance(size, int) and size.value and name not in names.values():
                names.setdefault(size.value, name)
    return names


def fixed_dimensions(model: ir.Model, wished: list[list[int]]) -> tuple[str, ...]:
    """One note for each dimension that is dynamic by default and is fixed in this model."""
    notes = []
    for value, dimensions in zip(model.graph.inputs, wished, strict=False):
        for dimension in dimensions:
            size = value.shape[dimension] if value.shape is not None else None
            if isinstance(size, int):
                why = (
                    "torch makes a size of 1 static, so give an example of 2"
                    if size == 1
                    else "torch or the module fixes it"
                )
                notes.append(f"dimension {dimension} of input {value.name} is fixed at {size}: {why}")
    return tuple(notes)


def write_numerals_as_numbers(model: ir.Model) -> None:
    """torch names a dynamic dimension that the module turned out to fix by its size, "64": that is no symbol."""
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    for value in values:
        sizes = [size if isinstance(size, int) else size.value for size in value.shape or ()]
        if any(isinstance(size, str) and size.isdecimal() for size in sizes):
            # a shape of its own: torch shares some between values, and freezes them
            value.shape = ir.Shape(int(s) if isinstance(s, str) and s.isdecimal() else s for s in sizes)


def _name_apart(model: ir.Model) -> None:
    """torch names a result by its operator, "mean", though a buffer may be called so: the file would be invalid."""
    taken = {*model.graph.initializers, *(value.name for value in model.graph.inputs)}
    results = [value for node in model.graph.all_nodes() for value in node.outputs]
    held = {value.name for value in results} | taken
    for value in results:
        number = 1
        if value.name in taken:
            while f"{value.name}_{number}" in held:
                number += 1
            value.name = f"{value.name}_{number}"
            held.add(value.name)
