"""`cached_signature`: a decoder with its key-value cache as named inputs and outputs.

The names are those of optimum and onnxruntime-genai: past_key_values.N.key and .value in, present.N.key and .value out,
each [batch, heads, past_sequence or total_sequence, head size]. Prefill is the same graph with a past of length 0.

Every layer keeps its whole past. PyTorch's sliding layers drop what is out of the window, which a graph of fixed
operators can express only with a counter beside the tensors; the attention mask hides the same positions either way.
"""

from __future__ import annotations

import inspect
from typing import Any

from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.exporters.signature import TEXT, Port, Signature, example_ids

_BATCH, _SEQUENCE, _PAST = 2, 3, 5  # none of them, nor the sum, is another or 1
_PAST_DIMS = {0: "batch", 2: "past_sequence"}
_PRESENT_DIMS = {0: "batch", 2: "total_sequence"}
_KNOWN = ("DynamicLayer", "DynamicSlidingWindowLayer")

Shapes = list[tuple[tuple[int, int], tuple[int, int]]]
"""Heads and head size of each layer's keys and values."""


def cached_signature(model: Any) -> Signature:
    """input_ids, attention_mask, position_ids and the past to logits and the present.

    attention_mask covers the past too: [batch, total_sequence]. A model that takes no position_ids is called without.

    Raises:
        ExportError: the model keeps no keys and values, or something else beside them (a recurrent state).
    """
    import torch

    if model.config.is_encoder_decoder:
        raise ExportError(
            f"{type(model).__name__} keeps a cache of its encoder's text too, which is not exported; leave cache off"
        )
    own, accepted = type(model).forward, inspect.signature(type(model).forward).parameters
    # transformers 5 renames the argument, and takes both for a while.
    keyword = "cache" if "cache" in accepted else "past_key_values"
    if keyword not in accepted:
        raise ExportError(f"{type(model).__name__} takes no cache; leave cache off")
    shapes = _shapes(model)
    takes_positions = "position_ids" in accepted

    def step(input_ids: Any, attention_mask: Any, past: Any, **more: Any) -> Any:
        cache = _cache(past)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, keyword: cache, "use_cache": True, **more}
        logits = own(model, **given)[0]
        return logits, [(layer.keys, layer.values) for layer in cache.layers]

    def with_positions(input_ids: Any, attention_mask: Any, position_ids: Any, past_key_values: Any) -> Any:
        return step(input_ids, attention_mask, past_key_values, position_ids=position_ids)

    def without_positions(input_ids: Any, attention_mask: Any, past_key_values: Any) -> Any:
        return step(input_ids, attention_mask, past_key_values)

    ids = example_ids(model, _BATCH, _SEQUENCE)
    mask = torch.ones(_BATCH, _PAST + _SEQUENCE, dtype=torch.int64)
    positions = torch.arange(_PAST, _PAST + _SEQUENCE).repeat(_BATCH, 1)
    dtype, generator = model.dtype, torch.Generator().manual_seed(1)
    past = [
        tuple(torch.randn(_BATCH, heads, _PAST, size, generator=generator).to(dtype) for heads, size in layer)
        for layer in shapes
    ]
    inputs = [Port("input_ids", TEXT), Port("attention_mask", {0: "batch", 1: "total_sequence"})]
    inputs += [Port("position_ids", TEXT)] * takes_positions
    names = [f"{layer}.{part}" for layer in range(len(shapes)) for part in ("key", "value")]
    return Signature(
        forward=with_positions if takes_positions else without_positions,
        args=(ids, mask, positions, past) if takes_positions else (ids, mask, past),
        inputs=(*inputs, *(Port(f"past_key_values.{name}", _PAST_DIMS) for name in names)),
        outputs=(Port("logits", TEXT), *(Port(f"present.{name}", _PRESENT_DIMS) for name in names)),
    )


def _shapes(model: Any) -> Shapes:
    """The heads and head sizes that the model's own cache gets from a short text."""
    import torch

    with torch.no_grad():
        given = model(input_ids=example_ids(model, _BATCH, _SEQUENCE), use_cache=True)
    cache = getattr(given, "past_key_values", None)
    cache = getattr(given, "cache", None) if cache is None else cache
    layers = getattr(cache, "layers", None)
    if not layers:
        raise ExportError(f"{type(model).__name__} gives no keys and values to keep; leave cache off")
    shapes = []
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if kind not in _KNOWN or layer.keys is None or layer.keys.dim() != 4:
            raise ExportError(
                f"layer {index} of {type(model).__name__} keeps a {kind}, and only keys and values of attention "
                "become inputs and outputs; leave cache off"
            )
        shapes.append(tuple((kept.shape[1], kept.shape[3]) for kept in (layer.keys, layer.values)))
    return shapes


def _cache(past: Any) -> Any:
    """A cache that holds these keys and values and grows by what is new."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in past:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache
