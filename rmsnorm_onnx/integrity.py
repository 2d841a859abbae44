"""What must hold of a model file before anything is done with it; a breach is one clear line.

ONNX's own checker cannot be used for this: it reads the weights, and it refuses operators that runtimes accept.
Everything here looks at the graph and at the sizes of files, never into a weight.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from rmsnorm_onnx import files
from rmsnorm_onnx.attributes import check_attributes, label, subgraphs
from rmsnorm_onnx.errors import ModelError


def check_proto(proto: onnx.ModelProto, name: str, file: Path | None) -> None:
    """Check a model's structure, its attributes, its tensors' sizes and its external data files.

    Args:
        proto: The model, its external data not loaded.
        name: How messages call the model.
        file: The file that it was read from; None when there is none, and external data is not looked for.

    Raises:
        ModelError: the first thing that does not hold, with the mend.
    """
    missing = "a graph" if not proto.HasField("graph") else "an opset" if not proto.opset_import else ""
    if missing:
        raise ModelError(f"{name} is not an ONNX model or is cut short: it lacks {missing}; fetch it again")
    _check_text(proto, name)
    if not proto.graph.node:
        raise ModelError(f"{name} has an empty graph: there is no node in it; export the model again")
    if proto.training_info:
        raise ModelError(f"{name} holds training information, which would be lost; save the inference model alone")
    _check_graph(proto.graph, name, frozenset())
    for function in proto.functions:
        where = f"{name}, function {function.name!r}"
        _check_nodes(function.node, set(function.input), where, frozenset())
        _check_outputs(function.output, function.node, function.input, where)
    _check_calls(proto, name)
    check_attributes(proto, name)
    for tensor in tensors(proto):
        _check_tensor(tensor, name, file)


def _check_calls(proto: onnx.ModelProto, name: str) -> None:
    """No function may call itself, by whatever detour: expanding it would never end."""
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    waiting = {key: set(_called(f.node)) & functions.keys() for key, f in functions.items()}
    while waiting:
        settled = {key for key, calls in waiting.items() if not calls}
        if not settled:
            domain, function, _ = next(iter(waiting))
            raise ModelError(f"{name}: the function {domain}::{function} calls itself; export the model again")
        waiting = {key: calls - settled for key, calls in waiting.items() if key not in settled}


def _called(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str, str]]:
    for node in nodes:
        yield node.domain, node.op_type, node.overload
        for attribute in node.attribute:
            for graph in subgraphs(attribute):
                yield from _called(graph.node)


def _check_text(message: Any, name: str) -> None:
    """Text that is no UTF-8 reaches Python as bytes, and would fail far from here."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if isinstance(value, Sequence) else (value,):
                if not isinstance(inner, onnx.TensorProto):
                    _check_text(inner, name)
        elif field.type == field.TYPE_STRING:
            for text in value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (value,):
                if isinstance(text, bytes):
                    raise ModelError(f"{name} holds text that is no UTF-8 ({text[:40]!r}); fetch it again")


def tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers and attributes, in branches and functions too."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _node_tensors(function.node)
        for attribute in function.attribute_proto:
            yield from _attribute_tensors(attribute)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: list[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for graph in subgraphs(attribute):
        yield from _graph_tensors(graph)


def _check_graph(graph: onnx.GraphProto, where: str, outer: frozenset[str]) -> None:
    if graph.sparse_initializer:
        raise ModelError(f"{where} holds sparse initializers, which would be lost; store them as dense ones")
    for value in (*graph.input, *graph.output, *graph.value_info):
        _forget_negative_dims(value)
    stored = {t.name for t in graph.initializer}
    if len(stored) < len(graph.initializer):
        raise ModelError(f"{where} holds two initializers of one name; export the model again")
    own = {v.name for v in graph.input} | stored
    _check_nodes(graph.node, own, where, outer)
    _check_outputs([v.name for v in graph.output], graph.node, own, where, outer)


def _forget_negative_dims(value: onnx.ValueInfoProto) -> None:
    """Read a negative dimension as an unknown one, as onnxruntime does: exporters write -1 for "any"."""
    if value.type.HasField("tensor_type"):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value < 0:
                dim.Clear()


def _check_nodes(nodes: list[onnx.NodeProto], own: set[str], where: str, outer: frozenset[str]) -> None:
    defined: dict[str, onnx.NodeProto] = {}
    for node in nodes:
        if not node.op_type:
            raise ModelError(f"{where}: {label(node)} has no operator type; export the model again")
        for output in node.output:
            if output and (output in defined or output in own):
                raise ModelError(f"{where}: {output!r} is computed twice, again by {label(node)}; rename one")
            if output:
                defined[output] = node
    visible = outer | own | defined.keys()
    for node in nodes:
        for value in node.input:
            if value and value not in visible:
                raise ModelError(f"{where}: {label(node)} reads {value!r}, which nothing computes; export again")
        for attribute in node.attribute:
            for graph in subgraphs(attribute):
                _check_graph(graph, where, frozenset(visible))
    _check_acyclic(nodes, defined, where)


def _check_outputs(
    outputs: list[str], nodes: list[onnx.NodeProto], own: set[str], where: str, outer: frozenset[str] = frozenset()
) -> None:
    known = {*own, *outer, *(o for node in nodes for o in node.output)}
    for output in outputs:
        if output not in known:
            raise ModelError(f"{where}: the output {output!r} is computed by nothing; the file may be cut short")


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node reads, those that its branches read from outside included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in subgraphs(attribute):
            own = {v.name for v in graph.input} | {o for inner in graph.node for o in inner.output}
            read = [v for inner in graph.node for v in _reads(inner)] + [v.name for v in graph.output]
            yield from (v for v in read if v not in own)


def _check_acyclic(nodes: list[onnx.NodeProto], defined: dict[str, onnx.NodeProto], where: str) -> None:
    """Kahn's algorithm, entered only when the nodes are not already in order, as the standard wants them."""
    done: set[str] = set()
    for node in nodes:
        if any(v in defined and v not in done for v in _reads(node)):
            break
        done.update(node.output)
    else:
        return
    waiting = list(nodes)
    done = set()
    while waiting:
        later = []
        for node in waiting:
            if any(v in defined and v not in done for v in _reads(node)):
                later.append(node)
            else:
                done.update(node.output)
        if len(later) == len(waiting):
            raise ModelError(f"{where}: the graph has a cycle through {label(later[0])}; export the model again")
        waiting = later


def _check_tensor(tensor: onnx.TensorProto, name: str, file: Path | None) -> None:
    what = f"{name}: tensor {tensor.name!r}"
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError):
        bits = None  # strings have no width
    if tensor.data_type not in set(ir.DataType) or tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise ModelError(f"{what} has the unknown element type {tensor.data_type}; export the model again")
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"{what} has a negative dimension in {list(tensor.dims)}; export the model again")
    count = math.prod(tensor.dims)
    nbytes = None if bits is None else -(-count * bits // 8)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if file is not None:
            _check_external(tensor, what, file, nbytes)
        return
    if tensor.HasField("raw_data"):
        held, needed, unit = len(tensor.raw_data), nbytes, "bytes"
    else:
        held, needed, unit = _entries(tensor, count, bits)
    if needed is not None and held != needed:
        raise ModelError(f"{what} of shape {list(tensor.dims)} needs {needed} {unit}, has {held}; fetch the file again")


def _entries(tensor: onnx.TensorProto, count: int, bits: int | None) -> tuple[int, int, str]:
    """How many entries the typed field of a tensor holds, and how many it must."""
    field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    needed = count
    if bits is not None and bits < 8:  # elements narrower than a byte share an entry
        needed = -(-count * bits // 8)
    elif tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        needed = 2 * count
    return len(getattr(tensor, field)), needed, f"entries of {field}"


def _check_external(tensor: onnx.TensorProto, what: str, model: Path, nbytes: int | None) -> None:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    file = f"{what} keeps its data in {files.shown(location)!r}, which"
    if not location:
        raise ModelError(f"{what} names no external data file; export the model again")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes or 0))
    except ValueError:
        raise ModelError(f"{what} has an external offset or length that is no number; export the model again") from None
    try:
        size = _data_size(file, model, location)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {files.words(error)}; export the model again") from error
    if offset < 0 or length < 0 or (nbytes is not None and length < nbytes):
        raise ModelError(f"{what} has the external offset {offset} and length {length}, and needs {nbytes} bytes")
    if offset + length > size:
        raise ModelError(f"{file} is too short: {size} of {offset + length} bytes are there; fetch it again")


def _data_size(file: str, model: Path, location: str) -> int:
    """The size of a data file, which must be a plain one beside the model or below."""
    folder = model.parent
    path = folder / location
    if os.path.isabs(location) or not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        raise ModelError(f"{file} leaves the model's folder; put the data beside the model and name it relatively")
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{file} does not exist; put it beside the model, or export again") from None
    if stat.S_ISLNK(status.st_mode) or not path.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"{file} is a symbolic link, which onnx refuses too; put a copy of its target in its place")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{file} is no file; put the data there, or export again")
    if files.same(path, model):
        raise ModelError(f"{file} is the model itself; put the data into a file of its own")
    if status.st_nlink > 1:
        raise ModelError(f"{file} has more than one hard link, which onnx refuses too; put a copy in its place")
    return status.st_size
