"""Times finding and rewriting every RMSNorm of a 96-layer decoder (193 norms), beside other tools on the same graph.

    python benchmarks/bench_fuse.py [--rounds 5] [--layers 96] [--spelling reciprocal|div] [--slow]

Everything is in process, after imports and a warm-up, the tools taking turns; each gets the model in the kind that it
works on, and works on its own copy, made outside the timing. Medians, ratios and how many norms each tool left as one
operator are printed and written to build/bench_fuse.json. Ratios are to `rmsnorm_onnx`, the pass alone; `fuse` clones
the model first and lists missing kernels after it. What takes many seconds is run once, with --slow only.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

HIDDEN, HEADS, MIDDLE = 32, 4, 64
FUSED = {"RMSNorm", "RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
OUTPUT = Path(__file__).parents[1] / "build" / "bench_fuse.json"


class Decoder:
    """Builds a decoder as torch.onnx.export spells it at opset 18, with small weights."""

    def __init__(self, layers: int, spelling: str) -> None:
        """Build it; `model` is the result."""
        self.spelling = spelling
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.random = np.random.default_rng(0)
        shape = ir.Shape(["batch", "sequence", HIDDEN])
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        self.two = self.constant("two", np.float32(2))
        self.one = self.constant("one", np.float32(1))
        self.epsilon = self.constant("epsilon", np.float32(1e-6))
        self.axes = self.constant("axes", np.array([-1], np.int64))
        self.split = self.constant("split", np.array([0, 0, HEADS, HIDDEN // HEADS], np.int64))
        self.merge = self.constant("merge", np.array([0, 0, HIDDEN], np.int64))
        self.scale = self.constant("scale", np.float32((HIDDEN // HEADS) ** -0.5))
        hidden = x
        for i in range(layers):
            hidden = self.layer(f"layers.{i}", hidden)
        y = self.norm("norm", hidden)
        y.shape = shape
        graph = ir.Graph([x], [y], nodes=self.nodes, initializers=self.initializers, opset_imports={"": 18}, name="g")
        self.model = onnx.shape_inference.infer_shapes(ir.to_proto(ir.Model(graph, ir_version=10)))

    def constant(self, name: str, value: np.ndarray | np.generic) -> ir.Value:
        """An initializer."""
        tensor = ir.tensor(np.asarray(value), name=name)
        self.initializers.append(
            ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        )
        return self.initializers[-1]

    def weight(self, name: str, *shape: int) -> ir.Value:
        """A random initializer."""
        return self.constant(name, self.random.standard_normal(shape, np.float32) * np.float32(0.1))

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """A float node of one output."""
        node = ir.node(kind, inputs, attributes, name=f"node_{kind}_{len(self.nodes)}")
        node.outputs[0].name = f"v{len(self.nodes)}"
        node.outputs[0].dtype = ir.DataType.FLOAT
        self.nodes.append(node)
        return node.outputs[0]

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        """RMSNorm, decomposed."""
        mean = self.op("ReduceMean", self.op("Pow", x, self.two), self.axes, keepdims=1, noop_with_empty_axes=0)
        root = self.op("Sqrt", self.op("Add", mean, self.epsilon))
        z = self.op("Div", x, root) if self.spelling == "div" else self.op("Mul", x, self.op("Reciprocal", root))
        return self.op("Mul", self.weight(f"{name}.weight", HIDDEN), z)

    def layer(self, name: str, x: ir.Value) -> ir.Value:
        """Attention and a gated feed-forward part, each behind a norm and beside a residual."""
        y = self.norm(f"{name}.input_layernorm", x)
        q, k, v = (self.heads(f"{name}.{part}", y, perm) for part, perm in zip("qkv", _PERMUTATIONS, strict=True))
        weights = self.op("Softmax", self.op("Mul", self.op("MatMul", q, k), self.scale), axis=-1)
        y = self.op("Transpose", self.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        y = self.op("MatMul", self.op("Reshape", y, self.merge), self.weight(f"{name}.o", HIDDEN, HIDDEN))
        x = self.op("Add", x, y)
        y = self.norm(f"{name}.post_attention_layernorm", x)
        gate = self.op("MatMul", y, self.weight(f"{name}.gate", HIDDEN, MIDDLE))
        gate = self.op("Mul", gate, self.op("Sigmoid", gate))
        y = self.op("Mul", gate, self.op("MatMul", y, self.weight(f"{name}.up", HIDDEN, MIDDLE)))
        return self.op("Add", x, self.op("MatMul", y, self.weight(f"{name}.down", MIDDLE, HIDDEN)))

    def heads(self, name: str, y: ir.Value, perm: list[int]) -> ir.Value:
        """A projection, split into heads."""
        y = self.op("MatMul", y, self.weight(name, HIDDEN, HIDDEN))
        return self.op("Transpose", self.op("Reshape", y, self.split), perm=perm)


_PERMUTATIONS = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])

Prepare = Callable[[], Any]
Work = Callable[[Any], Any]


def tools(proto: onnx.ModelProto, folder: str) -> dict[str, tuple[Prepare, Work]]:
    """By name: what makes a tool's own copy of the model, and what is timed; the result is a model of either kind."""
    import onnxruntime
    import onnxsim
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.fusion import _rms_normalization

    from rmsnorm_onnx import passes

    path, optimised = f"{folder}/model.onnx", f"{folder}/optimised.onnx"
    onnx.save(proto, path)

    def as_ir() -> ir.Model:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        return ir.from_proto(copy)

    def script_rules(model: ir.Model) -> ir.Model:
        return rewriter.rewrite(model, pattern_rewrite_rules=_rms_normalization.rms_normalization_ruleset)

    def session(_: None) -> str:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath, options.log_severity_level = optimised, 4
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return optimised

    return {
        "rmsnorm_onnx": (as_ir, lambda model: passes.FuseRMSNorm()(model).model),
        "rmsnorm_onnx.fuse": (as_ir, lambda model: passes.fuse(model)[0]),
        "onnxscript rules": (as_ir, script_rules),
        "onnxruntime session": (lambda: None, session),
        "onnxsim": (lambda: proto, lambda model: onnxsim.simplify(model)[0]),
    }


