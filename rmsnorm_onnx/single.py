"""One node as a model of its own, for what onnx itself can do with it: expand it by its definition, or convert it.

So no weight and no name of the model ever goes through onnx's C++ code, which keeps neither metadata nor external data.
"""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir

from rmsnorm_onnx.edit import Edit

# Steps that onnx's converter was seen to make right. It makes others too, and some of them only change the number
# where the meaning changed (GroupNormalization to 21, Hardmax to 13, Resize and Pad to 18): what is not listed is not
# asked of it.
CONVERTED = frozenset(
    {
        ("Dropout", 10, 12),
        ("Resize", 11, 13),
        ("DFT", 17, 20),
        ("DFT", 20, 17),
    }
)
"""Operator, the version that it has, the version that it gets."""


def expand(edit: Edit, version: int) -> str | None:
    """Replaces a node by the body that its definition has as a function.

    Args:
        edit: The node.
        version: Its version, which its body is written for too.

    Returns:
        None when it was done, else why not, in a few words.
    """
    node = edit.node
    schema = onnx.defs.get_schema(node.op_type, version)
    # The two properties are missing from onnx's type stubs.
    if not (getattr(schema, "has_function") or getattr(schema, "has_context_dependent_function")):  # noqa: B009
        return "no function defines it"
    reason = _from_around(node)
    if reason is not None:
        return reason
    proto = _alone(edit, version, constants=False)
    try:
        if None in node.inputs:
            _call_its_function(proto, schema)
            body = onnx.inliner.inline_local_functions(proto)
        else:
            body = onnx.inliner.inline_selected_functions(proto, [("", node.op_type)], inline_schema_functions=True)
    except Exception as error:  # onnx's C++ code raises many kinds, and each means that there is no body
        return f"onnx cannot expand it ({_one_line(error)})"
    if any(n.op_type == node.op_type and n.domain == "" for n in body.graph.node):
        return "onnx cannot expand it as its types are unknown"
    _splice(edit, body)
    return None


def _call_its_function(proto: onnx.ModelProto, schema: onnx.defs.OpSchema) -> None:
    """Makes the definition of a model's one node a local function of it: onnx's inliner of definitions takes no gaps.

    A node with an absent input before others, as Attention with a past and no mask, stops it with "Type unknown for".
    """
    (node,) = proto.graph.node
    types = {value.name: value.type for value in proto.graph.input}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.type and all(held.name != name for held in node.attribute):
            node.attribute.append(attribute.default_value)
    if getattr(schema, "has_context_dependent_function"):  # noqa: B009
        given = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        define = getattr(schema, "get_context_dependent_function")  # noqa: B009  # missing from the stubs too
        function = onnx.FunctionProto.FromString(define(node.SerializeToString(), given))
    else:
        function = onnx.FunctionProto.FromString(schema.function_body.SerializeToString())
    function.domain = node.domain = "body"
    function.opset_import[0].version = schema.since_version
    proto.functions.append(function)
    proto.opset_import.add(domain="body", version=1)


def convert(edit: Edit, version: int, target: int) -> str | None:
    """Replaces a node by what onnx's converter makes of it.

    Args:
        edit: The node.
        version: Its version.
        target: The opset to convert it to.

    Returns:
        None when it was done, else why not, in a few words.
    """
    reason = _from_around(edit.node)
    if reason is not None:
        return reason
    proto = _alone(edit, version, constants=True)
    try:
        converted = onnx.version_converter.convert_version(proto, target)
    except Exception as error:  # as above
        return f"onnx cannot convert it ({_one_line(error)})"
    _splice(edit, converted)
    return None


def _from_around(node: ir.Node) -> str | None:
    """Why a node means nothing without what is around it, in a few words; None where it does."""
    if any(attribute.is_ref() for attribute in node.attributes.values()):
        return "it takes attributes of the function around it"
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    if any(attribute.type in graphs for attribute in node.attributes.values()):
        return "it holds a graph, which may read values around it"
    return None


def _alone(edit: Edit, version: int, *, constants: bool) -> onnx.ModelProto:
    """The node as a model; its inputs are i0, i1 and its outputs o0, o1."""
    proto = onnx.ModelProto(ir_version=10)
    proto.opset_import.add(domain="", version=version)
    node = proto.graph.node.add()
    ir.serde.serialize_node_into(node, edit.node)
    del node.input[:], node.output[:], node.metadata_props[:]
    proto.graph.name = node.name = "one"
    for index, value in enumerate(edit.node.inputs):
        node.input.append("" if value is None else f"i{index}")
        if value is None:
            continue
        known = edit.constant(value) if constants else None
        if known is not None:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(known, f"i{index}"))
        else:
            _describe(proto.graph.input.add(name=f"i{index}"), edit, value)
    for index, value in enumerate(edit.node.outputs):
        node.output.append(f"o{index}" if value.name else "")
        if value.name:
            _describe(proto.graph.output.add(name=f"o{index}"), edit, value)
    return proto


def _describe(info: onnx.ValueInfoProto, edit: Edit, value: ir.Value) -> None:
    dtype, dims = edit.dtype(value), edit.dims(value)
    if dtype is None:
        return
    info.type.tensor_type.elem_type = int(dtype)
    if dims is not None:
        info.type.tensor_type.shape.SetInParent()
        for dim in dims:
            entry = info.type.tensor_type.shape.dim.add()
            if isinstance(dim, int):
                entry.dim_value = dim


def _splice(edit: Edit, body: onnx.ModelProto) -> None:
    """Puts a body's nodes in the node's place."""
    model = ir.from_proto(body)
    edit.types.note_all(model)
    graph = model.graph
    results = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    given = {f"i{index}": value for index, value in enumerate(edit.node.inputs) if value is not None}
    nodes = list(graph)
    graph.remove(nodes)
    for name, value in list(graph.initializers.items()):
        if name in given:
            ir.convenience.replace_all_uses_with(value, given[name])
        else:
            constant = ir.node("Constant", [], {"value": value.const_value})
            edit.types.note(constant.outputs[0], (constant.outputs[0].dtype, None))
            ir.convenience.replace_all_uses_with(value, constant.outputs[0])
            nodes.insert(0, constant)
    for value in graph.inputs:
        argument = given[str(value.name)]
        ir.convenience.replace_all_uses_with(value, argument)
        for name, result in results.items():
            if result is value:
                copy = ir.node("Identity", [argument])
                edit.types.note(copy.outputs[0], (edit.dtype(argument), edit.dims(argument)))
                nodes.append(copy)
                results[name] = copy.outputs[0]
    _rename_inner(edit, nodes)
    edit.insert(nodes)
    edit.become(*(results.get(f"o{index}") for index in range(len(edit.node.outputs))))


def _rename_inner(edit: Edit, nodes: list[ir.Node]) -> None:
    """Names that are free in the whole file, for what stands in branches and loops."""
    for node in nodes:
        for attribute in node.attributes.values():
            if attribute.type != ir.AttributeType.GRAPH or attribute.is_ref():
                continue
            inner = attribute.as_graph()
            for value in inner.inputs:
                value.name = edit.names.fresh(f"{edit.node.name}/{value.name}")
            for inside in inner:
                inside.name = edit.names.fresh(f"{edit.node.name}/{inside.op_type}")
                for value in inside.outputs:
                    if value.name:
                        value.name = edit.names.fresh(f"{edit.node.name}/{value.name}")
            _rename_inner(edit, list(inner))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
