"""A file beside its PyTorch module: whose error it is, in ulp, and what was not measured and why."""

from __future__ import annotations

import collections
import io
import json
from pathlib import Path

import nets
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from nets import Inline, Residual, Shared, example, exported, seeded
from rich.console import Console
from torch import nn

from rmsnorm_onnx import RMSNormSpec, find_rms_norms, reference, tolerance, ulp_distance, verify_torch
from rmsnorm_onnx.comparison import NormComparison, TorchParityReport, print_report
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.models import tiny
from rmsnorm_onnx.report import dumps
from rmsnorm_onnx.spec import preset

NORMS = ["norms.0", "norms.1", "last"]


@pytest.fixture(scope="module")
def single() -> ir.Model:
    """Residual's file in float32."""
    return exported(Residual)


@pytest.fixture(scope="module")
def half() -> ir.Model:
    """Residual's file in float16."""
    return exported(Residual, "float16")


def named(report: TorchParityReport) -> dict[str | None, NormComparison]:
    """The norms of a report by their modules."""
    return {norm.module: norm for norm in report.norms}


def printed(report: TorchParityReport) -> str:
    """A report as text."""
    out = io.StringIO()
    print_report(report, Console(file=out, width=400))
    return out.getvalue()


def test_both_sides_in_float32(single: ir.Model) -> None:
    """Each norm is measured in place and in PyTorch, and the numbers are those of the module's own tensors."""
    module, (x,) = seeded(Residual), example()
    report = verify_torch(single, module, (x,))
    assert report.ok and report.whole and not report.unmeasured and not report.unrun and not report.notes
    assert [n.module for n in report.norms] == NORMS
    for norm in report.norms:
        assert (norm.gain, norm.how, norm.torch_within, norm.runtime_within) == ("equal", "in place", True, True)
    with torch.no_grad():
        y, gain = module.norms[0](x).numpy(), module.norms[0].weight.numpy()
    first = named(report)["norms.0"]
    assert first.spec.canonical("float32") == preset("llama").canonical("float32")
    expected = float(ulp_distance(y, reference(first.spec, x.numpy(), gain)).max())
    assert first.torch_ulp == expected > 0
    assert first.x_difference is not None and first.x_difference.relative == 0.0
    (output,) = report.outputs
    assert output.torch_error is not None and output.runtime_error is not None and output.difference is not None
    assert 0 < output.difference.rms <= output.torch_error.rms + output.runtime_error.rms
    assert not output.nonfinite


def test_a_half_model_shows_both_roundings(half: ir.Model) -> None:
    """PyTorch rounds before the gain and after it, onnxruntime once: each side shows its own number."""
    report = verify_torch(half, seeded(Residual), example(), dtype="float16")
    assert report.ok and not report.unmeasured
    once = tolerance(RMSNormSpec(normalized_type="float32", gain_type="float32"), "float16", nets.WIDTH)
    for norm in report.norms:
        assert norm.torch_ulp is not None and norm.runtime_ulp is not None
        assert norm.runtime_ulp <= once < norm.torch_ulp <= norm.tolerance
    # The first x is the input; the others the runtime keeps in float32 until somebody looks at them.
    assert [norm.how for norm in report.norms] == ["in place", "own x", "own x"]
    assert sum("reads x before it is rounded" in note for norm in report.norms for note in norm.notes) == 2
    (output,) = report.outputs
    assert output.torch_error is not None and output.runtime_error is not None
    assert output.runtime_error.rms < output.torch_error.rms


def test_bfloat16_runs_one_by_one() -> None:
    """A file that onnxruntime has no kernels for is measured norm by norm on PyTorch's x, and the kernels are named."""
    report = verify_torch(exported(Residual, "bfloat16"), seeded(Residual), example(), dtype="bfloat16")
    assert report.ok and not report.whole
    assert [norm.how for norm in report.norms] == ["alone"] * 3
    assert all(norm.runtime_within and norm.torch_within for norm in report.norms)
    assert [norm.x_difference for norm in report.norms] == [None] * 3
    (reason,) = report.unrun
    assert reason.startswith("the whole file does not run, so norms run one by one: no bfloat16 kernel for MatMul(")
    (output,) = report.outputs
    assert output.runtime_error is None and output.torch_error is not None and output.torch_error.rms > 0
    assert report.unmeasured == (output.name,)


def with_epsilon(model: ir.Model, epsilon: float) -> ir.Model:
    """A copy whose last norm has another epsilon."""
    changed = model.clone()
    node = find_rms_norms(changed)[-1].node
    assert "epsilon" in node.attributes
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon)
    return changed


