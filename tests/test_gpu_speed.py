"""The times of the script for machines with a GPU, without one: who is compared, what counts, what is told."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU), str(ROOT / "tests" / "plugins")]

import measure as script  # noqa: E402
import peers  # noqa: E402
import speed  # noqa: E402
import torch  # noqa: E402
from kernel_build import library  # noqa: E402
from kernel_call import TYPES  # noqa: E402


def row(d: int, over_copy: float = 1.0, absent: Mapping[str, str] | None = None, **times: float) -> dict:
    """A row as it was timed."""
    times = {"copy": 100.0, "ours": 100.0, "torch": 200.0, "liger": 120.0} | times
    return {
        "type": "bfloat16",
        "d": d,
        "goal": speed.goal(d),
        "over_copy": {"ours": over_copy},
        "microseconds": times,
        "absent": dict(absent or {}),
    }


def raising(error: Exception) -> Callable[[torch.Tensor], peers.Run]:
    """A peer that fails as it runs."""

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        raise error

    return lambda gain: run


def broken_maker(gain: torch.Tensor) -> peers.Run:
    """A peer that fails as it is made, without a word."""
    raise ValueError


def test_peers_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that raises as it is made or run is named with its type and words, a copy too; the others are timed."""
    broken = {"copy": raising(RuntimeError("no copy\nat all")), "liger": broken_maker}
    monkeypatch.setattr(speed, "PEERS", dict(peers.PEERS) | broken)
    result = speed.one(peers.Ours(library()), torch.bfloat16, 64, speed.REHEARSAL)
    assert result["absent"] == {"copy": "RuntimeError: no copy", "liger": "ValueError: no words"}
    assert {"ours", "torch", "layer_norm"} == set(result["microseconds"]) and result["over_copy"] == {}
    missed = speed.verdicts([{**result, "type": "bfloat16", "d": 2048, "goal": 1.1}])
    assert missed[-2:] == [
        "bfloat16, d = 2048: not compared with copy (RuntimeError: no copy)",
        "bfloat16, d = 2048: not compared with liger (ValueError: no words)",
    ]


def halved(self: peers.Ours, gain: torch.Tensor) -> peers.Run:
    """Ours with a wrong last row."""

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(torch.nn.functional.rms_norm(x, gain.shape, gain, peers.EPSILON))
        y[-1] *= 0.5

    return run


def unwritten(self: peers.Ours, gain: torch.Tensor) -> peers.Run:
    """Ours with a row in the middle that is never written."""

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        norm = torch.nn.functional.rms_norm(x, gain.shape, gain, peers.EPSILON)
        middle = len(x) // 2
        y[:middle], y[middle + 1 :] = norm[:middle], norm[middle + 1 :]

    return run


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda self, gain: raising(RuntimeError("an illegal memory access"))(gain), "RuntimeError: an illegal memory"),
        (halved, "WrongNumbers: "),
        (unwritten, "WrongNumbers: elements of the result are not finite or were not written"),
    ],
)
def test_ours_that_fails(
    make: Callable[..., peers.Run], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ours raises or is wrong at a timed size, the row and the stage say so, and the exit code is 1."""
    monkeypatch.setattr(peers.Ours, "make", make)
    made = script.Session(tmp_path / "results.json", time.monotonic() + 300, True, library(), results={"stages": {}})
    assert script.run_stages(made, ["speed"]) == 1
    stage = json.loads(made.output.read_text())["stages"]["speed"]
    assert stage["ok"] is False and len(stage["rows"]) == 2
    assert stage["failed"][0].startswith(f"bfloat16, d = 64: {words}")


@pytest.mark.parametrize("dtype", TYPES)
def test_the_timed_numbers_hold(dtype: str) -> None:
    """What is timed in each type is held to the oracle's bound before."""
    result = speed.one(peers.Ours(library()), getattr(torch, dtype), 96, speed.REHEARSAL)
    assert result["rows_checked"] == 2 * result["rows"] and "ours" in result["microseconds"]


def test_slow_hosts() -> None:
    """Turns whose host outlasted the device's wait are dropped and counted; with too few left there is no time."""
    calls: dict[str, int] = {"ours": 0, "torch": 0, "liger": 0}

    def clock(run: str, x: object, y: object) -> tuple[float, float, float]:
        calls[run] += 1
        slow = run == "liger" or (run == "torch" and calls[run] <= 2)
        return (999.0 if slow else 10.0), (2000.0 if slow else 50.0), 1000.0

    taken = speed.turns({name: name for name in calls}, [(None, None)] * 3, 6, clock)
    assert [(t.dropped, len(t.device)) for t in taken.values()] == [(0, 6), (2, 4), (6, 0)]
    assert taken["liger"].failed == "only 0 of 6 turns count: in the others the host took longer than the device waited"
    told = speed.ratios({name: t for name, t in taken.items() if not t.failed})
    assert told["microseconds"] == {"ours": 10.0, "torch": 10.0}
    assert told["dropped"] == {"ours": 0, "torch": 2} and told["host_microseconds"]["torch"] == 50.0
    assert speed.WAIT_CYCLES >= 1_000_000


def test_a_turn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits before the first event of a turn, and the call lies alone between the two events."""
    order: list[str] = []

    class Event:
        """An event that knows when it was recorded: by the number of things done before it, in milliseconds."""

        def __init__(self, enable_timing: bool) -> None:
            self.at = -1

        def record(self) -> None:
            self.at = len(order)
            order.append("event")

        def synchronize(self) -> None:
            order.append("waited for")

        def elapsed_time(self, end: Event) -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"wait {cycles}"), raising=False)
    device, host, waited = speed._cuda_turn(lambda x, y: order.extend("abc"), None, None)
    wait = f"wait {speed.WAIT_CYCLES}"
    assert order == ["event", wait, "event", "a", "b", "c", "event", "waited for"]
    assert (device, waited) == (4000.0, 2000.0) and host > 0


def test_a_peer_that_fails_in_a_turn() -> None:
    """A peer that raises while it is timed is named; what ours raises there is ours to answer for."""

    def clock(run: str, x: object, y: object) -> tuple[float, float, float]:
        if run == "bad":
            raise RuntimeError("gone")
        return 1.0, 1.0, 2.0

    assert speed.turns({"ours": "good", "liger": "bad"}, [(0, 0)], 4, clock)["liger"].failed == "RuntimeError: gone"
    with pytest.raises(RuntimeError, match="gone"):
        speed.turns({"ours": "bad", "liger": "good"}, [(0, 0)], 4, clock)


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
    """Losing to a peer, winning by too little where the goal is 1.5, and whatever was not timed are all named."""
    assert speed.verdicts([row(8192, liger=99.0)]) == ["bfloat16, d = 8192: slower than liger, 100.0 to 99.0 us"]
    assert speed.verdicts([row(512, torch=149.0)]) == [
        "bfloat16, d = 512: 1.49 times as fast as torch, and the goal is 1.5"
    ]
    assert speed.verdicts([row(8192, absent={"liger": "x"})]) == ["bfloat16, d = 8192: not compared with liger (x)"]
    unrun = {"type": "float16", "d": 128, "goal": 1.25, "unrun": "the time was up"}
    assert speed.verdicts([unrun]) == ["float16, d = 128: not measured (the time was up)"]
    assert speed.verdicts([{**unrun, "failed": "E: x"}]) == ["float16, d = 128: failed (E: x)"]
