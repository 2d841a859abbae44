"""The families: classes of transformers held to their forms, and every tiny model through the whole chain."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path

import onnx
import pytest
import torch
from standin import FOLDER, build
from test_models import OUTPUT_LIMIT, hold
from x_transformers.x_transformers import SimpleRMSNorm

from rmsnorm_onnx.errors import MissingDependencyError
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.models import tiny
from rmsnorm_onnx.models.classes import FORMS, classes
from rmsnorm_onnx.models.inventory import layer_norms, norms, parameters, unknown
from rmsnorm_onnx.models.measure import Row, claimed, measure_tiny
from rmsnorm_onnx.site import Match

RMS_FORMS = tuple(form for form in FORMS if form != "layer_norm")
PAIRS = ((18, "float32"), (23, "float16"), (24, "bfloat16"))
PLAIN = {("gru", 18, "float32"), ("wan-block", 23, "float16")}
"""What `make test` runs: a norm in a loop's body, and one over an axis before others that is held in half types."""
NEW = tuple(name for name in tiny.NAMES if name not in ("llama", "qwen3", "gemma3", "mlp", "t5-encoder"))
SPREAD = {name: PAIRS[i % 3] for i, name in enumerate(NEW)}
SPREAD["x-transformers"] = (23, "float16")  # ONNX's Einsum takes no bfloat16
SPREAD["qwen3-next"] = (18, "float32")  # in float16 two experts tie for one token: PyTorch itself is 0.09 from float32
CASES = {(name, *pair) for name, pair in SPREAD.items()} | PLAIN


def make(kind: type, **changes: object) -> torch.nn.Module:
    """An instance of a norm class, whatever it calls its arguments, with a gain that is not one."""
    config = types.SimpleNamespace(hidden_size=64, eps=1e-5)
    given = {"hidden_size": 64, "dim": 64, "normalized_shape": 64, "size": 64, "eps": 1e-5, "group_size": 32}
    given |= {"config": config, **changes}
    wanted = inspect.signature(kind).parameters
    module = kind(**{name: value for name, value in given.items() if name in wanted})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def class_of(name: str) -> type:
    """A class by its full name."""
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)


def hold_class(name: str, dtype: str, **changes: object) -> None:
    """A class computes what its form's reader says."""
    module = make(class_of(name), **changes).to(getattr(torch, dtype))
    [norm] = norms(module)
    hold(module, norm)


@pytest.mark.parametrize("form", RMS_FORMS)
def test_one_class_of_each_form(form: str) -> None:
    """A class of each form computes what the form's reader says, in float16."""
    hold_class(classes(form)[-1], "float16")


@pytest.mark.full
@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("form", RMS_FORMS)
def test_every_class_of_each_form(form: str, dtype: str) -> None:
    """Every listed class of transformers computes what its form's reader says."""
    for name in classes(form):
        hold_class(name, dtype)


def test_optional_gains_and_groups() -> None:
    """A form whose gain may be absent has one form without, and a single group takes the gain into the norm."""
    for dtype in ("float32", "bfloat16"):
        hold_class(classes("gemma4")[0], dtype, with_scale=False)
        hold_class(classes("gate_first")[0], dtype, group_size=64)


@pytest.mark.full
def test_layer_norms_of_transformers_are_known() -> None:
    """The listed LayerNorms subtract the mean: a constant added to x changes nothing; none is in the inventory."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 8, (3, 64), generator=generator).double() / 8  # whose means are exact in float32
    for name in classes("layer_norm"):
        module = make(class_of(name))
        torch.testing.assert_close(module.double()(x), module(x + 3.0), msg=name)
        assert layer_norms(module) == [""] and norms(module) == []


def test_norm_without_a_module_is_counted() -> None:
    """A norm that a module computes by a function call is counted under that module's name."""
    head = "transformers.models.vibevoice.modeling_vibevoice.VibeVoiceDiffusionHeadFinalLayer"
    config = types.SimpleNamespace(rms_norm_eps=1e-5, hidden_size=64, hidden_act="silu")
    module = torch.nn.Sequential(class_of(head)(config, output_size=8)).half()
    [norm] = norms(module)
    assert (norm.name, norm.shape, norm.spec.has_gain) == ("0", (64,), False)
    hold(module, norm)


def test_form_that_no_spec_says_is_unknown() -> None:
    """A class of transformers with a form of its own (a gain before the norm) is named, not guessed."""
    module = make(class_of("transformers.models.muse_spark.modeling_muse_spark.MuseSparkTextInputScaledRMSNorm"))
    assert norms(module, strict=False) == [] and len(unknown(module)) == 1


CHUNKED = ("mamba2", "qwen3-next")
"""They cut a text into chunks, whose number is in the file."""


