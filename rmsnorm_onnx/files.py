"""Files: which may be read, where an output goes, and how it gets there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from rmsnorm_onnx.errors import ModelError, UsageError

Name: TypeAlias = str | os.PathLike[str]

_LONGEST = 200


def shown(name: Name) -> str:
    """A file's name in a message: one line, not endless.

    >>> shown("two\\nlines.onnx")
    "'two\\\\nlines.onnx'"
    """
    text = os.fspath(name)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _LONGEST else f"{text[:100]}...{text[-60:]}"


def words(error: Exception) -> str:
    """What an error of the file system says, without the name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def check_input(name: Name) -> None:
    """Check that a regular file that is not empty can be read there.

    Raises:
        UsageError: the name is empty.
        ModelError: there is no such file; pipes and devices are none, since they cannot be read twice.
    """
    if not os.fspath(name):
        raise UsageError("the model's name is empty; name an ONNX file")
    try:
        status = os.stat(name)
    except FileNotFoundError as error:
        if os.path.lexists(name):
            raise ModelError(f"{shown(name)} cannot be read: it is a link to nothing; mend the link") from error
        raise ModelError(f"{shown(name)} does not exist; check the path") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{shown(name)} cannot be read: {words(error)}") from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{shown(name)} is a folder; name the .onnx file in it")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{shown(name)} is no regular file; copy the model into one")
    if status.st_size == 0:
        raise ModelError(f"{shown(name)} is empty; fetch it again")


def output_file(name: Name) -> Path:
    """The file that an output really goes to: links are followed, so that they survive.

    Raises:
        UsageError: nothing can be written there: there is no folder for it, or none that is writable, or there is
            something that is no regular file (a folder, a pipe, a device), which would have to be replaced.
    """
    if not os.fspath(name):
        raise UsageError("the output's name is empty; name a file")
    cannot = f"cannot write {shown(name)}"
    status = None
    try:
        target = Path(os.path.realpath(name))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{cannot}: {words(error)}") from error
    if status is None:
        _check_folder(target, cannot)
    if (status is not None and stat.S_ISDIR(status.st_mode)) or os.fspath(name).endswith(os.sep):
        raise UsageError(f"{cannot}: it is a folder; name a file")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{cannot}: it is no regular file, and would be replaced; name a file")
    if not os.access(target.parent, os.W_OK | os.X_OK):  # the file itself is replaced, whatever its own mode
        raise UsageError(f"{cannot}: the folder {shown(target.parent)} is not writable; name another place")
    return target


def _check_folder(target: Path, cannot: str) -> None:
    if target.parent.is_dir():
        return
    if os.path.lexists(target.parent):
        raise UsageError(f"{cannot}: {shown(target.parent)} is no folder; name another place")
    raise UsageError(f"{cannot}: the folder {shown(target.parent)} does not exist; create it")


def same(first: Name, second: Name) -> bool:
    """Whether two names are of one file, which need not exist yet."""
    try:
        return os.path.samefile(first, second)
    except (OSError, ValueError):
        return os.path.realpath(first) == os.path.realpath(second)


def is_there(target: Path, written: os.stat_result | None) -> bool:
    """Whether a file is the one that was written, whatever has interrupted the writer since."""
    try:
        return written is not None and os.path.samestat(target.stat(), written)
    except OSError:
        return False


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary file that takes the target's place when the block succeeds, and vanishes when it does not.

    Only a process that is killed outright leaves it behind, as `.<target>.<8 digits>.tmp`.
    """
    temporary = target.with_name(f".{target.name[:32]}.{secrets.token_hex(4)}.tmp")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        temporary.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask


class Additions:
    """Files and folders that were not there before, to be removed again should a later step fail."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def add(self, path: Path) -> None:
        """Note a path before it is made."""
        self._made.append(path)

    def make_folder(self, folder: Path) -> None:
        """Make a folder and those above it."""
        if not folder.exists():
            self.make_folder(folder.parent)
            self.add(folder)
            folder.mkdir()

    def undo(self) -> None:
        """Remove what was added, the latest first."""
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
