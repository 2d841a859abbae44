"""From a framework to ONNX, with every norm kept whole.

>>> from rmsnorm_onnx.exporters import export
>>> export.__module__
'rmsnorm_onnx.exporters.torch'
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "ExportResult": "rmsnorm_onnx.exporters.torch",
    "Kept": "rmsnorm_onnx.exporters.kept",
    "PairedNorm": "rmsnorm_onnx.exporters.pairing",
    "export": "rmsnorm_onnx.exporters.torch",
    "export_keras": "rmsnorm_onnx.exporters.keras",
    "export_transformers": "rmsnorm_onnx.exporters.transformers",
}

__all__ = ["ExportResult", "Kept", "PairedNorm", "export", "export_keras", "export_transformers"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
