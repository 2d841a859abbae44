"""`load`: a transformers checkpoint in a local folder, checked before a tensor of it is read; nothing is fetched."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_onnx.errors import ExportError, MissingDependencyError, ModelError
from rmsnorm_onnx.exporters.steps import words

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ATTENTION = "eager"
"""The attention that is exported: plain operators with a float32 softmax, and a mask that is always written out."""

_NAMED = 3  # names in a message


def load(folder: str | os.PathLike[str], dtype: str | None = None) -> tuple[Any, tuple[str, ...]]:
    """The model of a checkpoint: config.json, and model.safetensors or its shards with their index.

    Args:
        folder: Where they are; no network is asked for anything.
        dtype: "float32", "float16" or "bfloat16"; by default the type that the checkpoint names, or its weights have.

    Returns:
        The model in inference mode, with attention as plain operators; and what a reader should know of its weights,
        each one sentence.

    Raises:
        ModelError: the folder holds no checkpoint, or one that is damaged or that the installed transformers does not
            know.
        ExportError: the checkpoint is quantised.
        MissingDependencyError: transformers is not installed.
    """
    path = Path(folder)
    _check_config(path)
    transformers = require_transformers("reading a checkpoint")
    _check_weights(path)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # an unknown model_type is a ValueError, a wrong field anything
        raise ModelError(f"{path / CONFIG} cannot be used: {words(error)}") from error
    if getattr(config, "quantization_config", None):
        raise ExportError(f"{path} holds quantised weights; export the checkpoint that they were made from")
    try:
        model, loading = model_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' own error names no tensor: they are named below
        )
    except Exception as error:
        raise ModelError(f"{path} cannot be loaded: {words(error)}") from error
    _check_sizes(path, loading["mismatched_keys"])
    # transformers draws what is missing at random, with no more than a warning.
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(f"{path} lacks {_some(missing)}, which {type(model).__name__} has; fetch it again")
    unused = sorted(loading["unexpected_keys"])
    notes = (f"{type(model).__name__} has no use for {_some(unused)} of the checkpoint",) if unused else ()
    return model.eval(), notes


def model_class(config: Any) -> Any:
    """The class that a config's checkpoint names; else its causal LM, its sequence-to-sequence LM, or its bare model.

    Raises:
        ModelError: transformers has no model for the config.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type):
            return named
    if config.is_encoder_decoder:
        choices = [transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    else:
        choices = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING]
    for mapping in (*choices, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            # Encoders have an LM head class of another name there, made for decoding with them.
            if mapping is transformers.MODEL_MAPPING or found.__name__.endswith(("ForCausalLM", "Generation")):
                return found
    raise ModelError(f"transformers has no model for a {type(config).__name__}")


def require_transformers(purpose: str) -> Any:
    """transformers, which needs torch.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", purpose, "rmsnorm_onnx[transformers]") from error
    return transformers


def _check_config(path: Path) -> None:
    if not (path / CONFIG).is_file():
        what = "holds no config.json" if path.is_dir() else "is no folder"
        raise ModelError(f"{path} {what}; name the folder of a transformers checkpoint")
    if not isinstance(_json(path / CONFIG), dict):
        raise ModelError(f"{path / CONFIG} is not a JSON object; fetch it again")


def _check_weights(path: Path) -> None:
    """Every shard is there, whole, and holds what the index says."""
    if (path / WEIGHTS).is_file():
        _keys(path / WEIGHTS)
        return
    if not (path / INDEX).is_file():
        other = next((p.name for p in sorted(path.glob("*.bin"))), None)
        why = f"only {other}; write it again with save_pretrained" if other else f"nor {INDEX}"
        raise ModelError(f"{path} holds no {WEIGHTS}, {why}")
    index = _json(path / INDEX)
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise ModelError(f"{path / INDEX} has no weight_map of names to files; fetch it again")
    for shard in sorted(set(placed.values())):
        if not (path / shard).is_file():
            raise ModelError(f"{path} lacks the shard {shard} that {INDEX} names; fetch it again")
        lost = {name for name, where in placed.items() if where == shard} - _keys(path / shard)
        if lost:
            raise ModelError(f"{path / shard} lacks {_some(sorted(lost))} that {INDEX} places there; fetch it again")


def _check_sizes(path: Path, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Every tensor is of the size that the config asks for; others would be drawn at random."""
    other = sorted((name, list(held), list(wanted)) for name, held, wanted in mismatched)
    if other:
        name, held, wanted = other[0]
        more = f", and {len(other) - 1} more tensors are of another size" if len(other) > 1 else ""
        raise ModelError(
            f"{path}: {name} is {held} in the file, and {wanted} by {CONFIG}{more}; "
            "put the weights and their own config together"
        )


def _keys(file: Path) -> set[str]:
    """The names of a safetensors file; its header is checked against its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is no safetensors file or is cut short ({words(error)}); fetch it again") from error


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({words(error)}); fetch it again") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
