"""`export`: any torch.nn.Module to an ONNX model in which every RMSNorm is one operator.

The way is torch.export, then torch.onnx with our translations of torch's RMSNorm operators and without its optimiser
(which deletes an epsilon of 1e-8), then `rmsnorm_onnx.fuse`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from rmsnorm_onnx import consumers, modelio, passes
from rmsnorm_onnx.errors import ExportError, MissingDependencyError, RMSNormError, UsageError

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.report import FusionReport

OLDEST_OPSET = 18
"""torch.onnx writes no older opset; it would answer with this one and a warning."""

ROUTE = "torch.export, torch.onnx"
"""How `export` goes, in words."""

DTYPES = ("float32", "float16", "bfloat16")
"""The types that `export` converts a module to."""

_DYNAMIC_DIMENSIONS = 2  # batch and sequence
_LOUD_PACKAGES = ("torch", "transformers", "onnxscript", "onnx_ir")
_ONE_AT_A_TIME = threading.Lock()  # torch.export patches modules of its own, and we redirect the output
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True, slots=True)
class ExportResult:
    """What `export` made.

    Attributes:
        model: The model; its weights share memory with the module's.
        opset: The opset of its default domain.
        route: How it was exported, in words.
        report: What `fuse` did, or None where it was not asked.
        notes: What differs from what was asked by default, each one sentence: a dimension that stayed fixed.
    """

    model: ir.Model
    opset: int
    route: str
    report: FusionReport | None
    notes: tuple[str, ...] = ()


def export(
    module: torch.nn.Module,
    args: Sequence[Any] | torch.Tensor,
    *,
    kwargs: Mapping[str, Any] | None = None,
    opset: int = OLDEST_OPSET,
    dtype: str | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    fuse: bool = True,
    consumer: str = "any",
    form: str | None = None,
) -> ExportResult:
    """Export a module to ONNX, each of its RMSNorms as one operator.

    The module is exported in inference mode and is left as it was.

    Args:
        module: The module, in any mode.
        args: Example inputs for its forward.
        kwargs: Example keyword inputs.
        opset: The opset to write, 18 or newer.
        dtype: "float32", "float16" or "bfloat16" converts a copy of the module, and floating-point inputs, first.
        dynamic_shapes: As torch.export takes them. By default the first two dimensions (batch and sequence) of every
            input of rank 2 or more are dynamic wherever the module allows it; `{}` fixes all of them.
        input_names: Names for the graph's inputs.
        output_names: Names for the graph's outputs.
        output: A path to write the model to, with weights over 2 GiB in a data file beside it.
        fuse: Whether to rewrite the norms; without it they are plain operators.
        consumer: The runtime that will load the model, as `rmsnorm_onnx.fuse` takes it.
        form: The form to write, over the consumer's choice.

    Returns:
        The model, the route it took, and the report of the norms.

    Raises:
        UsageError: an argument has no meaning; nothing was exported.
        ExportError: a step failed; the message names it and keeps the exporter's words, and nothing was written.
        MissingDependencyError: torch is not installed.
    """
    _check_arguments(opset, dtype, output, consumer, form)
    _check_names(input_names, output_names)
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "exporting a module", "rmsnorm_onnx[torch]") from error

    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a {type(module).__name__} is no module to export; give a torch.nn.Module")
    args = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(args, tuple | list):
        raise UsageError(f"args must be a tuple of tensors, got a {type(args).__name__}; keyword inputs go into kwargs")
    args = tuple(args)
    module, args, kwargs = _converted(module, args, dict(kwargs or {}), dtype)
    # With gradients, torch's successive traces disagree on the strides of attention's output, and T5 fails.
    with _ONE_AT_A_TIME, _quiet(), _inference(module), torch.no_grad():
        program, wished = _trace(module, args, kwargs, dynamic_shapes)
        model = _translate(program, opset, input_names, output_names)
    report = None
    if fuse:
        model, report = _fuse(model, consumer, form)
    if output is not None:
        with _step("saving"):
            modelio.save(model, output)
    return ExportResult(model=model, opset=opset, route=ROUTE, report=report, notes=_fixed_dimensions(model, wished))


def _check_arguments(
    opset: int, dtype: str | None, output: str | os.PathLike[str] | None, consumer: str, form: str | None
) -> None:
    """Find what is wrong with the arguments before a trace of a large model is paid for."""
    newest = onnx.defs.onnx_opset_version()
    if opset < OLDEST_OPSET:
        raise ExportError(f"opset {opset} is older than {OLDEST_OPSET}, the oldest that torch.onnx writes")
    if opset > newest:
        raise ExportError(f"opset {opset} is newer than {newest}, the newest that the installed onnx knows")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"cannot export as {dtype!r}; use one of {', '.join(DTYPES)}")
    consumers.parse_consumer(consumer)
    passes.Options(form=form)
    if output is not None and not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise UsageError(f"cannot write {os.fspath(output)}: its folder does not exist; create it")


def _check_names(input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> None:
    """torch.onnx takes names as they come, and writes an invalid file for doubled or empty ones."""
    seen: set[str] = set()
    for what, names in (("input_names", input_names), ("output_names", output_names)):
        if isinstance(names, str):
            raise UsageError(f"{what} must be a sequence of names, got the string {names!r}")
        for name in names or ():
            if not isinstance(name, str) or not name or name in seen:
                raise UsageError(f"{what} holds {name!r}; names must be distinct, and not empty")
            seen.add(name)


def _converted(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: str | None
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module and its inputs in the type asked for; a copy of the module where anything has to change."""
    if dtype is None:
        return module, args, kwargs
    import torch
    from torch.utils import _pytree as pytree

    wanted = getattr(torch, dtype)

    def convert(leaf: Any) -> Any:
        return leaf.to(wanted) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map(convert, (args, kwargs))
    tensors = (*module.parameters(), *module.buffers())
    if any(t.is_floating_point() and t.dtype != wanted for t in tensors):
        with _step(f"conversion to {dtype}"):
            module = copy.deepcopy(module).to(wanted)
    return module, args, kwargs


