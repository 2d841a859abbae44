"""The spec: what it refuses, how it is stored, and that the presets are what the models compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import RMSNormError, SpecError, UsageError
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.spec import PLACEMENTS, PRESETS, RMSNormSpec, leading_count, preset

TORCH_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

types = st.sampled_from(["x", *dtypes.FLOAT_TYPES])
specs = st.builds(
    RMSNormSpec,
    axes=st.sampled_from([(-1,), (-2, -1), (-3,)]),
    epsilon=st.floats(0, 1),
    epsilon_placement=st.sampled_from(PLACEMENTS),
    gain_offset=st.floats(-2, 2),
    has_bias=st.booleans(),
    statistic_type=types,
    factor_type=types,
    normalized_type=types,
    gain_type=types,
    result_type=types,
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"axes": ()}, "axes must be negative integers"),
        ({"axes": (1,)}, "axes must be negative integers, at least one, got (1,)"),
        ({"axes": (-3, -1)}, "axes must be trailing axes in ascending order, or one inner axis"),
        ({"axes": (-3, -2)}, "axes must be trailing axes in ascending order, or one inner axis"),
        ({"axes": (-1, -2)}, "axes must be trailing axes in ascending order"),
        ({"epsilon": -1e-6}, "epsilon must be finite and not negative, got -1e-06"),
        ({"epsilon": float("nan")}, "epsilon must be finite"),
        ({"epsilon": float("inf")}, "epsilon must be finite"),
        ({"epsilon_placement": "between"}, "epsilon_placement must be one of"),
        ({"leading": 0}, "leading must be positive"),
        ({"leading": 2, "axes": (-2, -1)}, "over the last axis alone"),
        ({"gain_offset": 1.0, "has_gain": False}, "gain_offset must be finite, and 0 without a gain"),
        ({"gain_offset": float("inf")}, "gain_offset must be finite"),
        ({"statistic_type": "int8"}, 'statistic_type must be "x" or a float type'),
        ({"result_type": "half"}, "result_type must be"),
    ],
)
def test_refusals_name_the_field(fields: Mapping[str, Any], words: str) -> None:
    """Each value without meaning is refused in one line that names the field."""
    with pytest.raises(SpecError) as caught:
        RMSNormSpec(**fields)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_bad_spec_is_a_usage_error() -> None:
    """Callers can catch it as a ValueError, and the command line exits with 2."""
    assert issubclass(SpecError, UsageError) and issubclass(UsageError, ValueError | RMSNormError)
    assert SpecError("").exit_code == 2


def test_lists_of_axes_become_tuples() -> None:
    """Axes given as a list leave the spec hashable."""
    assert hash(RMSNormSpec(axes=[-2, -1])) == hash(RMSNormSpec(axes=(-2, -1)))  # type: ignore[arg-type]


@given(specs)
def test_json_round_trip(spec: RMSNormSpec) -> None:
    """Every spec survives JSON text, epsilon to the last bit."""
    assert RMSNormSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_json_of_another_version_is_refused() -> None:
    """A layout that this version does not know is refused, and so is one without a version."""
    data = RMSNormSpec().to_json()
    assert data["version"] == 1
    for version in (2, None):
        with pytest.raises(SpecError, match=f"spec version {version} is not supported, expected 1"):
            RMSNormSpec.from_json({**data, "version": version})


def test_json_with_unknown_fields_is_refused() -> None:
    """A misspelled field is named, not ignored."""
    with pytest.raises(SpecError, match="unknown spec fields: eps, scale"):
        RMSNormSpec.from_json({"version": 1, "scale": 1, "eps": 1e-6})


def test_json_with_absent_fields_takes_the_defaults() -> None:
    """Only the version is required."""
    assert RMSNormSpec.from_json({"version": 1, "epsilon": 1e-6, "axes": [-2, -1]}) == RMSNormSpec(
        epsilon=1e-6, axes=(-2, -1)
    )


@given(specs, st.sampled_from(["float16", "bfloat16", "float32"]), st.integers(0, 99))
def test_canonical_specs_compute_the_same(spec: RMSNormSpec, x_type: str, seed: int) -> None:
    """The canonical spec gives the same rounded numbers, whenever the gain is of the type it is used in."""
    r, dtype = spec.resolve(x_type), dtypes.numpy_dtype(x_type)
    if not dtypes.holds(r.gain_type, x_type) or not dtypes.holds("float32", r.statistic_type):
        spec = spec.replace(gain_type="x", statistic_type="float32")
    rng = np.random.default_rng(seed)
    x, gain = (rng.normal(size=(2, 3, 4)).astype(dtype) for _ in range(2))
    args = (x, gain, gain if spec.has_bias else None)
    np.testing.assert_array_equal(
        reference(spec.canonical(x_type), *args, rounded=True), reference(spec, *args, rounded=True)
    )


def test_unknown_preset_lists_the_known_ones() -> None:
    """A misspelled preset is answered with the list."""
    with pytest.raises(SpecError, match="no preset 'lama'; there are torch, llama, gemma, t5, zhang2019"):
        preset("lama")
    assert list(PRESETS) == ["torch", "llama", "gemma", "t5", "zhang2019"]


@pytest.mark.parametrize(("d", "p", "count"), [(512, 0.0625, 32), (100, 0.29, 28), (7, 1.0, 7), (10, 0.19, 1)])
def test_leading_count_truncates(d: int, p: float, count: int) -> None:
    """int(d * p), float error included: 100 * 0.29 is 28.999..., so 28."""
    assert leading_count(d, p) == count


@pytest.mark.parametrize("p", [0.001, 1.5, -1.0])
def test_leading_count_refuses_none_and_too_many(p: float) -> None:
    """A statistic over no element, or over more than there are, has no meaning."""
    with pytest.raises(SpecError, match="it must leave between 1 and all of them"):
        leading_count(100, p)


# The presets against the models' own code


def model_inputs(x_type: str, size: int = 192) -> tuple[torch.Tensor, torch.Tensor]:
    """x [6, size] with rows of all scales, a zero row and one near epsilon; gain [size] around 1."""
    generator = torch.Generator().manual_seed(size)
    scales = torch.tensor([1.0, 30.0, 0.05, 1e-3, 2e-5, 0.0])[:, None]
    x = torch.randn(6, size, generator=generator) * scales
    gain = 1 + 0.3 * torch.randn(size, generator=generator)
    return x.to(TORCH_TYPES[x_type]), gain.to(TORCH_TYPES[x_type])


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same numbers in the numpy or ml_dtypes type of the same name."""
    name = str(tensor.dtype).removeprefix("torch.")
    return np.asarray(tensor.detach().to(torch.float32).numpy().astype(dtypes.numpy_dtype(name)))


