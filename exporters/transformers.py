"""`export_transformers`: a transformers model, its config, or a checkpoint folder to ONNX, with its cache if asked.

The way is `rmsnorm_onnx.exporters.export`. What torch's exporter cannot take (mixtures of experts, T5's relative
positions) goes through transformers' own, with its optimiser off, which would delete an epsilon of 1e-8 or less.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.passes import common

from rmsnorm_onnx import modelio, passes
from rmsnorm_onnx.errors import ExportError, MissingDependencyError, UsageError
from rmsnorm_onnx.exporters import checkpoint, epsilons, pairing
from rmsnorm_onnx.exporters import torch as exporter
from rmsnorm_onnx.exporters.cache import cached_signature
from rmsnorm_onnx.exporters.dynamo import fixed_dimensions, write_numerals_as_numbers
from rmsnorm_onnx.exporters.signature import Signature, name_dimensions, name_ports, text_signature
from rmsnorm_onnx.exporters.steps import ONE_AT_A_TIME, quiet, step
from rmsnorm_onnx.exporters.torch import ExportResult

if TYPE_CHECKING:
    import torch

ROUTE = "transformers.exporters, torch.onnx"
"""The way through transformers' own exporter, in words."""


def export_transformers(
    source: Any,
    *,
    cache: bool = False,
    opset: int | None = None,
    dtype: str | None = None,
    output: str | os.PathLike[str] | None = None,
    fuse: bool = True,
    consumer: str = "any",
    form: str | None = None,
    norms: Mapping[type, Any] | None = None,
    route: str | None = None,
    seed: int = 0,
) -> ExportResult:
    """Export a text model of transformers to ONNX, each of its RMSNorms as one operator.

    Without a cache the graph takes input_ids and attention_mask [batch, sequence] (and decoder_input_ids, of an
    encoder-decoder) and gives logits, or last_hidden_state of a model without a head. With one it takes position_ids
    and past_key_values.N.key and .value too, attention_mask then covers past and present, and gives present.N.key and
    .value besides. Attention is exported as plain operators ("eager"), weights under their names in the checkpoint.

    Args:
        source: A local folder with config.json and safetensors, a config (the weights are drawn from `seed`), or a
            model, which is left as it is.
        cache: Whether the keys and values of earlier tokens are inputs and outputs. A past of length 0 is the prefill.
        opset: The opset to write, by default 18.
        dtype: "float32", "float16" or "bfloat16"; by default the source's own. Weights are cast as transformers casts
            them when it loads: buffers such as the rotary frequencies, and modules that it keeps in float32, stay.
        output: A path to write the model to.
        fuse: Whether to rewrite the norms.
        consumer: The runtime that will load the model, as `rmsnorm_onnx.fuse` takes it.
        form: The form to write, over the consumer's choice.
        norms: Module classes that are kept whole, as `rmsnorm_onnx.exporters.export` takes them.
        route: "dynamo" or "torchscript" takes this one alone; by default "dynamo", and transformers' own exporter if
            it fails.
        seed: Of a config's weights.

    Returns:
        The model, the route it took, and the report of the norms; the notes say why another route was taken.

    Raises:
        UsageError: an argument has no meaning.
        ModelError: the folder holds no checkpoint, or a damaged one.
        ExportError: no route can export the model, its cache is of a kind that cannot be, or a norm of the graph has
            another epsilon than its module. Nothing was written.
        MissingDependencyError: torch or transformers is not installed.
    """
    exporter.check_arguments(opset, dtype, output, consumer, form, route)
    checkpoint.require_transformers("exporting its models")
    with ONE_AT_A_TIME, quiet(), step("reading the model"):
        model, notes = _read(source, dtype, seed)
        signature = cached_signature(model) if cache else text_signature(model)
    model.forward = signature.forward
    try:
        exported = exporter.export(
            model,
            signature.args,
            opset=opset,
            dynamic_shapes=signature.dynamic_shapes(),
            input_names=[port.name for port in signature.inputs],
            output_names=[port.name for port in signature.outputs],
            fuse=fuse,
            consumer=consumer,
            form=form,
            norms=norms,
            route=route or "dynamo",
        )
    except ExportError as problem:
        if route or norms:
            raise
        exported = _by_transformers(model, signature, opset or exporter.DEFAULT_OPSET, problem, fuse, consumer, form)
    graph = exported.model
    share_tied_weights(graph, model)
    # By this signature the mask covers past and present: that it is as long as both is no limit.
    said = [n for n in exported.notes if not ("attention_mask.shape[1]" in n and "past_key_values" in n)]
    fixed = name_dimensions(graph, signature, said)
    notes = (*notes, *said, *fixed, *epsilons.check(exported.norms, model.config))
    if output is not None:
        with step("saving"):
            modelio.save(graph, output)
    return dataclasses.replace(exported, notes=notes)