def slow_tools(folder: str) -> dict[str, Work]:
    """Those that are run once; the model's file is in the folder."""
    from onnxruntime.transformers import optimizer
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    def python_optimiser(_: ir.Model) -> onnx.ModelProto:
        options = optimizer.FusionOptions("bert")
        return optimizer.optimize_model(f"{folder}/model.onnx", "bert", HEADS, HIDDEN, options, opt_level=0).model

    return {
        "onnxruntime.transformers": python_optimiser,
        "onnxscript optimize_for_ort": lambda model: optimize_for_ort(model)[0],
    }


def fused(result: Any) -> int:
    """How many norms a tool left as one operator."""
    if isinstance(result, str):
        result = onnx.load(result)
    model = result if isinstance(result, ir.Model) else ir.from_proto(result)
    return sum(node.op_type in FUSED for node in model.graph)


def timed(work: Work, model: Any) -> tuple[float, Any]:
    """Seconds, and the result."""
    gc.collect()
    # The tools print; what they say is not ours to show.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        start = time.perf_counter()
        result = work(model)
        return time.perf_counter() - start, result


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--spelling", choices=("reciprocal", "div"), default="reciprocal")
    parser.add_argument("--slow", action="store_true")
    arguments = parser.parse_args()

    proto = Decoder(arguments.layers, arguments.spelling).model
    times: dict[str, list[float]] = collections.defaultdict(list)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        contestants = tools(proto, folder)
        for i in range(arguments.rounds + 1):
            for name, (prepare, work) in contestants.items():
                seconds, result = timed(work, prepare())
                counts[name] = fused(result)
                if i:  # the first round warms up
                    times[name].append(seconds)
        if arguments.slow:
            for name, work in slow_tools(folder).items():
                seconds, result = timed(work, contestants["onnxscript rules"][0]())
                times[name], counts[name] = [seconds], fused(result)
    report(arguments, len(proto.graph.node), times, counts)


def report(arguments: argparse.Namespace, nodes: int, times: dict[str, list[float]], counts: dict[str, int]) -> None:
    """Print a table and write the JSON."""
    ours = statistics.median(times["rmsnorm_onnx"])
    norms = 2 * arguments.layers + 1
    print(f"{nodes} nodes, {norms} norms, {arguments.rounds} rounds, {arguments.spelling} spelling")
    print(f"{'tool':28} {'median':>9} {'least':>9} {'ratio':>7} {'norms left as one operator':>27}")
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        rows[name] = {"seconds": seconds, "median": median, "ratio": median / ours, "fused": counts[name]}
        print(f"{name:28} {median:8.3f}s {min(seconds):8.3f}s {median / ours:6.2f}x {counts[name]:27}")
    packages = ("onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxsim", "numpy")
    facts = {
        "version": 1,
        "kind": "bench_fuse",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "nodes": nodes,
        "norms": norms,
        "spelling": arguments.spelling,
        "tools": rows,
    }
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"written to {OUTPUT}")


if __name__ == "__main__":
    main()
