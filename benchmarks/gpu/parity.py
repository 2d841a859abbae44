"""The kernels' numbers against the float64 oracle, within its bound, with the arrays where a launch finds them.

    python benchmarks/gpu/parity.py LIBRARY [--host] [--draw 60] [--small] [--graph]

The cases are those of the tests that run on the CPU (tests/plugins/kernel_cases.py). It exits 1 at a wrong number, and
prints one JSON object. Only numpy and the package itself are needed: `compute-sanitizer` can watch it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "plugins"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from kernel_call import TYPES, Kernels, numpy_type, problem_of  # noqa: E402
from kernel_cases import Case, awkward, branches, drawn, judge, values  # noqa: E402
from memory import Cuda, Host, Unavailable  # noqa: E402


def matrix(dtype: str, draw: int, small: bool) -> Iterator[Case]:
    """The cases of a type. Forced plans, odd addresses and in-place runs stay with the tests on the CPU."""
    every = itertools.chain(awkward(dtype), branches(dtype), drawn(dtype, draw))
    kept = (case for case in every if case.plan is None and not case.odd and not case.in_place)
    return itertools.islice(kept, 0, None, 23) if small else kept


def run(kernels: Kernels, memory: Cuda | Host, case: Case, graph: bool) -> str | None:
    """Runs a case; what is wrong, or None."""
    rng = np.random.default_rng(sum(case.shape))
    spec, x = case.spec, values(case, rng)
    dims = tuple(case.shape[axis] for axis in spec.axes)
    gain = rng.uniform(-2, 2, dims).astype(numpy_type(case.gain)) if spec.has_gain else None
    bias = rng.uniform(-1, 1, dims).astype(numpy_type(case.bias)) if spec.has_bias else None
    problem = problem_of(spec, case.dtype, case.shape, case.gain, case.bias)
    y = np.full(case.shape, np.nan, numpy_type(TYPES[problem.yType]))  # poison: every element must be written
    with contextlib.ExitStack() as stack:
        for name, array in {"x": x, "y": y, "gain": gain, "bias": bias}.items():
            if array is not None:
                setattr(problem, name, stack.enter_context(memory.placed(array)))
        status = _launch(kernels, memory, problem, graph)
    if status is not None:
        return status
    return judge(case, y.astype(np.float64), x, gain, bias)


def _launch(kernels: Kernels, memory: Cuda | Host, problem: Any, graph: bool) -> str | None:
    answers: list[str] = []
    if graph:
        memory.captured(lambda stream: answers.append(kernels.launch(problem, stream=stream)))
    else:
        answers.append(kernels.launch(problem))
        memory.finish()
    return None if answers == ["OK"] else f"status {answers}"


def measure(library: Path, memory: Cuda | Host, draw: int, small: bool, graph: bool) -> dict[str, Any]:
    """Runs the matrix; how many cases hold in each type, and the first that does not."""
    kernels, start = Kernels(library), time.monotonic()
    counts: dict[str, int] = {}
    for dtype in TYPES:
        counts[dtype] = 0
        for case in matrix(dtype, draw, small):
            wrong = run(kernels, memory, case, False)
            if wrong is None and graph:  # after a plain launch: no kernel is then loaded during a capture
                wrong = run(kernels, memory, case, True)
            if wrong is not None:
                return {"ok": False, "held": counts, "failed": f"{case}: {wrong}"}
            counts[dtype] += 1
    return {"ok": True, "held": counts, "seconds": round(time.monotonic() - start, 1)}


def main() -> int:
    """Runs the matrix on a library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--host", action="store_true", help="the library is the one that g++ compiled")
    parser.add_argument("--draw", type=int, default=60, help="how many random cases a type")
    parser.add_argument("--small", action="store_true", help="a sample, for a checker to watch")
    parser.add_argument("--graph", action="store_true", help="each launch captured into a CUDA graph, which is run")
    chosen = parser.parse_args()
    try:
        memory = Host() if chosen.host else Cuda()
        result = measure(chosen.library, memory, chosen.draw, chosen.small, chosen.graph)
    except Unavailable as reason:
        result = {"ok": False, "unavailable": str(reason)}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
