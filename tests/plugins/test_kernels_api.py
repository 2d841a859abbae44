"""The kernels' C interface: what it refuses, how it plans, what it returns.

`python tests/plugins/test_kernels_api.py` writes the dispatch table of plugins/README.md anew.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
from kernel_api import BASE, first_wrong, plan_table, problem
from kernel_build import KERNELS as SOURCES
from kernel_build import ROOT, compiler, library
from kernel_call import KERNELS, PLACEMENTS, STATUS, TYPES, Kernels, Plan, Problem

README = ROOT / "plugins" / "README.md"
SECTION = re.compile(r"(<!-- generated: dispatch -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER = (SOURCES / "rmsnorm.h").read_text()


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """The library, built here."""
    return Kernels(library())


def with_table(text: str, table: str) -> str:
    """A README with its dispatch table replaced."""
    changed, count = SECTION.subn(lambda m: m[1] + table + m[2], text)
    assert count == 1
    return changed


def test_what_is_refused(kernels: Kernels) -> None:
    """Unknown types, shapes, values, pointers and plans come back as their status, from every function alike."""
    assert first_wrong(kernels) is None


def test_null_arguments(kernels: Kernels) -> None:
    """A missing argument is a status, not a crash."""
    given, plan = problem(), Plan()
    code = -STATUS.index("NULL_POINTER")
    assert kernels.lib.rmsnormPlan(None, ctypes.byref(plan)) == code
    assert kernels.lib.rmsnormPlan(ctypes.byref(given), None) == code
    assert kernels.lib.rmsnormLaunch(None, None) == code
    assert kernels.lib.rmsnormLaunchPlan(ctypes.byref(given), None, None) == code
    assert kernels.lib.rmsnormLaunchPlan(None, ctypes.byref(plan), None) == code


def test_a_launch_error_is_returned(kernels: Kernels) -> None:
    """What the runtime says of a launch comes back as it is, once."""
    kernels.lib.shimFailNext(209)
    assert [kernels.launch(problem()) for _ in range(2)] == ["209", "OK"]


def test_an_empty_tensor_is_not_launched(kernels: Kernels) -> None:
    """No rows, no elements or no columns: done, without a launch that could fail."""
    for change in ({"outer": 0}, {"d": 0}, {"inner": 0}):
        kernels.lib.shimFailNext(209)
        assert kernels.launch(problem(**change)) == "OK"
        kernels.lib.shimFailNext(0)
        status, plan = kernels.plan(problem(**change))
        assert (status, plan.as_tuple()) == ("OK", (0,) * 7)


def test_every_status_has_a_sentence(kernels: Kernels) -> None:
    """All codes of the header, CUDA's errors and unknown numbers have a text of their own."""
    texts = [kernels.text(code) for code in (*range(-len(STATUS), 1), 209)]
    assert len(set(texts)) == len(texts) and all(texts)
    assert kernels.text(-99) == kernels.text(-len(STATUS)) == "an unknown status"


def test_names_and_codes_are_the_headers(kernels: Kernels, tmp_path: Path) -> None:
    """The enumerations and structs that the tests use are those of rmsnorm.h, compiled as C."""
    expected = {f"RMSNORM_{name}": -i for i, name in enumerate(STATUS)}
    expected |= {f"RMSNORM_{name.upper()}": i for names in (TYPES, PLACEMENTS, KERNELS) for i, name in enumerate(names)}
    assert set(re.findall(r"^    (RMSNORM_\w+) = ", HEADER, re.MULTILINE)) == set(expected)
    checks = [f'_Static_assert({name} == {code}, "");' for name, code in expected.items()]
    for name, kind in (("RmsnormProblem", Problem), ("RmsnormPlan", Plan)):
        checks.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "");')
        for field, *_ in kind._fields_:
            offset = getattr(kind, field).offset
            checks.append(f'_Static_assert(__builtin_offsetof({name}, {field}) == {offset}, "");')
    source = tmp_path / "header.c"
    source.write_text("\n".join(['#include "rmsnorm.h"', *checks]))
    command = [compiler(), "-x", "c", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{SOURCES}"]
    answer = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    version = re.search(r"#define RMSNORM_API_VERSION (\d+)", HEADER)
    assert version and kernels.lib.rmsnormApiVersion() == int(version[1])


def test_the_dispatch_table_is_the_readmes(kernels: Kernels) -> None:
    """The table in plugins/README.md is what the plan function says for every size."""
    table = plan_table(kernels)
    print(table)
    assert with_table(README.read_text(), table) == README.read_text()


@pytest.mark.parametrize(
    ("fields", "grid"),
    [
        ({"outer": 2**31, "d": 4096}, 2**31 - 1),
        ({"outer": 2**33, "d": 2048}, 2**31 - 1),
        ({"outer": 2**36, "d": 1, "x": BASE + 2, "y": BASE + 2}, 2**27),
        ({"outer": 2**50, "d": 1, "x": BASE + 2, "y": BASE + 2}, 2**31 - 1),
        ({"outer": 10**6, "d": 4096}, 10**6),
        ({"outer": 10**6, "d": 128}, 10**6 // 32 + (10**6 % 32 > 0)),
        ({"outer": 8, "d": 128}, 1),
        ({"outer": 64, "d": 1024}, 64),
        ({"outer": 2**20, "d": 64, "inner": 2**18}, 2**31 - 1),
        ({"outer": 2, "d": 64, "inner": 4096}, 128),
    ],
)
def test_grids(kernels: Kernels, fields: dict[str, int], grid: int) -> None:
    """Every row has its place in the grid, which never exceeds the device's limit; few rows are spread over blocks."""
    given = problem(**({"y": BASE, "gain": None, "bias": None} | fields))
    assert kernels.plan(given)[1].grid == grid


def test_parameters_that_are_not_on_16_bytes_slow_rows_only(kernels: Kernels) -> None:
    """A gain on 2 bytes makes rows go element by element, and columns not."""
    change = {"gain": BASE + 2050}
    assert kernels.plan(problem(**change))[1].elements == 1
    assert kernels.plan(problem(outer=1, inner=8, **change))[1].elements == 8


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), plan_table(Kernels(library()))))