def test_another_epsilon_is_beyond(single: ir.Model) -> None:
    """A file whose epsilon was changed is not what PyTorch computes, and the fault names both values."""
    report = verify_torch(with_epsilon(single, 1e-4), seeded(Residual), example())
    last = named(report)["last"]
    assert not report.ok and last.runtime_within and last.torch_within is False
    assert last.faults[0] == "last: its epsilon is 1e-06, the file's 1e-04"
    assert len(last.faults) == 2 and last.faults[1].startswith("last: PyTorch is ")
    assert [norm.ok for norm in report.norms] == [True, True, False]
    assert last.faults[0] in printed(report) and "2 within, 1 beyond" in printed(report)


def test_an_epsilon_that_no_number_shows(single: ir.Model) -> None:
    """A file's epsilon is compared as its gains are: one that is off in the fourth digit is another norm."""
    last = named(verify_torch(with_epsilon(single, 1.0001e-6), seeded(Residual), example()))["last"]
    assert last.torch_within and last.runtime_within
    assert last.faults == ("last: its epsilon is 1e-06, the file's 1.0001e-06",)


def test_a_call_that_the_file_has_no_norm_for() -> None:
    """A norm that PyTorch calls twice and the file holds once was lost."""
    model = exported(Shared, count=2).clone()
    first, second = find_rms_norms(model)
    second.output.replace_all_uses_with(first.output)
    model.graph.remove(second.node, safe=True)
    report = verify_torch(model, seeded(Shared), example(2))
    assert not report.ok
    assert report.norms[0].faults == ("norm: module 'norm' is called 2 times, and the file has 1 norms of it",)


def test_an_empty_example_measures_nothing(single: ir.Model) -> None:
    """Inputs without elements are refused, since all is within bounds on them."""
    with pytest.raises(UsageError, match="an example input is empty"):
        verify_torch(single, seeded(Residual), (example()[0][:0],))


def test_a_wrong_kernel_is_the_runtime_s_fault(single: ir.Model) -> None:
    """A body that computes something else than the file's node is beyond on the runtime's side alone, in place."""
    from rmsnorm_onnx import observation

    def scaled(*given: object) -> observation.Observation:
        seen = run(*given)
        values = {name: v * np.float32(1.001) if name == last else v for name, v in seen.values.items()}
        return observation.Observation(seen.outputs, values, seen.unchanged, seen.optimised)

    run, last = observation.observe, find_rms_norms(single)[-1].output.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observation, "observe", scaled)
        report = verify_torch(single, seeded(Residual), example())
    norm = named(report)["last"]
    assert (norm.torch_within, norm.runtime_within, report.ok) == (True, False, False)
    assert norm.faults[0].startswith("last: the runtime is ") and len(norm.faults) == 1


def test_another_seed_is_caught(single: ir.Model) -> None:
    """A module with other weights is told from the file's by every gain, and each norm is named."""
    report = verify_torch(single, seeded(Residual, seed=1), example())
    assert not report.ok and [norm.gain for norm in report.norms] == ["differs"] * 3
    for norm in report.norms:
        assert norm.faults == tuple(f for f in norm.faults if f.startswith(f"{norm.module}: its gain is not the"))
        assert f"{nets.WIDTH} of {nets.WIDTH} elements" in norm.faults[0]


def test_one_bit_of_a_gain_is_caught(single: ir.Model) -> None:
    """Gains are compared bit for bit: the next float32 beside one element is another gain."""
    module = seeded(Residual)
    with torch.no_grad():
        module.last.weight[3] = torch.nextafter(module.last.weight[3], torch.tensor(9.0))
    report = verify_torch(single, module, example())
    assert [norm.gain for norm in report.norms] == ["equal", "equal", "differs"]
    assert f"1 of {nets.WIDTH} elements" in named(report)["last"].faults[0]


def test_only_some_sites(single: ir.Model) -> None:
    """Patterns choose among the modules, and the outputs are compared all the same."""
    report = verify_torch(single, seeded(Residual), example(), only="norms.*")
    assert [norm.module for norm in report.norms] == NORMS[:2] and len(report.outputs) == 1


def test_calls_of_one_module_are_paired_in_order() -> None:
    """A norm that is called twice is paired call by call: each call reads the input that the file's norm reads."""
    report = verify_torch(exported(Shared, count=2), seeded(Shared), example(2))
    assert report.ok and [norm.module for norm in report.norms] == ["norm", "norm"]
    for norm in report.norms:
        assert norm.x_difference is not None and norm.x_difference.relative == 0.0
        assert norm.y_difference is not None and norm.torch_within and norm.runtime_within


