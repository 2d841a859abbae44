"""An error as the results tell it."""

from __future__ import annotations


def in_words(error: BaseException) -> str:
    """An exception's type and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no words'])[0][:300]}"
