"""Models with sites that need no recogniser: a placeholder root, which a form's nodes take the place of."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.functions import FunctionLibrary
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
        kinds = (0.0, 200.0, np.sqrt(max(self.spec.epsilon, 1e-6)))
        scales = np.array([*kinds, *[1.0] * len(rows)])[: len(rows)]
        outer = tuple(n for a, n in enumerate(self.shape) if a - len(self.shape) not in self.spec.axes)
        scales = scales.reshape(outer)
        x *= np.expand_dims(scales, self.spec.axes)
        values = {"x": x.astype(dtypes.numpy_dtype(self.x_type))}
        gain_shape = self.gain_shape if self.gain_shape is not None else self.shape[self.spec.axes[0] :][-1:]
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
    inputs, nodes, outputs, weights, matches = [], [], [], [], []
    for i, site in enumerate(sites):
        feed_type = "float32" if site.x_type == "bfloat16" else site.x_type
        feed = _value(f"x{i}", feed_type, ["n", *site.shape[1:]])
        inputs.append(feed)
        x = feed
        if feed_type != site.x_type:
            node = ir.node("Cast", [feed], {"to": dtypes.ir_dtype(site.x_type)})
            x = node.outputs[0]
            _set(x, f"x{i}_half", site.x_type, ["n", *site.shape[1:]])
            nodes.append(node)
        arrays = site.arrays()
        values = {}
        for name in ("gain", "bias"):
            if name in arrays:
                tensor = ir.tensor(arrays[name], name=f"{name}{i}")
                values[name] = ir.val(f"{name}{i}", const_value=tensor)
                weights.append(values[name])
        root = ir.node("Identity", [x], name=f"norm{i}")
        out_type = site.spec.resolve(site.x_type).result_type
        _set(root.outputs[0], f"y{i}", out_type, ["n", *site.shape[1:]])
        nodes.append(root)
        tail = ir.node("Cast", [root.outputs[0]], {"to": ir.DataType.FLOAT if out_type == "bfloat16" else dtypes.ir_dtype(out_type)})
        if out_type == "bfloat16":
            _set(tail.outputs[0], f"out{i}", "float32", ["n", *site.shape[1:]])
            nodes.append(tail)
            outputs.append(tail.outputs[0])
        else:
            outputs.append(root.outputs[0])
        gain_type = str(arrays["gain"].dtype) if "gain" in arrays else None
        matches.append(
            Match(spec=site.spec, form="primitive", node=root, x=x, gain=values.get("gain"), bias=values.get("bias"),
                  output=root.outputs[0], x_type=site.x_type, gain_type=gain_type)
        )
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=weights, name="g", opset_imports={"": opset})
    return ir.Model(graph, ir_version=ir_version), matches


def write(sites: list[Site], form: str, opset: int, **options: object) -> onnx.ModelProto:
    """The sites written in a form."""
    model, matches = build(sites, opset)
    names, functions = Names(model), FunctionLibrary(model)
    for match in matches:
        assert FORMS[form].refusal(match, opset) is None, FORMS[form].refusal(match, opset)
        replace(model, match, form, names, functions, **options)
    functions.finish()
    return ir.to_proto(model)


def replace(model: ir.Model, match: Match, form: str, names: Names, functions: FunctionLibrary, **options: object) -> Writer:
    """Writes one site of the main graph in a form, in place of its root."""
    writer = Writer(model, model.graph, model.graph.opset_imports[""], before=match.node, names=names,
                    functions=functions, **options)  # type: ignore[arg-type]
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


def _value(name: str, dtype: str, shape: list[int | str]) -> ir.Value:
    return ir.val(name, dtype=dtypes.ir_dtype(dtype), shape=shape)


def _set(value: ir.Value, name: str, dtype: str, shape: list[int | str]) -> None:
    value.name, value.type, value.shape = name, ir.TensorType(dtypes.ir_dtype(dtype)), ir.Shape(shape)