def _trace(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[torch.export.ExportedProgram, list[dict[int, Any]]]:
    """The exported program, and the dimensions of each tensor input that are dynamic by default."""
    import torch
    from torch.utils import _pytree as pytree

    with _step("torch.export"):
        signature = inspect.signature(module.forward)
        bound = dict(signature.bind(*args, **kwargs).arguments)
        # torch.export takes no dynamic dimensions where forward gathers keywords; the notes then name the fixed ones.
        gathers = any(p.kind is p.VAR_KEYWORD and bound.get(p.name) for p in signature.parameters.values())
        default = None if gathers else pytree.tree_map(_dynamic_dimensions, bound)
        shapes = default if dynamic_shapes is None else dynamic_shapes or None
        program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    tensors = [leaf for leaf in pytree.tree_leaves(bound) if isinstance(leaf, torch.Tensor)]
    return program, [_dynamic_dimensions(t) or {} for t in tensors] if dynamic_shapes is None else []


def _dynamic_dimensions(leaf: Any) -> dict[int, Any] | None:
    import torch

    if not isinstance(leaf, torch.Tensor) or leaf.dim() < _DYNAMIC_DIMENSIONS:
        return None
    # AUTO, not DYNAMIC: a dimension that the module ties to its weights is fixed, and named in the notes.
    return dict.fromkeys(range(_DYNAMIC_DIMENSIONS), torch.export.Dim.AUTO)


def _fixed_dimensions(model: ir.Model, wished: list[dict[int, Any]]) -> tuple[str, ...]:
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


def _translate(
    program: torch.export.ExportedProgram,
    opset: int,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> ir.Model:
    import torch

    from rmsnorm_onnx.exporters.translations import translations

    with _step("translation to ONNX"):
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            optimize=False,
            verbose=False,
            input_names=input_names,
            output_names=output_names,
            custom_translation_table=translations(opset),
        )
        assert exported is not None  # it writes to no file
        model: ir.Model = exported.model
        common.RemoveUnusedNodesPass()(model)
        _write_numerals_as_numbers(model)
    _check_written_names(model, [*(input_names or ()), *(output_names or ())])
    written = model.opset_imports.get("")
    if written != opset:
        raise ExportError(f"torch.onnx wrote opset {written}, not {opset}; ask for opset {written}")
    return model


def _check_written_names(model: ir.Model, names: list[str]) -> None:
    """A name that a weight bears, or that no input or output was left for, is a usage error."""
    borne = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    for name in names:
        if name in model.graph.initializers:
            raise UsageError(f"the name {name!r} is borne by a weight; choose another")
        if name not in borne:
            raise UsageError(f"there is no input or output left for the name {name!r}; give fewer names")


def _write_numerals_as_numbers(model: ir.Model) -> None:
    """torch names a dynamic dimension that the module turned out to fix by its size, "64": that is no symbol."""
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            name = None if isinstance(size, int) else size.value
            if value.shape is not None and name is not None and name.isdecimal():
                value.shape[axis] = int(name)


def _fuse(model: ir.Model, consumer: str, form: str | None) -> tuple[ir.Model, FusionReport]:
    with _step("fusion"):
        fused, report = passes.fuse(model, consumer=consumer, form=form)
    return fused, report


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    """Name the step at fault in whatever a foreign exporter raises; our own errors say enough."""
    try:
        yield
    except RMSNormError:
        raise
    except Exception as error:
        raise ExportError(f"{name} failed: {_words(error)}") from error


def _words(error: BaseException) -> str:
    """The root of an exception chain in one line: torch's outer errors say which issue tracker to use."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(_ANSI.sub("", str(error)).split())
    return f"{type(error).__name__}: {text[:500]}"


@contextlib.contextmanager
def _inference(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into inference mode, and each of its parts back into the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' progress, warnings and advice off the terminal; failures are raised, not printed."""
    # torch gives many of its loggers a level of their own; those made meanwhile inherit their package's.
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in _LOUD_PACKAGES]
    loggers = [logging.getLogger(name) for name in {*names, *_LOUD_PACKAGES}]
    levels = [logger.level for logger in loggers]
    sink = io.StringIO()  # torch prints whole graphs when it fails
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
