"""Files that were converted to float16 before us, whole models, and exports in half types: all squares are float32."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from halves import CLAMPED, EVERY_TOOL, EVERY_WAY, LOST, SUBNORMAL, assert_right, block_list, convert, plain, the_match

from rmsnorm_onnx import fuse, verify


@EVERY_WAY
@EVERY_TOOL
def test_converted_before_us(tool: str, keep: bool) -> None:
    """A plain norm that was converted squares in half: `fuse` raises and lists it; epsilon is the file's."""
    for epsilon, stored in ((LOST, CLAMPED[tool]), (SUBNORMAL, float(np.float16(SUBNORMAL)))):
        for gain in (True, False):
            half = convert(tool, plain(epsilon, gain=gain), keep)
            assert the_match(half).spec.statistic_type == "float16"
            fused, report = fuse(half)
            (site,) = report.sites
            assert site.action == "rewritten" and site.spec is not None and site.spec.epsilon == stored
            assert any(n.startswith("the graph computes the statistic in float16") for n in site.notes)
            assert_right(fused, stored)


BLOCKED = (
    ("Pow",),
    ("ReduceMean",),
    ("Pow", "ReduceMean"),
    ("Add", "Sqrt"),
    ("Pow", "ReduceMean", "Add", "Sqrt", "Div"),
    ("Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul"),
)


@EVERY_WAY
@EVERY_TOOL
@pytest.mark.parametrize("blocked", BLOCKED, ids="+".join)
def test_block_lists_before_us(blocked: tuple[str, ...], tool: str, keep: bool) -> None:
    """Whichever of the norm's operators stay in float32 between Casts, it is found, and a half statistic is raised."""
    half = convert(tool, plain(LOST), keep, op_block_list=block_list(tool, *blocked))
    fused, report = fuse(half)
    assert (report.found, report.rewritten, report.declined) == (1, 1, 0)
    assert_right(fused, float(np.float32(LOST)) if "Add" in blocked else CLAMPED[tool])


def test_an_epsilon_that_became_zero_is_told() -> None:
    """An epsilon that went down to float16 and up again is 0, and the report warns of rows of zeros."""
    model = plain(LOST, constant=True)
    (name,) = [n.name for n in model.graph.node if "eps" in n.output]
    half = convert("onnxruntime", model, False, node_block_list=[name, *(n.name for n in model.graph.node[2:])])
    _, report = fuse(half)
    assert report.sites[0].spec is not None and report.sites[0].spec.epsilon == 0
    assert any("a row of zeros gives NaN" in note for note in report.sites[0].notes)


def test_two_casts_of_one_input_are_told() -> None:
    """onnxconverter-common may cast an input once a reader: that norm is kept, with the reason and the hazard."""
    model = plain(SUBNORMAL)
    for node in model.graph.node:
        node.input[:] = ["x" if name == "h" else name for name in node.input]
    del model.graph.node[0]
    half = convert("onnxconverter-common", model, keep=True)
    _, report = fuse(half)
    (site,) = report.sites
    assert site.action == "kept" and "--allow-rounding-change" in site.why
    assert site.spec is not None and site.spec.statistic_type == "float16"
    fused, _ = fuse(half, allow_rounding_change=True)
    assert the_match(fused).spec.statistic_type == "float32"


def whole(name: str, tool: str, first: bool) -> None:
    """A tiny model, fused before a conversion and after it, or after it alone: all norms, in bounds, and it runs."""
    import torch

    from rmsnorm_onnx.exporters import export
    from rmsnorm_onnx.models import tiny

    model = tiny.build(name)
    proto = ir.to_proto(export(model.module, model.args, fuse=False).model)
    half = convert(tool, fuse(proto)[0] if first else proto, keep=True)
    fused, report = fuse(half)
    assert (report.found, report.declined) == (len(model.norms), 0)
    sites = verify(fused, half).sites
    assert all(site.within for site in sites)
    assert all(s.spec is not None and s.spec.statistic_type == "float32" for s in report.sites if s.action != "kept")
    if first:
        kept = {float(np.float32(norm.spec.epsilon)) for norm in model.norms}
        assert {s.spec.epsilon for s in report.sites if s.spec is not None} == kept and report.kept == 0
    (x,) = model.inputs(3, 5, seed=1)
    with torch.no_grad():
        expected = model.module(x).numpy()
    if tool == "OnnxModel" or name == "mlp":  # the others break the Constant nodes of torch's rotary embedding
        import onnxruntime as ort

        session = ort.InferenceSession(fused.SerializeToString(), providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.max(np.abs(y.astype(np.float64) - expected)) < 2e-2


def test_a_whole_model() -> None:
    """Fused, converted and fused again, a tiny network runs in float16 with each epsilon as PyTorch has it."""
    whole("mlp", "onnxruntime", first=True)


@pytest.mark.full
@pytest.mark.parametrize("first", [True, False], ids=["after us", "before us"])
@EVERY_TOOL
@pytest.mark.parametrize("name", ["llama", "gemma3", "mlp"])
def test_whole_models(name: str, tool: str, first: bool) -> None:
    """The same for the models of three families, by each tool, and for files that were converted before us."""
    whole(name, tool, first)


def squared_types(model: onnx.ModelProto) -> list[str]:
    """The types of all values that a norm squares, functions inlined."""
    from onnx.inliner import inline_local_functions

    flat = onnx.shape_inference.infer_shapes(inline_local_functions(model), strict_mode=True)
    types = {v.name: v.type.tensor_type.elem_type for v in [*flat.graph.value_info, *flat.graph.input]}
    means = {n.input[0] for n in flat.graph.node if n.op_type == "ReduceMean"}
    squares = [n for n in flat.graph.node if n.op_type in ("Pow", "Mul") and n.output[0] in means]
    return [onnx.TensorProto.DataType.Name(types[n.input[0]]) for n in squares]


def squares_in_float32(name: str, dtype: str, fused: bool) -> None:
    """Exports a tiny model in a half type and looks at what is squared, once for each norm of the module."""
    from rmsnorm_onnx.exporters import export
    from rmsnorm_onnx.models import tiny

    model = tiny.build(name)
    result = export(model.module, model.args, dtype=dtype, fuse=fused)
    assert squared_types(ir.to_proto(result.model)) == ["FLOAT"] * len(model.norms)


@pytest.mark.parametrize(("name", "dtype", "fused"), [("mlp", "bfloat16", False), ("gemma3", "float16", True)])
def test_export_squares_in_float32(name: str, dtype: str, fused: bool) -> None:
    """`export(dtype=...)` of torch.nn.RMSNorm and of Gemma 3: every value that the graph squares is float32."""
    squares_in_float32(name, dtype, fused)


@pytest.mark.full
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mlp"])
def test_every_export_squares_in_float32(name: str, dtype: str, fused: bool) -> None:
    """The same for three families in both half types, rewritten and as exported."""
    squares_in_float32(name, dtype, fused)
