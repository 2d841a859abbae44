"""The consumers' forms in cells, one per consumer, type and spec: what is chosen, what is known of it, and runners."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from form_kit import ONCE, PLAIN, SPECS, Site, build, write

from rmsnorm_onnx.consumers import Choice, choose
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.spec import RMSNormSpec

TYPES = ("float32", "float16", "bfloat16")
CASES: Mapping[str, RMSNormSpec] = {
    "plain (Llama)": PLAIN,
    "1 + gain (Gemma)": SPECS["gemma"],
    "rounded once (OLMo)": ONCE,
    "epsilon outside": SPECS["outside"],
    "no gain": SPECS["no gain"],
    "inner axis": SPECS["inner axis"],
}
VERSIONED = (
    "any", "onnxruntime", "onnxruntime-web", "onnxruntime-cuda", "onnxruntime-tensorrt", "openvino", "onnx-reference",
    "tensorrt:8.6", "tensorrt:10.x", "tensorrt:11.x", "tensorrt-rtx", "tensorrt-plugin",
)  # fmt: skip
BEYOND = frozenset({("openvino", "bfloat16")})
"""Consumer and type whose numbers are beyond the bound in every form; a test pins that they are."""
_MARKS = {"run here": "run", "built here": "built", "read in source": "read", "unrun": "unrun", None: ""}


def opset(consumer: str) -> int:
    """The opset of a consumer's cells: 23, and what TensorRT 8.6 reads."""
    return 17 if consumer == "tensorrt:8.6" else 23


def site(case: str, x_type: str) -> Site:
    """The norm of a cell."""
    return Site(CASES[case], x_type)


def chosen(consumer: str, case: str, x_type: str) -> Choice:
    """The form of a cell."""
    _, (match,) = build([site(case, x_type)], opset(consumer))
    return choose(consumer, match, opset(consumer))


def written(consumer: str, case: str, x_type: str) -> onnx.ModelProto:
    """A model of a cell's norm alone, in its form."""
    choice = chosen(consumer, case, x_type)
    assert choice.form is not None, choice.why
    return write([site(case, x_type)], choice.form, opset(consumer), plugin_domain=choice.domain)


def cell(consumer: str, case: str, x_type: str) -> str:
    """A cell as the README has it."""
    choice = chosen(consumer, case, x_type)
    if choice.form is None:
        return "none"
    return f"`{choice.form}` {'beyond' if (consumer, x_type) in BEYOND else _MARKS[choice.evidence]}"


def table() -> list[str]:
    """The cells as a table; types of equal rows share one."""
    lines = ["| `--for` | type of x | " + " | ".join(CASES) + " |", "|---|---|" + "---|" * len(CASES)]
    for consumer in VERSIONED:
        rows: dict[tuple[str, ...], list[str]] = {}
        for x_type in TYPES:
            rows.setdefault(tuple(cell(consumer, case, x_type) for case in CASES), []).append(x_type)
        lines += [f"| `{consumer}` | {', '.join(types)} | {' | '.join(row)} |" for row, types in rows.items()]
    return lines


def within(norm: Site, y: np.ndarray) -> bool:
    """Whether a result is within the float64 reference's bound, element by element."""
    a = norm.arrays()
    expected = reference(norm.spec, a["x"], a.get("gain"), a.get("bias"))
    bound = error_bound(norm.spec, a["x"], a.get("gain"), a.get("bias"))
    return bool((np.abs(y.astype(np.float64) - expected) <= bound).all())


def fed(norm: Site) -> np.ndarray:
    """The x that a model is fed: bfloat16 goes in as float32, which is cast."""
    x = norm.arrays()["x"]
    return x.astype(np.float32) if norm.x_type == "bfloat16" else x


def run_reference(model: onnx.ModelProto, norm: Site) -> np.ndarray:
    """The result in onnx.reference."""
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings(), np.errstate(all="ignore"):  # it squares in float16 where it is told to
        warnings.simplefilter("ignore")
        return np.asarray(ReferenceEvaluator(model).run(None, {"x0": fed(norm)})[0])  # type: ignore[index]


def compile_openvino(model: onnx.ModelProto, **properties: Any) -> Any:
    """A model in OpenVINO's CPU plugin, in float32 unless told otherwise."""
    import openvino

    core = openvino.Core()
    properties = properties or {"INFERENCE_PRECISION_HINT": "f32"}
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU", properties)


def kernels(compiled: Any) -> list[tuple[str, str]]:
    """The kind and the type of each operator that OpenVINO runs."""
    info = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    return [(one["layerType"].astype(str), one["runtimePrecision"].astype(str)) for one in info]
