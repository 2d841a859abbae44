"""Times our kernels beside their peers over the sizes of rows, as ratios within one run.

For each type and size the contestants take turns on several sets of tensors, which together are larger than the L2, so
that each reads x from memory. A turn is one launch between two events; medians are of all turns. What is compared
stands in `peers.py`. Results are dictionaries, ready for JSON.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from memory import Unavailable
from peers import PEERS, Ours, Run

SIZES = {
    "bfloat16": (64, 128, 256, 512, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536),
    "float16": (128, 1024, 4096, 16384),
    "float32": (128, 1024, 4096, 16384),
}
"""The sizes of a row by type; an inner axis is not timed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        moved: Bytes read and written by one launch, at least.
        sets: Sets of tensors in rotation.
        turns: Launches of each contestant.
        device: Where, as torch names it.
    """

    moved: int = 256 * 10**6
    sets: int = 3
    turns: int = 30
    device: str = "cuda"


REHEARSAL = Scale(moved=2**16, sets=2, turns=3, device="cpu")
"""Small, on the CPU: its times mean nothing."""


def goal(d: int) -> float | None:
    """The most that our time over a copy's may be."""
    if 4096 <= d <= 32768:
        return 1.05
    if 1024 <= d <= 2048:
        return 1.10
    return 1.25 if 64 <= d <= 512 else None


def measure(library: Path, scale: Scale, seconds: float, sizes: dict[str, tuple[int, ...]] = SIZES) -> Iterator[Any]:
    """One row for each type and size, as soon as it is there; sizes for which no time was left are named in theirs."""
    ours, end = Ours(library), time.monotonic() + seconds
    for name, ds in sizes.items():
        for d in ds:
            row: dict[str, Any] = {"type": name, "d": d, "goal": goal(d)}
            if time.monotonic() > end:
                yield {**row, "unrun": "the time was up"}
                continue
            yield {**row, **one(ours, getattr(torch, name), d, scale)}


def one(ours: Ours, dtype: torch.dtype, d: int, scale: Scale) -> dict[str, Any]:
    """Times of all contestants on rows of d elements, in microseconds, and ratios to the copy's."""
    rows = max(1, -(-scale.moved // (2 * d * dtype.itemsize)))
    generator = torch.Generator(scale.device).manual_seed(d)
    gain = torch.rand(d, generator=generator, device=scale.device).add_(0.5).to(dtype)
    made = [torch.randn(rows, d, generator=generator, device=scale.device).to(dtype) for _ in range(scale.sets)]
    sets = [(x, torch.empty_like(x)) for x in made]
    contestants: dict[str, Run] = {"ours": ours.make(gain)}
    absent: dict[str, str] = {}
    for name, make in PEERS.items():
        try:
            contestants[name] = make(gain)
        except Unavailable as reason:
            absent[name] = str(reason)
    with torch.no_grad():
        for name in list(contestants):
            try:
                for x, y in sets:  # compiles, tunes and loads
                    contestants[name](x, y)
            except Exception as error:  # a peer that fails is said to, and the others are timed
                absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                del contestants[name]
        times = _turns(contestants, sets, scale)
    medians = {name: statistics.median(values) for name, values in times.items()}
    spread = {name: round(_spread(values), 3) for name, values in times.items()}
    return {
        "rows": rows,
        "bytes": 2 * rows * d * dtype.itemsize,
        "microseconds": {name: round(value, 2) for name, value in medians.items()},
        "spread": spread,
        "over_copy": {name: round(value / medians["copy"], 3) for name, value in medians.items()},
        "absent": absent,
    }


def _spread(values: list[float]) -> float:
    """The width of the middle half over the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def _turns(contestants: dict[str, Run], sets: list[tuple[Any, Any]], scale: Scale) -> dict[str, list[float]]:
    clock = _cuda_turn if scale.device == "cuda" else _cpu_turn
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(scale.turns):
        for number, (name, run) in enumerate(contestants.items()):
            x, y = sets[(turn + number) % len(sets)]
            times[name].append(clock(run, x, y))
    return times


def _cuda_turn(run: Run, x: torch.Tensor, y: torch.Tensor) -> float:
    """Microseconds on the device: it first idles while the host prepares, so that no launch's overhead is counted."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(200_000)  # about 0.1 ms
    start.record()
    run(x, y)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def _cpu_turn(run: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> float:
    start = time.perf_counter()
    run(x, y)
    return (time.perf_counter() - start) * 1e6


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What of the goals was missed, one sentence each."""
    missed = []
    for row in rows:
        where = f"{row['type']}, d = {row['d']}"
        if "unrun" in row or "ours" not in row["over_copy"]:
            missed.append(f"{where}: not measured ({row.get('unrun') or row['absent']['ours']})")
            continue
        ratio, times = row["over_copy"]["ours"], row["microseconds"]
        if row["goal"] is not None and ratio > row["goal"]:
            missed.append(f"{where}: {ratio} of a copy's time, and the goal is {row['goal']}")
        for peer in ("torch", "torch.compile", "liger"):
            if peer in times and times["ours"] > times[peer]:
                missed.append(f"{where}: slower than {peer}, {times['ours']} to {times[peer]} us")
        if row["d"] <= 1024 and "torch" in times and times["torch"] < 1.5 * times["ours"]:
            missed.append(f"{where}: {times['torch'] / times['ours']:.2f} times as fast as torch, and the goal is 1.5")
    return missed
