"""The exceptions of this package.

    RMSNormError                     everything below; `exit_code` is the command line's
    ├── CheckFailedError      (1)    a parity or model check did not hold
    ├── ExportError           (1)    a model could not be exported; says which step failed
    ├── ConversionError       (1)    a model has no equal at the opset asked for; names the operators
    ├── UsageError            (2)    an argument that cannot be used (also a ValueError)
    │   └── SpecError         (2)    a value that no RMSNormSpec can hold
    ├── ModelError            (3)    the input model is unreadable or invalid
    ├── MissingDependencyError (4)   an optional package is not installed; names the pip command
    └── PluginError           (4)    the TensorRT plugin's library, or what builds it, is missing; names the mend

Declining a site is not an error: see `rmsnorm_onnx.site.Declined`.
"""

from __future__ import annotations


class RMSNormError(Exception):
    """Base of all errors raised on purpose; the message is one clear line."""

    exit_code = 1


class CheckFailedError(RMSNormError):
    """A check of numbers or of a written model failed."""


class ExportError(RMSNormError):
    """An export failed; the message names the step and keeps the exporter's words."""


class ConversionError(RMSNormError):
    """A model cannot be moved to another opset; the message names each operator in the way, and nothing was changed."""


class UsageError(RMSNormError, ValueError):
    """An argument cannot be used; the message names it and the mend."""

    exit_code = 2


class SpecError(UsageError):
    """A field of an `RMSNormSpec` holds a value that has no meaning."""


class ModelError(RMSNormError):
    """The input model cannot be read, or is not a valid model."""

    exit_code = 3


class MissingDependencyError(RMSNormError):
    """An optional dependency is missing.

    Args:
        package: What could not be imported.
        purpose: What it was needed for.
        install: The pip requirement that brings it.
    """

    exit_code = 4

    def __init__(self, package: str, purpose: str, install: str) -> None:
        super().__init__(f"{purpose} needs {package}: pip install '{install}'")
        self._given = (package, purpose, install)

    def __reduce__(self) -> tuple[type[MissingDependencyError], tuple[str, str, str]]:
        """Errors cross process boundaries by what they were made from."""
        return type(self), self._given


class PluginError(RMSNormError):
    """The TensorRT plugin's library, or what it is built or loaded with, is missing; the message has the mend."""

    exit_code = 4
