"""Times our kernels beside their peers over the sizes of rows, as ratios within one run.

For each type and size the contestants take turns on several sets of tensors, which together are larger than the L2, so
that each reads x from memory. Our numbers are checked first, on some rows of each set. A turn is one call between two
events, which the device waits for while the host prepares; a turn whose host took longer than that is dropped, and
counted. Medians are of the turns that are left. What is compared stands in `peers.py`. Results are dictionaries, ready
for JSON.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from kernel_cases import Case, judge
from memory import Unavailable
from peers import EPSILON, PEERS, Ours, Run, left_out
from words import in_words

from rmsnorm_onnx.spec import RMSNormSpec

WAIT_CYCLES = 2_000_000
"""For which the device waits before a turn: about 1 ms, several times what Triton's and torch.compile's hosts take."""

CHECKED_ELEMENTS = 2**17
"""Of each set of tensors, in whole rows: at least two of them."""

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


class WrongNumbers(RuntimeError):
    """Our result is not within the oracle's bound."""


def measure(library: Path, scale: Scale, seconds: float, sizes: dict[str, tuple[int, ...]] = SIZES) -> Iterator[Any]:
    """One row for each type and size, as soon as it is there.

    A row has `failed` where ours raised or was wrong, and `unrun` where no time was left or none could be taken. On a
    CPU there is no `goal`: its times are no measure of one.
    """
    ours, end = Ours(library), time.monotonic() + seconds
    for name, ds in sizes.items():
        for d in ds:
            row: dict[str, Any] = {"type": name, "d": d}
            if scale.device == "cuda":
                row["goal"] = goal(d)
            if time.monotonic() > end:
                row["unrun"] = "the time was up"
            else:
                try:
                    row |= one(ours, getattr(torch, name), d, scale)
                except Exception as error:  # told in the row; the other sizes are timed
                    row["failed"] = in_words(error)
            yield row


