"""A norm of a file run alone in onnxruntime on a given x, with its own gain and bias."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.sessions import array, one_line, open_session
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.subgraph import Places, Stop, UncutError, cut
from rmsnorm_onnx.trial import Trial
from rmsnorm_onnx.view import Ref


class Alone:
    """Runs the norms of one model."""

    def __init__(self, model: ir.Model) -> None:
        from rmsnorm_onnx.parameters import Parameters

        self._model = model
        self._places = Places(model)
        self._shapes = Shapes(self._places.view)
        self._parameters = Parameters(self._places, self._shapes)

    def parameters(self, match: Match, fed: Mapping[str, np.ndarray]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """A norm's gain and bias: constants, inputs of the model, or what the model computes from constants.

        Raises:
            UncutError: one of them is known only at run time.
        """
        gain = bias = None
        if match.gain is not None:
            gain = self._value(match, match.gain, "gain", fed)
        elif match.spec.has_gain:
            gain = self._parameters.stored_gain(match)
        if match.bias is not None:
            bias = self._value(match, match.bias, "bias", fed)
        return gain, bias

    def run(self, match: Match, x: np.ndarray) -> tuple[np.ndarray, bool]:
        """The norm's result on x, and whether onnxruntime's optimisations were on.

        Raises:
            UncutError: it cannot be cut out, or onnxruntime cannot run it.
        """
        stops = {match.x: Stop("x", match.x_type, x.shape)}
        if match.residual is not None:
            nothing = np.zeros(x.shape, x.dtype)
            stops[match.residual] = Stop("residual", match.x_type, x.shape, nothing)
        trial = Trial(match.x_type, RowKinds(match.spec, match.x_type, x.shape), [x], stops, {})
        (y,), optimised = trial.results(self._model, self._places, self._places.of(match.output), match.spec)
        return y, optimised

    def _value(self, match: Match, value: ir.Value, name: str, fed: Mapping[str, np.ndarray]) -> np.ndarray:
        constant = self._parameters.constant(match, value)
        if constant is not None:
            return constant
        if value.is_graph_input() and value.name is not None and value.name in fed:
            return fed[value.name]
        ref = Ref(value, self._places.of(match.output).calls)
        kind = self._shapes.float_type(self._places.view.resolve(ref) or ref)
        if kind is None:
            raise UncutError(f"the type of its {name} {value.name} is unknown")
        shape = self._parameters.dims(match, value, name)
        if not all(isinstance(n, int) for n in shape):
            raise UncutError(f"the shape of its {name} {value.name} is known only at run time")
        sizes = tuple(n for n in shape if isinstance(n, int))
        part = cut(self._model, self._places.view, ref, {}, Stop(name, kind, sizes))
        try:
            session = open_session(ir.to_proto(part).SerializeToString())
            binding = session.io_binding()
            binding.bind_output(name, "cpu")
            session.run_with_iobinding(binding)
            (result,) = binding.get_outputs()
            return array(result).astype(dtypes.numpy_dtype(kind), copy=False)
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise UncutError(f"its {name} {value.name} cannot be computed: {one_line(error)}") from error
