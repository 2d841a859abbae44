"""Cases for the kernels and what is asked of each: within the oracle's bound, nothing else read or written.

`python tests/plugins/kernel_cases.py LIBRARY` runs them all on a library and exits 1 at the first that fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from kernel_api import first_wrong
from kernel_call import KERNELS, TYPES, Kernels, Plan, numpy_type, placed, problem_of

from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.spec import RMSNormSpec, preset

PLAIN = RMSNormSpec(epsilon=1e-6)


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch.

    `plan` None is the library's own; `odd` names arrays that are not on 16 bytes. `exact`: the statistic has no
    rounding error, so that the result must be the oracle's with all rounding points, bit for bit.
    """

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    spec: RMSNormSpec = PLAIN
    gain: str = "bfloat16"
    bias: str = "bfloat16"
    values: str = "normal"
    odd: str = ""
    in_place: bool = False
    plan: tuple[int, ...] | None = None
    descending: bool = False
    kernel: str = ""
    exact: bool = False

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return " ".join(f"{k}={v}" for k, v in changed.items() if v not in ("", False, None))


def values(case: Case, rng: np.random.Generator) -> np.ndarray:
    """x of a case, in its type, with rows of a size of their own and one row of zeros where there are several."""
    x = rng.standard_normal(case.shape)
    epsilon = case.spec.epsilon
    size = {
        "normal": 1.0,
        "huge": 1e4 if case.dtype == "float16" else 1e17,
        "tiny": 1e-6 if case.dtype == "float16" else 1e-15,
        "near epsilon": np.sqrt(epsilon) if case.spec.epsilon_placement == "inside" else epsilon,
        "zeros": 0.0,
    }[case.values]
    x *= size
    if case.exact and case.spec.leading is None:
        x *= np.arange(case.shape[-2])[:, None] == 1  # one element a column: its square is the sum
    if case.values == "near epsilon" and len(case.shape) > 1 and case.shape[0] > 1:
        x[0] = 0
    if case.values == "huge" and case.dtype == "float16":
        x = np.clip(x, -6e4, 6e4)
        x.flat[:: max(1, x.size // 7)] = 6e4
    return x.astype(numpy_type(case.dtype))


def run(kernels: Kernels, case: Case, *, heap: bool = False) -> str | None:
    """Runs a case; what is wrong, or None."""
    rng = np.random.default_rng(sum(case.shape))
    spec, x = case.spec, values(case, rng)
    dims = tuple(case.shape[a] for a in spec.axes)
    gain = rng.uniform(-2, 2, dims).astype(numpy_type(case.gain)) if spec.has_gain else None
    bias = rng.uniform(-1, 1, dims).astype(numpy_type(case.bias)) if spec.has_bias else None
    problem = problem_of(spec, case.dtype, case.shape, case.gain, case.bias)
    y = np.zeros(case.shape, numpy_type(TYPES[problem.yType]))
    kernels.lib.shimDescending(case.descending)
    with contextlib.ExitStack() as stack:
        places = {}
        for name, array in {"x": x, "y": y, "gain": gain, "bias": bias}.items():
            if array is not None and not (name == "y" and case.in_place):
                place = stack.enter_context(placed(array, aligned=name not in case.odd.split(), heap=heap))
                places[name] = place
                setattr(problem, name, place.address)
        if case.in_place:
            problem.y = problem.x
        status, own = kernels.plan(problem)
        if case.kernel and KERNELS[own.kernel] != case.kernel:
            return f"the plan is {own.as_tuple()}, not {case.kernel}"
        plan = Plan(*case.plan) if case.plan else None
        status = kernels.launch(problem, plan)
        if status != "OK":
            return f"status {status}"
        got = places["x" if case.in_place else "y"].array.astype(np.float64)
        for name, array in {"x": x, "gain": gain, "bias": bias}.items():
            kept = case.in_place and name == "x"
            if array is not None and not kept and places[name].array.tobytes() != array.tobytes():
                return f"{name} was changed"
        for name, place in places.items():
            if not place.untouched():
                return f"something was written beside {name}"
    return judge(case, got, x, gain, bias)


def judge(case: Case, got: np.ndarray, x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None) -> str | None:
    """Whether a result is within the oracle's bound; where that is infinite, any value is."""
    want = reference(case.spec, x, gain, bias, rounded=case.exact)
    bound = np.zeros(x.shape) if case.exact else error_bound(case.spec, x, gain, bias)
    with np.errstate(invalid="ignore"):
        wrong = np.isfinite(bound) & ~(np.abs(got - want) <= bound) & (got != want)
    if not np.any(wrong):
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{np.sum(wrong)} of {wrong.size}; at {at}: {got[at]} for {want[at]} +- {bound[at]}"


def branches(dtype: str) -> Iterator[Case]:
    """Every way through the dispatch, by shape: both ends of every range, on rows and on columns."""
    wide = 4 if dtype == "float32" else 8
    same = {"dtype": dtype, "gain": dtype, "bias": dtype}
    by_accesses = {
        "WARP_ROWS": (
            (1, 70),
            (2, 65),
            (3, 33),
            (5, 9),
            (16, 8),
            (17, 5),
            (32, 5),
            (33, 3),
            (64, 5),
            (65, 2),
            (128, 3),
        ),
        "BLOCK_ROW": ((257, 2), (384, 2), (512, 1), (2048, 1), (2049, 2), (8192, 1)),
        "RELOAD_ROW": ((8193, 2), (16384, 1)),
    }
    by_accesses["WARP_ROWS"] += ((129, 3), (256, 2))
    for kernel, sizes in by_accesses.items():
        for accesses, rows in sizes:
            yield Case((rows, accesses * wide), kernel=kernel, **same)
    single = {1: 300, 2: 70, 3: 65, 7: 9, 31: 6, 33: 3, 100: 2, 255: 3, 257: 2, 1001: 1, 8191: 1, 8193: 1}
    for d, rows in single.items():
        kernel = "WARP_ROWS" if d <= 256 else "BLOCK_ROW" if d <= 8192 else "RELOAD_ROW"
        yield Case((rows, d), kernel=kernel, odd="x", **same)
    inner = RMSNormSpec(axes=(-2,), epsilon=1e-6)
    for d, columns in ((1, 16), (3, 72), (64, 8), (65, 64), (129, 8), (256, 24), (257, 8), (512, 8)):
        yield Case((2, d, columns), spec=inner, kernel="COLUMNS", **same)
    yield Case((2, 513, 8), spec=inner, kernel="RELOAD_COLUMNS", **same)
    yield Case((1, 1100, 8), spec=inner, kernel="RELOAD_COLUMNS", **same)
    for d, columns in ((5, 3), (64, 33), (128, 7)):
        yield Case((3, d, columns), spec=inner, kernel="COLUMNS", **same)
    yield Case((3, 129, 5), spec=inner, kernel="RELOAD_COLUMNS", **same)


def forced(dtype: str) -> Iterator[Case]:
    """Every kernel on small rows, by plans of our own: tails, blocks of several warps, several launches."""
    wide = 4 if dtype == "float32" else 8
    names = {name: code for code, name in enumerate(KERNELS)}
    leading = PLAIN.replace(leading=wide * 2 + 3)
    for elements, odd in ((wide, ""), (1, "x y")):
        for accesses, rows in ((1, 4), (2, 2), (4, 1), (8, 1)) if elements > 1 else ((1, 4), (8, 1)):
            d = elements * (accesses * 8 - 3)
            plan = (names["WARP_ROWS"], elements, accesses, rows, 8, 64, 1)
            for spec in (PLAIN, PLAIN.replace(leading=min(d, leading.leading)), PLAIN.replace(has_gain=False)):
                yield Case((37, d), dtype, spec, dtype, dtype, odd=odd, plan=plan)
        for kernel in ("BLOCK_ROW", "RELOAD_ROW"):
            for accesses in (
                (4, 8) if elements > 1 and kernel == "BLOCK_ROW" else (8,) if kernel == "BLOCK_ROW" else (4,)
            ):
                d = elements * (accesses * 64 - 3)
                for threads, descending in ((64, False), (64, True), (160, False)):
                    plan = (names[kernel], elements, accesses, 1, threads, threads, 2)
                    for spec in (PLAIN, leading, PLAIN.replace(has_gain=False)):
                        yield Case((5, d), dtype, spec, dtype, dtype, odd=odd, plan=plan, descending=descending)
        inner = RMSNormSpec(axes=(-2,), epsilon=1e-6)
        columns = 9 * elements if elements > 1 else 37
        for kernel, accesses in (("COLUMNS", 8), ("RELOAD_COLUMNS", 4)):
            lanes = 8 if elements > 1 else 32
            for threads, descending in ((128, False), (128, True)):
                d = threads // lanes * accesses - 1
                plan = (names[kernel], elements, accesses, 1, lanes, threads, 2)
                yield Case((5, d, columns), dtype, inner, dtype, dtype, odd=odd, plan=plan, descending=descending)


def awkward(dtype: str) -> Iterator[Case]:
    """Sizes of values, families of models, epsilons, memory: on rows and columns."""
    wide = 4 if dtype == "float32" else 8
    shapes = ((3, 6 * wide), (3, 13), (2, 260 * wide))
    for shape in shapes:
        for size in ("huge", "tiny", "near epsilon", "zeros"):
            for placement in ("inside", "outside", "clamp"):
                spec = PLAIN.replace(epsilon_placement=placement)
                yield Case(shape, dtype, spec, dtype, dtype, values=size)
        for epsilon in (0.0, 1e-12):
            for factor in ("float32", "float16"):
                spec = RMSNormSpec(epsilon=epsilon, factor_type=factor)
                yield Case(shape, dtype, spec, dtype, dtype, values="zeros")
        # 1 / epsilon is finite in float32, and about what rounds to infinity in the factor's type.
        for factor, epsilon in (("float16", 1.5262e-5), ("bfloat16", 2.939e-39), ("bfloat16", 2.942e-39)):
            for placement in ("outside", "clamp"):
                spec = RMSNormSpec(epsilon=epsilon, epsilon_placement=placement, factor_type=factor)
                yield Case(shape, dtype, spec, dtype, dtype, values="zeros", exact=True)
        for name in ("torch", "llama", "gemma", "t5", "zhang2019"):
            for gain in {dtype, "float32"}:
                yield Case(shape, dtype, preset(name), gain, dtype)
                yield Case(shape, dtype, preset(name, leading=1), gain, dtype, exact=True)
        yield Case(shape, dtype, PLAIN.replace(has_bias=True), dtype, dtype, in_place=True)
    for normalized, gain_type, result in itertools.product(TYPES, TYPES, TYPES):
        spec = PLAIN.replace(leading=1, normalized_type=normalized, gain_type=gain_type, result_type=result)
        yield Case((3, 6 * wide), dtype, spec, dtype, dtype, exact=True)
    for names in ("x", "y", "gain", "bias", "x y gain bias"):
        yield Case((3, 6 * wide), dtype, PLAIN.replace(has_bias=True), dtype, dtype, odd=names)
        inner = RMSNormSpec(axes=(-2,), epsilon=1e-6, has_bias=True)
        yield Case((2, 5, 3 * wide), dtype, inner, dtype, dtype, odd=names, values="near epsilon")
    # 49 * (1 / 49) is below 1 in float64: a column number divided by way of a reciprocal.
    for width in (49, 49 * wide):
        yield Case((5, 3, width), dtype, RMSNormSpec(axes=(-2,)), dtype, dtype)
    yield Case((2, 3, 4, wide), dtype, RMSNormSpec(axes=(-3, -2, -1)), dtype, dtype)
    yield Case((2, 5, 7, 3), dtype, RMSNormSpec(axes=(-3,), epsilon=0.0), dtype, dtype, values="zeros")


def drawn(dtype: str, count: int, seed: int = 0) -> Iterator[Case]:
    """Random combinations of all options, on small arrays; every other one with a statistic without rounding error."""
    rng = random.Random(f"{dtype} {seed}")
    wide = 4 if dtype == "float32" else 8
    for number in range(count):
        columns, exact = rng.random() < 0.25, number % 2 == 1
        shape = rng.choice(
            [(3, 4, 2 * wide), (2, 8, 3)] if columns else [(5, 3 * wide), (3, 11), (2, 70 * wide), (9, 1)]
        )
        axes = (-2,) if columns else (-1,)
        has_gain = rng.random() < 0.8
        spec = RMSNormSpec(
            axes=axes,
            epsilon=rng.choice([0.0, 1e-8, 1e-6, 1e-3]),
            epsilon_placement=rng.choice(["inside", "outside", "clamp"]),
            leading=None if columns else 1 if exact else rng.choice([None, None, 1, max(1, shape[-1] // 2), shape[-1]]),
            has_gain=has_gain,
            gain_offset=rng.choice([0.0, 1.0, -0.5]) if has_gain else 0.0,
            has_bias=rng.random() < 0.4,
            factor_type=rng.choice(["float32", "float32", *TYPES]),
            normalized_type=rng.choice(["x", *TYPES]),
            gain_type=rng.choice(["x", *TYPES]),
            result_type=rng.choice(["x", "x", *TYPES]),
        )
        in_place = spec.resolve(dtype).result_type == dtype and rng.random() < 0.3
        size = "normal" if exact else rng.choice(["normal", "normal", "near epsilon", "huge", "tiny"])
        odd = rng.choice(["", "", "x", "y gain", "bias"])
        gain, bias = rng.choice(TYPES), rng.choice(TYPES)
        yield Case(shape, dtype, spec, gain, bias, size, odd, in_place, None, rng.random() < 0.5, exact=exact)


def first_failure(kernels: Kernels, dtypes: Sequence[str], draw: int, heap: bool) -> str | None:
    """What fails first, or None."""
    wrong = first_wrong(kernels)
    if wrong is not None:
        return wrong
    for dtype in dtypes:
        for case in itertools.chain(awkward(dtype), forced(dtype), branches(dtype), drawn(dtype, draw)):
            problem = run(kernels, case, heap=heap)
            if problem is not None:
                return f"{case}: {problem}"
    return None


def without_guard(kernels: Kernels, number: int, dtypes: Sequence[str], draw: int) -> bool:
    """Whether all cases hold without a guard, in a process of their own: a crash or an endless loop is a failure."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        kernels.lib.shimAbsentGuard(number)
        os._exit(1 if first_failure(kernels, dtypes, draw, False) else 0)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    """Runs all cases on a library."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("--heap", action="store_true", help="arrays in malloc's memory, for a sanitizer to watch")
    parser.add_argument("--type", choices=TYPES, action="append")
    parser.add_argument("--draw", type=int, default=100, help="how many random cases a type")
    parser.add_argument("--guards", type=int, help="name the guards from 1 to this one whose absence is not noticed")
    chosen = parser.parse_args()
    kernels, dtypes = Kernels(chosen.library), chosen.type or TYPES
    failure = first_failure(kernels, dtypes, chosen.draw, chosen.heap)
    if failure is not None:
        print(failure)
        return 1
    print("all cases hold")
    for number in range(1, 1 + (chosen.guards or 0)):
        if without_guard(kernels, number, dtypes, chosen.draw):
            print(f"unnoticed: {number}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
