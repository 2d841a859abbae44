"""Tiny seeded models with the norms of their large relatives; nothing is downloaded.

`build("qwen3", "float16")` gives the same weights and inputs each time, in any process. Gains are random, so that one
that is lost or misplaced shows.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import MissingDependencyError, UsageError
from rmsnorm_onnx.models.inventory import Norm, norms

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
"""The types that the models come in."""

_VOCABULARY = 99
_HIDDEN = 64
_TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": _HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 64,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class TinyModel:
    """A model, ready to be exported.

    Attributes:
        name: As in `NAMES`.
        dtype: The type of its weights.
        module: The model, in inference mode; its forward takes and gives one tensor.
        args: Example inputs: token ids [2, 7], or values [2, 7, 64] for "mlp". Batch and sequence may be of any size.
        norms: Every norm that it holds.
    """

    name: str
    dtype: str
    module: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    norms: tuple[Norm, ...]

    def inputs(self, batch: int, sequence: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Other inputs of the same kind."""
        return _inputs(self.name, self.dtype, batch, sequence, seed)


def build(name: str, dtype: str = "float32", seed: int = 0) -> TinyModel:
    """A seeded model.

    Args:
        name: One of `NAMES`.
        dtype: One of `DTYPES`.
        seed: Of its weights and inputs.

    Raises:
        UsageError: no such model, or no such type.
        MissingDependencyError: torch or transformers is not installed.

    >>> model = build("mlp")
    >>> len(model.norms), model.module(*model.args).shape
    (3, torch.Size([2, 7, 64]))
    """
    if name not in _BUILDERS or dtype not in DTYPES:
        raise UsageError(f"no tiny model {name!r} in {dtype!r}; there are {', '.join(NAMES)} in {', '.join(DTYPES)}")
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "building a tiny model", "rmsnorm_onnx[torch]") from error

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _BUILDERS[name]()
        _randomize_gains(module)
    module = module.to(getattr(torch, dtype)).eval()
    args = _inputs(name, dtype, batch=2, sequence=7, seed=seed)
    return TinyModel(name=name, dtype=dtype, module=module, args=args, norms=tuple(norms(module)))


def _inputs(name: str, dtype: str, batch: int, sequence: int, seed: int) -> tuple[torch.Tensor, ...]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    if name == "mlp":
        return (torch.randn(batch, sequence, _HIDDEN, generator=generator).to(getattr(torch, dtype)),)
    return (torch.randint(0, _VOCABULARY, (batch, sequence), generator=generator),)


def _randomize_gains(module: torch.nn.Module) -> None:
    """Spread every gain around what it is initialised to: 1, or 0 where 1 is added to it."""
    import torch

    for norm in norms(module):
        if norm.spec.has_gain:
            weight = module.get_submodule(norm.name).weight
            assert isinstance(weight, torch.Tensor)
            with torch.no_grad():
                weight.add_(0.3 * torch.randn(weight.shape))


def _encoder(model: Any, **options: Any) -> torch.nn.Module:
    """A transformers model as a function from token ids to its last hidden state."""
    import torch

    class Encoder(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.model(input_ids=ids, **options)[0]

    return Encoder()


def _transformers() -> Any:
    # Nothing is fetched here, and transformers need not ask whether it could be.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", "building this model", "rmsnorm_onnx[transformers]") from error
    return transformers


def _llama() -> torch.nn.Module:
    tf = _transformers()
    return _encoder(tf.LlamaModel(tf.LlamaConfig(**_TRANSFORMER)), use_cache=False)


def _qwen3() -> torch.nn.Module:
    """Qwen 3 normalises each head's queries and keys."""
    tf = _transformers()
    return _encoder(tf.Qwen3Model(tf.Qwen3Config(head_dim=16, **_TRANSFORMER)), use_cache=False)


def _gemma3() -> torch.nn.Module:
    """Gemma 3 has six norms a layer, adds 1 to each gain, and rounds once."""
    tf = _transformers()
    return _encoder(tf.Gemma3TextModel(tf.Gemma3TextConfig(head_dim=16, **_TRANSFORMER)), use_cache=False)


def _t5_encoder() -> torch.nn.Module:
    tf = _transformers()
    config = tf.T5Config(d_model=_HIDDEN, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=_VOCABULARY)
    return _encoder(tf.T5EncoderModel(config))


def _mlp() -> torch.nn.Module:
    """torch.nn.RMSNorm in three variants: an epsilon, torch's default epsilon, and no gain."""
    from torch import nn

    return nn.Sequential(
        nn.RMSNorm(_HIDDEN, eps=1e-6),
        nn.Linear(_HIDDEN, 128),
        nn.RMSNorm(128),
        nn.GELU(),
        nn.Linear(128, _HIDDEN),
        nn.RMSNorm(_HIDDEN, eps=1e-5, elementwise_affine=False),
    )


_BUILDERS: Mapping[str, Callable[[], torch.nn.Module]] = MappingProxyType(
    {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3, "mlp": _mlp, "t5-encoder": _t5_encoder}
)

NAMES = tuple(_BUILDERS)
"""The tiny models."""
