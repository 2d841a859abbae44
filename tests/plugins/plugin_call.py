"""The life of a plugin by ctypes: from fields to a launch, over the CPU's memory or over a GPU's.

`Library` takes any library with the plugin's entry points: the one that CMake built, with pointers and streams of a
real device, or the one for the CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from kernel_call import TYPES, numpy_type

from rmsnorm_onnx.forms import plugin as form
from rmsnorm_onnx.spec import RMSNormSpec

FIELD_TYPES = ("FLOAT16", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "CHAR", "DIMS", "UNKNOWN", "BF16", "INT64")
DATA_TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "fp8": 6, "bfloat16": 7}
LINEAR, CHW2 = 0, 1
NO_FINDER, BARE, VERSIONED, NAMELESS, SILENT = range(5)

_void, _i32, _i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class PluginField(ctypes.Structure):
    """nvinfer1::PluginField."""

    _fields_ = (("name", ctypes.c_char_p), ("data", _void), ("type", _i32), ("length", _i32))


class Collection(ctypes.Structure):
    """nvinfer1::PluginFieldCollection."""

    _fields_ = (("count", _i32), ("fields", ctypes.POINTER(PluginField)))


class Dims(ctypes.Structure):
    """nvinfer1::Dims64."""

    _fields_ = (("rank", _i32), ("d", _i64 * 8))

    @classmethod
    def of(cls, shape: Sequence[int]) -> Self:
        """From a tuple; -1 is a size that is not known."""
        return cls(len(shape), (_i64 * 8)(*shape))

    def tuple(self) -> tuple[int, ...]:
        """As a tuple."""
        return tuple(self.d[: self.rank])


class TensorDesc(ctypes.Structure):
    """nvinfer1::PluginTensorDesc."""

    _fields_ = (("dims", Dims), ("type", _i32), ("format", _i32), ("scale", ctypes.c_float))


class DynamicDesc(ctypes.Structure):
    """nvinfer1::DynamicPluginTensorDesc."""

    _fields_ = (("desc", TensorDesc), ("min", Dims), ("max", Dims), ("opt", Dims))


@dataclasses.dataclass(frozen=True)
class Field:
    """One field: its bytes, TensorRT's name of its type, and the number of its elements."""

    data: bytes | None
    type: str
    length: int


def field(value: Any) -> Field:
    """A value as TensorRT's ONNX parser passes it: strings with their end, integers as INT32."""
    if isinstance(value, str):
        return Field(value.encode() + b"\0", "CHAR", len(value) + 1)
    if isinstance(value, np.ndarray):
        name = {"float32": "FLOAT32", "float16": "FLOAT16", "bfloat16": "BF16", "float64": "FLOAT64"}[value.dtype.name]
        return Field(value.tobytes(), name, value.size)
    array = np.atleast_1d(np.asarray(value, np.float32 if isinstance(value, float) else np.int32))
    return Field(array.tobytes(), "FLOAT32" if isinstance(value, float) else "INT32", array.size)


