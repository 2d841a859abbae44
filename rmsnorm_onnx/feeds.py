"""The inputs of a file from a PyTorch module's example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.capture import to_numpy
from rmsnorm_onnx.errors import UsageError

if TYPE_CHECKING:
    import torch


def feeds(
    model: ir.Model, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Each input of a file, and notes on those that had to be cast.

    Where every input of the file bears the name of a parameter of `forward` that is one tensor, names decide; else the
    example's tensors are taken in order.

    Raises:
        UsageError: the example has another number of tensors than the file has inputs, or one of another type or shape.
    """
    # An initializer that is an input too has a value already.
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    named, ordered = _tensors(module, args, kwargs)
    names = [value.name or "" for value in inputs]
    if all(name in named for name in names):
        tensors = [named[name] for name in names]
    elif len(inputs) == len(ordered):
        tensors = ordered
    else:
        raise UsageError(
            f"the file has {len(inputs)} inputs ({', '.join(names)}), and the example {len(ordered)} tensors; "
            "give the inputs that the file was exported with"
        )
    fed, notes = {}, []
    for value, tensor in zip(inputs, tensors, strict=True):
        array, note = _fitting(value, to_numpy(tensor))
        fed[value.name or ""] = array
        notes += [note] if note else []
    return fed, tuple(notes)


def _tensors(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The tensors by the parameters of `forward` that are one each, and all of them in order."""
    import torch
    from torch.utils import _pytree as pytree

    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UsageError(f"forward does not take these inputs: {error}") from error
    named = {name: value for name, value in bound.items() if isinstance(value, torch.Tensor)}
    leaves = pytree.tree_leaves(list(bound.values()))
    return named, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _fitting(value: ir.Value, array: np.ndarray) -> tuple[np.ndarray, str]:
    """An array in the type that an input declares, with a note where it is another than the example's."""
    declared = [] if value.shape is None else list(value.shape)
    fits = value.shape is None or (
        len(declared) == array.ndim
        and all(not isinstance(d, int) or d == n for d, n in zip(declared, array.shape, strict=True))
    )
    if not fits:
        shape = ", ".join(str(d) for d in declared)
        raise UsageError(
            f"input {value.name} is [{shape}] in the file, and {list(array.shape)} in the example; "
            "give the inputs that the file was exported with"
        )
    wanted = None if value.dtype is None else value.dtype.numpy()
    if wanted is None or wanted == array.dtype:
        return array, ""
    floats = wanted.name in dtypes.FLOAT_TYPES and array.dtype.name in dtypes.FLOAT_TYPES
    cast = array.astype(wanted)
    if not floats and (wanted.name in dtypes.FLOAT_TYPES or not np.array_equal(cast, array)):
        raise UsageError(f"input {value.name} is {wanted.name} in the file, and {array.dtype.name} in the example")
    return cast, f"input {value.name} is {wanted.name} in the file, and {array.dtype.name} in PyTorch"
