"""The script for machines with a GPU, as far as it runs without one: what it measures is measured there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU), str(ROOT / "tests" / "plugins")]

import speed  # noqa: E402
from kernel_build import library  # noqa: E402
from memory import Host, Unavailable  # noqa: E402
from parity import ByKernels, measure  # noqa: E402


def row(d: int, over_copy: float = 1.0, **times: float) -> dict:
    """A row as it was timed."""
    times = {"copy": 100.0, "ours": 100.0, "torch": 200.0, "liger": 120.0} | times
    return {
        "type": "bfloat16",
        "d": d,
        "goal": speed.goal(d),
        "over_copy": {"ours": over_copy},
        "microseconds": times,
        "absent": {},
    }


def test_a_rehearsal(tmp_path: Path) -> None:
    """Everything that needs no GPU runs and is written; what needs one is named, with the reason."""
    output = tmp_path / "results.json"
    words = [sys.executable, str(GPU / "measure.py"), "--rehearse", "-o", str(output)]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    results = json.loads(output.read_text())
    stages = results["stages"]
    assert results["rehearsal"] and results["machine"]["device"] == "none: a rehearsal"
    assert stages["parity"]["ok"] and min(stages["parity"]["held"].values()) > 100
    assert stages["plugin"]["ok"] and stages["plugin"]["held"] == stages["parity"]["held"]
    assert stages["graph"]["unrun"] == "a rehearsal has no CUDA graphs"
    assert {"copy", "torch", "ours"} <= set(stages["speed"]["rows"][0]["microseconds"])
    assert [r["d"] for r in stages["speed"]["rows"]] == [64, 256]
    assert "unrun" in stages["memcheck"] and "unrun" in stages["racecheck"]
    assert (tmp_path / "results.png").stat().st_size > 1000


def test_without_a_gpu() -> None:
    """Without a GPU the script ends with exit code 4 and one line, and so do the checks of numbers."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    answer = subprocess.run([sys.executable, str(GPU / "measure.py")], capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 4
    assert answer.stderr == "measure.py: torch sees no CUDA GPU here\n"


def test_a_wrong_number_is_told() -> None:
    """Kernels that forget a rounding point fail the matrix, which names the case and the element."""
    from kernel_build import KERNELS

    text = (KERNELS / "statistic.cuh").read_text()
    assert "epsilon" in text
    damaged = library(changed={"statistic.cuh": text.replace("sqrtf(", "2.0f * sqrtf(")})
    result = measure(ByKernels(damaged), Host(), draw=5, small=True, graph=False)
    assert result["ok"] is False
    assert "dtype=float32" in result["failed"] and " for " in result["failed"]


def test_a_graph_needs_a_gpu() -> None:
    """On the host nothing can be captured, and that is said rather than passed over."""
    with pytest.raises(Unavailable, match="no CUDA graphs"):
        measure(ByKernels(library()), Host(), draw=1, small=True, graph=True)


@pytest.mark.parametrize(
    ("d", "most"), [(64, 1.25), (512, 1.25), (1024, 1.1), (2048, 1.1), (4096, 1.05), (32768, 1.05)]
)
def test_goals(d: int, most: float) -> None:
    """A ratio at the goal is good, one beyond it is named with both numbers."""
    assert speed.verdicts([row(d, most)]) == []
    assert speed.verdicts([row(d, most + 0.01)]) == [
        f"bfloat16, d = {d}: {most + 0.01} of a copy's time, and the goal is {most}"
    ]


def test_peers_that_are_faster_are_named() -> None:
    """Losing to a peer, winning by too little where the goal is 1.5, and sizes that were not timed are all named."""
    assert speed.verdicts([row(8192, liger=99.0)]) == ["bfloat16, d = 8192: slower than liger, 100.0 to 99.0 us"]
    assert speed.verdicts([row(512, torch=149.0)]) == [
        "bfloat16, d = 512: 1.49 times as fast as torch, and the goal is 1.5"
    ]
    unrun = {"type": "float16", "d": 128, "goal": 1.25, "unrun": "the time was up"}
    assert speed.verdicts([unrun]) == ["float16, d = 128: not measured (the time was up)"]
