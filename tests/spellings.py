"""Any legal spelling of an RMSNorm, with what it means: drawn by hypothesis, or by random.Random.

`spellings()` is a hypothesis strategy, `draw(random)` its plain twin. A `Spelling` holds the model, the spec it spells,
feeds, and the plan that it was made from, so that a test can count its productions. Nothing here knows how the library
finds norms.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx
from emit import HALVES, Norm
from hypothesis import strategies as st
from kit import NUMPY, ONNX, Graph, V
from onnx import helper
from productions import FIELDS, PRODUCTIONS, Plan, Random, draw_plan

from rmsnorm_onnx.spec import RMSNormSpec

__all__ = ["PRODUCTIONS", "Spelling", "draw", "spellings"]

ROUNDED = ("mean rounded", "root rounded")  # roundings that no spec can say


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A model that spells one norm.

    Attributes:
        model: A model that passes the full check.
        spec: What it computes; its types mean nothing where `rounded` is true.
        x_type: The type of x.
        x, y: Names of the norm's x and result, in whatever scope they stand.
        gain, bias: Their raw values, or None.
        feeds: Inputs whose rows range from tiny through "mean square near epsilon" to large.
        plan: The choices it was made from.
        exact: Whether its epsilon is stored as it is, without a factor of d that has to be divided out.
        rounded: Whether it holds a rounding that no spec can say.
        reordered: Whether half-precision products stand in an order that no spec can say.
    """

    model: onnx.ModelProto
    spec: RMSNormSpec
    x_type: str
    x: str
    y: str
    gain: np.ndarray | None
    bias: np.ndarray | None
    feeds: dict[str, np.ndarray]
    plan: Plan
    exact: bool
    rounded: bool
    reordered: bool

    @property
    def productions(self) -> list[tuple[str, str]]:
        """The choices it shows, as in PRODUCTIONS."""
        return [(field, value) for field, value in self.plan.items() if value != "-"]

    def __repr__(self) -> str:
        return f"Spelling({', '.join(f'{k}: {v}' for k, v in self.plan.items() if v not in ('-', 'none'))})"


@st.composite
def spellings(draw_: Any, production: tuple[str, str] | None = None) -> Spelling:
    """A strategy for legal spellings, all of which hold the given production."""
    random = draw_(st.randoms(use_true_random=False))
    return draw(random, production)


def draw(random: Random, production: tuple[str, str] | None = None) -> Spelling:
    """One legal spelling."""
    plan = draw_plan(random, **({production[0]: production[1]} if production else {}))
    return build(plan, random)


def build(plan: Plan, random: Random) -> Spelling:
    """The spelling that a plan describes; what the plan leaves open is drawn."""
    assert plan.keys() == FIELDS.keys()
    norm = Norm(plan, random)
    model = _contain(plan, norm)
    rng = np.random.default_rng(random.randint(0, 2**32 - 1))
    return Spelling(
        model=model,
        spec=norm.spec(),
        x_type=plan["dtype"],
        x=norm.x.name,
        y=norm.y.name,
        gain=norm.gain_value,
        bias=norm.bias_value,
        feeds=_feeds(model, norm, rng),
        plan=plan,
        exact=norm.exact,
        rounded=plan["casts"] in ROUNDED,
        reordered=plan["gain order"].startswith("into") and norm.product in HALVES,
    )


def _contain(plan: Plan, norm: Norm) -> onnx.ModelProto:
    """The norm in its container: a graph, a branch, a loop, a function."""
    main = Graph(int(plan["opset"]))
    main.per_operator = plan["container"] == "per operator"
    container = plan["container"]
    shape, dtype = norm.input_shape, plan["dtype"]
    if container == "scan":
        return _scan(main, norm)
    x = main.input("x", dtype, shape)
    others = [main.input(name, v_type, v_shape) for name, v_type, v_shape in norm.other_inputs()]
    if container in ("main", "per operator"):
        return main.model([norm.emit(main, x, others)], ["pkg.torchlib"] if main.per_operator else [])
    if container == "function":
        return main.model([_call(main, norm, x, others)], ["local"])
    if container in ("if", "function in if"):
        condition = main.input("condition", "bool", ())
        branch = Graph(main.opset, main)
        y = _call(branch, norm, x, others) if container == "function in if" else norm.emit(branch, x, others)
        other = main.input("other", y.dtype, y.shape)
        untaken = Graph(main.opset, main)
        copy = untaken.op("Identity", other)
        branches = {"then_branch": branch.graph([y]), "else_branch": untaken.graph([copy])}
        norm.condition = norm.choose(True, False)
        if not norm.condition:
            branches = {"then_branch": branches["else_branch"], "else_branch": branches["then_branch"]}
        result = V("y", y.dtype, y.shape)
        main.nodes.append(helper.make_node("If", [condition.name], ["y"], **branches))
        return main.model([result], ["local"] if container == "function in if" else [])
    return _loop(main, norm, x, others, carried=container == "loop carried")


