"""The kernels' numbers against the float64 oracle, within its bound, with the arrays where a launch finds them.

    python benchmarks/gpu/parity.py LIBRARY [--plugin HARNESS] [--host] [--draw 60] [--small] [--graph]

The cases are those of the tests that run on the CPU (tests/plugins/kernel_cases.py). It prints one JSON object, and
exits 1 at a wrong number or an error of a launch, 4 where this machine has no GPU to launch on. Only numpy and the
package itself are needed: `compute-sanitizer` can watch it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "plugins"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from kernel_call import KERNELS, TYPES, Kernels, numpy_type, problem_of  # noqa: E402
from kernel_cases import Case, awkward, branches, drawn, judge, values  # noqa: E402
from memory import Cuda, Failed, Host, Unavailable  # noqa: E402
from plugin_call import VERSIONED, Library, Tensor, fields_of  # noqa: E402

Addresses = Mapping[str, int]


Kernel = tuple[str, int, int, int]
"""Name, elements an access, accesses and rows a thread: what a library has one function for, by type of x."""


def matrix(dtype: str, draw: int) -> Iterator[Case]:
    """The cases of a type. Forced plans and in-place runs stay with the tests on the CPU."""
    every = itertools.chain(awkward(dtype), branches(dtype), drawn(dtype, draw))
    return (case for case in every if case.plan is None and not case.in_place)


def sample(cases: Iterable[Case], kernel: Callable[[Case], Kernel]) -> Iterator[Case]:
    """Every 23rd case, and the first of each kernel."""
    seen: set[Kernel] = set()
    for number, case in enumerate(cases):
        if number % 23 == 0 or kernel(case) not in seen:
            seen.add(kernel(case))
            yield case


class ByKernels:
    """Launches by the kernels' own interface."""

    def __init__(self, library: Path) -> None:
        """Load them."""
        self._kernels = Kernels(library)

    def case(self, case: Case) -> Case:
        """Every case can be launched."""
        return case

    def kernel(self, case: Case) -> Kernel:
        """The kernel that the library chooses for a case, by addresses like the ones that it is launched with."""
        problem = problem_of(case.spec, case.dtype, case.shape, case.gain, case.bias)
        names = ("x", "y", *(name for name in ("gain", "bias") if getattr(case.spec, f"has_{name}")))
        items = {"x": case.dtype, "y": TYPES[problem.yType], "gain": case.gain, "bias": case.bias}
        for number, name in enumerate(names, 1):
            shift = numpy_type(items[name]).itemsize if name in case.odd.split() else 0
            setattr(problem, name, (number << 44) + shift)
        status, plan = self._kernels.plan(problem)
        if status != "OK":
            raise ValueError(f"{case}: no plan, status {status}")
        return KERNELS[plan.kernel], plan.elements, plan.accesses, plan.rows

    def launch(self, case: Case, arrays: Mapping[str, np.ndarray], addresses: Addresses, stream: int) -> str | None:
        """Launch; what went wrong, or None."""
        problem = problem_of(case.spec, case.dtype, case.shape, case.gain, case.bias)
        for name, address in addresses.items():
            setattr(problem, name, address)
        status = self._kernels.launch(problem, stream=stream)
        return None if status == "OK" else f"status {status}"


class ByPlugin:
    """Launches by the TensorRT plugin's enqueue, after the life that TensorRT gives it; every other gain is a field."""

    def __init__(self, library: Path, harness: Path) -> None:
        """Load both."""
        self._library = Library(harness, library, VERSIONED)
        self._count = 0

    def case(self, case: Case) -> Case:
        """The plugin takes parameters in x's type or float32, and specs with a statistic in float32."""
        gain, bias = ((kind if kind == case.dtype else "float32") for kind in (case.gain, case.bias))
        return dataclasses.replace(case, gain=gain, bias=bias, spec=case.spec.replace(statistic_type="float32"))

    def launch(self, case: Case, arrays: Mapping[str, np.ndarray], addresses: Addresses, stream: int) -> str | None:
        """Create, clone, attach and launch; what went wrong, or None."""
        self._count += 1
        field = arrays["gain"] if "gain" in arrays and self._count % 2 else None
        made = self._library.create(fields_of(case.spec, field))
        attached = made.clone().attach() if made is not None else None
        if attached is None:
            return f"no plugin: {self._library.log()}"
        names = [
            name for name in ("x", "gain", "bias", "y") if name in arrays and not (name == "gain" and field is not None)
        ]
        behind = (1,) * (-case.spec.axes[-1] - 1)
        tensors = [
            Tensor(arrays[n].shape if n in "xy" else (*arrays[n].shape, *behind), arrays[n].dtype.name) for n in names
        ]
        status = attached.enqueue(tensors, [addresses[n] for n in names], stream)
        return None if status == 0 else f"status {status}: {self._library.log()}"


