"""The tiny models and their inventory: what PyTorch computes is what the specs say, and exports hold all of it."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
import torch
from standin import build
from torch import nn

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.models import demo, tiny
from rmsnorm_onnx.models.inventory import Norm, norms, parameters, run, unknown
from rmsnorm_onnx.models.measure import Row, differences, measure_tiny
from rmsnorm_onnx.oracle import error_bound, reference

OUTPUT_LIMIT = {"float32": 1e-5, "float16": 2e-2}
PLAIN = ("llama", "gemma3", "mamba2", "mlp", "x-transformers")
"""One model for each kind of reading: twice rounded, once rounded, behind a gate, torch's own, F.normalize."""


def plain_part(names: tuple[str, ...]) -> list[object]:
    """The models as parameters, all but those in `PLAIN` left to the full matrices."""
    return [name if name in PLAIN else pytest.param(name, marks=pytest.mark.full) for name in names]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor in its own type, bfloat16 too."""
    return tensor.detach().float().numpy().astype(dtypes.numpy_dtype(str(tensor.dtype).removeprefix("torch.")))


def outputs(module: nn.Module, norm: Norm) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]]:
    """(x, what the norm makes of it, gain, bias) for rows of every kind, in the type that its module gets."""
    torch_type = getattr(torch, norm.module_type)
    gain, bias = (None if p is None else as_numpy(p) for p in parameters(module, norm))
    found = []
    for x in RowKinds(norm.spec, norm.module_type, norm.x_shape(4, 16)).batches(np.random.default_rng(0)):
        with torch.no_grad():
            y = run(module, norm, torch.from_numpy(x.astype(np.float32)).to(torch_type))
        found.append((x, as_numpy(y), gain, bias))
    return found


def hold(module: nn.Module, norm: Norm) -> None:
    """A norm is within its spec's bound of float64, and rounds where the spec says, not elsewhere."""
    spec = norm.spec
    if not dtypes.holds(norm.module_type, spec.resolve(norm.module_type).result_type):
        spec = spec.replace(result_type="x")  # its module rounds what it gives after a gate
    bare = spec.replace(has_gain=False, gain_offset=0.0, has_bias=False)
    smallest = float(dtypes.finfo(norm.module_type).smallest_normal) * norm.late_factor
    same = total = 0
    for x, y, gain, bias in outputs(module, norm):
        exact, bound = reference(spec, x, gain, bias), error_bound(spec, x, gain, bias)
        # Before a late factor a module rounds to the subnormal spacing, where its spec has a normal number.
        other = np.isinf(bound) | ((norm.late_factor != 1.0) & (np.abs(reference(bare, x)) < smallest))
        assert np.all((np.abs(y.astype(np.float64) - exact) <= bound) | other), norm
        same += int((y == reference(spec, x, gain, bias, rounded=True)).sum())
        total += y.size
    # PyTorch sums the squares of a half statistic in float32, which is nearer than the spec's rounding points.
    if norm.module_type != "float32" and dtypes.holds(spec.resolve(norm.module_type).statistic_type, "float32"):
        assert same > 0.995 * total, norm


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(t, marks=pytest.mark.full) for t in ("float32", "bfloat16"))]
)
@pytest.mark.parametrize("name", plain_part(tiny.NAMES))
def test_specs_are_what_the_modules_compute(name: str, dtype: str) -> None:
    """Each module is within its spec's bound of float64, and rounds where the spec says, not elsewhere."""
    model = build(name, dtype)
    for norm in {(n.spec, n.shape): n for n in model.norms}.values():
        hold(model.module, norm)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_points_tell_families_apart(dtype: str) -> None:
    """Llama's rounding before the gain is seen: the spec that rounds once gives other numbers."""
    model = tiny.build("llama", dtype)
    norm = model.norms[0]
    once = norm.spec.replace(normalized_type="float32", gain_type="float32")
    triples = [found[:3] for found in outputs(model.module, norm)]
    assert np.mean([np.mean(y == reference(once, x, gain, rounded=True)) for x, y, gain in triples]) < 0.9


# Not of the GRU: its scan compiles the step, so that no hook runs in it.
@pytest.mark.parametrize("name", plain_part(tuple(name for name in tiny.NAMES if name != "gru")))
def test_inventory_is_every_norm_that_runs(name: str) -> None:
    """Each norm of the inventory runs as often as it says in a forward pass, on inputs of its type."""
    model = build(name, "float16")
    calls: collections.Counter[str] = collections.Counter()

    def seen(norm: Norm, x: torch.Tensor) -> None:
        calls[norm.name] += 1
        assert x.dtype == getattr(torch, norm.module_type)

    for norm in model.norms:
        module = model.module.get_submodule(norm.name)
        module.register_forward_pre_hook(lambda _, args, norm=norm: seen(norm, args[0]))
    with torch.no_grad():
        model.module(*model.args)
    assert set(calls) == {n.name for n in model.norms}
    assert all(calls[n.name] == n.sites for n in model.norms)
    named = {path for path, m in model.module.named_modules() if "norm" in type(m).__name__.lower()}
    assert named - {n.name for n in model.norms} == set(model.layer_norms) and (model.norms or model.layer_norms)