def _loop(main: Graph, norm: Norm, x: V, others: list[V], *, carried: bool) -> onnx.ModelProto:
    trips = main.constant(np.int64(2), "int64")
    body = Graph(main.opset, main)
    body.input("i", "int64", ())
    going = body.input("going", "bool", ())
    inner = body.input("state", x.dtype, x.shape) if carried else x
    y = norm.emit(body, inner, others)
    keep = body.op("Identity", going)
    loop = [trips.name, "", x.name] if carried else [trips.name, ""]
    main.nodes.append(helper.make_node("Loop", loop, ["y"], body=body.graph([keep, y])))
    return main.model([V("y", y.dtype, y.shape if carried else (2, *y.shape))])


def _scan(main: Graph, norm: Norm) -> onnx.ModelProto:
    shape = norm.input_shape
    x = main.input("x", norm.plan["dtype"], (3, *shape))
    others = [main.input(name, dtype, v_shape) for name, dtype, v_shape in norm.other_inputs()]
    body = Graph(main.opset, main)
    row = body.input("row", x.dtype, shape)
    y = norm.emit(body, row, others)
    main.nodes.append(helper.make_node("Scan", [x.name], ["y"], body=body.graph([y]), num_scan_inputs=1))
    return main.model([V("y", y.dtype, (3, *y.shape))])


def _call(g: Graph, norm: Norm, x: V, others: list[V]) -> V:
    """The whole norm as a local function, whose gain is an argument wherever it is no node of the body."""
    body = Graph(g.opset, g, constants=True)
    body.nodes, body.inputs = [], []
    arguments = [x, *others]
    inner = [V(f"arg_{v.name}", v.dtype, v.shape) for v in arguments]
    if norm.plan["gain"] == "initializer":
        outer_gain = norm.gain_constant(g)
        arguments.append(outer_gain)
        inner.append(V("arg_gain", outer_gain.dtype, outer_gain.shape))
        norm.gain = inner[-1]
    y = norm.emit(body, inner[0], inner[1 : 1 + len(others)])
    opsets = [helper.make_opsetid("", g.opset)]
    names = [v.name for v in inner]
    g.functions.append(helper.make_function("local", "Block", names, [y.name], body.nodes, opsets))
    out = V(g.name("block"), y.dtype, y.shape)
    g.nodes.append(helper.make_node("Block", [v.name for v in arguments], [out.name], domain="local"))
    return out


def _feeds(model: onnx.ModelProto, norm: Norm, rng: np.random.Generator) -> dict[str, np.ndarray]:
    feeds = {}
    for value in model.graph.input:
        shape = [norm.sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        dtype = next(name for name, code in ONNX.items() if code == value.type.tensor_type.elem_type)
        if dtype == "bool":
            feeds[value.name] = np.asarray(norm.condition)
        elif value.name == "gain":
            feeds[value.name] = norm.gain_value
        else:
            feeds[value.name] = samples(rng, shape, norm.epsilon, NUMPY[dtype], norm.epsilon > 0)
    return feeds


def samples(
    rng: np.random.Generator, shape: list[int], epsilon: float, dtype: np.dtype, zeros: bool = True
) -> np.ndarray:
    """Normal numbers in slices of very different size: ordinary, near sqrt(epsilon), zero, large."""
    x = rng.normal(size=shape)
    near = max(math.sqrt(epsilon), 1e-4)
    scales = [1.0, near, 0.3 * near, 30.0, 3 * near]
    for i, index in enumerate(np.ndindex(*shape[:-1])):
        x[index] *= scales[i % len(scales)] if len(shape) > 1 else near
    if zeros and len(shape) > 1 and shape[0] > 2:
        x[-1] = 0
    return x.astype(dtype)