def check(name: str, opset: int, dtype: str, folder: Path) -> Row:
    """The whole chain on one model: every norm found as its module has it, rewritten, verified, loaded and run."""
    model = build(name, dtype)
    row = measure_tiny(model, opset, folder)
    limits = [note for note in row.notes if "is limited" in note]
    assert (row.found, row.differences, [n for n in row.notes if n not in limits]) == (len(model.norms), (), [])
    assert bool(limits) == (name in CHUNKED and opset >= 18)
    assert row.valid and row.opset == opset and row.within and row.ok
    assert row.reasons.get("layer-norm", 0) >= row.layer_norms
    late = sum(norm.late_factor != 1.0 for norm in model.norms)
    assert row.held == (late if dtype != "float32" else 0)
    if dtype == "bfloat16":
        assert row.why.startswith("no kernel: bfloat16 ")
    else:
        assert row.loads and row.output <= OUTPUT_LIMIT[dtype]
    return row


def parameters_of(cases: set[tuple[str, int, str]]) -> list[object]:
    """The cases as parameters, all but those in `PLAIN` left to the full matrices."""
    return [case if case in PLAIN else pytest.param(*case, marks=pytest.mark.full) for case in sorted(cases)]


@pytest.mark.parametrize(("name", "opset", "dtype"), parameters_of(CASES))
def test_every_norm_of_a_family(name: str, opset: int, dtype: str, tmp_path: Path) -> None:
    """Exported, found as the modules have them, rewritten, verified, loaded, and as PyTorch in the whole."""
    check(name, opset, dtype, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("name", "count"), [("cohere", 3), ("nemotron", 5)])
def test_layer_norms_stay(name: str, count: int, tmp_path: Path) -> None:
    """LayerNorms are declined as that, none is claimed, and the file computes what PyTorch does."""
    row = check(name, 18, "float32", tmp_path)
    assert (row.found, row.layer_norms, set(row.reasons)) == (0, count, {"layer-norm"})


def test_layer_norms_are_held_to_their_reason() -> None:
    """A LayerNorm that was not declined as one, and one that was taken for an RMSNorm, are each a difference."""
    module = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)).eval()
    sites = find_rms_norms(export(module, (torch.randn(2, 8),), fuse=False).model)
    assert claimed(sites, ["0"]) == ()
    assert claimed(sites, ["1"]) == (
        "1 subtracts the mean, and was taken for an RMSNorm",
        "1 was not declined as a LayerNorm",
    )


def test_gains_and_biases_are_random() -> None:
    """No norm of a tiny model has a gain or a bias of one number, so that one that is lost shows."""
    model = tiny.build("diffusers-block")
    assert any(norm.spec.has_bias for norm in model.norms)
    for norm in model.norms:
        assert all(p is None or p.std() > 0.1 for p in parameters(model.module, norm))


def test_timm_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without timm, or the torchvision that it imports, the ViT is a missing dependency with the command to run."""
    for module in ("timm.layers", "torchvision"):
        monkeypatch.setitem(sys.modules, module, None)
        if module == "torchvision":
            monkeypatch.setitem(sys.modules, "timm.layers", None)
        with pytest.raises(MissingDependencyError, match="building timm-vit needs timm: pip install 'timm'"):
            tiny.build("timm-vit")


@pytest.mark.full
def test_stand_in_disturbs_nobody() -> None:
    """With the stand-in on the path for a whole process, timm, transformers and diffusers build their models in it."""
    names = ("timm-vit", "llama", "wan-block", "diffusers-block")
    program = f"from rmsnorm_onnx.models import tiny; print([len(tiny.build(n).norms) for n in {names}])"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "[9, 5, 2, 3]\n", done.stderr


def test_half_statistic_is_as_its_module_has_it() -> None:
    """A statistic that a class takes in x's own half type is no difference between its file and its module."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), SimpleRMSNorm(8)).half().eval()
    result = export(module, (torch.ones(2, 3, 8, dtype=torch.float16),), fuse=False)
    assert result.notes == () and len(find_rms_norms(result.model)) == 1


def test_offset_of_a_gain_of_one_number() -> None:
    """1 + g is an offset and a gain where g is one number too, as ScaleNorm has it: the sum is no gain of its own."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]>
        scale_norm (float[3, 8] x) => (float[3, 8] y) <float[1] g = {0.25}, float e = {1e-6}, int64[1] axes = {-1}> {
            one = Constant <value: tensor = float {1.0}> ()
            squared = Mul (x, x)
            mean = ReduceMean (squared, axes)
            shifted = Add (mean, e)
            root = Sqrt (shifted)
            normalized = Div (x, root)
            gain = Add (g, one)
            y = Mul (normalized, gain)
        }"""
    )
    [match] = find_rms_norms(model)
    assert isinstance(match, Match) and (match.spec.gain_offset, match.gain.name) == (1.0, "g")
