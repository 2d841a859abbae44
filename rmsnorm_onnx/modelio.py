"""Models in and out: by path with the weights never read, or as the object that the caller has.

A model of 2 GB costs the memory of its graph. External data stays where it is: a file saved into the same folder
refers to it, a file saved elsewhere gets a plain copy of it (onnx refuses links).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx
import onnx_ir as ir

from rmsnorm_onnx import files, integrity, weights
from rmsnorm_onnx.errors import ModelError, UsageError

Kind: TypeAlias = Literal["path", "proto", "ir", "program"]
"""What a caller handed over: a path, an onnx.ModelProto, an onnx_ir.Model, or torch's ONNXProgram."""


def load(path: str | os.PathLike[str]) -> ir.Model:
    """Read a model's graph; its external weights are neither read nor mapped.

    Args:
        path: An ONNX file: protobuf, or the text forms that onnx knows by their extensions.

    Returns:
        The model, its nodes in topological order, its external tensors lazy.

    Raises:
        ModelError: the file is missing, no regular file, unreadable or not a valid model, or its external data is
            missing, too short or outside the model's folder.
        UsageError: the path is empty.
    """
    files.check_input(path)
    name = files.shown(path)
    proto = parse(path)
    file = Path(os.path.abspath(path))
    integrity.check_proto(proto, name, file)
    return _deserialize(proto, name, str(file.parent))


def check_output(path: str | os.PathLike[str]) -> None:
    """Check that `save` could write there, before the work that comes first is paid for.

    Raises:
        UsageError: it could not.
    """
    files.output_file(path)


def save(model: ir.Model, path: str | os.PathLike[str]) -> None:
    """Write a model, whole or not at all; writing over the file it came from is fine.

    External data in the target's folder is kept by reference; other external data is copied there, under its own name,
    or under a fresh one where another file bears it. A link is written through: it stays, and what it links to becomes
    the model, its data beside the link, where loaders look for it. Only a process that is killed outright leaves a
    file behind, `.<name>.<8 digits>.tmp`.

    Raises:
        UsageError: the file cannot be written there, or its data is kept there; nothing was written.
    """
    target = files.output_file(path)
    weights.check_apart(model, target, files.shown(path))
    added = files.Additions()
    written = None
    try:
        placed = weights.beside(model, Path(os.path.abspath(path)), target, added)
        with files.replacing(target) as temporary:
            _write(placed, temporary, target)
            written = temporary.stat()
    except BaseException as error:
        if not files.is_there(target, written):
            added.undo()
        if isinstance(error, OSError):
            raise UsageError(f"cannot write {files.shown(path)}: {files.words(error)}") from error
        raise


def to_ir(model: Any) -> tuple[ir.Model, Kind]:
    """A model that may be changed freely, from whatever the caller has; the caller's object is left alone.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or torch's ONNXProgram (recognised by its `model`).

    Returns:
        The model, and which of the four it was, for `from_ir`. External data of a ModelProto is kept by reference, and
        reading it raises a UsageError: a ModelProto does not say in which folder it is.

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
        return _deserialize(proto, "the model", None), "proto"
    if isinstance(model, ir.Model):
        return _cloned(model), "ir"
    if isinstance(getattr(model, "model", None), ir.Model) and hasattr(model, "model_proto"):
        return _cloned(model.model), "program"
    kinds = "a path, an onnx.ModelProto, an onnx_ir.Model or torch's ONNXProgram"
    raise UsageError(f"a {type(model).__name__} is no model; give {kinds}")


def from_ir(model: ir.Model, kind: Kind, original: Any = None, *, changed: bool = True) -> Any:
    """A model as the caller's kind: a path and an onnx_ir.Model give an onnx_ir.Model.

    Args:
        model: The model.
        kind: What `to_ir` said.
        original: What `to_ir` was given; an ONNXProgram passes its other fields on.
        changed: Whether the model was changed; a ModelProto that was not comes back as an equal one, to the byte.
    """
    if kind == "proto" and not changed and original is not None:
        same = onnx.ModelProto()
        same.CopyFrom(original)
        return same
    if kind == "proto":
        return weights.to_proto(model)
    if kind == "program":
        program = copy.copy(original)
        program.model = model
        # A session that the original has opened runs the original's graph.
        program._inference_session = program._tempdir = None
        return program
    return model


def _cloned(model: ir.Model) -> ir.Model:
    clone = model.clone()
    weights.adopt(clone, "")  # onnx_ir looks for data of an unnamed folder in the working directory
    return clone


def parse(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """A file's message, unchecked; its external data is not read.

    Raises:
        ModelError: it cannot be read, or is no ONNX file.
    """
    name = files.shown(path)
    try:
        return onnx.load(os.fspath(path), load_external_data=False)
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {files.words(error)}") from error
    except Exception as error:  # each of onnx's formats has its own exceptions, and all mean this
        raise ModelError(f"{name} is not an ONNX model or is cut short ({_one_line(error)}); fetch it again") from error


def _deserialize(proto: onnx.ModelProto, name: str, folder: str | None) -> ir.Model:
    try:
        with warnings.catch_warnings(), quiet():
            warnings.filterwarnings("ignore", "Ignoring unknown external data key")  # `adopt` keeps them
            model = ir.from_proto(proto)
        weights.adopt(model, folder, proto)
        for graph in (model.graph, *(f.graph for f in model.functions.values())):
            graph.sort()
    except Exception as error:  # whatever it is, the file's contents are its cause
        raise ModelError(f"{name} is not a valid ONNX model ({_one_line(error)}); export it again") from error
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep onnx_ir from logging what it passes over in a file: what is wrong is said by whoever reads the model."""
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _one_line(error: Exception) -> str:
    """The root of an exception chain in one line; onnx_ir's outer errors only say where they were raised."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _write(model: ir.Model, temporary: Path, target: Path) -> None:
    suffix = onnx.serialization.registry.get_format_from_file_extension(target.suffix)
    temporary.write_bytes(_encoded(weights.to_proto(model), suffix or "protobuf"))


def _encoded(proto: onnx.ModelProto, form: str) -> bytes:
    data: bytes | str = onnx.serialization.registry.get(form).serialize_proto(proto)
    return data.encode() if isinstance(data, str) else data