def module_of(name: str, size: int, epsilon: float) -> torch.nn.Module:
    """The model's own norm."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    classes = {
        "torch": torch.nn.RMSNorm,
        "llama": LlamaRMSNorm,
        "gemma": GemmaRMSNorm,
        "gemma3": Gemma3RMSNorm,
        "t5": T5LayerNorm,
    }
    return classes[name](size, eps=epsilon)


def ulp_of(spec: RMSNormSpec, y: np.ndarray, args: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """(worst error over its bound, share of elements equal to the rounded reference)."""
    error, bound = np.abs(y.astype(float) - reference(spec, *args)), error_bound(spec, *args)
    return float(np.max(error / np.maximum(bound, np.finfo(float).tiny))), float(
        np.mean(y.astype(float) == reference(spec, *args, rounded=True))
    )


@pytest.mark.parametrize("x_type", list(TORCH_TYPES))
@pytest.mark.parametrize("name", ["torch", "llama", "gemma", "gemma3", "t5"])
def test_presets_are_what_the_models_compute(name: str, x_type: str) -> None:
    """Each preset's bound holds its model's own norm, and in half types nearly all elements equal the rounded one."""
    spec = preset(name.rstrip("3"), epsilon=1e-6)
    x, gain = model_inputs(x_type)
    module = module_of(name, x.shape[-1], 1e-6).to(x.dtype)
    with torch.no_grad():
        next(module.parameters()).copy_(gain)
        y = to_numpy(module(x))
    ratio, equal = ulp_of(spec, y, (to_numpy(x), to_numpy(gain)))
    assert ratio <= 1
    assert equal > (0.2 if x_type == "float32" else 0.998)


@pytest.mark.parametrize("x_type", ["float16", "bfloat16"])
@pytest.mark.parametrize(("right", "wrong"), [("llama", "torch"), ("torch", "llama")])
def test_presets_differ_where_they_round(right: str, wrong: str, x_type: str) -> None:
    """In half types the other family's rounding points leave many elements unequal: equality says something."""
    x, gain = model_inputs(x_type)
    module = module_of(right, x.shape[-1], 1e-6).to(x.dtype)
    with torch.no_grad():
        next(module.parameters()).copy_(gain)
        y = to_numpy(module(x))
    assert ulp_of(preset(wrong, epsilon=1e-6), y, (to_numpy(x), to_numpy(gain)))[1] < 0.9


@pytest.mark.parametrize("x_type", list(TORCH_TYPES))
def test_torch_default_epsilon_is_that_of_float32(x_type: str) -> None:
    """eps=None is float32's machine epsilon, for half inputs too: a row near it shows."""
    x, gain = model_inputs(x_type)
    y = to_numpy(torch.nn.functional.rms_norm(x, (x.shape[-1],), gain))
    assert ulp_of(preset("torch"), y, (to_numpy(x), to_numpy(gain)))[0] <= 1
    if x_type != "float32":
        own = preset("torch", epsilon=float(torch.finfo(x.dtype).eps))
        assert ulp_of(own, y, (to_numpy(x), to_numpy(gain)))[0] > 10


def zhang_norm(x: torch.Tensor, gain: torch.Tensor, p: float = 1.0, epsilon: float = 1e-8) -> torch.Tensor:
    """The formula of Zhang and Sennrich's code: an L2 norm times d^-0.5, plus epsilon, over the first int(d * p)."""
    count = int(x.shape[-1] * p)
    root = torch.linalg.vector_norm(x[..., :count], dim=-1, keepdim=True) * count**-0.5
    return gain * (x / (root + epsilon))


@pytest.mark.parametrize("p", [1.0, 0.0625, 0.29])
@pytest.mark.parametrize("x_type", ["float32", "float64"])
def test_zhang2019_is_the_papers_own_code(x_type: str, p: float) -> None:
    """Epsilon 1e-8 outside the root, the statistic over the first int(d * p) elements: within the bound."""
    x, gain = (t.to(getattr(torch, x_type)) for t in model_inputs("float32", 200))
    count = leading_count(200, p)
    spec = preset("zhang2019", leading=None if count == 200 else count)
    args = (np.asarray(x.numpy()), np.asarray(gain.numpy()))
    assert ulp_of(spec, np.asarray(zhang_norm(x, gain, p).numpy()), args)[0] <= 1


def test_zhang2019_epsilon_stands_outside() -> None:
    """A row of 1e-8 is halved by an epsilon of 1e-8 outside the root, and vanishes under one inside it."""
    x = torch.full((1, 8), 1e-8)
    y = zhang_norm(x, torch.ones(8)).numpy()
    gain = np.ones(8, np.float32)
    np.testing.assert_allclose(reference(preset("zhang2019"), x.numpy(), gain), y, rtol=1e-6)
    assert abs(float(y[0, 0]) - 0.5) < 1e-6
    assert np.max(reference(preset("zhang2019", epsilon_placement="inside"), x.numpy(), gain)) < 1e-3


def test_zhang2019_in_half_is_within_its_wide_bound() -> None:
    """Without casts the statistic is a half one: the bound is wide, and holds what torch computes."""
    x, gain = model_inputs("float16", 64)
    x = x[:3]  # the smaller rows' squares vanish in float16
    args = (to_numpy(x), to_numpy(gain))
    y = to_numpy(zhang_norm(x, gain))
    assert ulp_of(preset("zhang2019"), y, args)[0] <= 1
    assert np.max(error_bound(preset("zhang2019"), *args)) > 4 * np.max(error_bound(preset("llama"), *args))
