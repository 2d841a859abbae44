"""Each guard and barrier of the kernels, removed, makes a case fail.

A guard is a line of plugins/kernels with the mark `// GUARD(true)` or `// GUARD(false)` (what its condition is replaced
by) or `// GUARD(drop)` (the line goes).
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import kernel_cases
import pytest
from kernel_build import HEADERS, SOURCES, library

MARK = re.compile(r"// GUARD\((true|false|drop)\)")
ASSIGNED = re.compile(r"(= )(.+)(; *// GUARD)")
TESTED = re.compile(r"(\bif \()(.+)(\) *// GUARD)")


@dataclasses.dataclass(frozen=True)
class Guard:
    file: str
    line: int
    text: str

    def switched(self, number: int, switch: str = "shim::absentGuard") -> str:
        """The line with a switch that leaves the guard out; `switch` is the variable that holds a guard's number."""
        mark = MARK.search(self.text)
        assert mark, f"{self}: the mark is not one of GUARD(true), GUARD(false) and GUARD(drop)"
        absent = f"{switch} == {number}"
        if mark[1] == "drop":
            return f"if (!({absent})) {{ {self.text[: mark.start()]} }}"
        for form in (TESTED, ASSIGNED):
            changed, count = form.subn(rf"\g<1>{absent} ? {mark[1]} : (\g<2>)\g<3>", self.text, count=1)
            if count:
                return changed
        raise AssertionError(f"{self}: a guard is `if (condition)` or `name = condition;`")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text.strip()}"


def guards() -> list[Guard]:
    """All marked lines."""
    return [
        Guard(path.name, number, line)
        for path in (*SOURCES, *HEADERS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "GUARD" in line
    ]


def library_with_switches(found: list[Guard]) -> Path:
    """The kernels with every guard switchable, guard n of the list by number n + 1."""
    texts = {path.name: path.read_text().splitlines() for path in (*SOURCES, *HEADERS)}
    for number, guard in enumerate(found, 1):
        texts[guard.file][guard.line - 1] = guard.switched(number)
    changed = {name: "\n".join(lines) + "\n" for name, lines in texts.items()}
    return library(flags=["-w"], changed=changed, only=["bfloat16"])


def unnoticed(found: list[Guard]) -> list[str]:
    """The guards without which every case still holds."""
    built = library_with_switches(found)
    command = [sys.executable, kernel_cases.__file__, str(built), "--type", "bfloat16", "--draw", "300"]
    answer = subprocess.run([*command, "--guards", str(len(found))], capture_output=True, text=True)
    assert answer.returncode == 0 and "all cases hold" in answer.stdout, answer.stdout + answer.stderr
    return [str(found[int(number) - 1]) for number in re.findall(r"unnoticed: (\d+)", answer.stdout)]


def test_every_barrier_and_end_is_marked() -> None:
    """No barrier, and no comparison with the end of a tensor, is without the mark."""
    for path in HEADERS:
        for line in path.read_text().splitlines():
            guard = re.search(r"bool const .*< (a\.rows|a\.d|span\.count)\b|^ *__syncthreads\(\);", line)
            assert not guard or MARK.search(line), f"{path.name}: {line}"
    assert len(guards()) >= 60


def test_removed_barriers_are_found() -> None:
    """Without a barrier, a case fails."""
    barriers = [guard for guard in guards() if "__syncthreads" in guard.text]
    assert len(barriers) == 3
    assert unnoticed(barriers) == []


@pytest.mark.full
def test_each_guard_is_needed() -> None:
    """Without any one of the guards, a case fails or the process ends."""
    assert unnoticed(guards()) == []
