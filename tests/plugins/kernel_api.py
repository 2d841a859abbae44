"""What the kernels' C interface refuses, and the plans that it makes, as tables."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from kernel_call import KERNELS, TYPES, Kernels, Plan, Problem

NAN, INFINITE = float("nan"), float("inf")
_memory = (ctypes.c_uint8 * 16384)()
BASE = (ctypes.addressof(_memory) + 4095) // 4096 * 4096


def problem(**fields: float | None) -> Problem:
    """A good problem over memory of our own, 2 rows of 64 in bfloat16, with some fields changed."""
    good: dict[str, float | None] = {"x": BASE, "y": BASE + 1024, "gain": BASE + 2048, "bias": BASE + 4096}
    good |= {"outer": 2, "d": 64, "inner": 1, "epsilon": 1e-6}
    types = ("xType", "yType", "gainStorage", "biasStorage", "normalizedType", "gainType")
    good |= dict.fromkeys(types, TYPES.index("bfloat16"))
    return Problem(**(good | fields))


REFUSED: tuple[tuple[str, Mapping[str, float | None]], ...] = (
    *(
        ("BAD_TYPE", {name: code})
        for name in ("xType", "yType", "gainStorage", "biasStorage", "factorType", "normalizedType", "gainType")
        for code in (-1, 3)
    ),
    ("BAD_TYPE", {"epsilonPlacement": 3}),
    ("BAD_SHAPE", {"outer": -1}),
    ("BAD_SHAPE", {"d": -1}),
    ("BAD_SHAPE", {"inner": -1}),
    ("BAD_SHAPE", {"leading": -1}),
    ("BAD_SHAPE", {"leading": 65}),
    ("BAD_SHAPE", {"leading": 8, "inner": 2}),
    ("TOO_LARGE", {"outer": 2**31, "d": 2**31}),
    ("TOO_LARGE", {"outer": 2**40, "d": 2**40}),
    ("BAD_VALUE", {"epsilon": -1e-6}),
    ("BAD_VALUE", {"epsilon": NAN}),
    ("BAD_VALUE", {"epsilon": INFINITE}),
    ("BAD_VALUE", {"gainOffset": INFINITE}),
    ("BAD_VALUE", {"gainOffset": 1.0, "gain": None}),
    ("NULL_POINTER", {"x": None}),
    ("NULL_POINTER", {"y": None}),
    *(("MISALIGNED", {name: address + 1}) for name, address in (("x", BASE), ("y", BASE + 1024))),
    *(("MISALIGNED", {name: BASE + 2050, storage: 0}) for name, storage in (("gain", "gainStorage"),)),
    *(("MISALIGNED", {name: BASE + 4098, storage: 0}) for name, storage in (("bias", "biasStorage"),)),
    ("OVERLAP", {"y": BASE, "yType": 0}),
    ("OVERLAP", {"y": BASE + 128}),
    ("OVERLAP", {"y": BASE + 2048 - 128}),
    ("OVERLAP", {"y": BASE + 4096 + 126}),
)
"""A status, and what makes a good problem deserve it."""

ALLOWED: tuple[Mapping[str, float | None], ...] = (
    {"y": BASE},
    {"y": BASE + 256},
    {"gain": None, "bias": None},
    {"x": None, "y": None, "outer": 0},
    {"x": None, "y": None, "d": 0},
    {"x": None, "y": None, "d": 0, "gain": None, "gainOffset": 1.0},
    {"x": None, "y": None, "inner": 0},
)
"""What a good problem may have."""

GOOD_PLAN = (KERNELS.index("WARP_ROWS"), 8, 1, 4, 8, 32, 1)
BAD_PLANS: tuple[tuple[tuple[int, ...], Mapping[str, float | None]], ...] = (
    ((9, 8, 1, 4, 8, 32, 1), {}),  # no such kernel
    ((0, 8, 1, 4, 8, 32, 1), {}),
    ((1, 4, 1, 4, 16, 32, 1), {}),  # elements
    ((1, 8, 1, 4, 8, 32, 1), {"x": BASE + 2}),
    ((1, 8, 3, 1, 8, 32, 1), {}),  # no such kernel
    ((1, 8, 1, 1, 8, 32, 1), {}),
    ((1, 8, 1, 4, 4, 32, 1), {}),  # does not cover d
    ((1, 8, 1, 4, 12, 32, 1), {}),  # lanes
    ((1, 8, 1, 4, 64, 64, 1), {}),
    ((1, 8, 1, 4, 8, 48, 1), {}),  # threads
    ((1, 8, 1, 4, 8, 0, 1), {}),
    ((1, 8, 1, 4, 8, 256, 1), {}),  # beyond the kernel's launch bounds
    ((1, 8, 1, 4, 8, 32, 0), {}),  # grid
    ((1, 8, 1, 4, 8, 32, 2**31), {}),
    ((2, 8, 4, 1, 32, 64, 1), {}),  # a block's lanes are its threads
    ((4, 8, 8, 1, 8, 128, 1), {}),  # columns for rows
    ((1, 8, 1, 4, 8, 32, 1), {"inner": 8, "outer": 1}),  # rows for columns
    ((4, 8, 8, 1, 32, 128, 1), {"inner": 8, "outer": 1}),
    ((4, 8, 8, 1, 8, 32, 1), {"inner": 8, "outer": 1}),  # 4 slices of 8 do not cover 64
)
"""A plan, and the change to a good problem that it is given for."""

FREE = {"x": BASE, "y": BASE, "gain": None, "bias": None}
DTYPE = {"float32": {"xType": 0, "yType": 0}, "half": {"xType": 1, "yType": 1}}


def first_wrong(kernels: Kernels) -> str | None:
    """The first status that is not as the tables have it."""
    for status, change in REFUSED:
        for got in (kernels.plan(problem(**change))[0], kernels.launch(problem(**change))):
            if got != status:
                return f"{change}: {got}, not {status}"
    for change in ALLOWED:
        got = kernels.launch(problem(**change))
        if got != "OK":
            return f"{change}: {got}, not OK"
    if kernels.launch(problem(), Plan(*GOOD_PLAN)) != "OK":
        return "the good plan is refused"
    for plan, change in BAD_PLANS:
        kernels.lib.shimFailNext(700)  # a plan that is let through must not run
        got = kernels.launch(problem(**change), Plan(*plan))
        kernels.lib.shimFailNext(0)
        if got != "BAD_PLAN":
            return f"the plan {plan} with {change}: {got}, not BAD_PLAN"
    return None


def plan_table(kernels: Kernels) -> str:
    """The dispatch as a Markdown table: the ranges of d that share a plan, for many rows or columns."""
    lines = ["| x | d | kernel | elements | accesses | rows | lanes | threads |", "|---|---|---|---|---|---|---|---|"]
    layouts = (
        ("float16, bfloat16, rows", {**FREE, **DTYPE["half"]}, 8, 1),
        ("float32, rows", {**FREE, **DTYPE["float32"]}, 4, 1),
        ("any type, rows, not on 16 bytes", {**FREE, **DTYPE["half"], "x": BASE + 2, "y": BASE + 2}, 1, 1),
        ("float16, bfloat16, columns", {**FREE, **DTYPE["half"]}, 1, 4096),
        ("float32, columns", {**FREE, **DTYPE["float32"]}, 1, 4096),
        ("any type, columns, not on 16 bytes", {**FREE, **DTYPE["half"]}, 1, 4095),
    )
    for name, fields, step, inner in layouts:
        start, known, row_before = step, None, ()
        limit = 70000 if inner == 1 else 2000
        for d in range(step, limit + step, step):
            _, plan = kernels.plan(problem(**fields, outer=10**6, d=d, inner=inner))
            row = plan.as_tuple()[:-1]
            kept = row[:4] + (row[4:] if row[0] != KERNELS.index("BLOCK_ROW") else ())
            if known is not None and kept != known[0]:
                lines.append(_line(name, f"{start} to {d - step}", known[1], row_before))
                start, known = d, None
            known = known or (kept, row)
            row_before = row
        lines.append(_line(name, f"from {start}", known[1], row_before))
    return "\n".join(lines) + "\n"


def _line(name: str, sizes: str, first: tuple[int, ...], last: tuple[int, ...]) -> str:
    cells = [str(a) if a == b else f"{a} to {b}" for a, b in zip(first[1:], last[1:], strict=True)]
    first_d, _, last_d = sizes.partition(" to ")
    sizes = first_d if first_d == last_d else sizes
    return f"| {name} | {sizes} | `{KERNELS[first[0]]}` | {' | '.join(cells)} |"
