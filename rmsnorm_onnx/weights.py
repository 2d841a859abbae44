"""Tensors and the data files that they are kept in: found, named when they are missing, put beside an output."""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import files, integrity
from rmsnorm_onnx.errors import ModelError, UsageError

Put: TypeAlias = Callable[[ir.TensorProtocol], None]
"""Puts another tensor in a tensor's place."""

# Protobuf cannot hold 2 GiB; what is larger keeps its weights in a data file beside it.
_PROTO_LIMIT = 2**31 - 2**24
_SMALL_TENSOR = 1024
_USUAL_ENTRIES = ("location", "offset", "length")


class ExternalTensor(ir.ExternalTensor):
    """A tensor in a data file that says in one line why it cannot be read, and keeps what else its file says of it.

    Args:
        tensor: The tensor as onnx_ir has it.
        folder: Where its data file is; None where nobody knows.
        entries: What the file says beside location, offset and length: a checksum, say.
    """

    __slots__ = ("entries", "folder")

    def __init__(
        self, tensor: ir.ExternalTensor, folder: str | None, entries: dict[str, str], location: str | None = None
    ) -> None:
        super().__init__(
            tensor.location if location is None else location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
            base_dir=folder or "",
        )
        self.folder = folder
        self.entries = entries

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values, mapped from the file."""
        with self._reading():
            return super().numpy()

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        with self._reading():
            return super().__array__(dtype)

    def tobytes(self) -> bytes:
        """The bytes, read from the file."""
        with self._reading():
            return super().tobytes()

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes to an open file."""
        with self._reading():
            super().tofile(file)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        what = f"tensor {self.name!r} keeps its data in {files.shown(self.location)!r}"
        if self.folder is None:
            mend = "give the model's path, or load the data with onnx.load_external_data_for_model"
            raise UsageError(f"{what}, and a ModelProto does not say in which folder; {mend}")
        try:
            yield
        except (OSError, ValueError) as error:
            raise ModelError(f"{what}, which cannot be read: {files.words(error)}; put it there again") from error


