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
    """What was asked for cannot be had here, as was seen before anything was launched; the text says why."""


class Failed(RuntimeError):
    """CUDA's runtime returned an error once the device was in use: a fault of what was launched, until explained."""


class Host:
    """Plain memory, for the kernels that g++ compiled."""

    name = "host"

    @contextlib.contextmanager
    def placed(self, array: np.ndarray, *, odd: bool = False) -> Iterator[int]:
        """The address of a copy of an array; what is written there is in the array afterwards.

        Args:
            array: Any array.
            odd: One element beyond a multiple of 16 bytes, not on one.
        """
        room = np.zeros(array.nbytes + 16 + array.itemsize, np.uint8)
        start = -room.ctypes.data % 16 + (array.itemsize if odd else 0)
        inside = room[start : start + array.nbytes]
        inside[:] = np.frombuffer(array.tobytes(), np.uint8)
        yield inside.ctypes.data
        array[...] = np.frombuffer(inside.tobytes(), array.dtype).reshape(array.shape)

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
        """Finds the runtime and the device, and takes the device into use by a first allocation.

        Raises:
            Unavailable: there is no runtime or no device, or the device gives no memory.
        """
        self._lib = _runtime()
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p
        count, first = ctypes.c_int(), ctypes.c_void_p()
        code = self._lib.cudaGetDeviceCount(ctypes.byref(count))
        if code or not count.value:
            raise Unavailable(f"looking for a GPU: {self._words(code) if code else 'CUDA finds none'}")
        code = self._lib.cudaMalloc(ctypes.byref(first), ctypes.c_size_t(1))
        if code:
            raise Unavailable(f"the first allocation: {self._words(code)}")
        self._lib.cudaFree(first)

    def _words(self, code: int) -> str:
        return f"CUDA error {code}, {self._lib.cudaGetErrorString(code).decode()}"

    def _check(self, code: int, doing: str) -> None:
        if code:
            raise Failed(f"{doing}: {self._words(code)}")

    @contextlib.contextmanager
    def placed(self, array: np.ndarray, *, odd: bool = False) -> Iterator[int]:
        """The device address of a copy of an array; what is written there is in the array afterwards.

        Args:
            array: Any array.
            odd: One element beyond a multiple of 16 bytes, not on one.

        Raises:
            Failed: it cannot be allocated or copied, or what ran meanwhile went wrong.
        """
        base, shift = ctypes.c_void_p(), array.itemsize if odd else 0
        host = np.ascontiguousarray(array)
        size, room = ctypes.c_size_t(array.nbytes), ctypes.c_size_t(max(array.nbytes + shift, 1))
        self._check(self._lib.cudaMalloc(ctypes.byref(base), room), "allocating")
        try:
            address, source = ctypes.c_void_p((base.value or 0) + shift), ctypes.c_void_p(host.ctypes.data)
            self._check(self._lib.cudaMemcpy(address, source, size, _TO_DEVICE), "copying to the device")
            yield address.value or 0
            self.finish()
            self._check(self._lib.cudaMemcpy(source, address, size, _TO_HOST), "copying from the device")
            array[...] = host
        finally:
            self._lib.cudaFree(base)

    def finish(self) -> None:
        """Waits for the device.

        Raises:
            Failed: something went wrong there.
        """
        self._check(self._lib.cudaDeviceSynchronize(), "running")

    def captured(self, launch: Callable[[int], None]) -> None:
        """Captures a launch on a stream into a graph and runs the graph once.

        Raises:
            Failed: the launch cannot be captured or its graph not be run, with the step and CUDA's reason.
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
