"""`export_keras`: a Keras 3 model on the torch backend to ONNX.

On that backend a Keras model is a torch module. Keras' own ONNX export goes through TorchScript, which has no symbol
for aten::rms_norm; this one goes through `rmsnorm_onnx.exporters.export`.

keras.layers.RMSNormalization, from its source (keras/src/ops/nn.py), for the layer's compute type x and C = float32 for
halves, x otherwise::

    s = x as C;  w = scale as x, as C
    y = s / sqrt(mean(s * s) + epsilon) * w      in C, rounded once to x

Under mixed_float16 the scale is kept in float32 and rounded to float16 before it is used.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes, modelio
from rmsnorm_onnx.errors import ExportError, MissingDependencyError, UsageError
from rmsnorm_onnx.exporters import torch as exporter
from rmsnorm_onnx.exporters.signature import Port, Signature, name_dimensions
from rmsnorm_onnx.exporters.steps import step
from rmsnorm_onnx.exporters.torch import ExportResult
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec, preset

if TYPE_CHECKING:
    import torch

_LAYER = "keras.src.layers.normalization.rms_normalization"
_BATCH, _FIRST = 2, 6  # example sizes: 2 along the batch, 6 + axis elsewhere


def export_keras(
    model: Any,
    args: Sequence[Any] | None = None,
    *,
    opset: int | None = None,
    output: str | os.PathLike[str] | None = None,
    fuse: bool = True,
    consumer: str = "any",
    form: str | None = None,
    **options: Any,
) -> ExportResult:
    """Export a Keras model to ONNX, each of its RMSNorms as one operator.

    The graph has the names of the model's inputs, output layers and variables ("dense/kernel").

    Args:
        model: A Keras 3 model or layer, built, on the torch backend. Its types are those of its dtype policies.
        args: Example inputs of a call, tensors or arrays; by default they are made from the inputs that a Functional
            or Sequential model declares. The dimensions declared as None are dynamic; without declared inputs, the
            first two of each.
        opset: The opset to write, by default 18.
        output: A path to write the model to.
        fuse: Whether to rewrite the norms.
        consumer: The runtime that will load the model, as `rmsnorm_onnx.fuse` takes it.
        form: The form to write, over the consumer's choice.
        options: Further keywords of `rmsnorm_onnx.exporters.export` (norms, route).

    Returns:
        The model, the route it took, and the report of the norms.

    Raises:
        UsageError: another backend than torch, no Keras model, or no inputs are known.
        ExportError: a step failed, a norm of the graph has another epsilon than its layer, or a layer normalises axes
            that Keras itself gets wrong. Nothing was written.
        MissingDependencyError: Keras or torch is not installed.
    """
    exporter.check_arguments(opset, None, output, consumer, form, options.get("route"))
    if "dtype" in options:
        raise UsageError("a Keras model's types are its dtype policies'; set them when the model is built")
    _require_torch_backend(model)
    for layer in norm_layers(model):
        _check_axes(layer)
    signature = _declared(model) if args is None else _given(model, args)
    exported = exporter.export(
        _module(model, signature.forward),
        signature.args,
        opset=opset,
        dynamic_shapes=signature.dynamic_shapes() if signature.inputs[0].dims else None,
        input_names=[port.name for port in signature.inputs],
        output_names=[port.name for port in signature.outputs] or None,
        fuse=fuse,
        consumer=consumer,
        form=form,
        **options,
    )
    graph = exported.model
    notes = exported.notes
    if signature.inputs[0].dims:
        notes = (*notes, *name_dimensions(graph, signature))
    _name_weights(graph, model)
    _check_epsilons(graph, model)
    if output is not None:
        with step("saving"):
            modelio.save(graph, output)
    return dataclasses.replace(exported, notes=notes)


def norm_layers(model: Any) -> list[Any]:
    """Every keras.layers.RMSNormalization of a model, each once."""
    return [layer for layer in model._flatten_layers() if type(layer).__module__ == _LAYER]


def layer_spec(layer: Any) -> RMSNormSpec:
    """What a built keras.layers.RMSNormalization computes on the torch backend, for inputs of its compute type.

    Raises:
        UsageError: the layer is not built.
    """
    rank = len(_input_shape(layer))
    wide = dtypes.wider(layer.compute_dtype, "float32")
    return preset(
        "torch",
        axes=tuple(sorted(axis % rank - rank for axis in layer.axis)),
        epsilon=float(layer.epsilon),
        statistic_type=wide,
        factor_type=wide,
        normalized_type=wide,
        gain_type=wide,
    )


def _require_torch_backend(model: Any) -> None:
    keras = sys.modules.get("keras")
    if keras is None:  # importing it here would choose its backend for the caller
        if importlib.util.find_spec("keras") is None:
            raise MissingDependencyError("keras", "exporting a Keras model", "rmsnorm_onnx[keras]")
        raise UsageError(f"a {type(model).__name__} is no Keras model")
    if not isinstance(model, keras.layers.Layer):
        raise UsageError(f"a {type(model).__name__} is no Keras model")
    backend = keras.backend.backend()
    if backend != "torch":
        raise UsageError(
            f"Keras runs on {backend} here, and only its torch backend is exported; "
            "set KERAS_BACKEND=torch before keras is imported"
        )
    if not model.built:
        raise UsageError(f"{model.name} is not built; call it once, or give it an Input")


def _input_shape(layer: Any) -> Sequence[int | None]:
    if not layer.built:
        raise UsageError(f"{layer.path} is not built; call the model once")
    shape: Sequence[int | None] = layer.get_build_config()["input_shape"]
    return shape


def _check_axes(layer: Any) -> None:
    """Ask Keras what it makes of a layer's axes: its torch backend knows only trailing ones, and may not say so.

    Raises:
        ExportError: it computes something else than its documentation says, or cannot.
    """
    import keras
    import torch

    rank = len(_input_shape(layer))
    axes = [axis % rank for axis in layer.axis]
    x = torch.randn([n + 2 for n in range(rank)], generator=torch.Generator().manual_seed(0))
    scale = torch.ones([x.shape[axis] for axis in sorted(axes)])
    meant = x / torch.sqrt((x * x).mean(axes, keepdim=True) + layer.epsilon)
    try:
        got = keras.ops.rms_normalization(x, scale, axis=sorted(axes), epsilon=layer.epsilon)
        right = got.shape == meant.shape and bool(torch.allclose(got, meant))
    except Exception:  # Keras raises what its backend does; the refusal below says all that a user can do
        right = False
    if not right:
        raise ExportError(
            f"{layer.path} normalises axes {list(layer.axis)} of rank {rank}, which Keras {keras.__version__} itself "
            "gets wrong on the torch backend; put keras.layers.Permute around it, and normalise the last axes"
        )


def _declared(model: Any) -> Signature:
    """The inputs that a model declares, with example values."""
    import keras
    import torch

    tensors = list(getattr(model, "inputs", None) or ())
    if not tensors:
        raise UsageError(f"{model.name} declares no inputs; give example inputs")
    structure = getattr(model, "_functional", model).input
    generator = torch.Generator().manual_seed(0)
    args, ports = [], []
    for tensor, name in zip(tensors, _distinct([t.name for t in tensors]), strict=True):
        sizes = [size or (_FIRST + axis if axis else _BATCH) for axis, size in enumerate(tensor.shape)]
        dtype = getattr(torch, tensor.dtype)
        drawn = torch.randn(sizes, generator=generator) if dtype.is_floating_point else torch.ones(sizes)
        args.append(drawn.to(dtype))
        dynamic = [axis for axis, size in enumerate(tensor.shape) if size is None]
        ports.append(Port(name, {axis: f"{name}_dim_{axis}" if axis else "batch" for axis in dynamic}))

    def call(inputs: list[Any]) -> Any:
        return keras.tree.flatten(model(keras.tree.pack_sequence_as(structure, inputs)))

    functional = getattr(model, "_functional", model)
    outputs = [Port(name, {}) for name in _distinct(functional.output_names, {port.name for port in ports})]
    return Signature(call, (args,), tuple(ports), tuple(outputs))


def _given(model: Any, args: Sequence[Any]) -> Signature:
    """Example inputs that the caller has."""
    import keras
    import torch

    if not isinstance(args, tuple | list):
        args = (args,)
    tensors = [torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise UsageError("args must be a tuple of tensors or arrays, those that the model is called with")
    count = min(2, min(tensor.dim() for tensor in tensors))

    def call(inputs: list[Any]) -> Any:
        return keras.tree.flatten(model(*inputs))

    names = [f"input_{index}" for index in range(len(tensors))]
    ports = tuple(
        Port(name, {axis: f"{name}_dim_{axis}" if axis else "batch" for axis in range(count)}) for name in names
    )
    return Signature(call, (tensors,), ports, ())


def _distinct(names: Sequence[str], taken: set[str] | None = None) -> list[str]:
    """Names as they are where they are distinct, else with a number."""
    taken = set() if taken is None else set(taken)
    distinct = []
    for name in names:
        number, choice = 1, name
        while choice in taken:
            number, choice = number + 1, f"{name}_{number}"
        taken.add(choice)
        distinct.append(choice)
    return distinct


def _module(model: Any, call: Callable[..., Any]) -> torch.nn.Module:
    """A module whose forward has a signature that torch.export can read; Keras' takes anything."""
    import torch

    class Called(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: list[torch.Tensor]) -> Any:
            return call(inputs)

    return Called()


