"""The TensorRT plugin from Python: where its library is, how it is built, and whether a model's nodes will reach it.

::

    from rmsnorm_onnx import plugin

    report = plugin.check("model.onnx")  # every fault of every plugin node, without TensorRT
    library = plugin.build()
    lines = plugin.command_lines("model.onnx", shapes={"x": (1, 8, 64)})
    engine = plugin.build_engine("model.onnx", "model.engine")

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmsnorm_onnx.plugin.checker import check
    from rmsnorm_onnx.plugin.commandline import command_lines
    from rmsnorm_onnx.plugin.compilation import build
    from rmsnorm_onnx.plugin.engine import build_engine, compare_engines
    from rmsnorm_onnx.plugin.library import find_library, library_path

__all__ = [
    "build",
    "build_engine",
    "check",
    "command_lines",
    "compare_engines",
    "find_library",
    "library_path",
]

_HOMES = {
    "build": "compilation",
    "build_engine": "engine",
    "check": "checker",
    "command_lines": "commandline",
    "compare_engines": "engine",
    "find_library": "library",
    "library_path": "library",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted({*globals(), *__all__})
