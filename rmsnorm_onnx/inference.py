"""onnx's shape inference over a graph or a function body, without its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableSequence, Set

import onnx
import onnx_ir as ir

Dim = int | str | None
Dims = tuple[Dim, ...]
Info = tuple[ir.DataType | None, Dims | None]
"""What is known of a value: its element type and its dimensions."""

# onnx numbers the dimensions that it cannot name from 0 in every run: only within a run is a number one dimension.
_INVENTED = "unk__"
_RUNS = itertools.count()
# Native norms that onnx does not know, with the output that holds the sum of x and a residual, if there is one.
NATIVE_NORMS: Mapping[str, int | None] = {
    "SimplifiedLayerNormalization": None,
    "SkipSimplifiedLayerNormalization": 3,
}
_TYPES = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
}
_CAST_LIKE = 15  # the first opset that has it
_AXES_INPUT = 13  # the first opset in which ReduceSum's axes are an input
_EXTRA = "a second node for one of the graph's"
_INPUT_LIMIT = 1024  # bytes of an initializer that shape inference may need to read (a Reshape's target)


def declared(value: ir.Value) -> Dims | None:
    """The shape that the file declares for a value; None when it declares no rank."""
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else symbol(d.value) for d in value.shape)


def symbol(name: str | None) -> Dim:
    """A symbolic dimension by its name; a numeral is a number, as torch writes a dimension that turned out fixed."""
    return int(name) if name is not None and name.isdecimal() else name or None


def infer(model: ir.Model, graph: ir.Graph, arguments: Mapping[ir.Value, Info] | None = None) -> dict[ir.Value, Info]:
    """Types and shapes of what the nodes of a graph and of its branches compute.

    Args:
        model: The model that the graph belongs to.
        graph: Its main graph, or a function's body.
        arguments: What is known of a function's inputs at one call.

    Returns:
        What onnx infers, by value; empty where it refuses the graph.
    """
    proto = onnx.ModelProto(ir_version=max(model.ir_version or 8, 8))
    for domain, version in {**model.opset_imports, **graph.opset_imports}.items():
        proto.opset_import.add(domain=domain, version=version)
    for value in graph.inputs:
        if value not in graph.initializers.values():
            dtype, shape = (arguments or {}).get(value, (value.dtype, declared(value)))
            _add_info(proto.graph, value.name or "", dtype, shape)
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.nbytes <= _INPUT_LIMIT and not isinstance(tensor, ir.ExternalTensor):
            ir.serde.serialize_tensor_into(proto.graph.initializer.add(), tensor)
        else:
            _add_info(proto.graph, value.name or "", tensor.dtype, tuple(tensor.shape))  # type: ignore[arg-type]
    for node in graph:
        ir.serde.serialize_node_into(proto.graph.node.add(), node)
    for function in model.functions.values():
        if function.graph is not graph:
            ir.serde.serialize_function_into(proto.functions.add(), function)
    opset = max((i.version for i in proto.opset_import if i.domain in ("", "ai.onnx")), default=1)
    bodies = {(domain, name) for domain, name, _ in model.functions}
    for part in (proto.graph, *proto.functions):
        _stand_in(part.node, bodies, opset)
    _forget_run_time_places(proto)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=False, data_prop=True)
    except Exception:  # onnx raises errors of several kinds; without shapes, what needs one is declined, never guessed
        return {}
    found: dict[ir.Value, Info] = {}
    _collect(inferred.graph, graph, found, f"run {next(_RUNS)}: ")
    return found


def _stand_in(nodes: MutableSequence[onnx.NodeProto], bodies: Set[tuple[str, str]], opset: int) -> None:
    """Puts nodes as onnx knows them in the place of norms that it does not know: the shape of x stays.

    Args:
        nodes: The nodes of a graph or a function; those of their branches are changed too.
        bodies: Domain and name of the model's functions, which onnx looks into itself.
        opset: The opset of the nodes.
    """
    kept = list(nodes)
    del nodes[:]
    for node in kept:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _stand_in(attribute.g.node, bodies, opset)
        if node.op_type in NATIVE_NORMS and node.input and node.input[0]:
            nodes.extend(_native_stand_ins(node, opset))
        elif _is_plugin(node) and (node.domain, node.op_type) not in bodies:
            nodes.append(_plugin_stand_in(node))
        else:
            nodes.append(node)


def _native_stand_ins(node: onnx.NodeProto, opset: int) -> Iterator[onnx.NodeProto]:
    """Of x's shape: the result, of the scale's type, and the sum of x and a residual where there is one."""
    likes = node.op_type == "SimplifiedLayerNormalization" and opset >= _CAST_LIKE and len(node.input) > 1
    operator, ends = ("CastLike", node.input[:2]) if likes else ("Identity", node.input[:1])
    yield onnx.helper.make_node(operator, ends, node.output[:1])
    total = NATIVE_NORMS[node.op_type]
    for index, output in enumerate(node.output):
        if index and output and index == total:
            yield onnx.helper.make_node("Identity", node.input[:1], [output], name=_EXTRA)
        elif index and output:
            yield from _row_stand_ins(node, output, opset)


def _row_stand_ins(node: onnx.NodeProto, output: str, opset: int) -> Iterator[onnx.NodeProto]:
    """For a mean or 1 / rms, which is float32: of x's shape, with 1 for each normalised dimension."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    if axis >= 0 or opset < _AXES_INPUT:
        return  # which axes those are takes x's rank
    axes, summed = f"{output} as axes", f"{output} as a sum"
    yield onnx.helper.make_node("Constant", [], [axes], value_ints=range(axis, 0), name=_EXTRA)
    yield onnx.helper.make_node("ReduceSum", [node.input[0], axes], [summed], name=_EXTRA)
    yield onnx.helper.make_node("Cast", [summed], [output], to=int(ir.DataType.FLOAT), name=_EXTRA)