def test_norms_that_are_no_modules() -> None:
    """A call of F.rms_norm is captured where it is made; a norm by hand is measured in the runtime, and told why."""
    report = verify_torch(exported(Inline), seeded(Inline), example())
    function, hand = report.norms
    assert function.torch_within and function.runtime_within and function.gain == "equal"
    assert hand.module == "hand" and hand.torch_within is None and hand.runtime_within and hand.gain == "none"
    assert hand.unrun[0].endswith("nor a call of F.rms_norm: module 'hand' computes the norm's input itself")
    assert report.ok and report.unmeasured == ("hand",)


class Loud(nn.Module):
    """A norm whose result leaves float16's range, though not float64's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nets.LlamaNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 60000.0


def test_infinity_in_the_runtime_fails() -> None:
    """An output that is infinite in float16 and finite in float64 is a failure, counted by its elements."""
    module, (x,) = seeded(Loud), example()
    report = verify_torch(exported(Loud, "float16"), module, (x,), dtype="float16")
    with torch.no_grad():
        expected = int(torch.isinf(module.half()(x.half())).sum())
    assert expected > 0 and all(norm.ok for norm in report.norms)
    assert [output.nonfinite for output in report.outputs] == [expected] and not report.ok
    assert f"{expected} elements are NaN or infinite in the runtime" in printed(report)


class Stubborn(Residual):
    """Refuses float64, as a custom operator does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("float32 only")
        return super().forward(x)


def test_no_float64_run_is_said(single: ir.Model) -> None:
    """Where the module cannot run in float64 the report says so, and the two sides are still compared."""
    report = verify_torch(single, seeded(Stubborn), example())
    assert report.unrun == ("there is no float64 run of the module: RuntimeError: float32 only",)
    (output,) = report.outputs
    assert output.torch_error is None and output.difference is not None and output.difference.rms > 0
    assert report.ok and report.unmeasured == (output.name,)
    assert all(norm.torch_drift is None and norm.torch_within for norm in report.norms)


class Flag(Residual):
    """Gives a dictionary of a float tensor and one of truth values."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = super().forward(x)
        return {"y": y, "positive": y > 0}


def test_outputs_of_other_types() -> None:
    """An output of truth values is compared with PyTorch's, and is no reason for --strict to fail."""
    report = verify_torch(exported(Flag), seeded(Flag), example())
    y, positive = report.outputs
    assert (y.dtype, positive.dtype) == ("float32", "bool") and positive.torch_error is None
    assert positive.difference is not None and positive.difference.relative == 0.0
    assert report.ok and not report.unmeasured and not positive.unrun


