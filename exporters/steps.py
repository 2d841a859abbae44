"""What every route shares: the name of the step at fault, silence, another type, inference mode, a replaced forward."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import ExportError, RMSNormError
from rmsnorm_onnx.exporters.state import State

if TYPE_CHECKING:
    import torch

ONE_AT_A_TIME = threading.Lock()
"""torch's exporters patch modules and registries of their own, and we redirect the output."""

_LOUD_PACKAGES = ("torch", "transformers", "onnxscript", "onnx_ir")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LONG, _LONGEST = 240, 400  # of further sentences, and of one that is endless itself
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z<(])|\n\s*\n|\n\s*(?=- |For |If |Caused by|Consider|consider|Suggested)")
_ASIDE = re.compile(r"\s*\((?:unhinted|Size-like symbols): (?:[^()]|\([^()]*\))*\)|^={3,}.*$", re.MULTILINE)
_ADVICE = re.compile(
    r"TORCH_?LOGS|TORCHDYNAMO_|TORCH_SHOW|TORCH_SYMINT|tlparse|stack trace|more information|"
    r"debugging help|draft_export|error above occurred|"
    r"guard_or_false|^Caused by|https?://|suppress_errors|issue tracker|Please report",
    re.IGNORECASE,
)
_DUMP = re.compile(
    r"^\s*(?:from user code|User (?:code|stack)|The following call raised|Traceback \(most|Original traceback|"
    r"While executing|Stack trace|Node:|Graph:|graph\(|File \"|class GraphModule|Exported program|## )",
    re.MULTILINE | re.IGNORECASE,
)
_USER_CALL = re.compile(
    r"The following call raised this error:\s+File \"(?P<file>[^\"]+)\", line (?P<line>\d+)|"
    r"Caused by: \((?!_|torch|fx|nn/)(?P<other>[^:()]+):(?P<at>\d+)"
)


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
    """The root of an exception chain in one line: torch's outer errors say which issue tracker to use.

    Its type and its first sentences; the exception itself, which callers keep as the cause, has all of it.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {shortened(str(error))}"


def shortened(text: str) -> str:
    """The first sentences of a message of torch's, in one line: no advice on torch's logs, and no code or graph.

    >>> shortened("Could not guard on Eq(u0, 1) (unhinted: Eq(u0, 1)).  (Size-like symbols: none)\\n\\n"
    ...     'Caused by: (a.py:1 in f)\\nFor more information, run with TORCH_LOGS="dynamic"')
    'Could not guard on Eq(u0, 1) (at a.py:1)'
    """
    plain = _ANSI.sub("", text)
    where = _USER_CALL.search(plain)
    plain = _DUMP.split(_ASIDE.sub("", plain), maxsplit=1)[0]
    sentences = [" ".join(piece.split()).removeprefix("- ") for piece in _SENTENCE.split(plain)]
    kept = ""
    for sentence in sentences:
        if not sentence or _ADVICE.search(sentence):
            continue
        if kept and len(kept) + len(sentence) > _LONG:
            break
        kept = f"{kept} {sentence}" if kept else sentence
    kept = kept if len(kept) <= _LONGEST else f"{kept[: _LONGEST - 3]}..."
    if where is None:
        return kept
    return f"{kept.rstrip('.')} (at {os.path.basename(where['file'] or where['other'])}:{where['line'] or where['at']})"


def converted(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: str | None
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module and its inputs in the type asked for; a copy of the module where anything has to change.

    Buffers of transformers' models that are computed and not saved, such as rotary frequencies, stay in float32, as
    where transformers makes or loads a model in a half type.
    """
    if dtype is None:
        return module, args, kwargs
    import torch
    from torch.utils import _pytree as pytree

    wanted = getattr(torch, dtype)

    def convert(leaf: Any) -> Any:
        return leaf.to(wanted) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map(convert, (args, kwargs))
    tensors = (*module.parameters(), *module.buffers())
    if any(t.is_floating_point() and t.dtype != wanted for t in tensors):
        with step(f"conversion to {dtype}"):
            module = copy.deepcopy(module)
            computed = _computed_buffers(module)
            module.to(wanted)
            for part, name, buffer in computed:
                part._buffers[name] = buffer
    return module, args, kwargs


def _computed_buffers(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """The float32 buffers of the models of transformers in a module that no checkpoint holds."""
    import torch

    transformers = sys.modules.get("transformers")  # a model of it is there only if it was imported
    kind = getattr(transformers, "PreTrainedModel", None)
    models = [part for part in module.modules() if kind is not None and isinstance(part, kind)]
    parts = {part: None for model in models for part in model.modules()}
    return [
        (part, name, buffer)
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None and name in part._non_persistent_buffers_set and buffer.dtype == torch.float32
    ]


@contextlib.contextmanager
def inference(module: torch.nn.Module) -> Iterator[State]:
    """Put a module into inference mode, and afterwards each of its parts back into the mode and state it was in."""
    modes = {part: part.training for part in module.modules()}
    state = State(module)
    module.eval()
    try:
        yield state
    finally:
        state.restore()
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
