"""Files that others' exporters write: every norm is found as its module has it, and rewritten within its bound."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from checkpoints import SMALL, VOCABULARY, add_tokenizer, randomized, save, trained_llama
from kit import parse
from test_export_transformers import HEADS, MODELS, build

from rmsnorm_onnx import find_rms_norms, fuse, modelio
from rmsnorm_onnx.parity import verify
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import preset
from rmsnorm_onnx.view import Ref, View

FAMILY = {"gemma2": "gemma", "gemma3": "gemma", "olmo2": "torch", "gpt-oss": "torch"}  # the others are Llama's


class Logits(torch.nn.Module):
    """A decoder as a function of two tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask."""
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids)


def check(model: ir.Model, name: str, module: Any, *, folded: bool = False) -> None:
    """As many norms as PyTorch has, each with its family's spec and its module's epsilon; none declined; then fuse.

    Where an exporter folds constants, the 1 of Gemma's gains is in the stored weights.
    """
    sites = find_rms_norms(model)
    assert [s.reason for s in sites if not isinstance(s, Match)] == []
    assert len(sites) == MODELS[name][1]
    meant = preset(FAMILY.get(name, "llama")).canonical("float32").replace(epsilon=0.0)
    meant = meant.replace(gain_offset=0.0) if folded else meant
    for site in sites:
        assert site.spec.canonical("float32").replace(epsilon=0.0) == meant, site.name
    stated = [getattr(m, "variance_epsilon", getattr(m, "eps", None)) for m in module.modules()]
    check_epsilons(sites, [e for e in stated if isinstance(e, float)])
    check_fused(model, len(sites))


def check_epsilons(sites: Sequence[Any], epsilons: Sequence[float]) -> None:
    """The epsilons of the sites are those of the modules, one for one."""
    counted = [collections.Counter(map(float, map(np.float32, e))) for e in ([s.spec.epsilon for s in sites], epsilons)]
    assert counted[0] == counted[1]


def check_fused(model: ir.Model, count: int) -> None:
    """All norms are rewritten, and each is within its bound."""
    fused, report = fuse(model)
    assert (report.found, report.declined) == (count, 0)
    measured = verify(fused, model)
    assert len(measured.sites) == count and all(site.within for site in measured.sites)


def torchscript(name: str, opset: int, folder: Path) -> ir.Model:
    """What torch's older exporter writes."""
    path, dynamic = folder / "model.onnx", {0: "batch", 1: "sequence"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Logits(build(name)), example(), str(path), dynamo=False, opset_version=opset,
            input_names=["ids", "mask"], dynamic_axes={"ids": dynamic, "mask": dynamic},
        )  # fmt: skip
    return modelio.load(path)


def test_torchscript(tmp_path: Path) -> None:
    """TorchScript's file at opset 13, where onnx infers few shapes, holds all norms of Gemma 3."""
    check(torchscript("gemma3", 13, tmp_path), "gemma3", build("gemma3"), folded=True)


@pytest.mark.full
@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral", "phi3", "olmo2", "granite", "deepseek-v3"])
def test_torchscript_of_every_family(name: str, opset: int, tmp_path: Path) -> None:
    """The same for other families at opsets 13 and 17."""
    check(torchscript(name, opset, tmp_path), name, build(name), folded=True)


def own_exporter(model: Any, opset: int, optimize: bool, fusions: str | None) -> ir.Model:
    """What transformers' own exporter writes."""
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    dims = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    config = OnnxConfig(
        opset_version=opset, optimize=optimize, ort_fusions=fusions,
        dynamic_shapes={"input_ids": dims, "attention_mask": dims},
    )  # fmt: skip
    ids, mask = example()
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    return OnnxExporter().export(model, inputs, config=config).program


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "opset", "optimize", "fusions"),
    [
        ("gemma3", 20, False, None),
        ("gemma3", 20, True, None),
        ("gemma3", 20, True, "cpu"),
        ("gemma3", 23, False, None),
        ("gemma3", 23, True, None),
        ("gemma3", 23, True, "cpu"),
        ("qwen3", 20, True, "cpu"),
        ("qwen3", 23, True, None),
    ],
)
def test_transformers_exporter(name: str, opset: int, optimize: bool, fusions: str | None) -> None:
    """transformers' own exporter: plain, optimised, and fused for onnxruntime, at opsets 20 and 23."""
    model = build(name)
    check(own_exporter(model, opset, optimize, fusions), name, model, folded=optimize)


