"""Registered norms: a class that the user vouches for is kept whole, and what is claimed of it is checked first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_kit import rows, run
from torch import nn

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import Kept, export
from rmsnorm_onnx.exporters.kept import evaluate
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.spec import RMSNormSpec, preset

D = 48


class Opaque(nn.Module):
    """A norm computed in numpy, in float64, rounded once: no exporter can look into it."""

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = hidden.detach().double().numpy()
        y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.epsilon) * self.scale.detach().double().numpy()
        return torch.from_numpy(y).to(hidden.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(D, D), Opaque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mix(x))


SPEC = preset("torch", epsilon=1e-6)
NORMS = {Opaque: Kept(lambda module: SPEC.replace(epsilon=module.epsilon), gain="scale")}


@pytest.mark.parametrize(
    ("opset", "dtype", "form"),
    [(17, "float32", None), (13, "float16", None), (18, "float16", None), (23, "float32", "onnx")],
)
def test_an_opaque_norm_is_kept_whole(opset: int, dtype: str, form: str | None) -> None:
    """On each route it is one operator that says its spec, within the bound, and the module is as it was."""
    module = Opaque().to(getattr(torch, dtype))
    example = torch.randn(2, 3, D).to(getattr(torch, dtype))
    result = export(module, example, opset=opset, norms=NORMS, form=form)
    [pair] = result.norms
    assert (pair.kind, pair.epsilon, pair.same_epsilon, result.report.rewritten) == ("Opaque", 1e-6, True, 1)
    assert pair.found.canonical(dtype) == SPEC.canonical(dtype)
    assert result.model.graph.inputs[0].name == "hidden" and "forward" not in vars(module)
    x = rows((D,)).astype(dtypes.numpy_dtype(dtype))
    gain = module.scale.detach().numpy()
    [y] = run(result.model, x)
    assert np.all(np.abs(y - reference(SPEC, x, gain)) <= error_bound(SPEC, x, gain))


def test_without_being_registered_it_is_no_model() -> None:
    """Numbers that leave torch fail on both routes, and the first reason comes first."""
    with pytest.raises(ExportError, match=r"^torch\.export failed: .*; torchscript: .*Python reads values"):
        export(Net(), torch.randn(2, 3, D))


@pytest.mark.parametrize(
    ("claim", "dtype", "words"),
    [
        (
            SPEC.replace(epsilon=1e-5),
            "float32",
            "ulp from its spec.*(near epsilon|tiny); its spec is true with epsilon=1e-06$",
        ),
        (SPEC.replace(epsilon_placement="outside"), "float32", "its spec is true with epsilon_placement='inside'$"),
        (
            SPEC.replace(epsilon_placement="outside", epsilon=1e-3),
            "float32",
            "no change of a single field makes its spec",
        ),
        (SPEC.replace(gain_offset=1.0), "float32", r"its spec is true with gain_offset=0\.0$"),
        (SPEC.replace(leading=D // 2), "float32", "ulp from its spec.*; its spec is true with leading=None$"),
        (
            preset("llama"),
            "float16",
            r"it rounds not before the gain \(\d+ elements agree.*true with normalized_type='float32'",
        ),
        (SPEC.replace(result_type="float32"), "float16", "it gives float16, its spec float32"),
        (SPEC.replace(statistic_type="x"), "float16", "cannot be kept whole: a statistic in float16"),
        (SPEC.replace(axes=(-4,)), "float32", "has no axis -4"),
    ],
)
def test_a_false_claim_never_gets_through(claim: RMSNormSpec, dtype: str, words: str, tmp_path: Path) -> None:
    """A spec that is not the module's is an error that names the class, the distance and where to look."""
    path = tmp_path / "m.onnx"
    with pytest.raises(ExportError, match=rf"^Opaque \(norm\) .*{words}"):
        export(Net(), torch.randn(2, 3, D), norms={Opaque: Kept(claim, gain="scale")}, dtype=dtype, output=path)
    assert not list(tmp_path.iterdir())


