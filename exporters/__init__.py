"""From a framework to ONNX, with every norm kept whole.

>>> from rmsnorm_onnx.exporters import export
>>> export.__module__
'rmsnorm_onnx.exporters.torch'
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ExportResult", "export"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("rmsnorm_onnx.exporters.torch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
