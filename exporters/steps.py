"""What every route shares: the name of the step at fault, silence, inference mode, and a forward that is replaced."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import ExportError, RMSNormError

if TYPE_CHECKING:
    import torch

ONE_AT_A_TIME = threading.Lock()
"""torch's exporters patch modules and registries of their own, and we redirect the output."""

_LOUD_PACKAGES = ("torch", "transformers", "onnxscript", "onnx_ir")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Name the step at fault in whatever a foreign exporter raises; our own errors say enough."""
    try:
        yield
    except RMSNormError:
        raise
    except Exception as error:
        raise ExportError(f"{name} failed: {words(error)}") from error


def words(error: BaseException) -> str:
    """The root of an exception chain in one line: torch's outer errors say which issue tracker to use."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(_ANSI.sub("", str(error)).split())
    return f"{type(error).__name__}: {text[:500]}"


@contextlib.contextmanager
def inference(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into inference mode, and each of its parts back into the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def forward_replaced(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module another forward, under the signature of its own unless the new one states another."""
    held = module.__dict__.get("forward")
    if not hasattr(forward, "__signature__"):
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if held is not None:
            module.__dict__["forward"] = held


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' progress, warnings and advice off the terminal; failures are raised, not printed."""
    # torch gives many of its loggers a level of their own; those made meanwhile inherit their package's.
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in _LOUD_PACKAGES]
    loggers = [logging.getLogger(name) for name in {*names, *_LOUD_PACKAGES}]
    levels = [logger.level for logger in loggers]
    sink = io.StringIO()  # torch prints whole graphs when it fails
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
