"""`export`: any PyTorch model to an ONNX model in which every RMSNorm is one operator.

A route leads to a model whose norms are plain operators, and `rmsnorm_onnx.fuse` makes each one operator:

- `dynamo`: torch.export, then torch.onnx with our translations and without its optimiser; opset 18 and up, and by
  lowering below;
- `torchscript`: torch's older exporter with our symbolic functions; opsets 13 to 20.

Another route is tried where the first fails, and the result names the one that was taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from rmsnorm_onnx import consumers, fullcheck, modelio, passes
from rmsnorm_onnx.errors import MissingDependencyError, UsageError
from rmsnorm_onnx.exporters import pairing, routes
from rmsnorm_onnx.exporters.dynamo import OLDEST_OPSET as DEFAULT_OPSET
from rmsnorm_onnx.exporters.example import Example
from rmsnorm_onnx.exporters.job import Job
from rmsnorm_onnx.exporters.kept import kept_whole
from rmsnorm_onnx.exporters.optimised import optimised
from rmsnorm_onnx.exporters.steps import ONE_AT_A_TIME, converted, inference, quiet, step

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.exporters.pairing import PairedNorm
    from rmsnorm_onnx.report import FusionReport

DTYPES = ("float32", "float16", "bfloat16")
"""The types that `export` converts a module to."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExportResult:
    """What `export` made.

    Attributes:
        model: The model; its weights share memory with the module's, so save it before the module changes.
        opset: The opset of its default domain.
        route: How it was exported, in words.
        report: What `fuse` did, or None where it was not asked.
        notes: What differs from what was asked by default, each one sentence: a dimension that stayed fixed, a route
            that failed, a norm of the module that was not found as it is, what onnx's full check has against the file.
        norms: The norms of the file beside the modules they come from.
    """

    model: ir.Model
    opset: int
    route: str
    report: FusionReport | None
    notes: tuple[str, ...] = ()
    norms: tuple[PairedNorm, ...] = ()


def export(
    source: Any,
    args: Sequence[Any] | torch.Tensor | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    opset: int | None = None,
    dtype: str | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    fuse: bool = True,
    consumer: str = "any",
    form: str | None = None,
    norms: Mapping[type, Any] | None = None,
    route: str | None = None,
    optimize: bool = False,
) -> ExportResult:
    """Export a PyTorch model to ONNX, each of its RMSNorms as one operator.

    A module is exported in inference mode and is left as it was, buffers that its forward changes included.

    Args:
        source: A torch.nn.Module, in any mode; a torch.export.ExportedProgram; or torch's ONNXProgram, whose norms are
            rewritten (an epsilon that its optimiser deleted does not come back: export with optimize=False).
        args: Example inputs for a module's forward.
        kwargs: Example keyword inputs.
        opset: The opset to write, 13 or newer: by default 18, and an ONNXProgram's own.
        dtype: "float32", "float16" or "bfloat16" converts a copy of the module, and floating-point inputs, first.
            Of transformers' models the float32 buffers that are computed and not saved (rotary frequencies) stay, as
            where transformers makes or loads a model in that type.
        dynamic_shapes: As torch.export takes them, or with a name in place of a Dim; the file has these names. By
            default the first two dimensions (batch and sequence) of every input of rank 2 or more are dynamic wherever
            the module allows it; `{}` fixes all of them.
        input_names: Names for the graph's inputs.
        output_names: Names for the graph's outputs.
        output: A path to write the model to, with weights over 2 GiB in a data file beside it.
        fuse: Whether to rewrite the norms; without it they are plain operators.
        consumer: The runtime that will load the model, as `rmsnorm_onnx.fuse` takes it.
        form: The form to write, over the consumer's choice.
        norms: Module classes that are kept whole, whatever their forward is made of: by class (exactly this class, no
            subclass) the `RMSNormSpec` that it computes, a function from the module to it, or a `Kept` where gain or
            bias have other names than weight and bias. The claim is checked first, on the module's own weights.
        route: "dynamo" or "torchscript" takes this one alone; by default the better one, and the other if it fails.
        optimize: Whether to fold constants and drop repeated parts, after the norms are safe.

    Returns:
        The model, the route it took, and the report of the norms.

    Raises:
        UsageError: an argument has no meaning; nothing was exported.
        ExportError: a step failed; the message names it and keeps the exporter's words, and nothing was written. So
            is a false claim in `norms`, and a norm whose epsilon is not its module's.
        MissingDependencyError: torch is not installed.
    """
    check_arguments(opset, dtype, output, consumer, form, route)
    _check_names(input_names, output_names)
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "exporting a module", "rmsnorm_onnx[torch]") from error

    names = {"input_names": tuple(input_names or ()), "output_names": tuple(output_names or ())}
    traced = {"dtype": dtype, "dynamic_shapes": dynamic_shapes, "norms": norms}
    goal = routes.Goal(fuse=fuse, consumer=consumer, form=form, route=route)
    module = None
    # With gradients, torch's successive traces disagree on the strides of attention's output, and T5 fails.
    with contextlib.ExitStack() as stack:
        for context in (ONE_AT_A_TIME, quiet(), torch.no_grad()):
            stack.enter_context(context)
        if _is_program(source):
            _refuse(traced | names | {"route": route}, "an ONNXProgram is translated already")
            made = routes.finish_program(modelio.to_ir(source)[0], opset, goal)
        elif isinstance(source, torch.export.ExportedProgram):
            _refuse(traced, "a torch.export.ExportedProgram is traced already")
            job = Job(module=None, example=None, program=source, opset=opset or DEFAULT_OPSET, **names)
            made = routes.run(job, goal)
        else:
            module, example = _module_and_example(source, args, dict(kwargs or {}), dtype, dynamic_shapes)
            state = stack.enter_context(inference(module))
            stack.enter_context(kept_whole(module, example, norms or {}))
            job = Job(
                module=module,
                example=example,
                program=None,
                opset=opset or DEFAULT_OPSET,
                kept=bool(norms),
                state=state,
                **names,
            )
            beside = functools.partial(pairing.pair, module=module, kept=norms or {})
            made = routes.run(job, dataclasses.replace(goal, pair=beside))
    if optimize:
        with ONE_AT_A_TIME, quiet():
            made = dataclasses.replace(made, model=optimised(made.model))
    paired, remarks = made.paired, list(made.remarks)
    if module is None or optimize:  # nothing was paired yet, or it changed since
        paired, remarks = pairing.pair(made.model, made.report, module, norms or {})
    objection = fullcheck.objection(made.model) if fullcheck.is_known(made.model) else None
    if objection is not None:  # runtimes may still take it
        remarks.append(f"onnx's full check refuses the file: {objection}")
    if output is not None:
        with step("saving"):
            modelio.save(made.model, output)
    written = made.model.opset_imports[""]
    return ExportResult(made.model, written, made.route, made.report, (*made.notes, *remarks), paired)