class Rounding(nn.Module):
    """Llama's norm by hand: rounded before the gain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_a_rounding_before_the_gain_is_told_from_one_after() -> None:
    """In half types a claim that rounds once is false of a module that rounds twice."""
    x = torch.randn(2, 3, D).half()
    result = export(Rounding().half(), x, norms={Rounding: preset("llama")}, opset=17)
    assert result.norms[0].found.canonical("float16") == preset("llama").canonical("float16")
    with pytest.raises(ExportError, match="Rounding is not what norms says"):
        export(Rounding().half(), x, norms={Rounding: SPEC}, opset=17)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ({nn.RMSNorm: SPEC}, "no module is a RMSNorm"),
        ({nn.Module: SPEC}, "subclasses are named themselves"),
        ({Opaque: SPEC}, "has no tensor 'weight' for the gain"),
        ({Opaque: "llama"}, "norms holds a str"),
        ({Opaque: lambda module: None}, "returned a NoneType, no spec"),
        ({Opaque: "llama"}, r"for Opaque; give rmsnorm_onnx\.spec\.preset\('llama'\)"),
        ({Opaque: 1e-6}, "norms holds a float for Opaque; give an RMSNormSpec"),
        ({Opaque: RMSNormSpec}, "norms holds the class RMSNormSpec for Opaque"),
        ({Opaque: Kept("llama")}, "norms holds a str for Opaque"),
        ({Opaque: Kept(SPEC, gain=3)}, "the Kept for Opaque names its gain 3"),
        ({Opaque: Kept(SPEC, gain="epsilon")}, "Opaque has no tensor 'epsilon' for the gain"),
        ({Opaque: Kept(SPEC.replace(axes=(-2, -1)), gain="scale")}, None),
        ({Opaque: Kept(SPEC.replace(axes=(-2,)), gain="scale")}, r"the gain of Opaque \(norm\) is of shape \[48, 1\]"),
        (
            {Opaque: lambda module: module.eps},
            "the function that norms gives for Opaque failed: AttributeError: .*'eps'",
        ),
        ({Opaque: lambda module: RMSNormSpec(epsilon=-1.0)}, "for Opaque failed: SpecError: epsilon must be finite"),
        ({"Opaque": SPEC}, "norms names 'Opaque', which is no class of torch.nn.Module"),
        ({int: SPEC}, "norms names <class 'int'>, which is no class of torch.nn.Module"),
        ({Opaque(): SPEC}, "norms names a module, a Opaque; use its class"),
        ([Opaque], "norms must map module classes to specs, got a list"),
        (Opaque, "norms must map module classes to specs, got a type"),
    ],
)
def test_what_cannot_be_registered(norms: Any, words: str | None) -> None:
    """Classes that are not there, and claims that are none, are usage errors."""
    with pytest.raises(ExportError if words is None else UsageError, match=words):
        export(Net(), torch.randn(2, 3, D), norms=norms)


def test_a_norm_with_a_second_input_is_not_kept() -> None:
    """A residual that goes into the norm is no part of a spec, and would be lost."""

    class Residual(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.mix(x), residual=x)

    module = Residual()
    with pytest.raises(ExportError, match="Opaque is called with residual, which no RMSNormSpec knows"):
        export(module, torch.randn(2, 3, D), norms=NORMS)
    assert "forward" not in vars(module.norm)


def test_a_channel_first_norm_with_a_bias_is_kept() -> None:
    """A gain and a bias of [C] lie along an inner axis, as in the reference."""

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.b = nn.Parameter(torch.linspace(0.5, 1.5, 6)), nn.Parameter(torch.linspace(-1, 1, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = x.detach().double().numpy()
            y = a / np.sqrt(np.mean(a * a, 1, keepdims=True) + 1e-5)
            g, b = (p.detach().double().numpy()[:, None, None] for p in (self.g, self.b))
            return torch.from_numpy(y * g + b).to(x.dtype)

    module, spec = Channels(), RMSNormSpec(axes=(-3,), epsilon=1e-5, has_bias=True)
    result = export(module, torch.randn(2, 6, 4, 5), norms={Channels: Kept(spec, gain="g", bias="b")}, opset=17)
    assert result.report.rewritten == 1
    x = np.random.default_rng(0).standard_normal((3, 6, 4, 5)).astype(np.float32)
    [y] = run(result.model, x)
    parameters = [p.detach().numpy() for p in (module.g, module.b)]
    assert np.all(np.abs(y - reference(spec, x, *parameters)) <= error_bound(spec, x, *parameters))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "spec",
    [
        preset("llama"),
        preset("gemma"),
        preset("torch"),
        SPEC.replace(epsilon_placement="clamp"),
        SPEC.replace(leading=7),
    ],
)
def test_the_operator_computes_its_spec(spec: RMSNormSpec, dtype: str) -> None:
    """The operator that stands for a registered module is within the bound of its spec, in every type."""
    kind = dtypes.numpy_dtype(dtype)
    spec = spec.replace(statistic_type="float64", factor_type="float64") if dtype == "float64" else spec
    x, gain = rows((D,)).astype(kind), np.linspace(-1.0, 1.5, D).astype(kind)
    tensors = [torch.from_numpy(a.astype(np.float64)).to(getattr(torch, dtype)) for a in (x, gain)]
    y = evaluate(spec, *tensors).double().numpy()
    assert np.all(np.abs(y - reference(spec, x, gain)) <= error_bound(spec, x, gain))