def one(ours: Ours, dtype: torch.dtype, d: int, scale: Scale) -> dict[str, Any]:
    """Times of all contestants on rows of d elements, in microseconds, and ratios to the copy's.

    Raises:
        WrongNumbers: ours is wrong.
        Exception: what ours raised; what a peer raises is told under `absent`.
    """
    rows = max(1, -(-scale.moved // (2 * d * dtype.itemsize)))
    generator = torch.Generator(scale.device).manual_seed(d)
    gain = torch.rand(d, generator=generator, device=scale.device).add_(0.5).to(dtype)
    made = [torch.randn(rows, d, generator=generator, device=scale.device).to(dtype) for _ in range(scale.sets)]
    sets = [(x, torch.full_like(x, torch.nan)) for x in made]
    with torch.no_grad():
        run = ours.make(gain)
        _all(run, sets)
        checked = sum(check(x, y, gain) for x, y in sets)
        peers, absent = _peers(gain, sets)
        clock = _cuda_turn if scale.device == "cuda" else _cpu_turn
        taken = turns({"ours": run, **peers}, sets, scale.turns, clock)
    absent |= {name: t.failed for name, t in taken.items() if t.failed}
    if "ours" in absent:
        return {"unrun": absent["ours"]}
    return {
        "rows": rows,
        "bytes": 2 * rows * d * dtype.itemsize,
        "rows_checked": checked,
        **ratios({name: t for name, t in taken.items() if not t.failed}),
        "absent": absent,
        "left_out": [name for name in PEERS if left_out(name, gain)],
    }


def check(x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor) -> int:
    """Holds y, which was full of NaN, to the float64 oracle's bound on some rows, the first and the last among them.

    Returns:
        How many rows.

    Raises:
        WrongNumbers: an element of y is not finite, or one of those rows is beyond the bound.
    """
    rows, d = x.shape
    if not bool(torch.isfinite(y).all()):
        raise WrongNumbers("elements of the result are not finite or were not written")
    chosen = np.unique(np.linspace(0, rows - 1, min(rows, max(2, CHECKED_ELEMENTS // d))).astype(np.int64))
    at = torch.from_numpy(chosen).to(x.device)
    name = str(x.dtype).removeprefix("torch.")
    case = Case((len(chosen), d), name, RMSNormSpec(epsilon=EPSILON), name, name)
    wrong = judge(case, _array(y[at]).astype(np.float64), _array(x[at]), _array(gain), None)
    if wrong is not None:
        raise WrongNumbers(wrong)
    return len(chosen)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor on the host; numpy's own types have no bfloat16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _all(run: Run, sets: list[tuple[Any, Any]]) -> None:
    """Runs on every set, which compiles, tunes and loads, and waits: an error is then that of this contestant."""
    for x, y in sets:
        run(x, y)
    if sets[0][0].is_cuda:
        torch.cuda.synchronize()


def _peers(gain: torch.Tensor, sets: list[tuple[Any, Any]]) -> tuple[dict[str, Run], dict[str, str]]:
    """The peers that run here, and why the others do not."""
    there: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for name, make in PEERS.items():
        if left_out(name, gain):
            continue
        try:
            run = make(gain)
            _all(run, sets)
        except Unavailable as reason:
            absent[name] = str(reason)
        except Exception as error:  # whatever a peer raises is told
            absent[name] = in_words(error)
        else:
            there[name] = run
    return there, absent


@dataclasses.dataclass
class Taken:
    """One contestant's turns.

    Attributes:
        device: Microseconds between the events, of the turns that count.
        host: Microseconds of the host, of all turns.
        dropped: How many turns' host took longer than the device waited.
        failed: Why there is no time to tell, if there is none.
    """

    device: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)
    dropped: int = 0
    failed: str = ""


Clock = Callable[[Run, Any, Any], tuple[float, float, float]]


def turns(contestants: dict[str, Run], sets: list[tuple[Any, Any]], count: int, clock: Clock) -> dict[str, Taken]:
    """Takes turns, and drops those whose host took longer than the device waited: the device would have idled within.

    Args:
        contestants: By name; `ours` is ours.
        sets: Tensors in rotation.
        count: Turns of each.
        clock: Gives a turn's microseconds on the device, those of the host, and those that the device waited.

    Raises:
        Exception: what ours raised; a peer that raises is told.
    """
    taken = {name: Taken() for name in contestants}
    for turn in range(count):
        for number, (name, run) in enumerate(contestants.items()):
            mine, (x, y) = taken[name], sets[(turn + number) % len(sets)]
            if mine.failed:
                continue
            try:
                device, host, waited = clock(run, x, y)
            except Exception as error:
                if name == "ours":
                    raise
                mine.failed = in_words(error)
                continue
            mine.host.append(host)
            if host > waited:
                mine.dropped += 1
            else:
                mine.device.append(device)
    for mine in taken.values():
        if not mine.failed and len(mine.device) < max(2, count / 2):
            kept = f"{len(mine.device)} of {count} turns count"
            mine.failed = f"only {kept}: in the others the host took longer than the device waited"
    return taken


def ratios(taken: dict[str, Taken]) -> dict[str, Any]:
    """Medians, spreads, the host's medians, dropped turns, and ratios to the copy's where it was timed."""
    medians = {name: statistics.median(t.device) for name, t in taken.items()}
    copy = medians.get("copy")
    return {
        "microseconds": {name: round(value, 2) for name, value in medians.items()},
        "host_microseconds": {name: round(statistics.median(t.host), 1) for name, t in taken.items()},
        "dropped": {name: t.dropped for name, t in taken.items()},
        "spread": {name: round(_spread(t.device), 3) for name, t in taken.items()},
        "over_copy": {name: round(value / copy, 3) for name, value in medians.items()} if copy else {},
    }


def _spread(values: list[float]) -> float:
    """The width of the middle half over the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def _cuda_turn(run: Run, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, float]:
    """Microseconds on the device, of the host, and of the wait before: while the device waits, the host prepares."""
    before, start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    began = time.perf_counter()
    before.record()
    torch.cuda._sleep(WAIT_CYCLES)
    start.record()
    run(x, y)
    stop.record()
    host = time.perf_counter() - began  # from before the wait was asked for: a turn that counts was prepared within it
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3, host * 1e6, float(before.elapsed_time(start)) * 1e3


def _cpu_turn(run: Run, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, float]:
    start = time.perf_counter()
    run(x, y)
    taken = (time.perf_counter() - start) * 1e6
    return taken, taken, float("inf")


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What of the goals was missed or could not be compared, one sentence each."""
    return [f"{row['type']}, d = {row['d']}: {missed}" for row in rows for missed in _missed(row)]


def _missed(row: dict[str, Any]) -> Iterator[str]:
    for key, words in (("failed", "failed"), ("unrun", "not measured")):
        if key in row:
            yield f"{words} ({row[key]})"
            return
    ratio, times = row["over_copy"].get("ours"), row["microseconds"]
    if ratio is not None and row["goal"] is not None and ratio > row["goal"]:
        yield f"{ratio} of a copy's time, and the goal is {row['goal']}"
    for peer in ("torch", "torch.compile", "liger"):
        if peer in times and times["ours"] > times[peer]:
            yield f"slower than {peer}, {times['ours']} to {times[peer]} us"
    if row["d"] <= 1024 and "torch" in times and times["torch"] < 1.5 * times["ours"]:
        yield f"{times['torch'] / times['ours']:.2f} times as fast as torch, and the goal is 1.5"
    for peer, reason in row["absent"].items():
        yield f"not compared with {peer} ({reason})"
