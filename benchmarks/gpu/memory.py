"""Where a launch's arrays lie: on the GPU by way of CUDA's runtime, or on the host for a rehearsal without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_TO_DEVICE, _TO_HOST = 1, 2


class Unavailable(RuntimeError):
    """What was asked for cannot be had on this machine; the text says why."""


class Host:
    """Plain memory, for the kernels that g++ compiled."""

    name = "host"

    @contextlib.contextmanager
    def placed(self, array: np.ndarray) -> Iterator[int]:
        """The address of a copy of an array on 16 bytes; what is written there is in the array afterwards."""
        room = np.zeros(array.nbytes + 16, np.uint8)
        start = -room.ctypes.data % 16
        inside = room[start : start + array.nbytes]
        inside[:] = np.frombuffer(array.tobytes(), np.uint8)
        yield inside.ctypes.data
        array[...] = inside.view(array.dtype).reshape(array.shape)

    def finish(self) -> None:
        """Nothing runs behind our back."""

    def captured(self, launch: Callable[[int], None]) -> None:
        """There are no graphs here.

        Raises:
            Unavailable: always.
        """
        raise Unavailable("a rehearsal has no CUDA graphs")


class Cuda:
    """The GPU's memory, through libcudart alone: a checker such as compute-sanitizer then watches little else."""

    name = "cuda"

    def __init__(self) -> None:
        """Finds the runtime and the device.

        Raises:
            Unavailable: there is none.
        """
        self._lib = _runtime()
        count = ctypes.c_int()
        self._check(self._lib.cudaGetDeviceCount(ctypes.byref(count)), "looking for a GPU")

    def _check(self, code: int, doing: str) -> None:
        if code:
            self._lib.cudaGetErrorString.restype = ctypes.c_char_p
            raise Unavailable(f"{doing}: CUDA error {code}, {self._lib.cudaGetErrorString(code).decode()}")

    @contextlib.contextmanager
    def placed(self, array: np.ndarray) -> Iterator[int]:
        """The device address of a copy of an array; what is written there is in the array afterwards."""
        address = ctypes.c_void_p()
        host = np.ascontiguousarray(array)
        size = ctypes.c_size_t(array.nbytes)
        self._check(self._lib.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 1))), "allocating")
        try:
            source = ctypes.c_void_p(host.ctypes.data)
            self._check(self._lib.cudaMemcpy(address, source, size, _TO_DEVICE), "copying to the device")
            yield address.value or 0
            self.finish()
            self._check(self._lib.cudaMemcpy(source, address, size, _TO_HOST), "copying from the device")
            array[...] = host
        finally:
            self._lib.cudaFree(address)

    def finish(self) -> None:
        """Waits for the device, and raises what went wrong there."""
        self._check(self._lib.cudaDeviceSynchronize(), "running")

    def captured(self, launch: Callable[[int], None]) -> None:
        """Captures a launch on a stream into a graph and runs the graph once.

        Raises:
            Unavailable: the launch cannot be captured, with CUDA's reason.
        """
        stream, graph, ready = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        lib, ref = self._lib, ctypes.byref
        self._check(lib.cudaStreamCreate(ref(stream)), "making a stream")
        try:
            self._check(lib.cudaStreamBeginCapture(stream, 0), "beginning a capture")
            launch(stream.value or 0)
            self._check(lib.cudaStreamEndCapture(stream, ref(graph)), "ending the capture")
            self._check(lib.cudaGraphInstantiate(ref(ready), graph, ctypes.c_ulonglong(0)), "instantiating the graph")
            self._check(lib.cudaGraphLaunch(ready, stream), "launching the graph")
            self._check(lib.cudaStreamSynchronize(stream), "running the graph")
            lib.cudaGraphExecDestroy(ready)
            lib.cudaGraphDestroy(graph)
        finally:
            lib.cudaStreamDestroy(stream)


def _runtime() -> Any:
    """libcudart: the toolkit's beside nvcc, or the one that the loader knows."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parents[1]) if nvcc else None]
    folders = ("lib64", "lib", "targets/x86_64-linux/lib")
    beside = [Path(root) / folder / "libcudart.so" for root in roots if root for folder in folders]
    for path in (*(str(path) for path in beside if path.exists()), "libcudart.so", "libcudart.so.13"):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise Unavailable("there is no libcudart.so beside nvcc nor on the loader's path")