def adopt(model: ir.Model, folder: str | None, proto: onnx.ModelProto | None = None) -> None:
    """Let the model's external tensors be of the class above.

    Args:
        model: The model, changed in place.
        folder: Where the data files are, for tensors that do not say so themselves; None where nobody knows.
        proto: What the model was made from, its nodes in the same order, if it was.
    """
    protos = itertools.repeat(None) if proto is None else integrity.tensors(proto)
    for (put, tensor), source in list(zip(tensors(model), protos, strict=proto is not None)):
        if isinstance(tensor, ir.ExternalTensor) and not isinstance(tensor, ExternalTensor):
            entries = {} if source is None else {e.key: e.value for e in source.external_data}
            others = {key: value for key, value in entries.items() if key not in _USUAL_ENTRIES}
            put(ExternalTensor(tensor, os.fspath(tensor.base_dir) or folder, others))


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto, with what onnx_ir leaves out of external data, and without what it says twice."""
    proto = ir.to_proto(model)
    for (_, tensor), written in zip(tensors(model), integrity.tensors(proto), strict=True):
        if isinstance(tensor, ExternalTensor):
            for key, value in tensor.entries.items():
                written.external_data.add(key=key, value=value)
        # onnx_ir appends a tensor's metadata to the copy of a proto that has it already.
        once = {entry.key: entry.value for entry in written.metadata_props}
        if len(once) < len(written.metadata_props):
            del written.metadata_props[:]
            for key, value in once.items():
                written.metadata_props.add(key=key, value=value)
    return proto


def tensors(model: ir.Model) -> Iterator[tuple[Put, ir.TensorProtocol]]:
    """Every tensor of a model, in the order of `integrity.tensors`: initializers and attributes, in branches too."""
    yield from _graph_tensors(model.graph)
    for function in model.functions.values():
        for node in function:
            yield from _attribute_tensors(node.attributes)
        yield from _attribute_tensors(function.attributes)


def _graph_tensors(graph: ir.Graph) -> Iterator[tuple[Put, ir.TensorProtocol]]:
    for value in tuple(graph.initializers.values()):
        if value.const_value is not None:
            yield _initializer_setter(value), value.const_value
    for node in graph:
        yield from _attribute_tensors(node.attributes)


def _attribute_tensors(attributes: Any) -> Iterator[tuple[Put, ir.TensorProtocol]]:
    for attribute in tuple(attributes.values()):
        if attribute.is_ref() or attribute.value is None:
            continue
        if attribute.type == ir.AttributeType.TENSOR:
            yield _attribute_setter(attributes, attribute.name), attribute.as_tensor()
        elif attribute.type == ir.AttributeType.TENSORS:
            for index, tensor in enumerate(attribute.as_tensors()):
                yield _list_setter(attributes, attribute.name, index), tensor
        elif attribute.type == ir.AttributeType.GRAPH:
            yield from _graph_tensors(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield from _graph_tensors(graph)


def _initializer_setter(value: ir.Value) -> Put:
    def put(new: ir.TensorProtocol) -> None:
        value.const_value = new

    return put


def _attribute_setter(attributes: Any, name: str) -> Put:
    def put(new: ir.TensorProtocol) -> None:
        attributes[name] = ir.AttrTensor(name, new, doc_string=attributes[name].doc_string)

    return put


def _list_setter(attributes: Any, name: str, index: int) -> Put:
    def put(new: ir.TensorProtocol) -> None:
        held = list(attributes[name].as_tensors())
        held[index] = new
        attributes[name] = ir.AttrTensors(name, held, doc_string=attributes[name].doc_string)

    return put


def _in_memory(tensor: ir.TensorProtocol) -> bool:
    return not isinstance(tensor, ir.ExternalTensor) and tensor.dtype != ir.DataType.STRING


def check_apart(model: ir.Model, target: Path, name: str) -> None:
    """Check that an output is none of the files that the model's weights are kept in.

    Raises:
        UsageError: it is; they would be gone.
    """
    for _, tensor in tensors(model):
        if isinstance(tensor, ir.ExternalTensor) and files.same(tensor.path, target):
            raise UsageError(f"cannot write {name}: the model's weights are kept in it; name another file")


def beside(model: ir.Model, path: Path, target: Path, added: files.Additions) -> ir.Model:
    """The model with all of its data in the output's folder; a clone when anything had to move.

    Args:
        model: The model, left alone.
        path: The output's name; those who load it will look for the data in its folder.
        target: The file that this is, or that it links to.
        added: Takes note of what is created, for the caller to remove should a later step fail.

    Raises:
        UsageError: a data file would have to bear the output's name.
        ModelError: a data file does not exist.
    """
    folder = path.parent
    outside = any(isinstance(t, ir.ExternalTensor) and not _lies_in(t, folder) for _, t in tensors(model))
    inline = sum(t.nbytes for _, t in tensors(model) if _in_memory(t))
    if not outside and inline < _PROTO_LIMIT:
        return model
    placed = model.clone()
    moved: dict[Path, str] = {}
    for put, tensor in list(tensors(placed)):
        if isinstance(tensor, ir.ExternalTensor) and not _lies_in(tensor, folder):
            source = Path(os.path.abspath(tensor.path))
            if source not in moved:
                place = _place(source, folder / _relative_location(tensor))
                if files.same(place, target):
                    raise UsageError(
                        f"cannot write {files.shown(path)}: a copy of the model's weights goes there; name another file"
                    )
                _copy(source, place, added)
                moved[source] = place.relative_to(folder).as_posix()
            entries = tensor.entries if isinstance(tensor, ExternalTensor) else {}
            put(ExternalTensor(tensor, str(folder), entries, moved[source]))
    if inline >= _PROTO_LIMIT:
        _spill(placed, path, added)
    return placed


def _lies_in(tensor: ir.ExternalTensor, folder: Path) -> bool:
    return not os.path.isabs(tensor.location) and os.path.realpath(tensor.base_dir or ".") == os.path.realpath(folder)


def _relative_location(tensor: ir.ExternalTensor) -> Path:
    location = Path(os.path.normpath(tensor.location))
    return Path(location.name) if location.is_absolute() or ".." in location.parts else location


def _place(source: Path, wanted: Path) -> Path:
    """Where a copy of a data file goes: where a file of the same content is, else where none is."""
    if not source.is_file():
        raise ModelError(f"the external data file {source} does not exist; put it there, or load the model again")
    return _free_place(wanted, lambda existing: filecmp.cmp(source, existing, shallow=False))


def _copy(source: Path, place: Path, added: files.Additions) -> None:
    if not place.exists():
        added.make_folder(place.parent)
        added.add(place)
        with files.replacing(place) as temporary:
            shutil.copyfile(source, temporary)


def _free_place(wanted: Path, serves: Callable[[Path], bool]) -> Path:
    """The wanted path, or the first numbered one beside it that is free or that holds the same."""
    for n in itertools.count():
        candidate = wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") if n else wanted
        if not os.path.lexists(candidate):
            return candidate
        if candidate.is_file() and not candidate.is_symlink() and candidate.stat().st_nlink == 1 and serves(candidate):
            return candidate
    raise AssertionError("itertools.count() has no end")


def _spill(model: ir.Model, path: Path, added: files.Additions) -> None:
    """Move the weights that are in memory into a data file: together they are too large for a protobuf."""
    large = [(put, t) for put, t in tensors(model) if _in_memory(t) and t.nbytes > _SMALL_TENSOR]
    place = _free_place(path.with_name(f"{path.name}.data"), lambda _: False)
    added.add(place)
    external = ir.external_data.convert_tensors_to_external([t for _, t in large], path.parent, place.name)
    for (put, _), tensor in zip(large, external, strict=True):
        put(tensor)
