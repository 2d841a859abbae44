"""What computes the same norm, or moves the same bytes, on the same tensors: ours and its peers.

Each maker gives a function of (x, y), which writes to y or makes its own result, as the peer's users would call it; or
raises `Unavailable`. The norm is y = gain * x / sqrt(mean(x^2) + 1e-6), rounded before the gain in a half type.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from kernel_call import TYPES, Kernels, Problem
from memory import Unavailable

EPSILON = 1e-6
Run = Callable[[torch.Tensor, torch.Tensor], Any]

COMPILED = MappingProxyType({"bfloat16": (128, 1024, 4096)})
"""The sizes that torch.compile is given, by type: each takes some ten seconds to compile."""


def left_out(name: str, gain: torch.Tensor) -> bool:
    """Whether a peer is not timed at a size by design."""
    return name == "torch.compile" and gain.numel() not in COMPILED.get(str(gain.dtype).removeprefix("torch."), ())


class Ours:
    """This project's kernels."""

    def __init__(self, library: Path) -> None:
        """Load them."""
        self._kernels = Kernels(library)

    def make(self, gain: torch.Tensor) -> Run:
        """The norm by our kernel: one launch, on torch's stream."""
        launch, kind = self._kernels.lib.rmsnormLaunch, TYPES.index(str(gain.dtype).removeprefix("torch."))
        problem = Problem(d=gain.numel(), inner=1, epsilon=EPSILON, gain=gain.data_ptr())
        for field in ("xType", "yType", "gainStorage", "biasStorage", "normalizedType", "gainType"):
            setattr(problem, field, kind)
        problem.factorType = TYPES.index("float32")

        def run(x: torch.Tensor, y: torch.Tensor) -> None:
            problem.x, problem.y, problem.outer = x.data_ptr(), y.data_ptr(), x.shape[0]
            status = launch(ctypes.byref(problem), ctypes.c_void_p(_stream(x)))
            if status:
                raise RuntimeError(self._kernels.text(status))

        return run


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def copy(gain: torch.Tensor) -> Run:
    """A copy of the same bytes: what no norm can beat."""
    return lambda x, y: y.copy_(x)


def eager(gain: torch.Tensor) -> Run:
    """torch.nn.functional.rms_norm."""
    return lambda x, y: torch.nn.functional.rms_norm(x, gain.shape, gain, EPSILON)


def layer_norm(gain: torch.Tensor) -> Run:
    """torch.nn.functional.layer_norm without a bias: the operator that RMSNorm replaced."""
    return lambda x, y: torch.nn.functional.layer_norm(x, gain.shape, gain, None, EPSILON)


def compiled(gain: torch.Tensor) -> Run:
    """torch.compile of rms_norm, for one shape."""
    norm = torch.compile(lambda x: torch.nn.functional.rms_norm(x, gain.shape, gain, EPSILON), dynamic=False)
    return lambda x, y: norm(x)


def liger(gain: torch.Tensor) -> Run:
    """Liger's Triton kernel, in the mode that rounds before the gain.

    Raises:
        Unavailable: it is not installed.
    """
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError as error:
        raise Unavailable(f"liger-kernel is not here: {error}") from error
    return lambda x, y: LigerRMSNormFunction.apply(x, gain, EPSILON, 0.0, "llama", False)


PEERS: MappingProxyType[str, Callable[[torch.Tensor], Run]] = MappingProxyType(
    {"copy": copy, "torch": eager, "torch.compile": compiled, "liger": liger, "layer_norm": layer_norm}
)
