"""Calls the kernels' C interface by ctypes, on arrays that lie against a page that nobody may touch."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from rmsnorm_onnx.spec import RMSNormSpec

TYPES = ("float32", "float16", "bfloat16")
PLACEMENTS = ("inside", "outside", "clamp")
STATUS = (
    "OK",
    "BAD_TYPE",
    "BAD_SHAPE",
    "TOO_LARGE",
    "BAD_VALUE",
    "NULL_POINTER",
    "MISALIGNED",
    "OVERLAP",
    "BAD_PLAN",
)
KERNELS = ("NOTHING", "WARP_ROWS", "BLOCK_ROW", "RELOAD_ROW", "COLUMNS", "RELOAD_COLUMNS")
CANARY = 0xA5

_void, _i32, _i64, _f32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Problem(ctypes.Structure):
    """RmsnormProblem."""

    _fields_ = (
        *((name, _void) for name in ("x", "y", "gain", "bias")),
        *((name, _i64) for name in ("outer", "d", "inner", "leading")),
        *((name, _f32) for name in ("epsilon", "gainOffset")),
        *((name, _i32) for name in ("epsilonPlacement", "xType", "yType", "gainStorage", "biasStorage")),
        *((name, _i32) for name in ("factorType", "normalizedType", "gainType")),
    )


class Plan(ctypes.Structure):
    """RmsnormPlan."""

    _fields_ = (
        *((name, _i32) for name in ("kernel", "elements", "accesses", "rows", "lanes", "threads")),
        ("grid", _i64),
    )

    def as_tuple(self) -> tuple[int, ...]:
        """The fields in order."""
        return tuple(getattr(self, name) for name, *_ in self._fields_)


def numpy_type(name: str) -> np.dtype:
    """The numpy dtype of one of TYPES."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclasses.dataclass(frozen=True)
class Place:
    """An array's memory. `whole` is everything around it that may be read or written without a fault."""

    address: int
    array: np.ndarray
    whole: np.ndarray

    def untouched(self) -> bool:
        """Whether no byte beside the array was written."""
        start = self.address - self.whole.ctypes.data
        return bool(np.all(np.delete(self.whole, np.s_[start : start + self.array.nbytes]) == CANARY))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _void
_libc.mmap.argtypes = (_void, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (_void, ctypes.c_size_t)
_libc.mprotect.argtypes = (_void, ctypes.c_size_t, ctypes.c_int)
_libc.posix_memalign.argtypes = (ctypes.POINTER(_void), ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (_void,)


def _view(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)


@contextmanager
def placed(array: np.ndarray, *, aligned: bool = True, heap: bool = False) -> Iterator[Place]:
    """A copy of an array that ends at a page without access.

    Args:
        array: Any array.
        aligned: On 16 bytes (then up to 15 bytes lie between its end and the page), or on its elements' size alone.
        heap: In memory of malloc's, for a sanitizer to watch over, which ends where the array does.
    """
    size, item = array.nbytes, array.itemsize
    if heap:
        holder = _void()
        shift = 0 if aligned else item
        assert _libc.posix_memalign(ctypes.byref(holder), 16, max(size, 1) + shift) == 0
        start = holder.value + shift
        whole = _view(start, size)
    else:
        body = (size // mmap.PAGESIZE + 2) * mmap.PAGESIZE
        base = _libc.mmap(None, body + mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, _void(-1).value)
        assert _libc.mprotect(base + body, mmap.PAGESIZE, 0) == 0
        end = base + body
        start = (end - size) // 16 * 16 if aligned else end - size
        if not aligned and start % 16 == 0:
            start -= item
        whole = _view(base, body)
        whole[:] = CANARY
    inside = _view(start, size).view(array.dtype).reshape(array.shape)
    inside[...] = array
    try:
        yield Place(start, inside, whole)
    finally:
        if heap:
            _libc.free(holder)
        else:
            _libc.munmap(base, body + mmap.PAGESIZE)


class Kernels:
    """The library: its functions with types."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.rmsnormPlan.argtypes = (_void, _void)
        self.lib.rmsnormLaunch.argtypes = (_void, _void)
        self.lib.rmsnormLaunchPlan.argtypes = (_void, _void, _void)
        self.lib.rmsnormStatusString.restype = ctypes.c_char_p

    def plan(self, problem: Problem) -> tuple[str, Plan]:
        """The status and the plan."""
        plan = Plan()
        return self.status(self.lib.rmsnormPlan(ctypes.byref(problem), ctypes.byref(plan))), plan

    def launch(self, problem: Problem, plan: Plan | None = None, stream: int = 0) -> str:
        """Launches on a stream, by a plan or by the library's own; the status."""
        on = _void(stream)
        if plan is None:
            return self.status(self.lib.rmsnormLaunch(ctypes.byref(problem), on))
        return self.status(self.lib.rmsnormLaunchPlan(ctypes.byref(problem), ctypes.byref(plan), on))

    def status(self, code: int) -> str:
        """A status by name; a CUDA error by number."""
        return STATUS[-code] if -len(STATUS) < code <= 0 else str(code)

    def text(self, code: int) -> str:
        """The sentence for a status."""
        return self.lib.rmsnormStatusString(code).decode()


def problem_of(spec: RMSNormSpec, x_type: str, shape: tuple[int, ...], gain_type: str, bias_type: str) -> Problem:
    """The problem of a spec over an array, without pointers; the types are those that gain and bias are stored in."""
    r = spec.resolve(x_type)
    first, last = spec.axes[0] % len(shape), spec.axes[-1] % len(shape)
    return Problem(
        outer=int(np.prod(shape[:first])),
        d=int(np.prod(shape[first : last + 1])),
        inner=int(np.prod(shape[last + 1 :])),
        leading=spec.leading or 0,
        epsilon=spec.epsilon,
        gainOffset=spec.gain_offset,
        epsilonPlacement=PLACEMENTS.index(spec.epsilon_placement),
        xType=TYPES.index(x_type),
        yType=TYPES.index(r.result_type),
        gainStorage=TYPES.index(gain_type),
        biasStorage=TYPES.index(bias_type),
        factorType=TYPES.index(r.factor_type),
        normalizedType=TYPES.index(r.normalized_type),
        gainType=TYPES.index(r.gain_type),
    )
