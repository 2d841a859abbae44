"""stdout, stderr and signals of the command line: closed, full or interrupted, it ends with one line that is true."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from rmsnorm_onnx.errors import RMSNormError


class StdoutError(RMSNormError):
    """The report cannot be written to stdout."""


class Interrupted(BaseException):
    """A signal asks to stop.

    Args:
        number: The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        self.word = "interrupted" if number == signal.SIGINT else "terminated"


def open_streams() -> None:
    """Put something behind each standard stream that is closed.

    Else the next file that is opened takes its number, and what a library prints to stderr goes into the model.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise `Interrupted`, so that whatever is half done is taken back.

    A signal that is ignored, as nohup does with SIGHUP, stays so.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    changed = {}
    if threading.current_thread() is threading.main_thread():  # others may set no handler
        for number in numbers:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                changed[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, before in changed.items():
            signal.signal(number, before)


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)


def write(text: str) -> None:
    """Write to stdout, all of it, now. A reader who has seen enough is no error.

    Raises:
        StdoutError: it is closed or full.
    """
    if sys.stdout is None:
        raise StdoutError("cannot write to stdout: it is closed")
    try:
        sys.stdout.write(_encodable(text, sys.stdout.encoding or "utf-8"))
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up(sys.stdout)
    except OSError as error:
        _give_up(sys.stdout)
        raise StdoutError(f"cannot write to stdout: {error.strerror or error}") from error


def tell(message: str) -> None:
    """Write one line to stderr, if anybody can be told."""
    try:
        print(" ".join(message.split()), file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _encodable(text: str, encoding: str) -> str:
    """The text with what an encoding lacks written as JSON's escapes, which JSON's readers turn back."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
    return text


def _give_up(stream: TextIO) -> None:
    """Python complains once more when it closes a stream that holds text which nobody takes."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