def test_unknown_norm_is_no_silence() -> None:
    """A class that is called an RMSNorm and has no reader is an error that names it."""

    class MyRMSNorm(nn.Module):
        pass

    module = nn.Sequential(MyRMSNorm(), nn.RMSNorm(4))
    with pytest.raises(UsageError, match=r"0 is a .*MyRMSNorm; the inventory has no reader for it"):
        norms(module)
    assert [norm.name for norm in norms(module, strict=False)] == ["1"]
    [(name, kind)] = unknown(module)
    assert name == "0" and kind.endswith("MyRMSNorm")


def test_torch_norm_readings() -> None:
    """torch.nn.RMSNorm's default epsilon follows the type of its statistic, and its axes its shape."""
    half, double, bare = norms(
        nn.Sequential(
            nn.RMSNorm((3, 4), dtype=torch.float16),
            nn.RMSNorm(4, dtype=torch.float64),
            nn.RMSNorm(4, eps=0.5, elementwise_affine=False),
        )
    )
    assert (half.spec.epsilon, half.spec.axes, half.shape, half.x_type) == (2.0**-23, (-2, -1), (3, 4), "float16")
    assert (double.spec.epsilon, double.spec.statistic_type) == (2.0**-52, "float64")
    assert (bare.spec.epsilon, bare.spec.has_gain, bare.shape) == (0.5, False, (4,))


def test_models_are_seeded_and_leave_the_generator_alone() -> None:
    """The same seed gives the same weights and inputs; another gives others; torch's own generator does not move."""
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second, third = tiny.build("mlp"), tiny.build("mlp"), tiny.build("mlp", seed=1)
    assert torch.equal(torch.rand(1), expected)
    weights = [[p for p in m.module.parameters()] for m in (first, second, third)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])
    assert torch.equal(first.args[0], second.args[0]) and not torch.equal(first.args[0], third.args[0])
    assert all(m.module.get_submodule(n.name).weight.std() > 0.1 for m in [first] for n in m.norms if n.spec.has_gain)


def test_unknown_model_names_the_known() -> None:
    """A model or type that does not exist is an error that lists those that do."""
    with pytest.raises(
        UsageError, match=r"there are llama, mistral, qwen2, .*, diffusers-block in float32, float16, bfloat16"
    ):
        tiny.build("gpt")


def check(name: str, dtype: str, opset: int, folder: Path) -> Row:
    """The whole chain on one model: everything found, as it is, within bounds, valid, and as PyTorch in the whole."""
    model = tiny.build(name, dtype)
    row = measure_tiny(model, opset, folder)
    assert (row.found, row.declined, row.differences) == (len(model.norms), 0, ())
    assert row.within and row.ulp <= row.tolerance and row.torch_ulp <= row.tolerance
    assert row.valid and row.opset == opset and row.notes == () and row.ok
    if dtype == "bfloat16":
        assert not row.loads and row.why.startswith("no kernel: bfloat16 ") and "MatMul(13)" in row.why
    else:
        assert row.loads and row.output <= OUTPUT_LIMIT[dtype]
    return row


@pytest.mark.parametrize(("name", "dtype", "opset"), [("gemma3", "float16", 23), ("t5-encoder", "bfloat16", 18)])
def test_every_norm_of_a_model_is_found_as_it_is(name: str, dtype: str, opset: int, tmp_path: Path) -> None:
    """Exported, found, rewritten, verified and run: each site's spec equals its module's."""
    check(name, dtype, opset, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("name", demo.MODELS)
def test_every_norm_of_every_model(name: str, dtype: str, opset: int, tmp_path: Path) -> None:
    """The same for the five models of the demonstration, in three types at both opsets."""
    check(name, dtype, opset, tmp_path)


def test_differences_are_said(tmp_path: Path) -> None:
    """A site with another spec than its module's, an unknown site and a missing one are each named."""
    from rmsnorm_onnx.exporters import export
    from rmsnorm_onnx.find import find_rms_norms

    model = tiny.build("mlp")
    sites = find_rms_norms(export(model.module, model.args, fuse=False).model)
    first, second, third = model.norms
    assert differences(sites, model.norms) == ()
    changed = Norm(first.name, first.kind, first.spec.replace(epsilon=1e-5), first.x_type, first.shape)
    assert differences(sites, [changed, second, third]) == (
        "0 was found as: axes -1, epsilon 1e-06, gain; it is: axes -1, epsilon 1e-05, gain",
    )
    assert differences(sites[1:], model.norms) == ("0 was not found",)
    [line] = differences(sites, [first, second])
    assert line.endswith("is no norm of the model, or one more of its module")
    twice = Norm(second.name, second.kind, second.spec, second.x_type, second.shape, sites=2)
    assert differences(sites, [first, twice, third]) == (f"{second.name} was not found",)
