"""Tiny language models of transformers: the configs of large relatives, two layers of width 64, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.models.design import HIDDEN, VOCABULARY, Design, Inputs, hidden_states, transformers

if TYPE_CHECKING:
    import torch

_SHARED: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
    }
)
# For configs that name tokens beyond so small a vocabulary.
_TOKENS: Mapping[str, Any] = MappingProxyType({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
_EXPERTS: Mapping[str, Any] = MappingProxyType({"num_experts_per_tok": 2, "moe_intermediate_size": 32})
_BATCHED = (
    "its experts run as batched products: torch.export cannot trace transformers' default, which groups tokens by "
    "expert at run time"
)


def _model(name: str, config: str = "", call: Mapping[str, Any] | None = None, **options: Any) -> torch.nn.Module:
    """The bare model of a family, by the names that its classes share, as a function from ids to hidden states."""
    tf = transformers()
    settings = getattr(tf, config or f"{name}Config")(**{**_SHARED, **options})
    return hidden_states(getattr(tf, f"{name}Model")(settings), use_cache=False, **(call or {}))


def _batched(module: torch.nn.Module) -> torch.nn.Module:
    module.model.set_experts_implementation("batched_mm")  # type: ignore[operator,union-attr]
    return module


def _family(name: str, config: str = "", trouble: str = "", **options: Any) -> Design:
    kind = f"{name}Model"
    return Design(source=f"transformers.{kind}", make=lambda: _model(name, config, **options), trouble=trouble)


def _experts(name: str, **options: Any) -> Design:
    return Design(source=f"transformers.{name}Model", make=lambda: _batched(_model(name, **options)), trouble=_BATCHED)


def _mamba2() -> torch.nn.Module:
    """Mamba 2 normalises the product with its gate, in two groups; the gain lies along both."""
    tf = transformers()
    config = tf.Mamba2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=8,
        **_TOKENS,
    )
    return hidden_states(tf.Mamba2Model(config), use_cache=False)


def _t5_config() -> Any:
    tf = transformers()
    return tf.T5Config(d_model=HIDDEN, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=VOCABULARY)


def _t5_encoder() -> torch.nn.Module:
    return hidden_states(transformers().T5EncoderModel(_t5_config()))


def _t5() -> torch.nn.Module:
    """Encoder and decoder: two texts in, the hidden states of both out."""
    import torch

    model = transformers().T5Model(_t5_config())

    class EncoderDecoder(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, target_ids: torch.Tensor) -> Any:
            made = self.model(input_ids=ids, decoder_input_ids=target_ids, use_cache=False)
            return made.last_hidden_state, made.encoder_last_hidden_state

    return EncoderDecoder()


def _two_texts(draw: Inputs) -> tuple[torch.Tensor, ...]:
    return draw.ids(), draw.ids()


_HEADS: Mapping[str, Any] = MappingProxyType({"head_dim": 16})

DESIGNS: Mapping[str, Design] = MappingProxyType(
    {
        "llama": _family("Llama"),
        "mistral": _family("Mistral", **_HEADS),
        "qwen2": _family("Qwen2"),
        # Queries and keys are normalised head by head.
        "qwen3": _family("Qwen3", **_HEADS),
        # The Gemmas add 1 to each gain (4 does not), and round once; 2 and 3 have norms behind each half of a layer.
        "gemma": _family("Gemma", **_HEADS),
        "gemma2": _family("Gemma2", **_HEADS),
        "gemma3": _family("Gemma3Text", **_HEADS),
        "gemma4": _family(
            "Gemma4Text",
            **_HEADS,
            global_head_dim=16,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=0,
        ),
        # Norms behind each half of a layer only, and over whole queries and keys.
        "olmo2": _family("Olmo2", **_TOKENS),
        "phi3": _family("Phi3", **_TOKENS),
        "glm4": _family("Glm4", **_HEADS, **_TOKENS),
        "granite": _family("Granite"),
        "deepseek-v3": _experts(
            "DeepseekV3",
            **_EXPERTS,
            **{"num_key_value_heads": 4},
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        ),
        "gpt-oss": _experts("GptOss", **_HEADS, **_TOKENS, num_local_experts=4, num_experts_per_tok=2),
        "helium": _family("Helium", **_HEADS),
        "mamba2": Design(source="transformers.Mamba2Model", make=_mamba2, wide=("*.mixer.norm", "*.norm_f")),
        "qwen3-next": _experts(
            "Qwen3Next",
            # An export unrolls the 64 steps of a chunk, one by one; another length of chunks is the same mathematics.
            call={"chunk_size": 8},
            **_EXPERTS,
            **_HEADS,
            num_experts=4,
            shared_expert_intermediate_size=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        ),
        "t5": Design(source="transformers.T5Model", make=_t5, inputs=_two_texts),
        "t5-encoder": Design(source="transformers.T5EncoderModel", make=_t5_encoder),
        # These two subtract the mean.
        "cohere": _family("Cohere", **_TOKENS),
        "nemotron": _family("Nemotron"),
    }
)
"""The language models."""