def _is_program(source: Any) -> bool:
    """Whether it is torch's ONNXProgram, as `modelio.to_ir` recognises it."""
    return isinstance(getattr(source, "model", None), ir.Model) and hasattr(source, "model_proto")


def _refuse(given: Mapping[str, Any], why: str) -> None:
    """Refuse what can only be said of a module."""
    for name, value in given.items():
        if value is not None and value != ():
            raise UsageError(f"{name} cannot be used here: {why}; give the module")


def _module_and_example(
    source: Any, args: Any, kwargs: dict[str, Any], dtype: str | None, dynamic_shapes: Any
) -> tuple[torch.nn.Module, Example]:
    import torch

    if not isinstance(source, torch.nn.Module):
        kinds = "a torch.nn.Module, a torch.export.ExportedProgram or torch's ONNXProgram"
        raise UsageError(f"a {type(source).__name__} is no module to export; give {kinds}")
    args = (args,) if isinstance(args, torch.Tensor) else () if args is None else args
    if not isinstance(args, tuple | list):
        raise UsageError(f"args must be a tuple of tensors, got a {type(args).__name__}; keyword inputs go into kwargs")
    module, args, kwargs = converted(source, tuple(args), kwargs, dtype)
    example = Example(inspect.signature(module.forward), args, kwargs, dynamic_shapes)
    example.bound  # noqa: B018  # finds inputs that do not fit before a route is tried
    return module, example


def check_arguments(
    opset: int | None,
    dtype: str | None,
    output: str | os.PathLike[str] | None,
    consumer: str,
    form: str | None,
    route: str | None,
) -> None:
    """Find what is wrong with the arguments before a trace of a large model is paid for."""
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and opset < routes.OLDEST_OPSET:
        raise UsageError(f"opset {opset} is older than {routes.OLDEST_OPSET}, the oldest that export writes")
    if opset is not None and opset > newest:
        raise UsageError(f"opset {opset} is newer than {newest}, the newest that the installed onnx knows")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"cannot export as {dtype!r}; use one of {', '.join(DTYPES)}")
    if route is not None and route not in routes.ROUTES:
        raise UsageError(f"no route {route!r}; there are {', '.join(routes.ROUTES)}")
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
