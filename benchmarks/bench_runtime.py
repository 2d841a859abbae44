"""Times each form of a norm in onnxruntime on the CPU, one thread, as ratios to the contrib kernel in the same run.

    python benchmarks/bench_runtime.py [--rounds 15] [--size 32x4096] [--dtype float16] [--norm llama] [--step]

Rows x elements of 1 x 4096, 32 x 4096, 512 x 4096 and 8192 x 128, in float32, float16 and bfloat16: the norm of OLMo 2
(rounded once; `--norm llama`: before the gain too, which the contrib kernel leaves out; `--norm gemma`: 1 + gain) as
torch.onnx exports it, in each form, and LayerNormalization of the same rows. The contestants take turns; a turn repeats
a run until it lasts some milliseconds of its thread's time, which other processes add nothing to. `--step` also times
one decode step of a 4-layer Llama of width 1,024. Medians and ratios are printed and written to
build/bench_runtime.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

import rmsnorm_onnx
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.exporters.transformers import export_transformers
from rmsnorm_onnx.models.families import GemmaNorm, LlamaNorm, OlmoNorm

SIZES = ("1x4096", "32x4096", "512x4096", "8192x128")
DTYPES = ("float32", "float16", "bfloat16")
OPSETS = {"function": 18, "onnx": 23, "contrib": 18, "primitive": 18}
NORMS = {"olmo": OlmoNorm, "llama": LlamaNorm, "gemma": GemmaNorm}
BASE = "contrib"
TURN = 4e-3  # seconds
OUTPUT = Path(__file__).parents[1] / "build" / "bench_runtime.json"

Run = Callable[[], Any]


def norms(dtype: str, d: int, norm: str) -> dict[str, ir.Model]:
    """The norm by spelling: as exported, in each form, and as the consumer table has it for onnxruntime."""
    generator = torch.Generator().manual_seed(d)
    module = NORMS[norm](d).eval().to(getattr(torch, dtype))
    with torch.no_grad():
        module.weight.copy_(torch.rand(d, generator=generator) + 0.5)
    x = torch.randn(2, d, generator=generator).to(getattr(torch, dtype))
    exported = {opset: export(module, (x,), opset=opset, fuse=False).model for opset in {*OPSETS.values()}}
    made = {"as exported": exported[18]}
    for form, opset in OPSETS.items():
        made[form] = rmsnorm_onnx.fuse(exported[opset], form=form, allow_rounding_change=form == "contrib")[0]
    made["for onnxruntime"] = rmsnorm_onnx.fuse(exported[23], consumer="onnxruntime")[0]
    return made | {"LayerNormalization": layer_norm(dtype, d)}


def layer_norm(dtype: str, d: int) -> ir.Model:
    """The operator that subtracts the mean, without a bias."""
    kind = ir.DataType[{"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}[dtype]]
    x = ir.Value(name="x", type=ir.TensorType(kind), shape=ir.Shape(["rows", d]))
    gain = ir.tensor(np.ones(d, kind.numpy()), name="gain")
    weight = ir.Value(name="gain", type=ir.TensorType(kind), shape=gain.shape, const_value=gain)
    node = ir.node("LayerNormalization", [x, weight], {"axis": -1, "epsilon": 1e-6})
    (y,) = node.outputs
    y.name, y.type, y.shape = "y", ir.TensorType(kind), x.shape
    graph = ir.Graph([x], [y], nodes=[node], initializers=[weight], opset_imports={"": 18}, name="g")
    return ir.Model(graph, ir_version=10)


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    """A session of one thread with every optimisation."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    text = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(text, options, providers=["CPUExecutionProvider"])


def runner(model: ir.Model, feeds: Mapping[str, torch.Tensor]) -> Run:
    """A run whose inputs and outputs stay where they are."""
    made = session(model)
    binding = made.io_binding()
    for name, tensor in feeds.items():
        kinds = {torch.bfloat16: onnx.TensorProto.BFLOAT16, torch.float16: onnx.TensorProto.FLOAT16}
        kind = kinds.get(tensor.dtype) or onnx.helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype)
        binding.bind_input(name, "cpu", 0, kind, tuple(tensor.shape), tensor.data_ptr())
    for value in made.get_outputs():
        binding.bind_output(value.name, "cpu")
    kept = list(feeds.values())  # the binding holds addresses alone

    def run() -> Any:
        made.run_with_iobinding(binding)
        return kept

    return run