def _read(source: Any, dtype: str | None, seed: int) -> tuple[Any, tuple[str, ...]]:
    """A model of our own, with attention as plain operators, in inference mode."""
    import torch
    import transformers

    if isinstance(source, str | os.PathLike):
        return checkpoint.load(source, dtype)
    wanted = None if dtype is None else getattr(torch, dtype)
    if isinstance(source, transformers.PreTrainedConfig):
        config = copy.deepcopy(source)
        wanted = wanted or getattr(config, "dtype", None) or torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = checkpoint.model_class(config)._from_config(
                config, dtype=wanted, attn_implementation=checkpoint.ATTENTION
            )
        return drawn.eval(), ()
    if not isinstance(source, transformers.PreTrainedModel):
        raise UsageError(
            f"a {type(source).__name__} is no transformers model; give one, its config, or a checkpoint's folder"
        )
    # A copy of the modules, not of the weights.
    model = copy.deepcopy(source, {id(t): t for t in (*source.parameters(), *source.buffers())})
    model.set_attn_implementation(checkpoint.ATTENTION)
    if wanted is not None:
        _cast(model, wanted)
    return model.eval(), ()


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers; what is computed from the config stays, as where transformers loads in it."""
    import torch

    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    saved, done = set(model.state_dict()), {}
    for prefix, part in model.named_modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is None or full not in saved or not tensor.is_floating_point():
                    continue
                wide = dtype != torch.float32 and not kept.isdisjoint(full.split("."))
                if id(tensor) not in done:
                    cast = tensor.detach().to(torch.float32 if wide else dtype)
                    done[id(tensor)] = (
                        torch.nn.Parameter(cast, requires_grad=False) if held is part._parameters else cast
                    )
                held[name] = done[id(tensor)]


def _by_transformers(
    model: Any,
    signature: Signature,
    opset: int,
    problem: ExportError,
    fuse: bool,
    consumer: str,
    form: str | None,
) -> ExportResult:
    """What transformers' own exporter makes of a model that torch's cannot take.

    Raises:
        ExportError: it cannot either; both exporters' words are kept.
    """
    try:
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    except ImportError:  # transformers is older than its exporter
        raise problem from None
    names = list(inspect.signature(signature.forward).parameters)
    shapes = dict(zip(names, signature.dynamic_shapes(), strict=True))
    inputs = dict(zip(names, signature.args, strict=True))
    config = OnnxConfig(opset_version=opset, optimize=False, dynamic_shapes=shapes)
    try:
        with ONE_AT_A_TIME, quiet(), step("transformers' own exporter"):
            graph: ir.Model = OnnxExporter().export_program(model, inputs, config)[0]
            common.RemoveUnusedNodesPass()(graph)
            write_numerals_as_numbers(graph)
    except (ExportError, MissingDependencyError) as second:
        raise ExportError(f"{problem}; {second}") from second
    written = graph.opset_imports.get("")
    if written != opset:
        raise ExportError(f"{problem}; transformers' own exporter wrote opset {written}, not {opset}")
    name_ports(graph, signature)
    fixed = fixed_dimensions(graph, [list(port.dims) for port in signature.inputs])
    report = None
    if fuse:
        with step("fusion"):
            graph, report = passes.fuse(graph, consumer=consumer, form=form)
    paired, remarks = pairing.pair(graph, report, model, {})
    note = f"exported by transformers' own exporter, its optimiser off, since {problem}"
    return ExportResult(graph, opset, ROUTE, report, (note, *fixed, *remarks), paired)


def share_tied_weights(graph: ir.Model, model: torch.nn.Module) -> int:
    """Let initializers that are one tensor in PyTorch be one in the graph, under the name that checkpoints give it.

    Returns:
        How many initializers were dropped.
    """
    names = {_identity(tensor): name for name, tensor in reversed(list(model.named_parameters()))}
    first: dict[Any, ir.Value] = {}
    dropped = 0
    for name, value in list(graph.graph.initializers.items()):
        identity = _identity(getattr(value.const_value, "raw", None))
        if identity is None or value in graph.graph.inputs or value in graph.graph.outputs:
            continue
        kept = first.setdefault(identity, value)
        if kept is not value:
            value.replace_all_uses_with(kept)
            del graph.graph.initializers[name]
            dropped += 1
    for identity, value in first.items():
        known = names.get(identity)
        if known is not None and known not in graph.graph.initializers:
            value.name = known
    return dropped


def _identity(tensor: Any) -> tuple[Any, ...] | None:
    """What is the same for two names of one tensor of PyTorch, and for nothing else."""
    if not callable(getattr(tensor, "data_ptr", None)) or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
