"""onnxruntime's CPU provider: a model loaded on one thread, and arrays of every float type in and out of it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import MissingDependencyError

_FOLDER_OF_DATA = "session.model_external_initializers_file_folder_path"


def require(purpose: str) -> None:
    """Check that onnxruntime is here.

    Raises:
        MissingDependencyError: it is not.
    """
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("onnxruntime", purpose, "onnxruntime>=1.23") from error


def open_session(model: bytes, *, optimised: bool = True, folder: str | None = None) -> Any:
    """An InferenceSession of a serialised model.

    Args:
        model: The model.
        optimised: Whether onnxruntime's default optimisations are on.
        folder: Where the model's external data is.

    Raises:
        Exception: whatever onnxruntime raises; its exceptions have no common base.
    """
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    if folder is not None:
        options.add_session_config_entry(_FOLDER_OF_DATA, folder)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def ort_value(array: np.ndarray) -> Any:
    """An array as an OrtValue, bfloat16 included."""
    import onnxruntime

    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        element = int(ir.DataType.BFLOAT16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), element)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def array(value: Any) -> np.ndarray:
    """An OrtValue as an array that is ours; onnxruntime hands out no bfloat16 arrays itself."""
    if value.data_type() != "tensor(bfloat16)":
        return np.array(value.numpy())
    shape = value.shape()
    data = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
    return np.frombuffer(data, dtypes.numpy_dtype("bfloat16")).reshape(shape)


def one_line(error: Exception) -> str:
    """An exception in one line, without onnxruntime's codes."""
    text = " ".join(str(error).split())
    return text.rsplit(" : ", 1)[-1][:300] if text.startswith("[ONNXRuntimeError]") else text[:300]