def measure(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of one run, a value for each round; the contestants take turns."""
    counts = {name: max(1, round(TURN / once(run, 3))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            seconds = once(run, counts[name])
            if number:  # the first round warms up
                times[name].append(seconds)
    return times


def once(run: Run, count: int) -> float:
    """Seconds of one run, over several: this thread's, which other processes on the machine do not add to."""
    start = time.thread_time()
    for _ in range(count):
        run()
    return max((time.thread_time() - start) / count, 1e-9)


def summary(times: Mapping[str, list[float]], absent: Mapping[str, str], base: str) -> dict[str, Any]:
    """Medians in microseconds, and the median over the rounds of the ratio to the base within a round."""
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds, times[base], strict=True))
        for name, seconds in times.items()
    }
    return {
        "microseconds": {name: round(statistics.median(seconds) * 1e6, 2) for name, seconds in times.items()},
        "ratio": {name: round(value, 3) for name, value in ratios.items()},
        "absent": dict(absent),
    }


def one_size(dtype: str, rows: int, d: int, rounds: int, norm: str) -> dict[str, Any]:
    """All spellings on one size."""
    x = torch.randn(rows, d, generator=torch.Generator().manual_seed(rows)).to(getattr(torch, dtype))
    runs: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for name, model in norms(dtype, d, norm).items():
        try:
            runs[name] = runner(model, {model.graph.inputs[0].name: x})
            runs[name]()
        except Exception as error:  # onnxruntime has no narrower type for a missing kernel
            runs.pop(name, None)
            absent[name] = str(error).split("\n")[0][:160]
    return {"norm": norm, "dtype": dtype, "rows": rows, "d": d, **summary(measure(runs, rounds), absent, BASE)}


def step_models() -> tuple[dict[str, ir.Model], dict[str, torch.Tensor]]:
    """One decode step of a 4-layer Llama with 128 tokens in its cache: the model by spelling, and its inputs."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=1000,
    )
    exported = export_transformers(config, opset=18, cache=True, fuse=False).model
    made = {"as exported": exported}
    for form in ("function", "contrib", "primitive"):
        made[form] = rmsnorm_onnx.fuse(exported, form=form)[0]
    made["onnx"] = rmsnorm_onnx.fuse(exported, form="onnx", opset=23)[0]
    sizes = {"batch": 1, "sequence": 1, "past_sequence": 128, "total_sequence": 129}
    return made, {value.name: _step_input(value, sizes) for value in exported.graph.inputs}


def _step_input(value: ir.Value, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = [size if isinstance(size, int) else sizes[str(size.value)] for size in value.shape or ()]
    if value.dtype == ir.DataType.INT64:
        return torch.ones(shape, dtype=torch.int64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1


def step(rounds: int) -> dict[str, Any]:
    """The whole step in each spelling, as ratios to the exported file."""
    models, feeds = step_models()
    runs = {name: runner(model, feeds) for name, model in models.items()}
    return summary(measure(runs, rounds), {}, "as exported")


def show(title: str, result: Mapping[str, Any]) -> None:
    """Print one table."""
    print(f"\n{title}")
    for name, ratio in result["ratio"].items():
        print(f"  {name:20} {result['microseconds'][name]:12.1f} us {ratio:8.3f}")
    for name, words in result["absent"].items():
        print(f"  {name:20} {words}")


def facts() -> dict[str, Any]:
    """The machine and the versions."""
    packages = ("onnx", "onnx-ir", "onnxruntime", "torch", "numpy")
    return {
        "version": 1,
        "kind": "bench_runtime",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", action="append", choices=SIZES)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--norm", choices=NORMS, default="olmo")
    parser.add_argument("--step", action="store_true", help="also a whole decode step")
    chosen = parser.parse_args()
    results: dict[str, Any] = {**facts(), "base": BASE, "norms": []}
    for dtype in chosen.dtype or DTYPES:
        for size in chosen.size or SIZES:
            rows, d = map(int, size.split("x"))
            results["norms"].append(one_size(dtype, rows, d, chosen.rounds, chosen.norm))
            show(f"{chosen.norm}, {dtype}, {rows} x {d} (ratio to {BASE})", results["norms"][-1])
    if chosen.step:
        results["step"] = step(chosen.rounds)
        show("a decode step, 4 layers of width 1,024, float32 (ratio to the exported file)", results["step"])
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {OUTPUT}")


if __name__ == "__main__":
    main()
