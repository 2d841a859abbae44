"""One site run in onnxruntime on one set of inputs, and its distance from the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.oracle import error_bound, reference, ulp_distance
from rmsnorm_onnx.sessions import one_line, open_session, ort_value
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.storage import hidden_by_storage
from rmsnorm_onnx.subgraph import Places, Stop, UncutError, cut
from rmsnorm_onnx.view import Ref


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a run showed.

    Attributes:
        ulp: The worst distance from the reference.
        ratio: The worst error over its bound.
        optimised: Whether onnxruntime's optimisations were on, as they are unless they break the graph.
    """

    ulp: float
    ratio: float
    optimised: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One set of inputs for a site.

    Attributes:
        x_type: x's type.
        rows: What the rows of x are.
        batches: x, one array for each run.
        stops: The values of the site's graph that the inputs stand for.
        given: The gain and the bias by those names, where the norm has them.
    """

    x_type: str
    rows: RowKinds
    batches: Sequence[np.ndarray]
    stops: Mapping[ir.Value, Stop]
    given: Mapping[str, np.ndarray]

    def distances(self, model: ir.Model, places: Places, output: Ref, spec: RMSNormSpec) -> Measured:
        """Measures one site of a model.

        Raises:
            UncutError: it cannot be cut out, or onnxruntime cannot run it.
        """
        results, optimised = self.results(model, places, output, spec)
        ulp = ratio = 0.0
        for x, y in zip(self.batches, results, strict=True):
            here = worst(y, spec, x, self.given.get("gain"), self.given.get("bias"))
            ulp, ratio = max(ulp, here[0]), max(ratio, here[1])
        return Measured(ulp, ratio, optimised)

    def results(self, model: ir.Model, places: Places, output: Ref, spec: RMSNormSpec) -> tuple[list[np.ndarray], bool]:
        """The site's results for all batches, and whether they were computed with onnxruntime's optimisations.

        Raises:
            UncutError: it cannot be cut out, or onnxruntime cannot run it.
        """
        result = Stop("y", spec.resolve(self.x_type).result_type, self.rows.shape)
        return _run(cut(model, places.view, output, self.stops, result), self, result)


def measure(
    trials: Sequence[Callable[[], Trial]], model: ir.Model, places: Places, output: Ref, spec: RMSNormSpec
) -> Measured:
    """Measures a site on the first set of inputs that its graph takes.

    Raises:
        UncutError: it takes none; the reason is the last one's.
    """
    for trial in trials[:-1]:
        try:
            return trial().distances(model, places, output, spec)
        except (UncutError, UsageError):
            continue  # smaller dimensions than the graph's own: some constant may hold those
    return trials[-1]().distances(model, places, output, spec)


def worst(
    y: np.ndarray,
    spec: RMSNormSpec,
    x: np.ndarray,
    gain: np.ndarray | None,
    bias: np.ndarray | None,
    *,
    x_was_stored: bool = False,
) -> tuple[float, float]:
    """The largest distance of a result from the float64 reference, in ulp, and the largest error over its bound.

    With x_was_stored, the bound has what the rounding of x hides on top.
    """
    gain, bias = _of_rank(gain, x.ndim), _of_rank(bias, x.ndim)
    exact, bound = reference(spec, x, gain, bias), error_bound(spec, x, gain, bias)
    if x_was_stored:
        bound = bound + hidden_by_storage(spec, x, gain)
    ulp = float(np.max(ulp_distance(y, exact), initial=0.0))
    return ulp, float(np.max(_ratio(y.astype(np.float64), exact, bound), initial=0.0))


def _run(model: ir.Model, trial: Trial, result: Stop) -> tuple[list[np.ndarray], bool]:
    """The results for all batches, and whether they were computed with onnxruntime's optimisations."""
    data = ir.to_proto(model).SerializeToString()
    try:
        return _run_at(True, data, trial, result), True
    except UncutError:
        raise
    except Exception as error:  # onnxruntime's exceptions have no common base
        first = error
    try:
        return _run_at(False, data, trial, result), False
    except Exception:  # the same errors; the first one says more, so it is the one reported
        raise UncutError(one_line(first)) from first


def _run_at(optimised: bool, data: bytes, trial: Trial, result: Stop) -> list[np.ndarray]:
    session = open_session(data, optimised=optimised)
    wanted = {i.name for i in session.get_inputs()}
    if "x" not in wanted:
        raise UncutError("its result does not depend on its input")
    feeds = {name: ort_value(a) for name, a in trial.given.items() if name in wanted}
    return [_bound_run(session, feeds | {"x": ort_value(x)}, result) for x in trial.batches]


def _bound_run(session: Any, feeds: Mapping[str, Any], result: Stop) -> np.ndarray:
    """One run into an array of ours: onnxruntime hands out no bfloat16 arrays."""
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, value)
    y = np.full(result.shape, np.nan, dtypes.numpy_dtype(result.type))
    element = int(dtypes.ir_dtype(result.type))
    binding.bind_output("y", "cpu", 0, element, list(result.shape), y.ctypes.data)
    session.run_with_iobinding(binding)
    return y


def _of_rank(parameter: np.ndarray | None, rank: int) -> np.ndarray | None:
    """A gain or bias with leading ones, so that it lies as numpy broadcasting lays it."""
    return None if parameter is None else parameter.reshape((1,) * (rank - parameter.ndim) + parameter.shape)


def _ratio(y: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Errors over their bounds; 0 where there is no error or no bound, infinite for a NaN that is bounded."""
    error = np.abs(y - exact)
    error = np.where(np.isnan(error), np.inf, error)
    with np.errstate(all="ignore"):
        ratio = np.where(error == 0, 0.0, error / bound)
    return np.where(np.isinf(bound), 0.0, ratio)
