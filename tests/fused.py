"""What a rewritten model must be: valid, loadable, and as near to float64 as its spec allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from rmsnorm_onnx import RMSNormSpec
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.runtimes import missing_kernels


def load(model: onnx.ModelProto, *, optimise: bool = True) -> Any:
    """An onnxruntime session of a model, on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], *, optimise: bool = True) -> dict[str, np.ndarray]:
    """A model's outputs from onnxruntime on the CPU."""
    session = load(model, optimise=optimise)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


def runnable(model: onnx.ModelProto) -> bool:
    """Whether onnxruntime is said to have a kernel for every node of a model."""
    import onnx_ir as ir

    return not missing_kernels(ir.from_proto(model))


def assert_within_bound(got: np.ndarray, spec: RMSNormSpec, x: Any, gain: Any = None, bias: Any = None) -> None:
    """A result lies as near to the float64 norm as the roundings of its spec imply, element by element."""
    want, bound = reference(spec, x, gain, bias), error_bound(spec, x, gain, bias)
    with np.errstate(invalid="ignore"):
        off = np.abs(got.astype(np.float64) - want)
        # Where 1/rms overflows its type the bound is infinite: anything goes, NaN included.
        far = ~((off <= bound) | np.isinf(bound) | (np.isnan(got.astype(np.float64)) & np.isnan(want)))
    assert not far.any(), f"{far.sum()} of {far.size} elements are out of bound, the worst by {np.nanmax(off / bound)}"
