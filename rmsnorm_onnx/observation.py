"""A whole file run in onnxruntime on given inputs, and what flows between its nodes meanwhile.

Values are watched by making them outputs, in their own types: a Cast beside them changed the outputs of some files. So
a half value is seen as it is stored, which is not always what the next operator reads: between float16 operators
onnxruntime's CPU provider works in float32 and leaves the roundings out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes, weights
from rmsnorm_onnx.errors import RMSNormError, UsageError
from rmsnorm_onnx.sessions import array, one_line, open_session, ort_value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One run of a file.

    Attributes:
        outputs: Its outputs, from a run of the file as it is; None for one that is no tensor.
        values: The watched values by name, from a second run.
        unchanged: Whether the outputs of both runs are the same, to the bit.
        optimised: Whether onnxruntime's optimisations were on, as they are unless they break the file.
    """

    outputs: Sequence[np.ndarray | None]
    values: Mapping[str, np.ndarray]
    unchanged: bool
    optimised: bool


class NotRunError(Exception):
    """A file does not run; the message says why in a few words."""


def observe(model: ir.Model, feeds: Mapping[str, np.ndarray], watched: Mapping[ir.Value, str]) -> Observation:
    """Run a model as it is, and once more with some of its values as outputs.

    Args:
        model: The model; its outputs are changed and put back.
        feeds: Its inputs by name.
        watched: Values of its main graph, and their float types.

    Raises:
        NotRunError: onnxruntime cannot load or run it.
        UsageError: nobody knows where its external data is.
    """
    _check_functions(model)
    folder = _data_folder(model)
    plain, optimised = _run(model, feeds, folder)
    before = list(model.graph.outputs)
    _watch(model, watched)
    try:
        names = [value.name for value in model.graph.outputs]
        results, _ = _run(model, feeds, folder)
    finally:
        for extra in [value for value in model.graph.outputs if value not in before]:
            model.graph.outputs.remove(extra)
    seen = {name: result for name, result in zip(names, results, strict=True) if name and result is not None}
    values = {value.name: seen[value.name] for value in watched if value.name in seen}
    same = all(_equal(a, b) for a, b in zip(plain, results[: len(plain)], strict=True))
    return Observation(plain, values, same, optimised)


def _watch(model: ir.Model, watched: Mapping[ir.Value, str]) -> None:
    """Make values outputs."""
    for value, kind in watched.items():
        if value.type is None:
            value.type = ir.TensorType(dtypes.ir_dtype(kind))
        if not value.is_graph_output():
            model.graph.outputs.append(value)


def _check_functions(model: ir.Model) -> None:
    for function in model.functions.values():
        if any(node.op_type == "SimplifiedLayerNormalization" for node in function.graph.all_nodes()):
            # Loading such a model ends the process.
            raise NotRunError(f"onnxruntime cannot load SimplifiedLayerNormalization inside function {function.name}")


def _data_folder(model: ir.Model) -> str | None:
    """Where the external data is; None without any."""
    for _, tensor in weights.tensors(model):
        if isinstance(tensor, weights.ExternalTensor):
            if tensor.folder is None:
                raise UsageError(
                    f"tensor {tensor.name!r} is in a data file, and a ModelProto does not say in which folder; "
                    "give the model's path"
                )
            return tensor.folder
    return None


def _run(model: ir.Model, feeds: Mapping[str, np.ndarray], folder: str | None) -> tuple[list[np.ndarray | None], bool]:
    try:
        data = weights.to_proto(model).SerializeToString()
    except RMSNormError:
        raise
    except Exception as error:  # protobuf's own errors: above 2 GiB it holds nothing
        raise NotRunError(f"it cannot be serialised ({one_line(error)}); save it, and give its path") from error
    first: Exception | None = None
    for optimised in (True, False):
        try:
            return list(_results(open_session(data, optimised=optimised, folder=folder), feeds)), optimised
        except Exception as error:  # onnxruntime's exceptions have no common base; the first one says more
            first = first or error
    assert first is not None
    raise NotRunError(one_line(first)) from first


def _results(session: Any, feeds: Mapping[str, np.ndarray]) -> Iterator[np.ndarray | None]:
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, ort_value(value))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(binding)
    for value in binding.get_outputs():
        yield array(value) if value.is_tensor() else None


def _equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