def test_the_module_is_left_as_it_was(single: ir.Model) -> None:
    """Mode, type and weights of the caller's module stay, and no hook stays on it."""
    module = seeded(Residual).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    verify_torch(single, module, example(), dtype="float32")
    assert all(part.training and not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_the_file_is_left_as_it_was(single: ir.Model) -> None:
    """The caller's model has the outputs that it had."""
    before = ir.to_proto(single).SerializeToString(deterministic=True)
    verify_torch(single, seeded(Residual), example())
    assert ir.to_proto(single).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_watching_does_not_keep_norms_from_fusion(dtype: str, single: ir.Model, half: ir.Model, tmp_path: Path) -> None:
    """With every norm's x and y as outputs, onnxruntime fuses as many norms, and the outputs are the same bits."""
    from rmsnorm_onnx.observation import observe

    model = {"float32": single, "float16": half}[dtype].clone()
    kinds, inputs = model.graph.inputs[0], example()[0].numpy().astype(dtype)
    watched = {v: dtype for m in find_rms_norms(model) for v in (m.x, m.output) if v.producer() is not None}
    seen = observe(model, {kinds.name: inputs}, watched)
    assert seen.unchanged and seen.optimised and len(seen.values) == len(watched) == 5
    fused = []
    for extra in ([], [v for v in watched if not v.is_graph_output()]):
        model.graph.outputs.extend(extra)
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.optimized_model_filepath = 4, str(tmp_path / "optimised.onnx")
        onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
        nodes = onnx.load(tmp_path / "optimised.onnx").graph.node
        fused.append(collections.Counter(node.op_type for node in nodes)["SimplifiedLayerNormalization"])
    assert fused == [3, 3]


def test_by_path_with_external_data(single: ir.Model, tmp_path: Path) -> None:
    """A file whose weights are in a data file beside it is run by its path."""
    ir.save(single.clone(), tmp_path / "model.onnx", external_data="model.data")
    assert (tmp_path / "model.data").stat().st_size > 4 * nets.WIDTH**2
    report = verify_torch(tmp_path / "model.onnx", seeded(Residual), example())
    assert report.ok and report.whole and not report.unmeasured and len(report.norms) == 3


def test_a_plain_file_without_traces(single: ir.Model) -> None:
    """A file without the exporter's traces is paired by the names of its gains."""
    model = single.clone()
    for node in model.graph:
        node.metadata_props.clear()
    report = verify_torch(model, seeded(Residual), example())
    assert report.ok and [norm.module for norm in report.norms] == NORMS and not report.unmeasured


def test_a_torchscript_file(tmp_path: Path) -> None:
    """In a file of TorchScript's exporter, unfused, the node's names tell the modules."""
    module, path = seeded(Residual), tmp_path / "script.onnx"
    torch.onnx.export(module, example(), path, dynamo=False, opset_version=17, verbose=False)
    report = verify_torch(path, module, example())
    assert report.ok and [norm.module for norm in report.norms] == NORMS and not report.unmeasured
    assert all(norm.how == "in place" and norm.gain == "equal" for norm in report.norms)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "forward does not take these inputs"),
        ((torch.zeros(2, 5, 32),), {}, r"is \[2, 5, 64\] in the file, and \[2, 5, 32\] in the example"),
        ((torch.zeros(2, 5, nets.WIDTH, dtype=torch.int64),), {}, "is float32 in the file, and int64 in the example"),
        (example(), {"dtype": "int8"}, "cannot convert to 'int8'"),
    ],
)
def test_wrong_examples(single: ir.Model, args: tuple[torch.Tensor, ...], kwargs: dict[str, str], words: str) -> None:
    """Inputs that do not fit the module or the file are usage errors that say what fits."""
    with pytest.raises(UsageError, match=words):
        verify_torch(single, seeded(Residual), args, **kwargs)


def test_no_module(single: ir.Model) -> None:
    """Something that is no module is a usage error."""
    with pytest.raises(UsageError, match="a str is no module to compare with"):
        verify_torch(single, "net", example())


def test_json(single: ir.Model, half: ir.Model) -> None:
    """The JSON's keys are stable and always there, and the text is JSON that any parser reads."""
    report = verify_torch(single, seeded(Residual), example())
    data = json.loads(dumps(report.to_json()))
    assert list(data) == [
        *("version", "kind", "ok", "whole", "within", "beyond", "unmeasured"),
        *("faults", "unrun", "notes", "norms", "outputs"),
    ]
    assert (data["version"], data["kind"], data["within"], data["beyond"]) == (1, "torch-parity", 3, 0)
    assert list(data["norms"][0]) == [
        *("name", "scope", "module", "spec", "dtype", "tolerance", "gain", "how", "torch_ulp", "torch_ratio"),
        *("runtime_ulp", "runtime_ratio", "x_difference", "y_difference", "torch_drift", "runtime_drift"),
        *("faults", "unrun", "notes", "torch_within", "runtime_within", "ok"),
    ]
    assert list(data["norms"][0]["y_difference"]) == ["relative", "rms"]
    assert list(data["outputs"][0]) == [
        *("name", "dtype", "torch_ulp", "torch_error", "runtime_ulp", "runtime_error", "difference", "nonfinite"),
        *("allowed_ulp", "faults", "unrun"),
    ]
    assert list(verify_torch(half, seeded(Residual), example(), only="last", dtype="float16").to_json()) == list(data)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("gemma3", "float16"), ("gemma3", "bfloat16")),
        *(("llama", "float32"), ("qwen3", "float16"), ("t5-encoder", "float16"), ("t5-encoder", "bfloat16")),
    ],
)
def test_tiny_models(name: str, dtype: str) -> None:
    """Every norm of every tiny model is paired with its module, bears its gain, and holds on both sides."""
    from rmsnorm_onnx import export

    model = tiny.build(name, dtype)
    report = verify_torch(export(model.module, model.args).model, model.module, model.args)
    assert sorted(n.module or "" for n in report.norms) == sorted(norm.name for norm in model.norms)
    assert report.ok and report.whole == (dtype != "bfloat16")
    assert {norm.gain for norm in report.norms} == {"equal"}
    assert all(norm.torch_within and norm.runtime_within for norm in report.norms)
