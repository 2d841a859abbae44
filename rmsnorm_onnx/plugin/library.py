"""Where the plugin's library is, and where its sources are."""

from __future__ import annotations

import os
from pathlib import Path

from rmsnorm_onnx import files
from rmsnorm_onnx.errors import PluginError

NAME = "librmsnorm_onnx_plugin.so"
VARIABLE = "RMSNORM_ONNX_PLUGIN"
"""The environment variable that names the library, before all other places."""

_PACKAGE = Path(__file__).parents[1]


def library_path() -> Path:
    """The plugin's library.

    Returns:
        The file that RMSNORM_ONNX_PLUGIN names; else the one in the package; else the one that `build` made for the
        user. Only the first of them that is there.

    Raises:
        PluginError: there is none, or RMSNORM_ONNX_PLUGIN names no file; the message has the mend.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise PluginError(f"{VARIABLE} names {files.shown(named)}, which is no file; unset it, or name the library")
        return path.absolute()
    for path in places():
        if path.is_file():
            return path
    looked = " or ".join(files.shown(path.parent) for path in places())
    raise PluginError(f"{NAME} is not in {looked}; run `rmsnorm-onnx plugin build`, or name it in {VARIABLE}")


def find_library() -> Path | None:
    """The plugin's library, or None where there is none."""
    try:
        return library_path()
    except PluginError:
        return None


def places() -> tuple[Path, Path]:
    """Where the library is looked for: the package, then the user's cache, where `build` puts it."""
    return _PACKAGE / "lib" / NAME, cache_folder() / NAME


def cache_folder() -> Path:
    """The user's folder for what this package builds: `rmsnorm_onnx` in XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative one is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "rmsnorm_onnx"


def source_folder() -> Path:
    """The folder of CMakeLists.txt and plugins/: the checkout that the package runs from, or what it brings along.

    Raises:
        PluginError: there is neither.
    """
    checkout, shipped = _PACKAGE.parent, _PACKAGE / "plugin" / "source"
    for folder in (checkout, shipped):
        if (folder / "CMakeLists.txt").is_file() and (folder / "plugins" / "kernels").is_dir():
            return folder
    raise PluginError(f"the plugin's sources are not in {files.shown(shipped)}; install rmsnorm_onnx again")
