"""Takes a trained model to deployment with its RMSNorms intact.

Finds every RMSNorm in an ONNX graph whatever its spelling, rewrites it into one operator, and proves parity in ulp::

    import rmsnorm_onnx

    fused, report = rmsnorm_onnx.fuse("model.onnx")

Names are imported when they are first used: `import rmsnorm_onnx` loads no runtime and no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsnorm_onnx.against import verify_torch
    from rmsnorm_onnx.exporters.torch import export
    from rmsnorm_onnx.find import find_rms_norms
    from rmsnorm_onnx.oracle import reference, tolerance, ulp_distance
    from rmsnorm_onnx.parity import verify
    from rmsnorm_onnx.passes import FuseRMSNorm, fuse
    from rmsnorm_onnx.site import Declined, Match
    from rmsnorm_onnx.spec import RMSNormSpec

__all__ = [
    "Declined",
    "FuseRMSNorm",
    "Match",
    "RMSNormSpec",
    "export",
    "find_rms_norms",
    "fuse",
    "reference",
    "tolerance",
    "ulp_distance",
    "verify",
    "verify_torch",
]

__version__ = "0.1.0"

# What is reached as rmsnorm_onnx.exporters.export and the like, after `import rmsnorm_onnx` alone.
_MODULES = ("errors", "exporters", "models", "opsets", "plugin", "spec")

_HOMES = {
    "Declined": "rmsnorm_onnx.site",
    "FuseRMSNorm": "rmsnorm_onnx.passes",
    "Match": "rmsnorm_onnx.site",
    "RMSNormSpec": "rmsnorm_onnx.spec",
    "export": "rmsnorm_onnx.exporters.torch",
    "find_rms_norms": "rmsnorm_onnx.find",
    "fuse": "rmsnorm_onnx.passes",
    "reference": "rmsnorm_onnx.oracle",
    "tolerance": "rmsnorm_onnx.oracle",
    "ulp_distance": "rmsnorm_onnx.oracle",
    "verify": "rmsnorm_onnx.parity",
    "verify_torch": "rmsnorm_onnx.against",
}


def __getattr__(name: str) -> Any:
    """Imports a public name, or a module of `_MODULES`, when it is first used (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, and the modules that hold more."""
    return sorted({*globals(), *__all__, *_MODULES})