def _name_weights(graph: ir.Model, model: Any) -> None:
    """Give initializers the paths of the variables that they are; torch.export sees only tensors."""
    paths = {}
    for variable in model.variables:
        paths.setdefault((variable.value.data_ptr(), tuple(variable.value.shape)), variable.path)
    taken = {value.name for node in graph.graph.all_nodes() for value in node.outputs}
    taken |= {value.name for value in graph.graph.inputs}
    for value in list(graph.graph.initializers.values()):
        raw = getattr(value.const_value, "raw", None)
        if not callable(getattr(raw, "data_ptr", None)):
            continue
        path = paths.get((raw.data_ptr(), tuple(raw.shape)))
        if path is not None and path not in taken and path not in graph.graph.initializers:
            value.name = path


def _check_epsilons(graph: ir.Model, model: Any) -> None:
    """Every RMSNormalization's epsilon is that of some norm in the graph.

    Raises:
        ExportError: one is not.
    """
    found = {np.float32(site.spec.epsilon) for site in find_rms_norms(graph) if isinstance(site, Match)}
    for layer in norm_layers(model):
        if np.float32(layer.epsilon) not in found:
            raise ExportError(
                f"no norm of the graph has the epsilon {layer.epsilon:g} of {layer.path}; the layer is not called, or "
                "the exporter changed it"
            )
