"""The choices of which every legal spelling of an RMSNorm is made, and which of them go together.

A plan names one value for each field; "-" means that the field has no say. `FIELDS` is the grammar, `CONSTRAINTS` say
what is legal ONNX and has one meaning, and `PRODUCTIONS` lists every choice that a test must see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Plan = dict[str, str]

FIRST_OPSET, LAST_OPSET = 11, 28

FIELDS: Mapping[str, tuple[str, ...]] = {
    "opset": tuple(str(n) for n in range(FIRST_OPSET, LAST_OPSET + 1)),
    "dtype": ("float32", "float16", "bfloat16", "float64"),
    "container": ("main", "if", "loop", "loop carried", "scan", "function", "function in if", "per operator"),
    "layout": (
        "last axis",
        "rank 1",
        "two axes",
        "three axes",
        "channel first 4-D",
        "channel first 3-D",
        "per head, then transpose",
        "transpose, then per head",
        "grouped",
    ),
    "batch": ("static", "dynamic"),
    "target": ("constant", "computed", "-"),  # of the Reshape into heads or groups: from the shape of x, or given
    "x": ("input", "sum", "product"),
    "leading": ("whole", "slice", "split"),
    "casts": (
        "none",  # one type throughout
        "before the gain",  # Llama: up, normalise, down, gain
        "separate",  # the same, the statistic and the numerator cast apart
        "last",  # Gemma, gpt-oss: the gain in the wide type, one rounding
        "stays wide",  # the result keeps the wide type
        "down and up",  # rounded before a gain of the wide type, then rounded again
        "factor rounded",  # 1/rms is rounded, x never widened
        "mean rounded",  # the mean square is rounded: no spec says so
        "root rounded",  # the root is rounded: no spec says so
    ),
    "square": ("pow", "pow int32", "pow int64", "pow cast", "mul", "ReduceSumSquare", "ReduceL2"),
    "count": ("mean", "divided by d", "times 1/d", "x times sqrt(d)", "sqrt(d) after"),
    "epsilon": ("inside", "outside", "clamp by Max", "clamp by Clip", "absent"),
    "epsilon side": ("left", "right", "-"),
    "epsilon spelling": (
        "initializer",
        "constant",
        "float",
        "cast",
        "cast constant",
        "cast float16",
        "[1]",
        "full shape",
        "-",
    ),
    "root": ("Sqrt, Div", "Sqrt, Reciprocal", "Pow(-0.5)", "1/Sqrt", "Sqrt(Reciprocal)", "Pow(0.5), Div"),
    "axis": ("negative", "positive"),
    "axes": ("attribute", "initializer", "constant"),
    "keepdims": ("1", "0, Unsqueeze", "0, Reshape"),
    "kept at": ("mean", "root", "factor", "-"),
    "expand": ("none", "Shape", "constant"),
    "gain": ("none", "initializer", "constant", "graph input"),
    "gain shape": ("axes", "scalar", "[1]", "leading ones", "-"),
    "gain form": ("plain", "cast", "one plus", "one plus folded", "-"),
    "gain side": ("left", "right", "-"),
    "gain order": ("last", "into the factor", "into x", "-"),
    "bias": ("none", "left", "right"),
    "factor side": ("left", "right", "-"),
    "no-op": ("none", "Identity", "Cast", "Slice", "Reshape"),
    "no-op at": ("x", "statistic", "numerator", "square", "mean", "root", "normalized", "gain", "-"),
}

CONSTRAINTS: tuple[Callable[..., bool], ...] = (
    # What ONNX allows at each opset.
    lambda opset, dtype: dtype != "bfloat16" or int(opset) >= 13,
    lambda opset, dtype, container: (
        dtype != "bfloat16" or container in ("main", "function", "per operator") or int(opset) >= 16
    ),
    lambda opset, dtype, square: dtype != "bfloat16" or not square.startswith("pow") or int(opset) >= 15,
    lambda opset, dtype, root: dtype != "bfloat16" or "Pow" not in root or int(opset) >= 15,
    lambda opset, square: square not in ("pow int32", "pow int64") or int(opset) >= 12,
    lambda opset, epsilon_spelling: epsilon_spelling != "float" or int(opset) >= 12,
    lambda opset, axes: axes == "attribute" or int(opset) >= 13,
    lambda opset, axes: axes != "attribute" or int(opset) < 18,
    lambda opset, axes, square, count: (
        (axes == "attribute") == (int(opset) < (13 if count != "mean" and not square.startswith("Reduce") else 18))
    ),
    # What is a spelling of one norm.
    lambda square, count: not square.startswith("Reduce") or count != "mean",
    lambda square, epsilon: square != "ReduceL2" or epsilon != "inside",
    lambda square, root: square != "ReduceL2" or root in ("Sqrt, Div", "Sqrt, Reciprocal", "1/Sqrt"),
    lambda epsilon, root: epsilon in ("inside", "absent") or root not in ("Pow(-0.5)", "Sqrt(Reciprocal)"),
    lambda epsilon, epsilon_side: (epsilon_side == "-") == (epsilon in ("absent", "clamp by Clip")),
    lambda epsilon, epsilon_spelling: (epsilon_spelling == "-") == (epsilon == "absent"),
    lambda epsilon, epsilon_spelling: epsilon != "clamp by Clip" or epsilon_spelling not in ("[1]", "full shape"),
    lambda epsilon_spelling, container: (
        container not in ("function", "function in if") or epsilon_spelling != "initializer"
    ),
    lambda epsilon_spelling, batch: epsilon_spelling != "full shape" or batch == "static",
    lambda epsilon_spelling, keepdims: epsilon_spelling != "full shape" or keepdims == "1",
    lambda epsilon_spelling, layout, keepdims: epsilon_spelling != "[1]" or layout != "rank 1" or keepdims == "1",
    lambda root, factor_side: (factor_side == "-") == root.endswith("Div"),
    # A half statistic holds neither a large sum nor 1e-6.
    lambda dtype, casts, count: casts != "none" or dtype in ("float32", "float64") or count in ("mean", "divided by d"),
    # Casts go from a narrow type to a wide one and back.
    lambda dtype, casts: dtype != "float64" or casts == "none",
    lambda casts, root: casts != "factor rounded" or not root.endswith("Div"),
    lambda casts, root: casts != "root rounded" or root == "Sqrt, Div",
    lambda casts, square: casts != "mean rounded" or square != "ReduceL2",
    lambda casts, count: casts not in ("factor rounded", "root rounded", "mean rounded") or "sqrt" not in count,
    lambda casts, gain_order: gain_order in ("last", "-") or casts in ("none", "last", "stays wide"),
    lambda casts, gain: casts != "down and up" or gain != "none",
    # Layouts.
    lambda layout, leading: leading == "whole" or layout == "last axis",
    lambda leading, count: leading == "whole" or "sqrt" not in count,
    lambda layout, container: container != "scan" or layout in ("last axis", "channel first 4-D", "two axes"),
    lambda layout, container: (
        container != "loop carried" or layout in ("last axis", "two axes", "rank 1", "channel first 4-D")
    ),
    lambda casts, container: container != "loop carried" or casts != "stays wide",
    lambda batch, layout: batch == "static" or layout != "rank 1",
    lambda keepdims, kept_at: (kept_at == "-") == (keepdims == "1"),
    lambda kept_at, root: kept_at != "factor" or not root.endswith("Div"),
    lambda kept_at, square: kept_at != "mean" or square != "ReduceL2",
    lambda expand, root: expand == "none" or root.endswith("Div"),
    lambda expand, batch: expand != "constant" or batch == "static",
    # The gain.
    lambda gain, gain_shape: (gain == "none") == (gain_shape == "-"),
    lambda gain, gain_form: (gain == "none") == (gain_form == "-"),
    lambda gain, gain_side: (gain == "none") == (gain_side == "-"),
    lambda gain, gain_order: (gain == "none") == (gain_order == "-"),
    lambda gain_form, gain_shape: not gain_form.startswith("one plus") or gain_shape in ("axes", "leading ones"),
    lambda gain_form, gain: gain_form != "one plus folded" or gain in ("initializer", "constant"),
    lambda gain_form, dtype: gain_form != "cast" or dtype != "float64",
    lambda gain_shape, layout: gain_shape != "leading ones" or layout not in ("rank 1", "three axes"),
    lambda gain_order, root, expand: gain_order != "into the factor" or expand == "none",
    lambda target, layout: (
        (target != "-") == (layout in ("per head, then transpose", "transpose, then per head", "grouped"))
    ),
    # No-ops need something to stand on.
    lambda no_op, no_op_at: (no_op == "none") == (no_op_at == "-"),
    lambda no_op_at, square: no_op_at != "square" or not square.startswith("Reduce"),
    lambda no_op_at, square: no_op_at != "mean" or square != "ReduceL2",
    lambda no_op_at, gain: no_op_at != "gain" or gain != "none",
    lambda no_op_at, no_op, gain_shape: no_op_at != "gain" or no_op in ("Identity", "Cast") or gain_shape != "scalar",
    lambda no_op_at, no_op, layout, keepdims: (
        no_op in ("Identity", "Cast") or no_op_at not in ("mean", "root") or layout != "rank 1" or keepdims == "1"
    ),
)

PRODUCTIONS: tuple[tuple[str, str], ...] = tuple(
    (field, value) for field, values in FIELDS.items() for value in values if value != "-"
)
"""Every choice, as (field, value)."""


class Random(Protocol):
    """What drawing needs of random.Random, or of hypothesis's imitation of it."""

    def choice(self, seq: Any) -> Any: ...

    def randint(self, a: int, b: int) -> int: ...


def _names(constraint: Callable[..., bool]) -> tuple[str, ...]:
    spelled = {field.replace(" ", "_").replace("-", "_"): field for field in FIELDS}
    return tuple(spelled[name] for name in inspect.signature(constraint).parameters)


_READS = tuple((constraint, _names(constraint)) for constraint in CONSTRAINTS)


def _fits(plan: Plan, field: str) -> bool:
    for constraint, names in _READS:
        if field in names and all(name in plan for name in names) and not constraint(*(plan[name] for name in names)):
            return False
    return True


def draw_plan(random: Random, **pinned: str) -> Plan:
    """A legal plan; pinned fields keep their value."""
    for _ in range(1000):
        plan: Plan = dict(pinned)
        for field, values in FIELDS.items():
            if field in pinned:
                if not _fits(plan, field):
                    break
                continue
            fitting = [value for value in values if _fits({**plan, field: value}, field)]
            if not fitting:
                break
            plan[field] = random.choice(fitting)
        else:
            return plan
    raise AssertionError(f"no legal plan with {pinned}")