def fields_of(spec: RMSNormSpec, gain: np.ndarray | None = None) -> dict[str, Field]:
    """The fields of a spec, as `rmsnorm_onnx.fuse` writes them, and the gain where it is one of them."""
    written = form.fields(spec)
    values = {name: field(written[name]) for name in form.FIELDS}
    return values if gain is None else {**values, "gain": field(gain)}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What TensorRT says of a tensor."""

    shape: tuple[int, ...]
    type: str
    format: int = LINEAR

    def desc(self) -> TensorDesc:
        """As the plugin sees it at a launch."""
        return TensorDesc(Dims.of(self.shape), DATA_TYPES[self.type], self.format, -1.0)

    def dynamic(self) -> DynamicDesc:
        """As the plugin sees it while an engine is built."""
        known = Dims.of([max(n, 1) for n in self.shape])
        return DynamicDesc(self.desc(), known, known, known)


def tensor(array: np.ndarray) -> Tensor:
    """The tensor of an array."""
    return Tensor(array.shape, array.dtype.name)


class Library:
    """A plugin's library with its one creator, through the harness.

    Args:
        harness: The harness.
        path: The plugin's library.
        finder: How the host lends its logger.
    """

    def __init__(self, harness: Path, path: Path, finder: int = BARE) -> None:
        self.lib = ctypes.CDLL(str(harness))
        for name in ("Open", "FieldNames", "Create", "Clone", "Attach", "Fields"):
            getattr(self.lib, f"harness{name}").restype = _void
        for name in ("TimingId", "Metadata"):
            getattr(self.lib, f"harness{name}").restype = ctypes.c_char_p
        for name in ("Log", "Identity", "Workspace"):
            getattr(self.lib, f"harness{name}").restype = ctypes.c_size_t
        self.plugin = ctypes.CDLL(str(path))
        self._path = path
        self.lend(finder)

    def lend(self, finder: int) -> None:
        """Opens the library as a host with another finder of loggers."""
        problem = ctypes.create_string_buffer(1000)
        self.creator = _void(self.lib.harnessOpen(str(self._path).encode(), finder, problem, len(problem)))
        if not self.creator:
            raise OSError(problem.value.decode())

    @property
    def kernels(self) -> ctypes.CDLL:
        """The shim's controls, in a library for the CPU: they are the kernels', which it is linked with."""
        return self.plugin

    def log(self) -> str:
        """What was logged since the last call."""
        text = ctypes.create_string_buffer(10000)
        self.lib.harnessLog(text, len(text))
        return text.value.decode()

    def field_names(self) -> dict[str, str]:
        """The declared fields and their types."""
        found = Collection.from_address(self.lib.harnessFieldNames(self.creator))
        return {f.name.decode(): FIELD_TYPES[f.type] for f in found.fields[: found.count]}

    def create(self, fields: Mapping[str, Field] | Iterable[tuple[str, Field]], name: str = "norm") -> Plugin | None:
        """A plugin; None where the fields are refused."""
        pairs = list(fields.items()) if isinstance(fields, Mapping) else list(fields)
        data = [None if f.data is None else ctypes.create_string_buffer(f.data, len(f.data) or 1) for _, f in pairs]
        array = (PluginField * max(len(pairs), 1))()
        for item, (field_name, f), memory in zip(array, pairs, data, strict=False):
            address = None if memory is None else ctypes.addressof(memory)
            item.name, item.data = field_name.encode(), address
            item.type, item.length = FIELD_TYPES.index(f.type), f.length
        collection = Collection(len(pairs), array)
        found = self.create_raw(collection, name)
        for memory in data:  # what the plugin keeps must be its own
            if memory is not None:
                ctypes.memset(memory, 0xEE, len(memory))
        return found

    def create_raw(self, collection: Collection | None, name: str | None = "norm") -> Plugin | None:
        """A plugin of a collection as it is."""
        pointer = None if collection is None else ctypes.byref(collection)
        found = self.lib.harnessCreate(self.creator, None if name is None else name.encode(), pointer, 0)
        return Plugin(self, found) if found else None


class Plugin:
    """One plugin."""

    def __init__(self, library: Library, address: int) -> None:
        self.library, self.lib, self.address = library, library.lib, _void(address)

    def destroy(self) -> None:
        """Ends it."""
        self.lib.harnessDestroy(self.address)

    def clone(self) -> Plugin:
        """A copy."""
        return Plugin(self.library, self.lib.harnessClone(self.address))

    def attach(self) -> Plugin | None:
        """A copy for an execution context; None where that fails."""
        found = self.lib.harnessAttach(self.address)
        return Plugin(self.library, found) if found else None

    def identity(self) -> str:
        """Names, versions, namespaces and interfaces."""
        text = ctypes.create_string_buffer(1000)
        self.lib.harnessIdentity(self.library.creator, self.address, text, len(text))
        return text.value.decode()

    def stored(self) -> dict[str, Field]:
        """The fields that an engine keeps."""
        found = Collection.from_address(self.lib.harnessFields(self.address))
        sizes = {"FLOAT32": 4, "INT32": 4, "CHAR": 1, "FLOAT16": 2, "BF16": 2}
        kept = {}
        for f in found.fields[: found.count]:
            kind = FIELD_TYPES[f.type]
            kept[f.name.decode()] = Field(ctypes.string_at(f.data, f.length * sizes[kind]), kind, f.length)
        return kept

    def timing_id(self) -> str:
        """What tells it apart in a timing cache."""
        return self.lib.harnessTimingId(self.address).decode()

    def metadata(self) -> str:
        """What an engine's inspector shows."""
        return self.lib.harnessMetadata(self.address).decode()

    def output_type(self, *inputs: str, outputs: int = 1) -> str | None:
        """y's type for types of inputs; None where they are refused."""
        out = (_i32 * 4)(*[-1] * 4)
        array = (_i32 * len(inputs))(*[DATA_TYPES[name] for name in inputs])
        if self.lib.harnessOutputTypes(self.address, array, len(inputs), out, outputs) != 0:
            return None
        return next(name for name, code in DATA_TYPES.items() if code == out[0])

    def output_shape(self, *inputs: Sequence[int], outputs: int = 1) -> tuple[int, ...] | None:
        """For each axis of y, the input's number times 100 plus its axis; None where the shapes are refused."""
        array = (Dims * len(inputs))(*[Dims.of(shape) for shape in inputs])
        shape = Dims()
        status = self.lib.harnessOutputShape(self.address, array, len(inputs), outputs, ctypes.byref(shape))
        return shape.tuple() if status == 0 else None

    def supports(self, *tensors: Tensor, outputs: int = 1) -> list[bool]:
        """Whether each tensor, the inputs and then the outputs, fits those before it."""
        array = (DynamicDesc * len(tensors))(*[t.dynamic() for t in tensors])
        inputs = len(tensors) - outputs
        return [bool(self.lib.harnessSupports(self.address, i, array, inputs, outputs)) for i in range(len(tensors))]

    def configure(self, *tensors: Tensor, outputs: int = 1) -> int:
        """The status; 0 is good."""
        array = (DynamicDesc * len(tensors))(*[t.dynamic() for t in tensors])
        return self.lib.harnessConfigure(self.address, array, len(tensors) - outputs, outputs)

    def workspace(self, *tensors: Tensor, outputs: int = 1) -> int:
        """Bytes."""
        array = (DynamicDesc * len(tensors))(*[t.dynamic() for t in tensors])
        return self.lib.harnessWorkspace(self.address, array, len(tensors) - outputs, outputs)

    def shape_change(self, *tensors: Tensor, outputs: int = 1) -> int:
        """The status; 0 is good."""
        array = (TensorDesc * len(tensors))(*[t.desc() for t in tensors])
        return self.lib.harnessShapeChange(self.address, array, len(tensors) - outputs, outputs)

    def enqueue(
        self, tensors: Sequence[Tensor], addresses: Sequence[int | None], stream: int | None = None, outputs: int = 1
    ) -> int:
        """Launches on the addresses of the inputs and then of the outputs; the status."""
        inputs = len(tensors) - outputs
        descs = (TensorDesc * len(tensors))(*[t.desc() for t in tensors])
        pointers = (_void * len(tensors))(*addresses)
        out = ctypes.byref(descs, inputs * ctypes.sizeof(TensorDesc))
        to = ctypes.byref(pointers, inputs * ctypes.sizeof(_void))
        return self.lib.harnessEnqueue(self.address, descs, out, pointers, to, _void(stream))


def result_of(spec: RMSNormSpec, x: np.ndarray) -> np.ndarray:
    """An array for y, in its own type."""
    name = spec.resolve(x.dtype.name).result_type
    assert name in TYPES
    return np.zeros(x.shape, numpy_type(name))
