"""What must hold of a file's attributes: a declared type, the field that goes with it, and the type of the operator.

onnx_ir reads the field that the type names and no other, so that an attribute which says one thing and holds another
would be misread, or fail far from its file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from rmsnorm_onnx.errors import ModelError
from rmsnorm_onnx.functions import DOMAIN

_STANDARD = ("", "ai.onnx")
_TYPES = onnx.AttributeProto.AttributeType
_FIELDS = {
    "FLOAT": "f",
    "INT": "i",
    "STRING": "s",
    "TENSOR": "t",
    "GRAPH": "g",
    "SPARSE_TENSOR": "sparse_tensor",
    "TYPE_PROTO": "tp",
    "FLOATS": "floats",
    "INTS": "ints",
    "STRINGS": "strings",
    "TENSORS": "tensors",
    "GRAPHS": "graphs",
    "SPARSE_TENSORS": "sparse_tensors",
    "TYPE_PROTOS": "type_protos",
}
# A value of 0 may have no field in the file, and an empty list has none.
_NEEDED = ("TENSOR", "GRAPH", "TYPE_PROTO")
# Attributes that hold an element type's number; 0 leaves the choice to the operator, except in a Cast.
_ELEMENT_TYPES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type")
_OWN = {"epsilon": "FLOAT", "axis": "INT", "trailing": "INT"}

Calls: TypeAlias = Mapping[tuple[str, str, str], Mapping[str, set[int]]]
"""For each local function the attributes that its body refers to, each with the types that it needs them in."""


def check_attributes(proto: onnx.ModelProto, name: str) -> None:
    """Check the attributes of every node, in branches and functions too.

    Args:
        proto: The model.
        name: How messages call it.

    Raises:
        ModelError: the first attribute that is not valid, with its node.
    """
    parameters = {(f.domain, f.name, f.overload): _parameters(f) for f in proto.functions}
    _check_nodes(proto.graph.node, name, _opset(proto.opset_import), parameters, inside=False)
    for function in proto.functions:
        where = f"{name}, function {function.name!r}"
        for attribute in function.attribute_proto:
            _check_fields(attribute, f"{where} has the attribute {attribute.name!r}")
        _check_nodes(function.node, where, _opset(function.opset_import), parameters, inside=True)


def label(node: onnx.NodeProto) -> str:
    """A node as messages name it."""
    name = node.name or next((o for o in node.output if o), "")
    return f"{node.op_type or 'a node without an operator'} {name!r}"


def subgraphs(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def _opset(imports: Iterable[onnx.OperatorSetIdProto]) -> int:
    return max((entry.version for entry in imports if entry.domain in _STANDARD), default=1)


def _parameters(function: onnx.FunctionProto) -> dict[str, set[int]]:
    """The attributes that a function's body refers to, each with the types that it needs them in."""
    types: dict[str, set[int]] = {a.name: {a.type} for a in function.attribute_proto}
    for attribute in _all_attributes(function.node):
        if attribute.ref_attr_name:
            types.setdefault(attribute.ref_attr_name, set()).add(attribute.type)
    return types


def _all_attributes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.AttributeProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield attribute
            for graph in subgraphs(attribute):
                yield from _all_attributes(graph.node)


def _check_nodes(nodes: Iterable[onnx.NodeProto], where: str, opset: int, calls: Calls, inside: bool) -> None:
    for node in nodes:
        called = calls.get((node.domain, node.op_type, node.overload), {})
        seen = set()
        for attribute in node.attribute:
            what = f"{where}: {label(node)} has the attribute {attribute.name!r}"
            if not attribute.name or attribute.name in seen:
                raise ModelError(f"{what} {'twice' if attribute.name else 'without a name'}; export again")
            seen.add(attribute.name)
            _check_fields(attribute, what)
            if attribute.ref_attr_name and not inside:
                raise ModelError(f"{what}, which refers to a function's, and it stands in none; export again")
            for expected in (_expected(node, attribute.name, opset), called.get(attribute.name)):
                if expected and attribute.type not in expected:
                    wanted = " or ".join(sorted(_TYPES.Name(kind) for kind in expected))
                    raise ModelError(f"{what} as {_TYPES.Name(attribute.type)}, not {wanted}; export again")
            _check_element_type(node, attribute, what)
            for graph in subgraphs(attribute):
                _check_nodes(graph.node, where, opset, calls, inside)
        if node.domain in _STANDARD and node.op_type == "Cast" and "to" not in seen:
            raise ModelError(f"{where}: {label(node)} lacks the attribute 'to'; export again")


def _check_fields(attribute: onnx.AttributeProto, what: str) -> None:
    """The type is there, and of the fields for values at most its own is set."""
    if attribute.type not in _TYPES.values() or attribute.type == onnx.AttributeProto.UNDEFINED:
        raise ModelError(f"{what} without a type; export again")
    kind = _TYPES.Name(attribute.type)
    held = {field.name for field, _ in attribute.ListFields()} & set(_FIELDS.values())
    if attribute.ref_attr_name:
        if held:
            raise ModelError(f"{what}, which refers to a function's and has a value of its own; export again")
        return
    other = held - {_FIELDS[kind]}
    if other:
        raise ModelError(f"{what} of type {kind} and a value in the field {min(other)!r}; export again")
    if kind in _NEEDED and not held:
        raise ModelError(f"{what} of type {kind} without a value; export again")
    if kind.startswith("SPARSE"):
        raise ModelError(f"{what}, a sparse tensor, which would be lost; store it as a dense one")


def _check_element_type(node: onnx.NodeProto, attribute: onnx.AttributeProto, what: str) -> None:
    known = node.domain in (*_STANDARD, "com.microsoft") and attribute.name in _ELEMENT_TYPES
    if not known or attribute.ref_attr_name or attribute.type != onnx.AttributeProto.INT:
        return
    lowest = 1 if node.op_type == "Cast" else 0
    if attribute.i < lowest or attribute.i not in set(ir.DataType):
        raise ModelError(f"{what} = {attribute.i}, which is no element type; export again")


def _expected(node: onnx.NodeProto, name: str, opset: int) -> set[int] | None:
    """The types that an operator's definition allows; None for what no definition is known of."""
    if node.domain in _STANDARD:
        versions = _definitions().get(node.op_type, {}).get(name, [])
        # The newest definition that this opset has; an attribute of later opsets is held to its first one.
        known = [kind for since, kind in versions if since <= max(opset, versions[0][0])]
        return {known[-1]} if known else None
    if node.domain == DOMAIN and name in _OWN:
        return {_TYPES.Value(_OWN[name])}
    return {onnx.AttributeProto.INT} if node.domain == "com.microsoft" and name in _ELEMENT_TYPES else None


@functools.lru_cache(maxsize=1)
def _definitions() -> dict[str, dict[str, list[tuple[int, int]]]]:
    """For each standard operator and attribute, the opsets that define it, oldest first, with its type there."""
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for schema in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: s.since_version):
        if schema.domain in _STANDARD:
            for name, attribute in schema.attributes.items():
                kinds = found.setdefault(schema.name, {}).setdefault(name, [])
                number: Any = attribute.type  # an enumeration with the numbers of AttributeProto
                kinds.append((schema.since_version, int(number)))
    return found
