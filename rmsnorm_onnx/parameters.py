"""What a norm that is cut out needs beside x: its gain, bias and residual, the model's own where they are constant."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.inputs import concrete_shape
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.subgraph import Places, Stop, UncutError
from rmsnorm_onnx.view import Ref


class Parameters:
    """The inputs of a model's norms."""

    def __init__(self, places: Places, shapes: Shapes) -> None:
        self._places, self._shapes = places, shapes

    def stops(
        self,
        match: Match,
        spec: RMSNormSpec,
        shape: tuple[int, ...],
        rng: np.random.Generator,
        symbols: dict[str, int],
    ) -> tuple[dict[ir.Value, Stop], dict[str, np.ndarray]]:
        """Where the slice of a site ends, and the gain and bias by those names.

        Args:
            match: The site.
            spec: What it is held to.
            shape: x's.
            rng: For a gain or bias that is no constant of the model: it is drawn from 0.5 to 1.5.
            symbols: Sizes that dimensions have taken, as `concrete_shape` keeps them.

        Raises:
            UncutError: the type or the shape of one of them is unknown.
        """
        stops = {match.x: Stop("x", match.x_type, shape)}
        if match.residual is not None:
            nothing = np.zeros(shape, dtypes.numpy_dtype(match.x_type))
            stops[match.residual] = Stop("residual", match.x_type, shape, nothing)
        given: dict[str, np.ndarray] = {}
        for name, value in (("gain", match.gain), ("bias", match.bias)):
            if value is not None:
                given[name], stops[value] = self._parameter(match, value, name, rng, symbols)
        if spec.has_gain and match.gain is None:
            given["gain"] = self.stored_gain(match)
        return stops, given

    def constant(self, match: Match, value: ir.Value) -> np.ndarray | None:
        """A constant's value; None for what is known only at run time."""
        ref = self._resolved(match, value)
        tensor = ref.value.const_value
        node = ref.value.producer()
        if tensor is None and node is not None and node.op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
        return None if tensor is None else np.array(tensor.numpy())

    def dims(self, match: Match, value: ir.Value, what: str) -> Dims:
        """A value's shape.

        Raises:
            UncutError: it is unknown.
        """
        dims = self._shapes.shape(self._resolved(match, value))
        if dims is None:
            raise UncutError(f"the shape of its {what} {value.name} is unknown; run shape inference")
        return dims

    @staticmethod
    def stored_gain(match: Match) -> np.ndarray:
        """The gain that a node holds as its attribute.

        Raises:
            UncutError: it holds none.
        """
        stored = match.node.attributes.get("gain")
        if stored is None:
            raise UncutError("its gain is no value of the graph around it")
        return np.array(stored.as_tensor().numpy())

    def _parameter(
        self, match: Match, value: ir.Value, name: str, rng: np.random.Generator, symbols: dict[str, int]
    ) -> tuple[np.ndarray, Stop]:
        kind = self._shapes.float_type(self._resolved(match, value))
        if kind is None:
            raise UncutError(f"the type of its {name} {value.name} is unknown")
        data = self.constant(match, value)
        if data is not None:
            return data, Stop(name, kind, data.shape, data)
        shape = concrete_shape(self.dims(match, value, name), symbols)
        data = rng.uniform(0.5, 1.5, shape).astype(dtypes.numpy_dtype(kind))
        return data, Stop(name, kind, shape)

    def _resolved(self, match: Match, value: ir.Value) -> Ref:
        ref = self._places.view.resolve(Ref(value, self._places.of(match.output).calls))
        if ref is None:
            raise UncutError(f"{value.name} is passed to the function around it by no caller")
        return ref
