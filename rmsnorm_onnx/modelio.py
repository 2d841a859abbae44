"""Models in and out: by path with the weights never read, or as the object that the caller has.

A model of 2 GB costs the memory of its graph. External data stays where it is: a file saved into the same folder
refers to it, a file saved elsewhere gets a plain copy of it (onnx refuses links).
"""

from __future__ import annotations

import contextlib
import copy
import filecmp
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx
import onnx_ir as ir

from rmsnorm_onnx import integrity
from rmsnorm_onnx.errors import ModelError, UsageError

Kind: TypeAlias = Literal["path", "proto", "ir", "program"]
"""What a caller handed over: a path, an onnx.ModelProto, an onnx_ir.Model, or torch's ONNXProgram."""

# Protobuf cannot hold 2 GiB; what is larger keeps its weights in a data file beside it.
_PROTO_LIMIT = 2**31 - 2**24
_SMALL_TENSOR = 1024


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read a model's graph; its external weights are neither read nor mapped.

    Args:
        path: An ONNX file: protobuf, or the text forms that onnx knows by their extensions.

    Returns:
        The model, its nodes in topological order, its external tensors lazy.

    Raises:
        ModelError: the file is missing, unreadable or not a valid model, or its external data is missing, too short
            or outside the model's folder.
    """
    name = os.fspath(path)
    if not os.path.lexists(path):
        raise ModelError(f"{name} does not exist; check the path")
    if os.path.isdir(path):
        raise ModelError(f"{name} is a folder; name the .onnx file in it")
    proto = _parse(name)
    folder = Path(os.path.abspath(path)).parent
    integrity.check_proto(proto, name, folder)
    model = _deserialize(proto, name)
    for _, tensor in _external_tensors(model):
        tensor.base_dir = str(folder)
    return model


def save(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model, whole or not at all; writing over the file it came from is fine.

    External data in the target's folder is kept by reference; other external data is copied there, under its own name,
    or under a fresh one where another file bears it.

    Raises:
        UsageError: the file cannot be written there; nothing was.
    """
    target = Path(os.path.abspath(path))
    if target.is_dir():
        raise UsageError(f"cannot write {os.fspath(path)}: it is a folder; name a file")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {os.fspath(path)}: the folder {target.parent} does not exist; create it")
    written: list[Path] = []
    try:
        placed = _place_data(model, target, written)
        with _replacing(target) as temporary:
            _write(placed, temporary, target)
    except BaseException as error:
        for file in written:
            file.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UsageError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error
        raise


def to_ir(model: Any) -> tuple[ir.Model, Kind]:
    """A model that may be changed freely, from whatever the caller has; the caller's object is left alone.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or torch's ONNXProgram (recognised by its `model`).

    Returns:
        The model, and which of the four it was, for `from_ir`.

    Raises:
        ModelError: it is not a valid model.
        UsageError: it is none of the four.
    """
    if isinstance(model, str | os.PathLike):
        return load(model), "path"
    if isinstance(model, onnx.ModelProto):
        # Tensors made from a proto share its memory, and renaming a value would rename the caller's tensor.
        proto = onnx.ModelProto()
        proto.CopyFrom(model)
        integrity.check_proto(proto, "the model", None)
        return _deserialize(proto, "the model"), "proto"
    if isinstance(model, ir.Model):
        return model.clone(), "ir"
    if isinstance(getattr(model, "model", None), ir.Model) and hasattr(model, "model_proto"):
        return model.model.clone(), "program"
    kinds = "a path, an onnx.ModelProto, an onnx_ir.Model or torch's ONNXProgram"
    raise UsageError(f"a {type(model).__name__} is no model; give {kinds}")


def from_ir(model: ir.Model, kind: Kind, original: Any = None) -> Any:
    """A model as the caller's kind: a path and an onnx_ir.Model give an onnx_ir.Model.

    Args:
        model: The model.
        kind: What `to_ir` said.
        original: What `to_ir` was given; an ONNXProgram passes its other fields on.
    """
    if kind == "proto":
        return ir.to_proto(model)
    if kind == "program":
        program = copy.copy(original)
        program.model = model
        # A session that the original has opened runs the original's graph.
        program._inference_session = program._tempdir = None
        return program
    return model


def _parse(name: str) -> onnx.ModelProto:
    try:
        if os.path.getsize(name) == 0:
            raise ModelError(f"{name} is empty; fetch it again")
        return onnx.load(name, load_external_data=False)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # each of onnx's formats has its own exceptions, and all mean this
        raise ModelError(f"{name} is not an ONNX model or is cut short ({_one_line(error)}); fetch it again") from error


def _deserialize(proto: onnx.ModelProto, name: str) -> ir.Model:
    try:
        model = ir.from_proto(proto)
        for graph in (model.graph, *(f.graph for f in model.functions.values())):
            graph.sort()
    except Exception as error:  # whatever it is, the file's contents are its cause
        raise ModelError(f"{name} is not a valid ONNX model ({_one_line(error)}); export it again") from error
    return model


