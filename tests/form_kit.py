"""Models with sites that need no recogniser: a placeholder root, which a form's nodes take the place of."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.functions import FunctionLibrary
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.writer import Names, Writer


@dataclasses.dataclass
class Site:
    """One norm to write: its spec, its types and shapes."""

    spec: RMSNormSpec
    x_type: str = "float32"
    gain_type: str | None = None
    bias_type: str | None = None
    shape: tuple[int, ...] = (3, 2, 16)
    gain_shape: tuple[int, ...] | None = None
    seed: int = 0

    def arrays(self) -> dict[str, np.ndarray]:
        """Seeded x (with a zero row, a huge, a tiny one, and one near epsilon), gain and bias, in their own types."""
        rng = np.random.default_rng(self.seed)
        x = rng.normal(size=self.shape)
        rows = np.moveaxis(x, self.spec.axes, range(-len(self.spec.axes), 0))
        rows = rows.reshape(-1, *(self.shape[a] for a in self.spec.axes))
        kinds = (0.0, 2000.0, np.sqrt(max(self.spec.epsilon, 1e-6)))
        scales = np.array([*kinds, *[1.0] * len(rows)])[: len(rows)]
        outer = tuple(n for a, n in enumerate(self.shape) if a - len(self.shape) not in self.spec.axes)
        scales = scales.reshape(outer)
        x *= np.expand_dims(scales, self.spec.axes)
        values = {"x": x.astype(dtypes.numpy_dtype(self.x_type))}
        gain_shape = self.gain_shape
        if gain_shape is None:  # along the normalised axes; laid along an inner one
            gain_shape = tuple(self.shape[a] for a in self.spec.axes) + (1,) * (-self.spec.axes[-1] - 1)
        if self.spec.has_gain:
            gain = rng.normal(1 - self.spec.gain_offset, 0.3, gain_shape)
            values["gain"] = gain.astype(dtypes.numpy_dtype(self.gain_type or self.x_type))
        if self.spec.has_bias:
            bias = rng.normal(0, 0.3, gain_shape)
            values["bias"] = bias.astype(dtypes.numpy_dtype(self.bias_type or self.x_type))
        return values


def build(sites: list[Site], opset: int, ir_version: int = 10) -> tuple[ir.Model, list[Match]]:
    """A model with one placeholder root per site, and the matches.

    bfloat16 inputs and outputs are float32 with a Cast, since onnxruntime takes no bfloat16 from numpy.
    """
    graph = ir.Graph([], [], nodes=[], name="g", opset_imports={"": opset})
    matches = [_add_site(graph, i, site) for i, site in enumerate(sites)]
    return ir.Model(graph, ir_version=ir_version), matches


def _add_site(graph: ir.Graph, i: int, site: Site) -> Match:
    dims: list[int | str] = ["n", *site.shape[1:]]
    x = _value(f"x{i}", "float32" if site.x_type == "bfloat16" else site.x_type, dims)
    graph.inputs.append(x)
    if site.x_type == "bfloat16":
        x = _cast(graph, x, f"x{i}_half", "bfloat16", dims)
    arrays = site.arrays()
    values = {}
    for name in arrays.keys() & {"gain", "bias"}:
        values[name] = ir.val(f"{name}{i}", const_value=ir.tensor(arrays[name], name=f"{name}{i}"))
        graph.register_initializer(values[name])
    root = ir.node("Identity", [x], name=f"norm{i}")
    graph.append(root)
    out_type = site.spec.resolve(site.x_type).result_type
    output = _set(root.outputs[0], f"y{i}", out_type, dims)
    graph.outputs.append(_cast(graph, output, f"out{i}", "float32", dims) if out_type == "bfloat16" else output)
    return Match(
        spec=site.spec,
        form="primitive",
        node=root,
        x=x,
        gain=values.get("gain"),
        bias=values.get("bias"),
        output=output,
        x_type=site.x_type,
        gain_type=str(arrays["gain"].dtype) if "gain" in arrays else None,
    )


PLAIN = RMSNormSpec()
ONCE = RMSNormSpec(normalized_type="float32", gain_type="float32")

SPECS: dict[str, RMSNormSpec] = {
    "llama": RMSNormSpec(epsilon=1e-6),
    "torch": ONCE.replace(epsilon=2.0**-23),
    "gemma": ONCE.replace(epsilon=1e-6, gain_offset=1.0),
    "outside": RMSNormSpec(epsilon=1e-8, epsilon_placement="outside"),
    "clamp": RMSNormSpec(epsilon=1e-3, epsilon_placement="clamp"),
    "no epsilon": RMSNormSpec(epsilon=0.0),
    "leading": RMSNormSpec(leading=5),
    "no gain": RMSNormSpec(has_gain=False),
    "offset in x's type": RMSNormSpec(gain_offset=0.5),
    "bias": RMSNormSpec(has_bias=True),
    "bias, rounded once": ONCE.replace(has_bias=True, gain_offset=1.0),
    "bias alone": RMSNormSpec(has_gain=False, has_bias=True),
    "two axes": RMSNormSpec(axes=(-2, -1)),
    "inner axis": RMSNormSpec(axes=(-2,)),
    "half factor": RMSNormSpec(factor_type="float16"),
    "to float32": ONCE.replace(result_type="float32"),
    "to float16": RMSNormSpec(normalized_type="float16", result_type="float16"),
    "float32 gain after rounding": RMSNormSpec(normalized_type="float16", gain_type="float32", result_type="float32"),
    "double statistic": RMSNormSpec(statistic_type="float64", factor_type="float64", epsilon=1e-6),
}
"""Every field of the spec in a value of its own."""


def double(spec: RMSNormSpec) -> RMSNormSpec:
    """The spec as a model in double has it: each float32 is a float64."""
    fields = ("statistic_type", "factor_type", "normalized_type", "gain_type", "result_type")
    return spec.replace(**{f: "float64" for f in fields if getattr(spec, f) == "float32"})


def assert_right(model: onnx.ModelProto, sites: list[Site]) -> None:
    """Runs a model and compares each result with the float64 reference, element by element."""
    for site, y in zip(sites, run(model, sites), strict=True):
        a = site.arrays()
        spec = site.spec
        expected = reference(spec, a["x"], a.get("gain"), a.get("bias"))
        bound = error_bound(spec, a["x"], a.get("gain"), a.get("bias"))
        zero_over_zero = ~np.isfinite(y.astype(np.float64)) & (expected == 0) & (spec.epsilon == 0)
        error = np.abs(y.astype(np.float64) - expected)
        wrong = ~(error <= bound) & ~zero_over_zero
        assert not wrong.any(), (spec, site.x_type, error[wrong].max(), bound[wrong].min())


def write(sites: list[Site], form: str, opset: int, **options: object) -> onnx.ModelProto:
    """The sites written in a form."""
    model, matches = build(sites, opset)
    names, functions = Names(model), FunctionLibrary(model)
    for match in matches:
        assert FORMS[form].refusal(match, opset) is None, FORMS[form].refusal(match, opset)
        replace(model, match, form, names, functions, **options)
    functions.finish()
    return ir.to_proto(model)


def replace(
    model: ir.Model, match: Match, form: str, names: Names, functions: FunctionLibrary, **options: object
) -> Writer:
    """Writes one site of the main graph in a form, in place of its root."""
    writer = Writer(
        model,
        model.graph,
        model.graph.opset_imports[""],
        before=match.node,
        names=names,
        functions=functions,
        **options,
    )  # type: ignore[arg-type]
    new = FORMS[form].write(match, writer)
    old = match.output
    name = old.name
    model.graph.insert_before(match.node, writer.nodes)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    model.graph.remove(match.node, safe=True)
    new.name = name
    return writer


def run(model: onnx.ModelProto, sites: list[Site], optimized: str | None = None) -> list[np.ndarray]:
    """The results in onnxruntime, each in its own type."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if optimized:
        options.optimized_model_filepath = optimized
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for i, site in enumerate(sites):
        x = site.arrays()["x"]
        feeds[f"x{i}"] = x.astype(np.float32) if site.x_type == "bfloat16" else x
    results = session.run(None, feeds)
    types = [dtypes.numpy_dtype(s.spec.resolve(s.x_type).result_type) for s in sites]
    return [r.astype(t) for r, t in zip(results, types, strict=True)]


class Known:
    """What the values themselves say of their types and shapes, as the forms ask for it."""

    def dtype(self, value: ir.Value) -> str | None:
        return dtypes.float_name(value.dtype)

    def shape(self, value: ir.Value) -> tuple[int | str | None, ...] | None:
        return None if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)


def _value(name: str, dtype: str, dims: list[int | str]) -> ir.Value:
    return ir.val(name, dtype=dtypes.ir_dtype(dtype), shape=dims)


def _set(value: ir.Value, name: str, dtype: str, dims: list[int | str]) -> ir.Value:
    value.name, value.type, value.shape = name, ir.TensorType(dtypes.ir_dtype(dtype)), ir.Shape(dims)
    return value


def _cast(graph: ir.Graph, value: ir.Value, name: str, dtype: str, dims: list[int | str]) -> ir.Value:
    node = ir.node("Cast", [value], {"to": dtypes.ir_dtype(dtype)})
    graph.append(node)
    return _set(node.outputs[0], name, dtype, dims)
