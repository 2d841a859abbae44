"""Tiny checkpoints as real ones lie on a disk: trained weights, shards, tied embeddings, a tokenizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from test_models import OUTPUT_LIMIT

VOCABULARY = 99
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STEPS = 120


@functools.cache
def trained_llama(tied: bool = False) -> transformers.LlamaForCausalLM:
    """A Llama of two layers that has learnt to count in steps, so that none of its gains is 1."""
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(rms_norm_eps=1e-5, tie_word_embeddings=tied, **SMALL)
        model = transformers.LlamaForCausalLM(config).train()
        optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(STEPS):
            start, step = torch.randint(0, VOCABULARY, (16, 1)), torch.randint(1, 5, (16, 1))
            ids = (start + step * torch.arange(12)) % VOCABULARY
            loss = model(input_ids=ids, labels=ids).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    return model.eval()


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """A model whose gains are spread around what they were initialised to, the same each time."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name.rpartition(".")[0].rpartition(".")[2]:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return model.eval()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small models run faster on one thread, and many times so where processes compete for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a checkpoint as its users do, and return its folder."""
    model.save_pretrained(folder, **options)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Put a tokenizer of words "w0", "w1" and so on beside a checkpoint; some builders read one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(VOCABULARY - 4))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def assert_close(got: np.ndarray, wanted: torch.Tensor, dtype: str) -> None:
    """A runtime's output is PyTorch's, to what whole models are held to, for values as large as the largest."""
    exact = wanted.detach().double().numpy()
    assert np.isfinite(exact).all()
    assert np.abs(got.astype(np.float64) - exact).max() <= OUTPUT_LIMIT[dtype] * max(1.0, np.abs(exact).max())
