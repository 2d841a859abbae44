"""Each guard of the TensorRT plugin, left out, makes a check fail. The marks are those of the kernels' guards."""

from __future__ import annotations

import re
import subprocess
import sys

import plugin_cases
import pytest
from plugin_build import HEADERS, SOURCES, harness, plugin_on_cpu
from test_kernels_mutation import Guard


def guards() -> list[Guard]:
    """All marked lines of the plugin."""
    return [
        Guard(path.name, number, line)
        for path in (*SOURCES, *HEADERS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "GUARD(" in line
    ]


def unnoticed(found: list[Guard]) -> list[str]:
    """The guards without which every check still holds."""
    texts = {path.name: path.read_text().splitlines() for path in (*SOURCES, *HEADERS)}
    for number, guard in enumerate(found, 1):
        texts[guard.file][guard.line - 1] = guard.switched(number, "standinAbsentGuard")
    library = plugin_on_cpu(flags=["-w"], changed={name: "\n".join(lines) + "\n" for name, lines in texts.items()})
    command = [sys.executable, plugin_cases.__file__, str(library), str(harness())]
    answer = subprocess.run([*command, "--guards", str(len(found))], capture_output=True, text=True)
    assert answer.returncode == 0 and "all cases hold" in answer.stdout, answer.stdout + answer.stderr
    return [str(found[int(number) - 1]) for number in re.findall(r"unnoticed: (\d+)", answer.stdout)]


def test_the_gain_on_the_device_is_guarded() -> None:
    """Without one of the steps that bring a gain to the device, and free it, a check fails."""
    found = [guard for guard in guards() if guard.file == "gain.cpp"]
    assert len(found) >= 6
    assert unnoticed(found) == []


@pytest.mark.full
def test_each_guard_is_needed() -> None:
    """Without any one of the guards, a check fails or the process ends."""
    found = guards()
    assert len(found) >= 45
    assert unnoticed(found) == []