def _one_line(error: Exception) -> str:
    """The root of an exception chain in one line; onnx_ir's outer errors only say where they were raised."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _external_tensors(model: ir.Model) -> Iterator[tuple[Callable[[ir.TensorProtocol], None], ir.ExternalTensor]]:
    """Each external tensor with a function that puts another in its place."""
    for put, tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            yield put, tensor


def _tensors(model: ir.Model) -> Iterator[tuple[Callable[[ir.TensorProtocol], None], ir.TensorProtocol]]:
    graphs = [model.graph, *model.graph.subgraphs()]
    for function in model.functions.values():
        graphs += [function.graph, *function.graph.subgraphs()]
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield _initializer_setter(value), value.const_value
        for node in graph:
            for attribute in tuple(node.attributes.values()):
                if not attribute.is_ref() and attribute.type == ir.AttributeType.TENSOR:
                    yield _attribute_setter(node, attribute.name), attribute.as_tensor()


def _initializer_setter(value: ir.Value) -> Callable[[ir.TensorProtocol], None]:
    def put(new: ir.TensorProtocol) -> None:
        value.const_value = new

    return put


def _attribute_setter(node: ir.Node, name: str) -> Callable[[ir.TensorProtocol], None]:
    def put(new: ir.TensorProtocol) -> None:
        node.attributes[name] = ir.AttrTensor(name, new)

    return put


def _in_memory(tensor: ir.TensorProtocol) -> bool:
    return not isinstance(tensor, ir.ExternalTensor) and tensor.dtype != ir.DataType.STRING


def _place_data(model: ir.Model, target: Path, written: list[Path]) -> ir.Model:
    """The model with all of its data in the target's folder; a clone when anything had to move.

    Args:
        model: The model, left alone.
        target: The file that will hold it.
        written: Every file that is created is appended, for the caller to remove should a later step fail.
    """
    outside = any(not _lies_in(t, target.parent) for _, t in _external_tensors(model))
    inline = sum(t.nbytes for _, t in _tensors(model) if _in_memory(t))
    if not outside and inline < _PROTO_LIMIT:
        return model
    placed = model.clone()
    moved: dict[Path, str] = {}
    for put, tensor in list(_external_tensors(placed)):
        if not _lies_in(tensor, target.parent):
            source = Path(os.path.abspath(tensor.path))
            if source not in moved:
                moved[source] = _copy_beside(source, _relative_location(tensor), target.parent, written)
            put(_relocated(tensor, moved[source], target.parent))
    if inline >= _PROTO_LIMIT:
        _spill(placed, target, written)
    return placed


def _lies_in(tensor: ir.ExternalTensor, folder: Path) -> bool:
    return not os.path.isabs(tensor.location) and os.path.realpath(tensor.base_dir or ".") == os.path.realpath(folder)


def _relative_location(tensor: ir.ExternalTensor) -> Path:
    location = Path(os.path.normpath(tensor.location))
    return Path(location.name) if location.is_absolute() or ".." in location.parts else location


def _relocated(tensor: ir.ExternalTensor, location: str, folder: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
        base_dir=str(folder),
    )


def _copy_beside(source: Path, location: Path, folder: Path, written: list[Path]) -> str:
    """Copy a data file into a folder, reusing a file of the same content, never writing over another."""
    if not source.is_file():
        raise ModelError(f"the external data file {source} does not exist; put it there, or load the model again")
    destination = _free_place(folder / location, lambda existing: filecmp.cmp(source, existing, shallow=False))
    if not destination.exists():
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(destination) as temporary:
            shutil.copyfile(source, temporary)
        written.append(destination)
    return destination.relative_to(folder).as_posix()


def _free_place(wanted: Path, serves: Callable[[Path], bool]) -> Path:
    """The wanted path, or the first numbered one beside it that is free or that holds the same."""
    for n in itertools.count():
        candidate = wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") if n else wanted
        if not os.path.lexists(candidate):
            return candidate
        if candidate.is_file() and not candidate.is_symlink() and candidate.stat().st_nlink == 1 and serves(candidate):
            return candidate
    raise AssertionError("itertools.count() has no end")


def _spill(model: ir.Model, target: Path, written: list[Path]) -> None:
    """Move the weights that are in memory into a data file: together they are too large for a protobuf."""
    large = [(put, t) for put, t in _tensors(model) if _in_memory(t) and t.nbytes > _SMALL_TENSOR]
    place = _free_place(target.with_name(target.name + ".data"), lambda _: False)
    written.append(place)
    external = ir.external_data.convert_tensors_to_external([t for _, t in large], target.parent, place.name)
    for (put, _), tensor in zip(large, external, strict=True):
        put(tensor)


def _write(model: ir.Model, temporary: Path, target: Path) -> None:
    suffix = onnx.serialization.registry.get_format_from_file_extension(target.suffix)
    temporary.write_bytes(_encoded(ir.to_proto(model), suffix or "protobuf"))


def _encoded(proto: onnx.ModelProto, form: str) -> bytes:
    data: bytes | str = onnx.serialization.registry.get(form).serialize_proto(proto)
    return data.encode() if isinstance(data, str) else data


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file that takes the target's place when the block succeeds, and vanishes when it does not."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:32]}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask
