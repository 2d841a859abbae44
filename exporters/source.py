"""`resolve`: from text on a command line to a module and its example inputs; `is_checkpoint`: what is a folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from rmsnorm_onnx.errors import ExportError, MissingDependencyError, UsageError
from rmsnorm_onnx.exporters.steps import words

OPTIONS = ("kwargs", "dynamic_shapes", "input_names", "output_names", "norms")
"""The keywords of `export` that a callable may give, since no flag can."""

_RETURNS = "(module, args) or (module, args, options)"


def is_checkpoint(source: str) -> bool:
    """Whether `source` names a folder, which is then taken for a transformers checkpoint."""
    return os.path.isdir(source)


def resolve(source: str) -> tuple[Any, Any, dict[str, Any]]:
    """Call what `source` names, and take the module, its example inputs and further options from it.

    Args:
        source: "package.module:callable", importable from the working directory too, or "path/to/file.py:callable".
            The callable takes nothing and returns (module, args), or (module, args, options) with a dictionary of
            `OPTIONS`. What `export` takes in a module's place is taken here too, with None for args.

    Returns:
        The module, its example inputs, and the options.

    Raises:
        UsageError: the text, or what it names, cannot be used so.
        MissingDependencyError: the user's code imports torch, which is not installed.
        ExportError: the user's code raised; its words are kept.
    """
    place, separator, name = source.rpartition(":")
    if not separator or not place or not name:
        raise UsageError(f"{source!r} names no callable and no folder; write module:callable or file.py:callable")
    build: Any = _imported(place)
    for part in name.split("."):
        if not hasattr(build, part):
            raise UsageError(f"{place} has no {name!r}; name a callable that returns {_RETURNS}")
        build = getattr(build, part)
    if not callable(build):
        raise UsageError(f"{source} is a {type(build).__name__}; name a callable that returns {_RETURNS}")
    try:
        built = build()
    except Exception as error:
        raise ExportError(f"calling {source} failed: {words(error)}") from error
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise UsageError(f"{source} returned a {type(built).__name__}; it must return {_RETURNS}")
    module, args, options = (*built, {})[:3]
    if not isinstance(options, dict):
        raise UsageError(f"{source} returned options in a {type(options).__name__}; give a dictionary")
    for name in options:
        if name not in OPTIONS:
            raise UsageError(
                f"{source} returned the option {name!r}; there are {', '.join(OPTIONS)}, the rest is flags"
            )
    return module, args, options


def _imported(place: str) -> types.ModuleType:
    path = Path(place)
    try:
        if path.suffix == ".py":
            return _imported_file(path)
        # An installed command does not see the working directory, as `python -m` does.
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        finally:
            sys.path.remove(os.getcwd())
    except FileNotFoundError as error:
        raise UsageError(f"{place} does not exist; check the path") from error
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise MissingDependencyError("torch", "exporting a module", "rmsnorm_onnx[torch]") from error
        raise UsageError(f"cannot import {place}: no module named {error.name!r}") from error
    except Exception as error:
        raise ExportError(f"importing {place} failed: {words(error)}") from error


def _imported_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
