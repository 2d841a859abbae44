"""The exporter: its plain spelling is torch's RMSNorm to the last rounding, its files hold what it returns."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from export_kit import DTYPES, SHAPES, D, InOut, check, norm, rows, run, spec_of
from torch import nn

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.spec import preset


@pytest.mark.parametrize(("variant", "dtype", "opset"), [("weight", "float16", 18), ("eps_none", "bfloat16", 23)])
def test_plain_spelling_is_torchs_norm(variant: str, dtype: str, opset: int) -> None:
    """torch.nn.RMSNorm exports with torch's epsilon and its one rounding, at both ends of the opsets in use."""
    assert check(variant, dtype, opset).notes == ()


@pytest.mark.full
@pytest.mark.parametrize("opset", [18, 20, 22, 23, 24, 26, onnx.defs.onnx_opset_version()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", SHAPES)
def test_plain_spelling_matrix(variant: str, dtype: str, opset: int) -> None:
    """Every variant of torch.nn.RMSNorm, in every type, at opsets from 18 to onnx's newest."""
    assert check(variant, dtype, opset).notes == ()


@pytest.mark.parametrize(
    ("dtype", "epsilon", "written"),
    [("float16", None, 2.0**-23), ("float32", None, 2.0**-23), ("float64", None, 2.0**-52), ("float64", 1e-6, 1e-6)],
)
def test_epsilon_is_exact(dtype: str, epsilon: float | None, written: float) -> None:
    """The graph holds epsilon in the type of the statistic: torch's default for it, doubles to the last bit."""
    module = nn.RMSNorm(D, eps=epsilon, dtype=getattr(torch, dtype))
    result = export(module, torch.randn(2, 3, D, dtype=getattr(torch, dtype)), opset=23, fuse=False)
    [add] = [n for n in result.model.graph if n.op_type == "Add"]
    tensor = add.inputs[1].producer().attributes["value"].as_tensor()
    assert tensor.dtype == (ir.DataType.DOUBLE if dtype == "float64" else ir.DataType.FLOAT)
    assert tensor.numpy().item() == written


def test_every_value_has_a_shape() -> None:
    """Intermediate values carry types and shapes, so that a norm can be proven without shape inference."""
    result = export(norm("two_dims", "float16"), torch.randn(2, 5, 3, D).half(), fuse=False)
    values = [n.outputs[0] for n in result.model.graph if n.op_type != "Constant"]
    assert len(values) == 9
    assert all(v.shape is not None and v.shape[2:].count(None) == 0 and v.dtype is not None for v in values)


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fused_operator(dtype: str, opset: int) -> None:
    """aten._fused_rms_norm, which CUDA traces hold, gives the norm and 1/rms, the latter in float32."""

    class Fused(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ops.aten._fused_rms_norm(x, [D], w, None)

    kind = np.dtype(dtype)
    x, w = rows((D,)).astype(kind), np.linspace(0.5, 1.5, D).astype(kind)
    result = export(Fused(), (torch.from_numpy(x), torch.from_numpy(w)), opset=opset, fuse=False)
    y, factor = run(result.model, x, w)
    spec = spec_of("eps_none", dtype)
    assert np.all(np.abs(y - reference(spec, x, w)) <= error_bound(spec, x, w))
    exact = 1 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 2.0**-23)
    assert factor.dtype == np.float32 and np.abs(factor / exact - 1).max() < 10 * 2.0**-24


@pytest.mark.parametrize(("x_type", "gain_type"), [("float16", "float32"), ("float32", "float64")])
def test_wider_gain(x_type: str, gain_type: str) -> None:
    """A gain wider than x is multiplied in its own type, and the result rounded once to x's, as torch does."""
    x = rows((D,)).astype(x_type)
    w = np.linspace(0.5, 1.5, D).astype(gain_type) / 3

    class Wide(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (D,), w, 1e-6)

    result = export(Wide(), (torch.from_numpy(x), torch.from_numpy(w)), opset=23, fuse=False)
    [y] = run(result.model, x, w)
    spec = spec_of("weight", x_type).replace(gain_type=gain_type)
    assert y.dtype == np.dtype(x_type)
    assert np.all(np.abs(y - reference(spec, x, w)) <= error_bound(spec, x, w))


def test_dtype_converts_a_copy() -> None:
    """dtype converts a copy of the module and the floating-point inputs; the module keeps its own."""
    module = norm("weight", "float32")
    result = export(module, torch.randn(2, 3, D), dtype="bfloat16", fuse=False)
    assert result.model.graph.inputs[0].dtype == ir.DataType.BFLOAT16
    assert module.weight.dtype == torch.float32


def test_default_shapes_are_dynamic_and_exceptions_are_named() -> None:
    """Batch and sequence are dynamic; a dimension that the module or a size of 1 fixes is named in a note."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(D)

        def forward(self, x: torch.Tensor, scale: float, *, y: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * scale + self.norm(y)

    x = torch.randn(2, 3, D)
    result = export(Model(), (x, 0.5), kwargs={"y": torch.randn(1, D)}, fuse=False)
    fixed = [[isinstance(d, int) for d in i.shape] for i in result.model.graph.inputs if len(i.shape) > 1]
    assert fixed == [[False, False, True], [True, True]]
    assert result.notes == (
        "dimension 0 of input y is fixed at 1: torch makes a size of 1 static, so give an example of 2",
        f"dimension 1 of input y is fixed at {D}: torch or the module fixes it",
    )
    static = export(Model(), (x, 0.5), kwargs={"y": torch.randn(1, D)}, dynamic_shapes={}, fuse=False)
    assert list(static.model.graph.inputs[0].shape) == [2, 3, D] and static.notes == ()


def test_names_are_the_callers() -> None:
    """Inputs and outputs bear the names that were asked for."""
    result = export(
        norm("weight", "float32"), torch.randn(2, 3, D), input_names=["in"], output_names=["out"], fuse=False
    )
    assert (result.model.graph.inputs[0].name, result.model.graph.outputs[0].name) == ("in", "out")


def test_output_is_written_whole(tmp_path) -> None:
    """The file holds the model that is returned, passes the full check, and no temporary file stays."""
    path = tmp_path / "norm.onnx"
    result = export(norm("weight", "float16"), torch.randn(2, 3, D).half(), opset=23, output=path, fuse=False)
    onnx.checker.check_model(str(path), full_check=True)
    assert [p.name for p in tmp_path.iterdir()] == ["norm.onnx"]
    assert onnx.load(path) == ir.to_proto(result.model)


class Manual(nn.Module):
    """The forms that people write by hand, each with its own rounding points."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, D) + (family != "gemma"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.family == "llama":
            return self.weight * h.to(x.dtype)
        return (
            (h * (1.0 + self.weight.float())).to(x.dtype) if self.family == "gemma" else (self.weight * h).to(x.dtype)
        )


# gpt-oss multiplies in float32 and rounds once, as torch.nn.RMSNorm does.
MANUAL = {"llama": preset("llama"), "gemma": preset("gemma"), "gpt_oss": preset("torch", epsilon=1e-6)}


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("family", MANUAL)
def test_hand_written_half_norm(family: str, opset: int) -> None:
    """Trap 11: a half norm of any family is one valid operator, with its own spec (torch writes unlike types at 23)."""
    module = Manual(family).half()
    result = export(module, torch.randn(2, 3, D).half(), opset=opset)
    [site] = result.report.sites
    spec, gain = MANUAL[family], module.weight.detach().numpy()
    assert site.action == "rewritten" and site.spec.canonical("float16") == spec.canonical("float16")
    x = rows((D,)).astype(np.float16)
    [y] = run(result.model, x)
    assert np.all(np.abs(y - reference(spec, x, gain)) <= error_bound(spec, x, gain))


def check_fused(variant: str, dtype: str, opset: int) -> None:
    """Export with the norms rewritten: one operator, the module's spec, the module's numbers."""
    module = norm(variant, dtype)
    example = torch.randn(2, 3, *SHAPES[variant], dtype=torch.float64)
    result = export(InOut(module, getattr(torch, dtype)), example, opset=opset)
    [site] = result.report.sites
    spec = spec_of(variant, dtype)
    assert site.action == "rewritten" and site.spec.canonical(dtype) == spec.canonical(dtype)
    operators = [n.op_type for n in result.model.graph if n.op_type not in ("Cast", "Constant")]
    assert operators == ["RMSNorm"]
    kind = dtypes.numpy_dtype(dtype)
    x = rows(SHAPES[variant]).astype(kind)
    [y] = run(result.model, x.astype(np.float64))
    gain = None if module.weight is None else module.weight.detach().double().numpy().astype(kind)
    assert np.all(np.abs(y - reference(spec, x, gain)) <= error_bound(spec, x, gain))


@pytest.mark.parametrize(
    ("variant", "dtype", "opset"), [("eps_none", "float16", 18), ("two_dims", "float32", 23), ("weight", "float64", 20)]
)
def test_module_becomes_one_operator(variant: str, dtype: str, opset: int) -> None:
    """torch.nn.RMSNorm becomes one node with the exact epsilon, all of its axes, and float32 statistics for halves."""
    check_fused(variant, dtype, opset)


@pytest.mark.full
@pytest.mark.parametrize("opset", [18, 21, 23, 25, onnx.defs.onnx_opset_version()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", SHAPES)
def test_module_becomes_one_operator_matrix(variant: str, dtype: str, opset: int) -> None:
    """The same for every variant and type, over the opsets."""
    check_fused(variant, dtype, opset)


def test_form_and_consumer_reach_the_rewrite() -> None:
    """The consumer and the form are handed on to the rewrite."""
    module, x = norm("weight", "float32"), torch.randn(2, 3, D)
    by_form = export(module, x, opset=23, form="onnx")
    assert [n.op_type for n in by_form.model.graph if n.op_type != "Constant"] == ["RMSNormalization"]
    by_consumer = export(module, x, consumer="tensorrt-plugin")
    assert by_consumer.report.consumer == "tensorrt-plugin"
    assert [s.form for s in by_consumer.report.sites] == ["plugin"]


def test_a_norm_right_at_a_rank_two_input() -> None:
    """A dimension that the module fixes is a number in the file, is said in the notes, and hides no norm."""

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.arange(1.0, 65.0)

    result = export(Norm(), (torch.randn(2, 64),))
    assert result.report is not None and (result.report.found, result.report.declined) == (1, 0)
    assert result.model.graph.inputs[0].shape[1] == 64
    assert any("fixed at 64" in note for note in result.notes)


def test_keywords_that_forward_gathers() -> None:
    """Inputs that go into forward(**options) are inputs like others."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)

        def forward(self, x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + options["shift"]

    result = export(Module(), (torch.randn(2, 3, 8),), kwargs={"shift": torch.randn(2, 3, 8)})
    assert result.report is not None and result.report.rewritten == 1
    assert [value.name for value in result.model.graph.inputs] == ["x", "shift"]
    assert len(result.notes) == 4  # torch.export fixes all dimensions then


def test_a_gated_norm_that_is_given_float32_in_a_half_model() -> None:
    """Mamba 2's scan hands its gated norm float32 beside half weights: the norm is found as the module computes it."""
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = MambaRMSNormGated(D, D // 2, eps=1e-5)

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return self.norm(x.float() * 2, gate)

    result = export(Scan(), (torch.randn(2, 3, D), torch.randn(2, 3, D)), dtype="float16")
    [norm] = result.norms
    assert result.notes == ()
    assert norm.expected.canonical("float32") == norm.found.canonical("float32")
    assert norm.expected.canonical("float32").result_type == "float32"
