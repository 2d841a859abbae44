"""Trained checkpoints: every gain is in the file to the last bit, tied weights once, and the numbers are PyTorch's."""

from __future__ import annotations

import collections
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from checkpoints import SMALL, VOCABULARY, assert_close, save, trained_llama
from safetensors.torch import load_file

from rmsnorm_onnx import cli, dtypes
from rmsnorm_onnx.errors import ExportError, ModelError
from rmsnorm_onnx.exporters import export_transformers
from rmsnorm_onnx.parity import verify

NORMS = 2 * SMALL["num_hidden_layers"] + 1


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, from all of its shards."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bits(array: np.ndarray) -> bytes:
    """An array's bytes, for types that numpy compares loosely."""
    return np.ascontiguousarray(array).tobytes()


def check_gains(model: ir.Model, folder: Path, dtype: str) -> None:
    """Each norm of the checkpoint is a weight of its name in the graph, cast to the type and otherwise the same."""
    gains = {name: tensor for name, tensor in tensors(folder).items() if "norm" in name}
    assert len(gains) == NORMS and all(tensor.std() > 0.01 for tensor in gains.values())
    for name, tensor in gains.items():
        stored = model.graph.initializers[name].const_value.numpy()
        wanted = tensor.to(getattr(torch, dtype)).float().numpy().astype(dtypes.numpy_dtype(dtype))
        assert bits(stored) == bits(wanted), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    return save(trained_llama(), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tied embeddings in several files."""
    folder = save(trained_llama(tied=True), tmp_path_factory.mktemp("shards"), max_shard_size="50KB")
    assert (folder / "model.safetensors.index.json").exists() and not (folder / "model.safetensors").exists()
    return folder


def logits(path: Path, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What onnxruntime computes for a text."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def check_model(path: Path, model: torch.nn.Module, dtype: str) -> None:
    """A file computes what PyTorch does, for another batch and length than the example's, padded on the left."""
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
    got = logits(path, ids.numpy(), mask.numpy())
    seen = mask.bool().numpy()
    assert_close(got[seen], wanted[mask.bool()], dtype)


def test_one_file(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export FOLDER` keeps a trained checkpoint's gains to the last bit, its numbers, and each norm within bounds."""
    path = tmp_path / "model.onnx"
    assert cli.main(["export", str(whole), "-o", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["found"], told["rewritten"], told["declined"], told["export"]["notes"]) == (NORMS, NORMS, 0, [])
    check_gains(ir.load(path), whole, "float32")
    check_model(path, trained_llama(), "float32")
    report = verify(path)
    assert len(report.sites) == NORMS and all(site.within for site in report.sites)


def test_shards_and_tied_weights(shards: Path, tmp_path: Path) -> None:
    """A checkpoint in shards is read whole; embeddings that are tied are stored once, in the type asked for."""
    path = tmp_path / "model.onnx"
    result = export_transformers(shards, dtype="float16", output=path)
    check_gains(result.model, shards, "float16")
    check_model(path, type(trained_llama()).from_pretrained(shards, dtype=torch.float16), "float16")
    written = ir.load(path)
    stored = {v.name: v.const_value.nbytes for v in written.graph.initializers.values() if v.const_value.size > 64}
    assert stored == {name: 2 * tensor.numel() for name, tensor in tensors(shards).items() if tensor.numel() > 64}
    assert "lm_head.weight" not in stored


@pytest.mark.full
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type(dtype: str, opset: int, shards: Path, tmp_path: Path) -> None:
    """Gains are the checkpoint's, or their cast, in every type; norms are within bounds, also where no model runs."""
    path = tmp_path / "model.onnx"
    result = export_transformers(shards, dtype=dtype, opset=opset, output=path)
    check_gains(result.model, shards, dtype)
    sites = verify(path).sites
    assert len(sites) == NORMS and all(site.within for site in sites)
    if dtype != "bfloat16":  # onnxruntime has no kernels
        reread = type(trained_llama()).from_pretrained(shards, dtype=getattr(torch, dtype))
        check_model(path, reread, dtype)


@pytest.mark.full
def test_a_checkpoints_own_type(tmp_path: Path) -> None:
    """Without a type asked for, the checkpoint's own is exported."""
    folder = save(copy.deepcopy(trained_llama()).to(torch.bfloat16), tmp_path / "half")
    result = export_transformers(folder)
    assert {site.x_type for site in result.report.sites} == {"bfloat16"}
    check_gains(result.model, folder, "bfloat16")


def cut(folder: Path) -> None:
    """Lose the end of a shard."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-10])


def no_header(folder: Path) -> None:
    """Write something else in place of a shard."""
    sorted(folder.glob("*.safetensors"))[0].write_bytes(b"not a tensor")


def lose_shard(folder: Path) -> None:
    """Lose a shard."""
    sorted(folder.glob("*.safetensors"))[1].unlink()


def lose_weights(folder: Path) -> None:
    """Lose all weights, index included."""
    for file in folder.glob("model*"):
        file.unlink()


def lose_index_entry(folder: Path) -> None:
    """Let the index place a tensor where it is not."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = sorted(index["weight_map"])
    index["weight_map"][names[0]] = index["weight_map"][names[-1]]
    file.write_text(json.dumps(index))


def lose_tensor(folder: Path) -> None:
    """Lose a norm's gain and its entry in the index: transformers would draw it at random."""
    from safetensors.torch import save_file

    for file in folder.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(file).items() if name != "model.norm.weight"}
        save_file(kept, file, metadata={"format": "pt"})
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))


def edit(**fields: Any) -> Any:
    """Change fields of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def garble(folder: Path) -> None:
    """Cut config.json short."""
    file = folder / "config.json"
    file.write_text(file.read_text()[:50])


DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "config cut short": (garble, "cannot be read as JSON"),
    "unknown model": (edit(model_type="no-such-model"), "no-such-model"),
    "shard lost": (lose_shard, "lacks the shard model-00002"),
    "shard cut short": (cut, "no safetensors file or is cut short"),
    "no shard": (no_header, "no safetensors file or is cut short"),
    "no weights": (lose_weights, "holds no model.safetensors, nor model.safetensors.index.json"),
    "index": (lose_index_entry, "that model.safetensors.index.json places there"),
    "tensor lost": (lose_tensor, "lacks model.norm.weight, which LlamaForCausalLM has"),
    "shapes": (edit(hidden_size=32, head_dim=16), "weight is [99, 64] in the file, and [99, 32] by config.json, and "),
    "one shape": (
        edit(vocab_size=98),
        "is [99, 64] in the file, and [98, 64] by config.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(damage: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is no whole checkpoint is one line on stderr, exit code 3, and no file."""
    break_it, words = DAMAGES[damage]
    folder, output = tmp_path / "checkpoint", tmp_path / "model.onnx"
    shutil.copytree(shards, folder)
    break_it(folder)
    assert cli.main(["export", str(folder), "-o", str(output)]) == 3
    told = capsys.readouterr()
    assert words in told.err and len(told.err.splitlines()) == 1 and told.out == ""
    assert not output.exists() and [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_quantised_checkpoints_are_refused(whole: Path, tmp_path: Path) -> None:
    """A checkpoint of quantised weights is refused before they are read."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole, folder)
    edit(quantization_config={"quant_method": "gptq", "bits": 4})(folder)
    with pytest.raises(ExportError, match="holds quantised weights"):
        export_transformers(folder)


def test_other_weights_are_noted(whole: Path, tmp_path: Path) -> None:
    """Tensors that the model has no use for are named in the notes; a folder of .bin files alone is no checkpoint."""
    from safetensors.torch import save_file

    from rmsnorm_onnx.exporters.checkpoint import load

    folder = tmp_path / "checkpoint"
    shutil.copytree(whole, folder)
    extra = {**load_file(folder / "model.safetensors"), "extra.weight": torch.ones(2)}
    save_file(extra, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder)[1] == ("LlamaForCausalLM has no use for extra.weight of the checkpoint",)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model.bin; write it again with save_pretrained"):
        load(folder)


@pytest.mark.full
def test_command_line_with_a_cache(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`export FOLDER --cache --dtype --opset` writes the decoder with its cache in that type and opset."""
    path = tmp_path / "model.onnx"
    flags = ["--cache", "--dtype", "float16", "--opset", "20", "--json"]
    assert cli.main(["export", str(whole), "-o", str(path), *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["found"], told["rewritten"], told["export"]["opset"]) == (NORMS, NORMS, 20)
    model = ir.load(path)
    kinds = collections.Counter(v.dtype for v in model.graph.inputs)
    assert kinds == {ir.DataType.INT64: 3, ir.DataType.FLOAT16: 2 * SMALL["num_hidden_layers"]}
    check_gains(model, whole, "float16")


def test_cache_needs_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--cache of a module, which has the inputs that it has, is a usage error."""
    assert cli.main(["export", "net.py:make", "-o", str(tmp_path / "m.onnx"), "--cache"]) == 2
    assert "--cache is for the folder of a transformers checkpoint" in capsys.readouterr().err