def _is_plugin(node: onnx.NodeProto) -> bool:
    """Whether a node is our plugin's, which may stand in a domain without a body."""
    return any(a.name == "plugin_namespace" and a.s == b"rmsnorm_onnx" for a in node.attribute) and len(node.input) > 0


def _plugin_stand_in(node: onnx.NodeProto) -> onnx.NodeProto:
    """A Cast to the type that the node's fields name for its result; "x" is its input's."""
    named = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "result_type"), "x")
    if named not in _TYPES:
        return onnx.helper.make_node("Identity", node.input[:1], node.output[:1])
    return onnx.helper.make_node("Cast", node.input[:1], node.output[:1], to=int(_TYPES[named]))


def _forget_run_time_places(proto: onnx.ModelProto) -> None:
    """Keeps onnx from knowing what a Gather or Slice gives where only the run knows the place that it takes.

    When it propagates data, onnx reads an unknown place as 0, and so takes the target of a Reshape for known. Abs
    carries types and shapes on, and no data.
    """
    _forget_places_of(proto.graph.node, {initializer.name for initializer in proto.graph.initializer})
    for function in proto.functions:
        _forget_places_of(function.node, set())


def _forget_places_of(nodes: MutableSequence[onnx.NodeProto], known: Set[str]) -> None:
    known = known | {name for node in nodes if node.op_type == "Constant" for name in node.output}
    kept = list(nodes)
    del nodes[:]
    for node in kept:
        nodes.append(node)
        node = nodes[-1]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = known | {initializer.name for initializer in attribute.g.initializer}
                _forget_places_of(attribute.g.node, inner)
        if node.op_type in ("Gather", "Slice") and any(name and name not in known for name in node.input[1:]):
            result = node.output[0]
            node.output[0] = f"{result} as onnx guesses it"
            nodes.append(onnx.helper.make_node("Abs", [node.output[0]], [result], name=_EXTRA))


def _add_info(graph: onnx.GraphProto, name: str, dtype: ir.DataType | None, shape: Dims | None) -> None:
    if dtype is None:
        return
    info = graph.input.add(name=name)
    info.type.tensor_type.elem_type = int(dtype)
    for dim in shape if shape is not None else ():
        entry = info.type.tensor_type.shape.dim.add()
        if isinstance(dim, int):
            entry.dim_value = dim
        elif dim is not None:
            entry.dim_param = dim
    if shape is not None and not shape:
        info.type.tensor_type.shape.SetInParent()


def _collect(proto: onnx.GraphProto, graph: ir.Graph, found: dict[ir.Value, Info], run: str) -> None:
    infos = {i.name: i.type.tensor_type for i in (*proto.value_info, *proto.output) if i.type.HasField("tensor_type")}
    for node, node_proto in zip(graph, (n for n in proto.node if n.name != _EXTRA), strict=False):
        for value in node.outputs:
            info = infos.get(value.name or "")
            if info is not None:
                found[value] = (ir.DataType(info.elem_type), _dims(info, run))
        for attr in node_proto.attribute:
            own = node.attributes.get(attr.name)
            if attr.type == onnx.AttributeProto.GRAPH and own is not None and not own.is_ref():
                _collect(attr.g, own.as_graph(), found, run)


def _dims(info: onnx.TypeProto.Tensor, run: str) -> Dims | None:
    if not info.HasField("shape"):
        return None
    dims: list[Dim] = []
    for dim in info.shape.dim:
        invented = dim.dim_param.startswith(_INVENTED)
        name = f"{run}{dim.dim_param}" if invented else dim.dim_param
        dims.append(dim.dim_value if dim.HasField("dim_value") else symbol(name))
    return tuple(dims)
