"""The CUDA kernels' numbers, run on the CPU from the very same source, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import kernel_cases
import numpy as np
import pytest
from kernel_build import SANITIZE, compiler, library
from kernel_call import TYPES, Kernels
from kernel_cases import Case, run

from rmsnorm_onnx.spec import RMSNormSpec


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """The library, built here."""
    return Kernels(library())


def wrong(kernels: Kernels, cases: Iterable[Case]) -> list[str]:
    """The cases that do not hold, with the reason."""
    found = [(case, run(kernels, case)) for case in cases]
    assert found
    return [f"{case}: {problem}" for case, problem in found if problem is not None]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_way_through_the_dispatch(kernels: Kernels, dtype: str) -> None:
    """Both ends of each range of sizes take the kernel that the plan names and stay within the bound."""
    assert wrong(kernels, kernel_cases.branches(dtype)) == []


@pytest.mark.parametrize("dtype", TYPES)
def test_every_kernel_on_small_rows(kernels: Kernels, dtype: str) -> None:
    """Each kernel with tails, a leading count, several warps in either order, and several launches."""
    assert wrong(kernels, kernel_cases.forced(dtype)) == []


@pytest.mark.parametrize("dtype", TYPES)
def test_awkward_values_and_memory(kernels: Kernels, dtype: str) -> None:
    """Huge, tiny and near-epsilon rows, rows of zeros, each placement, model families, unaligned and shared memory."""
    assert wrong(kernels, kernel_cases.awkward(dtype)) == []


@pytest.mark.parametrize("dtype", TYPES)
def test_drawn_options(kernels: Kernels, dtype: str) -> None:
    """Random combinations of all options; half of them bit for bit, because their statistic has no rounding error."""
    assert wrong(kernels, kernel_cases.drawn(dtype, 300)) == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("dtype", TYPES)
def test_many_drawn_options(kernels: Kernels, dtype: str, seed: int) -> None:
    """More random combinations of all options."""
    assert wrong(kernels, kernel_cases.drawn(dtype, 1500, seed)) == []


def test_long_rows(kernels: Kernels) -> None:
    """131,072 elements, and more than any plan holds."""
    cases = [Case((1, 131072)), Case((2, 200008), "float16", gain="float32"), Case((1, 100001), "float32")]
    assert wrong(kernels, [dataclasses.replace(case, kernel="RELOAD_ROW") for case in cases]) == []


def test_a_million_rows(kernels: Kernels) -> None:
    """Rows of one element are 1 or -1 times the gain, a million times."""
    assert wrong(kernels, [Case((1_000_000, 1), "float16", RMSNormSpec(epsilon=0.0), "float16")]) == []


def test_the_judge_sees_a_wrong_element(kernels: Kernels) -> None:
    """One element that is two ulp off is found."""
    case = Case((2, 64), "float16", RMSNormSpec(epsilon=1e-6, has_gain=False))
    x = kernel_cases.values(case, np.random.default_rng(0))
    good = kernel_cases.reference(case.spec, x)
    bad = good.copy()
    bad[1, 7] += 2 * np.spacing(np.float16(abs(bad[1, 7])))
    assert kernel_cases.judge(case, good, x, None, None) is None
    assert "at (1, 7)" in (kernel_cases.judge(case, bad, x, None, None) or "")


@pytest.mark.full
def test_under_the_sanitizers() -> None:
    """All cases again, with the address and undefined-behaviour sanitizers watching every access."""
    preload = subprocess.run(
        [compiler(), "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    built = library(flags=SANITIZE)
    command = [sys.executable, str(Path(kernel_cases.__file__)), str(built), "--heap"]
    # Fibers switch stacks under the sanitizer's feet, and Python itself leaks.
    options = "detect_leaks=0:detect_stack_use_after_return=0:verify_asan_link_order=0"
    environment = os.environ | {"LD_PRELOAD": preload, "ASAN_OPTIONS": options, "UBSAN_OPTIONS": "halt_on_error=1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr[-4000:]
    assert "all cases hold" in answer.stdout