@pytest.mark.full
def test_transformers_exporter_loses_small_epsilons() -> None:
    """Its optimiser, which is on by default, deletes an epsilon of 1e-8: the site says 0, and why that matters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(rms_norm_eps=1e-8, **{**SMALL, "num_hidden_layers": 1})
    model = randomized(transformers.LlamaForCausalLM(config))
    for optimize, epsilon in ((True, 0.0), (False, 1e-8)):
        sites = find_rms_norms(own_exporter(model, 20, optimize, None))
        check_epsilons(sites, [epsilon] * 3)
        lost = [note for site in sites for note in site.notes if "a row of zeros gives NaN" in note]
        assert len(lost) == (3 if optimize else 0)


def built_for_genai(folder: Path, precision: str) -> ir.Model:
    """What onnxruntime-genai's model builder makes of a checkpoint."""
    add_tokenizer(folder)
    output = folder / precision
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(output)]
    ran = subprocess.run(
        [*command, "-p", precision, "-e", "cpu", "-c", str(folder / "cache")],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-500:]
    return modelio.load(output / "model.onnx")


def check_genai(model: ir.Model, module: Any, count: int, x_type: str = "float32") -> None:
    """Its norms are native, most with the residual sum inside; Gemma's 1 is in the weights, and no offset is left."""
    sites = find_rms_norms(model)
    assert [s.reason for s in sites if not isinstance(s, Match)] == []
    assert len(sites) == count and {site.form for site in sites} == {"contrib"}
    assert {(site.x_type, site.spec.gain_offset, site.spec.epsilon_placement) for site in sites} == {
        (x_type, 0.0, "inside")
    }
    skips = [site for site in sites if site.residual is not None]
    operators = collections.Counter(node.op_type for node in model.graph)
    assert 0 < len(skips) == operators["SkipSimplifiedLayerNormalization"]
    stated = [getattr(m, "variance_epsilon", getattr(m, "eps", None)) for m in module.modules()]
    check_epsilons(sites, [e for e in stated if isinstance(e, float)])
    offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
    gains = {w.detach().numpy().tobytes() for n, p in module.named_parameters() if "norm" in n for w in [p + offset]}
    if x_type == "float32":
        assert {site.gain.const_value.numpy().tobytes() for site in sites} == gains
    changes = [change for site in sites for change in site.rounding_changes]
    assert len(changes) == (len(skips) if x_type == "float16" else 0)


def test_genai_builder(tmp_path: Path) -> None:
    """onnxruntime-genai's file in int4 holds all norms of a trained Llama, each gain the checkpoint's."""
    model = built_for_genai(save(trained_llama(), tmp_path / "checkpoint"), "int4")
    check_genai(model, trained_llama(), 5)
    check_fused(model, 5)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_genai_builder_in_other_precisions(precision: str, tmp_path: Path) -> None:
    """The same in float32 and float16, where the skip form's rounding is told."""
    model = built_for_genai(save(trained_llama(), tmp_path / "checkpoint"), precision)
    check_genai(model, trained_llama(), 5, "float32" if precision == "fp32" else "float16")
    if precision == "fp32":
        check_fused(model, 5)
    else:  # the sum that the skip form normalises is not rounded: rewriting it moves a rounding, so it is asked for
        assert fuse(model)[1].declined == 0
        fused, report = fuse(model, form="function", allow_rounding_change=True)
        assert (report.found, report.rewritten, report.declined) == (5, 5, 0)
        assert all(site.within for site in verify(fused, model).sites)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_genai_builder_of_other_families(name: str, tmp_path: Path) -> None:
    """Norms of heads are found as others; Gemma's gains hold the 1."""
    config = transformers.Qwen3Config(**HEADS) if name == "qwen3" else transformers.GemmaConfig(**HEADS)
    torch.manual_seed(0)
    module = randomized(transformers.AutoModelForCausalLM.from_config(config))
    model = built_for_genai(save(module, tmp_path / "checkpoint"), "fp32")
    count = 9 if name == "qwen3" else 5
    check_genai(model, module, count)
    check_fused(model, count)


def shape_of(text: str, name: str, **arrays: np.ndarray) -> Any:
    """What is known of the shape of one value."""
    model = parse(text, opset=13, check=False, **arrays)
    view = View(model)
    [found] = [o for node in model.graph for o in node.outputs if o.name == name]
    return Shapes(view).shape(Ref(found, ()))


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("y = MatMul (x, w)", ("B", "S", 5)),
        ("y = Concat <axis = -1> (x, x)", ("B", "S", 8)),
        ("y = Concat <axis = 1> (x, x)", ("B", None, 4)),
        ("f = Equal (n, n)  t = Where (f, n, n)  y = Reshape (x, t)", (None, None)),
        ("f = Equal (n, n)  t = Where (f, n, n)  r = Reshape (x, t)  y = MatMul (r, w)", (None, 5)),
        ("f = Equal (x, x)  y = Where (f, x, x)", ("B", "S", 4)),
        ("f = Greater (x, x)  y = And (f, f)", ("B", "S", 4)),
    ],
)
def test_shapes_that_onnx_loses_at_old_opsets(body: str, shape: tuple[Any, ...]) -> None:
    """Products, concatenations, choices and targets of known length keep a rank, where sizes are known at run time."""
    text = "m (float[B,S,4] x, int64[2] n, float[4,5] w) => (float y) {\n" + body.replace("  ", "\n ") + "\n}"
    assert shape_of(text.replace("=> (float y)", "=> (float[R] z)"), "y") == shape
