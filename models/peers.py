"""What other tools make of the norms of the same file: how many become one operator, and whether the file still works.

Each tool gets its own copy of the plain export. What it makes is loaded and run beside the file that it was given, so
that a count is never reported of a file that is invalid, does not load, or gives other numbers without saying so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import modelio
from rmsnorm_onnx.models.measure import run

OPERATORS = frozenset({"RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"})
"""What a norm is as one operator of others."""

GROSS: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5})
"""How far outputs of a peer's file may be from those of the file it was given, over the largest: gross faults alone."""

_UNKNOWN_TO_CHECKER = "No Op registered"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one tool made of one file.

    Attributes:
        count: How many norms are one operator in its result; None where there is no result.
        problem: What is wrong with the result, in a few words; "" where nothing is known to be.
        detail: The words of whoever refused it.
    """

    count: int | None
    problem: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """The cell of a table.

        >>> str(Finding(5, "does not load")), str(Finding(None, "fails")), str(Finding(3))
        ('5 (does not load)', 'fails', '3')
        """
        if self.count is None:
            return self.problem
        return f"{self.count} ({self.problem})" if self.problem else str(self.count)

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON-ready data."""
        return dataclasses.asdict(self)


class TooLongError(Exception):
    """A tool took longer than it was given."""


def find(tool: str, plain: Path, folder: Path, inputs: Sequence[np.ndarray], dtype: str, seconds: int = 120) -> Finding:
    """Run one tool on a file.

    Args:
        tool: A key of `TOOLS`.
        plain: The file, its norms in plain operators; only read.
        folder: Where the tool's result is written to.
        inputs: Inputs in the order of the graph, that both files are run on.
        dtype: The float type of the model.
        seconds: How long the tool may take; only in a process's main thread.
    """
    result = folder / f"{plain.stem}-{tool.replace(' ', '-')}.onnx"
    try:
        with _quiet(), _limit(seconds):
            TOOLS[tool](plain, result)
    except TooLongError:
        return Finding(None, f"over {seconds} s")
    except Exception as error:  # whatever a foreign tool raises is its answer
        return Finding(None, _refusal(error), one_line(error))
    model = ir.from_proto(onnx.load(result, load_external_data=False))
    count = sum(node.op_type in OPERATORS for node in _all_nodes(model))
    problem, detail = _fault(plain, result, inputs, dtype)
    return Finding(count, problem, detail)


def _onnxruntime(plain: Path, result: Path) -> None:
    """onnxruntime's C++ optimiser, as a session runs it when it loads a file for the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(result), 4
    onnxruntime.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])


def _rules(plain: Path, result: Path) -> None:
    """onnxscript's rewriter with its rules for RMSNormalization."""
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.fusion import _rms_normalization

    model = rewriter.rewrite(_load(plain), pattern_rewrite_rules=_rms_normalization.rms_normalization_ruleset)
    modelio.save(model, result)


def _for_ort(plain: Path, result: Path) -> None:
    """onnxscript's fusions for onnxruntime."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    modelio.save(optimize_for_ort(_load(plain))[0], result)


def _transformers(plain: Path, result: Path) -> None:
    """The fusions of transformers' exporter for onnxruntime's CPU provider."""
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

    model = _load(plain)
    fuse_for_onnxruntime(model, "cpu")
    modelio.save(model, result)


TOOLS: Mapping[str, Callable[[Path, Path], None]] = MappingProxyType(
    {
        "onnxruntime": _onnxruntime,
        "onnxscript rules": _rules,
        "optimize_for_ort": _for_ort,
        "transformers": _transformers,
    }
)
"""The tools by name; each reads one path and writes another."""


def one_line(error: BaseException | str, limit: int = 200) -> str:
    """An error's words on one line."""
    return " ".join(str(error).split())[:limit]


def _load(path: Path) -> ir.Model:
    return ir.from_proto(onnx.load(path))


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _refusal(error: Exception) -> str:
    """A tool that loads a file cannot say more of one with operators that have no kernel."""
    return "no kernel" if "NOT_IMPLEMENTED" in str(error) else "fails"


def _fault(plain: Path, result: Path, inputs: Sequence[np.ndarray], dtype: str) -> tuple[str, str]:
    """What is wrong with a tool's result, and in whose words."""
    try:
        onnx.checker.check_model(str(result), full_check=True)
    except Exception as error:  # the checker raises several kinds, and onnx its own for files it cannot read
        if _UNKNOWN_TO_CHECKER not in str(error):
            return "invalid", one_line(error)
    try:
        expected = run(plain, inputs, optimise=False)
    except Exception:  # the plain file does not run either: for want of kernels, which says nothing of the tool
        return "", ""
    try:
        outputs = run(result, inputs)
    except Exception as error:
        return "does not load", one_line(error)
    worst = max((_distance(a, b) for a, b in zip(outputs, expected, strict=True)), default=0.0)
    if not worst <= GROSS[dtype]:
        return "other numbers", f"its outputs are off by {worst:.2g} of the largest"
    return "", ""


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference over the largest number."""
    a, b = (v.astype(np.float64) for v in (a, b))
    return float(np.max(np.abs(a - b), initial=0.0) / max(float(np.max(np.abs(b), initial=0.0)), 1e-30))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the tools print and warn of off the terminal."""
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
