"""The ways to damage a graph, each a function of the site that says whether it found something to change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from kit import NUMPY, ONNX, tensor
from onnx import TensorProto, helper, numpy_helper
from shape_changes import dimension_changed

if TYPE_CHECKING:
    from damage import Site

REDUCTIONS = (
    "ReduceMean",
    "ReduceSum",
    "ReduceMax",
    "ReduceMin",
    "ReduceL2",
    "ReduceSumSquare",
    "ReduceL1",
    "ReduceProd",
)
UNARY = ("Sqrt", "Reciprocal", "Abs", "Neg", "Exp", "Identity", "Floor", "Relu", "Sigmoid", "Tanh")
BINARY = ("Mul", "Div", "Add", "Sub", "Pow", "Max", "Min")
FAMILIES = (REDUCTIONS, UNARY, BINARY)


def _attribute(node: Any, name: str) -> Any:
    return next((a for a in node.attribute if a.name == name), None)


def _set(node: Any, name: str, value: Any) -> None:
    old = _attribute(node, name)
    if old is not None:
        node.attribute.remove(old)
    node.attribute.append(helper.make_attribute(name, value))


def _store(held: Any, array: np.ndarray) -> None:
    held.CopyFrom(tensor(held.name, array))


def _fresh(site: Site, hint: str) -> str:
    return f"{hint}_{site.random.randint(0, 10**9)}"


def exponent_changed(site: Site) -> bool:
    """Another power than the square or the root."""
    powers = [n for n in site.ancestors if n.op_type == "Pow"]
    exponents = {name for n in powers for name in n.input[1:]}
    held = [(t, a) for t, a in site.constants(floats=True) + site.constants(floats=False) if t.name in exponents]
    if not held:
        return False
    where, array = site.choose(held)
    _store(where, np.full(array.shape, site.choose([3, 1, 4, 0, -2, 1.5, -1, 0.5, 2.0001])).astype(array.dtype))
    return True


def operator_changed(site: Site) -> bool:
    """Another operator of the same number of operands."""
    node = site.pick(*UNARY, *BINARY, *REDUCTIONS)
    if node is None:
        return False
    family = next(f for f in FAMILIES if node.op_type in f)
    node.op_type = site.choose(o for o in family if o != node.op_type)
    return True


def reduction_changed(site: Site) -> bool:
    """Another reduction."""
    node = site.pick(*REDUCTIONS)
    if node is None:
        return False
    node.op_type = site.choose(o for o in REDUCTIONS if o != node.op_type)
    return True


def axes_changed(site: Site) -> bool:
    """A reduction, Unsqueeze or Slice over other axes, or a constant of integers that holds others."""
    node = site.pick(*REDUCTIONS, "Unsqueeze")
    if node is not None and _attribute(node, "axes") is not None:
        _set(node, "axes", site.choose([[0], [1], [-2], [-1], [-3], [0, 1], [-2, -1], [1, 2]]))
        return True
    held = site.constants(floats=False)
    if not held:
        return False
    where, array = site.choose(held)
    if array.size == 0:
        return False
    changed = array.copy().reshape(-1)
    changed[site.random.randint(0, array.size - 1)] = site.choose([-3, -2, -1, 0, 1, 2, 3, 4])
    _store(where, changed.reshape(array.shape))
    return True


def axes_dropped(site: Site) -> bool:
    """A reduction over all axes, because its axes are left out."""
    node = site.pick(*REDUCTIONS)
    if node is None or (len(node.input) < 2 and _attribute(node, "axes") is None):
        return False
    if len(node.input) > 1:
        del node.input[1:]
    else:
        node.attribute.remove(_attribute(node, "axes"))
    return True


def keepdims_flipped(site: Site) -> bool:
    """A statistic that broadcasts along another axis."""
    node = site.pick(*REDUCTIONS)
    if node is None:
        return False
    old = _attribute(node, "keepdims")
    if old is not None and old.ref_attr_name:
        return False
    _set(node, "keepdims", 1 - (1 if old is None else old.i))
    return True


def input_replaced(site: Site) -> bool:
    """A node reads another value of the same type."""
    node = site.pick()
    if node is None or not node.input or node.output[0] not in site.values:
        return False
    i = site.random.randint(0, len(node.input) - 1)
    held = site.values.get(node.input[i])
    if held is None:
        return False
    names = [n for n in site.before(node) if n in site.values and site.values[n].dtype == held.dtype]
    if not names:
        return False
    node.input[i] = site.choose(names)
    return True


def constant_changed(site: Site) -> bool:
    """Another value in a constant."""
    held = site.constants(floats=True)
    if not held:
        return False
    where, array = site.choose(held)
    wide = array.astype(np.float64)
    change = site.choose(["scale", "negate", "zero", "one", "add", "element"])
    if change == "scale":
        wide = wide * site.choose([0.5, 2.0, 1.01, 10.0])
    elif change == "element" and wide.size > 1:
        wide.reshape(-1)[site.random.randint(0, wide.size - 1)] += 0.75
    else:
        wide = {"negate": -wide, "zero": wide * 0, "one": wide * 0 + 1}.get(change, wide + 0.5)
    _store(where, wide.astype(array.dtype))
    return True


def constant_reshaped(site: Site) -> bool:
    """A constant of another shape: an epsilon that is a vector, a gain that widens or turns."""
    held = site.constants(floats=True)
    if not held:
        return False
    where, array = site.choose(held)
    d = site.choose([2, 3, 4, array.size])
    shapes = [(d,), (d, 1), (1, d), (1, d, 1), (2, 1, d), (d, d), (1, 1, 1, 1, d)]
    shape = site.choose(shapes)
    wide = np.resize(array.astype(np.float64), shape)
    if site.choose([True, False]):
        wide = wide * np.linspace(1, 2, wide.size).reshape(shape)
    _store(where, wide.astype(array.dtype))
    return True


def constant_fed(site: Site) -> bool:
    """A constant that a graph input replaces, or can replace."""
    graph = site.model.graph
    held = [t for t in graph.initializer if any(t.name in n.input for n in site.ancestors)]
    if not held:
        return False
    where = site.choose(held)
    array = numpy_helper.to_array(where)
    graph.input.append(helper.make_tensor_value_info(where.name, where.data_type, array.shape))
    if site.choose([True, False]):
        site.feeds[where.name] = array
        graph.initializer.remove(where)
    return True


def operator_inserted(site: Site) -> bool:
    """A further operator on an edge."""
    node = site.pick()
    if node is None or not node.input or not any(n is node for n in site.nodes):
        return False
    i = site.random.randint(0, len(node.input) - 1)
    held = site.values.get(node.input[i])
    name = next((k for k, code in ONNX.items() if held is not None and code == held.dtype), None)
    if name is None or not held.dtype.is_floating_point():
        return False
    out = _fresh(site, "inserted")
    op_type = site.choose([*UNARY, "Cast", "Transpose", "Reverse"])
    if op_type == "Cast":
        to = site.choose([TensorProto.INT32, TensorProto.INT64, TensorProto.FLOAT16, TensorProto.FLOAT])
        new = [
            helper.make_node("Cast", [node.input[i]], [f"{out}_cast"], to=to),
            helper.make_node("Cast", [f"{out}_cast"], [out], to=int(held.dtype)),
        ]
    elif op_type == "Reverse":
        numbers = {"starts": [-1], "ends": [np.iinfo(np.int64).min], "axes": [-1], "steps": [-1]}
        new = [
            helper.make_node("Constant", [], [f"{out}_{k}"], value=tensor("", np.asarray(v, NUMPY["int64"])))
            for k, v in numbers.items()
        ]
        new.append(helper.make_node("Slice", [node.input[i], *(f"{out}_{k}" for k in numbers)], [out]))
    else:
        new = [helper.make_node(op_type, [node.input[i]], [out])]
    site.insert(node, *new)
    node.input[i] = out
    return True


def operands_swapped(site: Site) -> bool:
    """Two operands in the other order."""
    node = site.pick(*(("Div", "Pow", "Sub") if site.choose([True, True, False]) else BINARY))
    if node is None or len(node.input) != 2:
        return False
    a, b = node.input
    node.input[:] = [b, a]
    return True


def operator_removed(site: Site) -> bool:
    """A node that is bypassed: no root, no epsilon, no cast, no reduction."""
    node = site.pick()
    if node is None or not node.input or node.output[0] == site.root:
        return False
    source = site.choose([n for n in node.input if n] or [""])
    touched = False
    for other in site.ancestors:
        for i, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[i], touched = source, True
    return touched and bool(source)


def permutation_changed(site: Site) -> bool:
    """A Transpose that exchanges other axes."""
    node = site.pick("Transpose")
    if node is None or _attribute(node, "perm") is None:
        return False
    rank = len(_attribute(node, "perm").ints)
    i, j = site.choose([(i, j) for i in range(rank) for j in range(i)])
    perm = list(_attribute(node, "perm").ints)
    perm[i], perm[j] = perm[j], perm[i]
    _set(node, "perm", perm)
    return True


def cast_changed(site: Site) -> bool:
    """A Cast to another type."""
    node = site.pick("Cast")
    if node is None:
        return False
    _set(node, "to", site.choose([TensorProto.INT32, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE]))
    return True


CHANGES: Mapping[str, Callable[[Site], bool]] = {
    function.__name__: function
    for function in (
        exponent_changed,
        operator_changed,
        reduction_changed,
        axes_changed,
        axes_dropped,
        keepdims_flipped,
        input_replaced,
        constant_changed,
        constant_reshaped,
        constant_fed,
        operator_inserted,
        operands_swapped,
        operator_removed,
        permutation_changed,
        cast_changed,
        dimension_changed,
    )
}


def _interior(site: Site) -> str | None:
    here = {o for n in site.nodes for o in n.output}
    names = [
        n.output[0]
        for n in site.ancestors
        if n.output[0] in here and n.op_type != "Constant" and n.output[0] != site.root
    ]
    names = [n for n in names if n in site.values and site.values[n].dtype.is_floating_point()]
    return site.choose(names) if names else None


def value_read_elsewhere(site: Site) -> bool:
    """An interior value has a further reader, whose result nobody wants."""
    name = _interior(site)
    if name is None:
        return False
    site.nodes.append(helper.make_node("Identity", [name], [_fresh(site, "reader")]))
    return True


def value_is_output(site: Site) -> bool:
    """An interior value is also an output of the graph."""
    name = _interior(site)
    if name is None or not site.main or any(o.name == name for o in site.model.graph.output):
        return False
    held = site.values[name]
    info = helper.make_tensor_value_info(name, int(held.dtype), [None] * held.array.ndim)
    site.model.graph.output.append(info)
    return True


def unused_node(site: Site) -> bool:
    """A node without a reader, first in the scope."""
    out = _fresh(site, "unused")
    site.nodes.insert(0, helper.make_node("Constant", [], [out], value=tensor("", np.float32(3))))
    return True


def unused_initializer(site: Site) -> bool:
    """An initializer that nobody reads."""
    site.model.graph.initializer.append(tensor(_fresh(site, "unused"), np.float32([1, 2])))
    return True


def texts(site: Site) -> bool:
    """Doc strings, metadata and other node names."""
    site.model.doc_string = site.model.graph.doc_string = "a text"
    for i, node in enumerate(site.nodes):
        node.doc_string = f"step {i}"
        node.name = site.choose(["", f"renamed_{i}"])
        entry = node.metadata_props.add()
        entry.key, entry.value = "rmsnorm_onnx", "{}"
    return True


def nodes_reordered(site: Site) -> bool:
    """Another order in which every node still stands after those that it reads."""
    waiting, done = [copy.deepcopy(n) for n in site.nodes], []
    made = {o for n in waiting for o in n.output}
    ready: set[str] = set()
    while waiting:
        free = [i for i, n in enumerate(waiting) if all(name in ready or name not in made for name in n.input)]
        node = waiting.pop(site.choose(free))
        done.append(node)
        ready.update(node.output)
    del site.nodes[:]
    site.nodes.extend(done)
    return True


def values_renamed(site: Site) -> bool:
    """Other names for the interior values."""
    read = {name for n in site.nodes for name in n.input}
    kept = {site.root, site.x}
    new = {o: f"v{i}" for i, n in enumerate(site.nodes) for o in n.output if o in read and o not in kept}
    for node in site.nodes:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    return not site.outputs & new.keys()


def commuted(site: Site) -> bool:
    """Operands of a Mul, Add or Max in the other order."""
    node = site.pick("Mul", "Add", "Max")
    if node is None or len(node.input) != 2:
        return False
    a, b = node.input
    node.input[:] = [b, a]
    return True


HARMLESS: Mapping[str, Callable[[Site], bool]] = {
    function.__name__: function
    for function in (
        value_read_elsewhere,
        value_is_output,
        unused_node,
        unused_initializer,
        texts,
        values_renamed,
        nodes_reordered,
        commuted,
    )
}
