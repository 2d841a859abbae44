"""The bound of the reference, held to what runtimes compute, and the reference itself to the formula as written."""

from __future__ import annotations

import math

import numpy as np
import onnx.parser
import pytest

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.oracle import error_bound, reference, tolerance, ulp_distance
from rmsnorm_onnx.spec import RMSNormSpec

ONCE = RMSNormSpec(normalized_type="float32", gain_type="float32")
TWICE = RMSNormSpec()


def onnxruntime_norm(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    """onnxruntime's own RMSNormalization kernel."""
    import onnxruntime

    kind = {"float16": "float16", "float32": "float", "float64": "double"}[x.dtype.name]
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        norm ({kind}[n, d] x, {kind}[d] g) => ({kind}[n, d] y)
        {{ y = RMSNormalization <axis = -1, epsilon = {epsilon:.10f}> (x, g) }}"""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    proto = onnx.parser.parse_model(text).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x, "g": gain})[0])


def torch_norm(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    """torch's F.rms_norm."""
    import torch

    args = [torch.from_numpy(a) for a in (x, gain)]
    return np.asarray(torch.nn.functional.rms_norm(args[0], (x.shape[-1],), args[1], epsilon).numpy())


def rows_of(size: int, x_type: str, constants: int = 64) -> np.ndarray:
    """Random, zero, huge, tiny and near-epsilon rows, and constant ones, whose roundings all go the same way."""
    rng = np.random.default_rng(size)
    top = min(math.sqrt(float(np.finfo(np.float32).max) / size), float(dtypes.finfo(x_type).max)) / 8
    scales = np.array([1.0, 0.0, top, 1e-4, 3e-3])[:, None]
    random = rng.uniform(-1, 1, (5, size)) * scales
    constant = np.repeat(rng.uniform(1, 2, (constants, 1)), size, axis=1)
    return np.concatenate([random, constant]).astype(dtypes.numpy_dtype(x_type))


def assert_runtimes_are_within(size: int, x_type: str) -> None:
    """Hold onnxruntime's and torch's norms to the bound, and to the tolerance on the rows in the normal range."""
    x = rows_of(size, x_type)
    gain = np.random.default_rng(0).uniform(0.5, 1.5, size).astype(x_type)
    exact, bound = reference(ONCE, x, gain), error_bound(ONCE, x, gain)
    allowed = tolerance(ONCE, x_type, size)
    for run in (onnxruntime_norm, torch_norm):
        y = run(x, gain, ONCE.epsilon)
        assert np.all(np.abs(y - exact) <= bound), run.__name__
        assert np.max(ulp_distance(y, exact)[[0, 2, *range(5, len(x))]]) <= allowed, run.__name__


@pytest.mark.parametrize("x_type", ["float16", "float32"])
@pytest.mark.parametrize("size", [1, 7, 64, 1000, 4096])
def test_runtimes_are_within_the_bound(size: int, x_type: str) -> None:
    """onnxruntime's kernel and torch's stay within the bound on every kind of row."""
    assert_runtimes_are_within(size, x_type)


@pytest.mark.full
@pytest.mark.parametrize("x_type", ["float16", "float32"])
@pytest.mark.parametrize("size", [2, 3, 15, 16, 17, 127, 128, 513, 2048, 3072, 8192, 65536])
def test_runtimes_are_within_the_bound_in_full(size: int, x_type: str) -> None:
    """As above, over the lengths in between and up to 65,536, where the float32 sum alone costs hundreds of ulps."""
    assert_runtimes_are_within(size, x_type)


def test_a_runtime_that_rounds_once_is_within_a_spec_that_rounds_twice() -> None:
    """onnxruntime rounds once in float16 whatever the graph says, which is nearer to the exact value."""
    x, gain = rows_of(256, "float16"), np.random.default_rng(0).uniform(0.5, 1.5, 256).astype(np.float16)
    y = onnxruntime_norm(x, gain, TWICE.epsilon)
    assert np.any(y != reference(TWICE, x, gain, rounded=True))
    assert np.all(np.abs(y - reference(TWICE, x, gain)) <= error_bound(TWICE, x, gain))


@pytest.mark.parametrize("x_type", ["float16", "bfloat16"])
def test_rounded_reference_is_what_the_formula_gives(x_type: str) -> None:
    """The rounding points, spelled out step by step with numpy casts, give the same numbers bit by bit."""
    dtype = dtypes.numpy_dtype(x_type)
    x, gain = rows_of(64, x_type), np.random.default_rng(0).uniform(0.5, 1.5, 64).astype(dtype)
    x32 = x.astype(np.float32)
    mean = np.mean(np.square(x32).astype(np.float64), -1, keepdims=True).astype(np.float32)
    factor = np.float32(1) / np.sqrt(mean + np.float32(1e-5))
    expected = gain * (x32 * factor).astype(dtype)
    np.testing.assert_array_equal(reference(TWICE, x, gain, rounded=True), expected.astype(np.float64))
