"""What the tests of conversion to float16 share: the tools, a plain norm, and what right and refused mean."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import form_kit
import numpy as np
import onnx
import pytest
from form_kit import Site

from rmsnorm_onnx import Match, RMSNormSpec, find_rms_norms
from rmsnorm_onnx.oracle import error_bound, reference

D = 32
SCALES = (0.0, 300.0, 5000.0, 20000.0, 1e-4, 1e-5, 1e-6, 1e-7, 1e-4, 10**-2.5, 1.0)
"""Rows whose squares overflow in float16, vanish in it, are zero, or lie near the epsilons 1e-8 and 1e-5."""

LOST, SUBNORMAL = 1e-8, 1e-5
"""Epsilons that float16 rounds to 0 and to a subnormal number."""


def by_onnxruntime(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """onnxruntime's pass, as a function."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(model, **options)


def by_onnx_model(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """The same through OnnxModel, which infers types in its own way and merges Casts afterwards."""
    from onnxruntime.transformers.onnx_model import OnnxModel

    held = OnnxModel(model)
    held.convert_float_to_float16(**options)
    return held.model


def by_common(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """onnxconverter-common's pass."""
    from onnxconverter_common.float16 import convert_float_to_float16

    return convert_float_to_float16(model, **options)


Converter = Callable[..., onnx.ModelProto]
CONVERTERS: Mapping[str, Converter] = {
    "onnxruntime": by_onnxruntime,
    "OnnxModel": by_onnx_model,
    "onnxconverter-common": by_common,
}
EVERY_WAY = pytest.mark.parametrize("keep", [False, True], ids=["half io", "float io"])
EVERY_TOOL = pytest.mark.parametrize("tool", CONVERTERS)


def convert(tool: str, model: onnx.ModelProto, keep: bool, **options: Any) -> onnx.ModelProto:
    """A converted copy; what the tool prints is not shown."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return CONVERTERS[tool](copy.deepcopy(model), keep_io_types=keep, **options)


def block_list(tool: str, *more: str) -> list[str]:
    """The operators that a tool leaves in float32 by default, and more."""
    if tool == "onnxconverter-common":
        from onnxconverter_common.float16 import DEFAULT_OP_BLOCK_LIST
    else:
        from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST
    return [*DEFAULT_OP_BLOCK_LIST, *more]


def plain(epsilon: float, *, gain: bool = True, opset: int = 18, constant: bool = False) -> onnx.ModelProto:
    """A float32 norm in others' plain operators, between two operators that are none of it."""
    last = ("ReduceMean (sq, last)", ", int64[1] last = {-1}") if opset >= 18 else ("ReduceMean <axes = [-1]> (sq)", "")
    held = f"float eps = {{{epsilon}}}, "
    node = f"eps = Constant <value = float {{{epsilon}}}> ()" if constant else ""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}]>
        m (float[N,{D}] x) => (float[N,{D}] y) <{"" if constant else held}float two = {{2.0}}{last[1]}> {{
        {node}
        h = Identity (x) sq = Pow (h, two) ms = {last[0]} me = Add (ms, eps) rms = Sqrt (me) z = Div (h, rms)
        {"n = Mul (z, gain)" if gain else "n = Identity (z)"}
        y = Identity (n) }}""")
    if gain:
        model.graph.initializer.append(onnx.numpy_helper.from_array(GAIN, "gain"))
    for index, node_proto in enumerate(model.graph.node):
        node_proto.name = f"{node_proto.op_type}_{index}"  # node_block_list goes by names
    onnx.checker.check_model(model, full_check=True)
    return model


GAIN = np.random.default_rng(0).normal(1, 0.3, D).astype(np.float32)


def written(spec: RMSNormSpec, form: str, opset: int, **options: Any) -> onnx.ModelProto:
    """A float32 norm in a form of ours, from x0 to y0, the gain in gain0."""
    return form_kit.write([Site(spec, shape=(2, 3, D))], form, opset, **options)


def run(model: onnx.ModelProto, x: np.ndarray, *, optimise: bool) -> np.ndarray:
    """The result in onnxruntime's CPU provider, x in the type that the file takes."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[taken.type]
    (y,) = session.run(None, {taken.name: x.astype(dtype)})
    return y


def the_match(model: onnx.ModelProto) -> Match:
    """The one norm of a model."""
    (match,) = find_rms_norms(model)
    assert isinstance(match, Match), match
    return match


def initializer(model: onnx.ModelProto, name: str) -> np.ndarray | None:
    """Its numbers; None where there is none of the name."""
    return next((onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name.startswith(name)), None)


def gain_of(model: onnx.ModelProto, match: Match) -> np.ndarray | None:
    """The gain's numbers as the file has them: an initializer, or the constant that an offset was folded into."""
    node = None if match.gain is None else match.gain.producer()
    if node is None:
        return initializer(model, "gain")
    return node.attributes["value"].as_tensor().numpy()


def assert_right(model: onnx.ModelProto, epsilon: float, shape: tuple[int, ...] = (-1, D)) -> None:
    """The file loads, squares in float32, holds epsilon exactly, and each element is within the bound of its spec."""
    match = the_match(model)
    assert match.spec.statistic_type == "float32" and np.float32(match.spec.epsilon) == np.float32(epsilon)
    rows = np.random.default_rng(1).normal(size=(len(SCALES), D)) * np.array(SCALES)[:, None]
    x = np.clip(rows, -6e4, 6e4).astype(np.float16)
    x = np.concatenate([x, x[: -len(x) % 3]]).reshape(shape)
    spec, gain, bias = match.spec, gain_of(model, match), initializer(model, "bias")
    expected, bound = reference(spec, x, gain, bias), error_bound(spec, x, gain, bias)
    for optimise in (True, False):
        y = run(model, x, optimise=optimise).astype(np.float64)
        if spec.resolve(match.x_type).result_type == "float32":  # a Cast to float16 follows the norm
            bound = bound + np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64) / 2
        assert np.all(np.abs(y - expected) <= bound)


def assert_refused(model: onnx.ModelProto) -> None:
    """Neither the full check nor onnxruntime takes the file, whether it optimises or not."""
    import onnxruntime as ort

    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        onnx.checker.check_model(model, full_check=True)
    for optimise in (True, False):
        with pytest.raises(ort.capi.onnxruntime_pybind11_state.Fail):
            run(model, np.zeros((2, D)), optimise=optimise)


CLAMPED = {"onnxruntime": 2.0**-24, "OnnxModel": 2.0**-24, "onnxconverter-common": 2.0**-23}
"""What the tools make of 1e-8 by default."""