Route = ByKernels | ByPlugin


def run(route: Route, memory: Cuda | Host, case: Case, graph: bool) -> str | None:
    """Run a case; what is wrong, or None."""
    rng = np.random.default_rng(sum(case.shape))
    spec, x = case.spec, values(case, rng)
    dims = tuple(case.shape[axis] for axis in spec.axes)
    gain = rng.uniform(-2, 2, dims).astype(numpy_type(case.gain)) if spec.has_gain else None
    bias = rng.uniform(-1, 1, dims).astype(numpy_type(case.bias)) if spec.has_bias else None
    # poison: every element of y must be written
    y = np.full(case.shape, np.nan, numpy_type(spec.resolve(case.dtype).result_type))
    arrays = {name: a for name, a in {"x": x, "gain": gain, "bias": bias, "y": y}.items() if a is not None}
    answers: list[str | None] = []
    with contextlib.ExitStack() as stack:
        odd = case.odd.split()
        addresses = {n: stack.enter_context(memory.placed(array, odd=n in odd)) for n, array in arrays.items()}

        def launch(stream: int) -> None:
            answers.append(route.launch(case, arrays, addresses, stream))

        if graph:
            memory.captured(launch)
        else:
            launch(0)
            memory.finish()
    if answers != [None]:
        return str(answers)
    return judge(case, y.astype(np.float64), x, gain, bias)


def measure(route: Route, memory: Cuda | Host, draw: int, small: bool, graph: bool) -> dict[str, Any]:
    """Run the matrix; how many cases hold in each type, of how many kernels, and the first that does not hold.

    Raises:
        Unavailable: graphs were asked for where there are none.
    """
    start = time.monotonic()
    counts: dict[str, int] = {}
    kernels: dict[str, int] = {}
    result: dict[str, Any] = {"ok": True, "held": counts}
    if isinstance(route, ByKernels):  # the plugin's library shows no plans
        result["kernels"] = kernels
    for dtype in TYPES:
        counts[dtype] = 0
        seen: set[Kernel] = set()
        for case in map(route.case, chosen_cases(route, dtype, draw, small)):
            try:
                wrong = run(route, memory, case, False)
                if wrong is None and graph:  # after a plain launch: no kernel is then loaded during a capture
                    wrong = run(route, memory, case, True)
            except Failed as error:
                wrong = str(error)
            if wrong is not None:
                return result | {"ok": False, "failed": f"{case}: {wrong}"}
            counts[dtype] += 1
            if isinstance(route, ByKernels):
                seen.add(route.kernel(case))
                kernels[dtype] = len(seen)
    return result | {"seconds": round(time.monotonic() - start, 1)}


def chosen_cases(route: Route, dtype: str, draw: int, small: bool) -> Iterator[Case]:
    """The matrix of a type, or the sample of it that has a case of every kernel.

    Raises:
        ValueError: a sample was asked for of a plugin's library, which shows no plans.
    """
    if not small:
        return matrix(dtype, draw)
    if isinstance(route, ByPlugin):
        raise ValueError("a sample is chosen by the kernels' plans, which a plugin's library does not show")
    return sample(matrix(dtype, draw), route.kernel)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the matrix on a library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--plugin", type=Path, metavar="HARNESS", help="the library is the TensorRT plugin's")
    parser.add_argument("--host", action="store_true", help="the library is the one that g++ compiled")
    parser.add_argument("--draw", type=int, default=60, help="how many random cases a type")
    parser.add_argument("--small", action="store_true", help="a sample, for a checker to watch")
    parser.add_argument("--graph", action="store_true", help="each launch captured into a CUDA graph, which is run")
    chosen = parser.parse_args(arguments)
    if chosen.plugin and chosen.small:
        parser.error("--small chooses by the kernels' plans, which a plugin's library does not show")
    try:
        memory = Host() if chosen.host else Cuda()
        route = ByPlugin(chosen.library, chosen.plugin) if chosen.plugin else ByKernels(chosen.library)
        result = measure(route, memory, chosen.draw, chosen.small, chosen.graph)
    except Unavailable as reason:
        print(json.dumps({"unavailable": str(reason)}))
        return 4
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
