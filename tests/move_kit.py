"""Norms as others write them, in a node of ONNX or of onnxruntime; and what such a node computes, by its definition."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx.reference
from onnx import TensorProto, helper

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.spec import RMSNormSpec

WIDTH = 16
EPSILON = float(np.float32(1e-3))
OPERATORS = {
    "onnx": ("RMSNormalization", ""),
    "contrib": ("SimplifiedLayerNormalization", ""),
    "contrib elsewhere": ("SimplifiedLayerNormalization", "com.microsoft"),
    "skip": ("SkipSimplifiedLayerNormalization", "com.microsoft"),
    "skip elsewhere": ("SkipSimplifiedLayerNormalization", ""),
}
"""Each native operator in each domain that it is seen in; onnxruntime knows it in one."""
SCALES: dict[str, tuple[int, ...] | None] = {
    "full": (WIDTH,),
    "leading ones": (1, 1, WIDTH),
    "[1]": (1,),
    "scalar": (),
    "scalar one": (),
    "rows": (2, WIDTH),
    "missing": None,
}
"""Shapes of the scale beside an x of [3, 2, WIDTH]; "scalar one" is 1, and None is no scale."""
NUMBERS = {name: int(dtypes.ir_dtype(name)) for name in ("float32", "float16", "bfloat16", "float64")}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """One norm of somebody else's.

    Attributes:
        source: A key of OPERATORS.
        scale: A key of SCALES.
        x_type: x's type, the skip's too.
        scale_type: The scale's and, where there is one, the result's.
        opset: ONNX's.
        stash_type: The attribute's number; None leaves it out.
        extra: Names of the further outputs, in order; an empty one is left out.
        skip_shape: The shape of the skip.
    """

    source: str
    scale: str = "full"
    x_type: str = "float32"
    scale_type: str = "float32"
    opset: int = 23
    stash_type: int | None = None
    extra: tuple[str, ...] = ()
    skip_shape: tuple[int, ...] = (3, 2, WIDTH)

    @property
    def form(self) -> str:
        """The form that the node is of."""
        return "onnx" if self.source == "onnx" else "contrib"

    @property
    def has_skip(self) -> bool:
        """Whether the operator adds a second input first."""
        return self.source.startswith("skip")

    @property
    def mixed(self) -> bool:
        """Whether x and the scale are of two types."""
        return self.scale_type != self.x_type

    def arrays(self) -> dict[str, np.ndarray]:
        """Inputs: a row of zeros, a large one, two whose mean square is near epsilon, ordinary ones; skip; scale."""
        rng = np.random.default_rng(0)
        factors = np.array([0.0, 2000.0, EPSILON**0.5, EPSILON**0.5 / 4, 1.0, 1.0]).reshape(3, 2, 1)
        values = {"x": (rng.normal(size=(3, 2, WIDTH)) * factors).astype(dtypes.numpy_dtype(self.x_type))}
        if self.has_skip:
            skip = rng.normal(size=self.skip_shape) * 0.5
            skip *= factors != 0 if self.skip_shape == (3, 2, WIDTH) else 1
            values["skip"] = skip.astype(dtypes.numpy_dtype(self.x_type))
        shape = SCALES[self.scale]
        if shape is not None:
            scale = np.ones(shape) if self.scale == "scalar one" else rng.normal(1, 0.3, shape)
            values["scale"] = scale.astype(dtypes.numpy_dtype(self.scale_type))
        return values

    def spec(self) -> RMSNormSpec:
        """What the node computes, by its operator's definition; a half statistic is raised, as every form has it."""
        wide = "float64" if self.x_type == "float64" or self.stash_type == TensorProto.DOUBLE else "float32"
        spec = RMSNormSpec(epsilon=EPSILON, statistic_type=wide, factor_type=wide)
        if self.source != "onnx":  # rounded once, whatever stash_type says
            wide = dtypes.wider("float32", self.x_type)
            spec = spec.replace(statistic_type=wide, factor_type=wide)
        if self.source == "onnx" and not self.mixed:
            return spec
        wide = dtypes.wider(dtypes.wider(self.x_type, self.scale_type), "float32")
        return spec.replace(normalized_type=wide, gain_type=wide, result_type=self.scale_type)

    def normalized(self) -> np.ndarray:
        """The value that is normalised: x, or the sum, rounded."""
        arrays = self.arrays()
        return arrays["x"] if not self.has_skip else (arrays["x"] + arrays["skip"]).astype(arrays["x"].dtype)

    def model(self) -> onnx.ModelProto:
        """The node in a model; bfloat16 comes in and goes out by Casts, since numpy has none."""
        operator, domain = OPERATORS[self.source]
        arrays = self.arrays()
        nodes, infos = [], []
        for name in [n for n in ("x", "skip") if n in arrays]:
            infos.append(_input(name, self.x_type, ["n" if d == 3 else d for d in arrays[name].shape], nodes))
        attributes = {} if self.stash_type is None else {"stash_type": self.stash_type}
        outputs = ["y", *self.extra]
        node = helper.make_node(operator, list(arrays), outputs, "norm", domain=domain, epsilon=EPSILON, **attributes)
        nodes.append(node)
        result_type = self.scale_type if "scale" in arrays else self.x_type
        known = [helper.make_tensor_value_info(n, NUMBERS[self.x_type], i.type.tensor_type.shape and
                 [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim])
                 for n, i in zip(arrays, infos, strict=False)]  # fmt: skip
        results = [_output("y", result_type, ["n", 2, WIDTH], nodes, known)]
        for name in filter(None, self.extra):
            if name == "sum":
                results.append(_output(name, self.x_type, ["n", 2, WIDTH], nodes, known))
            else:
                results.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2, 1]))
        scales = [_tensor("scale", arrays["scale"], self.scale_type)] if "scale" in arrays else []
        graph = helper.make_graph(nodes, "g", infos, results, scales, value_info=known)
        imports = [helper.make_opsetid("", self.opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
        return helper.make_model(graph, opset_imports=imports, ir_version=10)


def outputs(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What onnxruntime computes, by the name of each output."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    values = session.run(names, _feeds([i.name for i in session.get_inputs()], arrays))
    return {n.removesuffix("_wide"): v for n, v in zip(names, values, strict=True)}


def as_written(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What plain operators compute, each rounded to its own type, by onnx's evaluator.

    onnxruntime computes an Add in float16 in float32 and leaves out the rounding of a sum that is widened again.
    """
    evaluator = onnx.reference.ReferenceEvaluator(model)
    values = evaluator.run(None, _feeds(evaluator.input_names, arrays))
    return {n.removesuffix("_wide"): v for n, v in zip(evaluator.output_names, values, strict=True)}


def assert_within(y: np.ndarray, spec: RMSNormSpec, x: np.ndarray, gain: np.ndarray | None) -> None:
    """Every element is within the bound that the spec implies of the float64 reference."""
    if gain is not None and not spec.has_gain:
        gain = None
    error = np.abs(y.astype(np.float64) - reference(spec, x, gain))
    bound = error_bound(spec, x, gain)
    assert np.all(error <= bound), (spec, float(np.max(error - bound)))


def runs(model: onnx.ModelProto) -> bool:
    """Whether onnxruntime has the kernels: it has none for RMSNormalization in bfloat16."""
    types = {v.name: v.type.tensor_type.elem_type for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    native = [node for node in model.graph.node if node.op_type == "RMSNormalization"]
    return not any(types.get(node.input[0]) == TensorProto.BFLOAT16 for node in native)


def _feeds(names: list[str], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values = {name: arrays[name.removesuffix("_wide")] for name in names}
    return {n: v.astype(np.float32) if n.endswith("_wide") else v for n, v in values.items()}


def _tensor(name: str, value: np.ndarray, dtype: str) -> onnx.TensorProto:
    return helper.make_tensor(name, NUMBERS[dtype], value.shape, value.tobytes(), raw=True)


def _input(name: str, dtype: str, dims: list[int | str], nodes: list[onnx.NodeProto]) -> onnx.ValueInfoProto:
    if dtype != "bfloat16":
        return helper.make_tensor_value_info(name, NUMBERS[dtype], dims)
    nodes.append(helper.make_node("Cast", [f"{name}_wide"], [name], to=TensorProto.BFLOAT16))
    return helper.make_tensor_value_info(f"{name}_wide", TensorProto.FLOAT, dims)


def _output(
    name: str, dtype: str, dims: list[int | str], nodes: list[onnx.NodeProto], known: list[onnx.ValueInfoProto]
) -> onnx.ValueInfoProto:
    if dtype != "bfloat16":
        return helper.make_tensor_value_info(name, NUMBERS[dtype], dims)
    nodes.append(helper.make_node("Cast", [name], [f"{name}_wide"], to=TensorProto.FLOAT))
    known.append(helper.make_tensor_value_info(name, TensorProto.BFLOAT16, dims))
    return helper.make_tensor_value_info(f"{name}_wide", TensorProto.FLOAT, dims)
