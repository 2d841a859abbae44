"""The outputs of a file and of its PyTorch module, against a float64 run of the module: whether the file's are right.

A file that computes what its module computes rounds elsewhere than PyTorch, and not by more: on either side each
operator is within a few ulp of its exact result, and what follows amplifies both alike. So its error may be

    MULTIPLE * max(PyTorch's own error, how far the output moves) + FLOOR ulp of the output's largest value

where errors are the largest of the output's elements, both against float64, and "how far the output moves" is what one
eps of the type, up or down in each weight and each floating-point input, makes of the float64 output: backward error.
It is measured only where PyTorch's own error is not enough: PyTorch may be right by luck, and a near tie (an expert
that is chosen by a hair) falls to either side by a rounding.

MULTIPLE is 16: a runtime may add a row of n products one by one where PyTorch adds blocks of them, and random roundings
then grow as sqrt(n) and not as sqrt(n / blocks); with rows of some thousands and blocks of 16 numbers and more that is
a factor of 4 or more, and the largest of few elements is off by as much again. FLOOR is 4: one transcendental function
of a runtime is off by as much where PyTorch's is exact. A changed weight is off by orders of magnitude more, unless no
rounding in this type could tell it from the right one.

An output of another type than float must be PyTorch's, except where float64, or one eps, makes another of it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.comparison import OutputComparison, difference, ulp_of_largest
from rmsnorm_onnx.rounding import spacing

MULTIPLE = 16.0
"""How many times further from float64 than PyTorch a file's output may be."""
FLOOR = 4.0
"""What is added to that, in ulp of the output's type at its largest value."""


@dataclasses.dataclass(frozen=True)
class Sides:
    """One output on all sides; None where a side has none.

    Attributes:
        ours: PyTorch's.
        theirs: The runtime's.
        exact: The float64 run's.
        moved: Gives those of the runs with moved weights; called only where it matters.
    """

    ours: np.ndarray | None
    theirs: np.ndarray | None
    exact: np.ndarray | None
    moved: Callable[[], Sequence[np.ndarray]]

    @property
    def held(self) -> np.ndarray | None:
        """The one whose type and shape is the output's."""
        return next((value for value in (self.theirs, self.ours) if value is not None), None)


def compare_output(name: str, sides: Sides) -> OutputComparison:
    """One output on both sides, with what is wrong with the runtime's."""
    ours, theirs, exact = sides.ours, sides.theirs, sides.exact
    kind = "" if sides.held is None else sides.held.dtype.name
    misfit = _misfit(name, ours, theirs)
    if sides.held is not None and kind not in dtypes.FLOAT_TYPES:
        apart = None if theirs is None or ours is None else difference(theirs, ours)
        why = () if apart is not None else (f"output {name} was not compared: a side is missing, or of another shape",)
        faults = misfit or _discrete_faults(name, sides)
        return OutputComparison(name=name, dtype=kind, difference=apart, unrun=why, faults=faults)
    bad, lost = _nonfinite(theirs, exact if exact is not None else ours), _nonfinite(ours, theirs)
    shown = None if exact is None or _empty(exact) else exact
    allowed, beyond = (None, ()) if misfit else _judged(name, sides)
    return OutputComparison(
        name=name,
        dtype=kind,
        torch_ulp=None if ours is None or shown is None else ulp_of_largest(ours, shown),
        torch_error=None if ours is None or shown is None else difference(ours, shown),
        runtime_ulp=None if theirs is None or shown is None else ulp_of_largest(theirs, shown),
        runtime_error=None if theirs is None or shown is None else difference(theirs, shown),
        difference=None if theirs is None or ours is None else difference(theirs, ours),
        nonfinite=bad,
        allowed_ulp=allowed,
        faults=misfit or (*_finite_faults(name, sides, bad, lost), *beyond),
        unrun=tuple(_unrun(name, sides)),
    )


def _misfit(name: str, ours: np.ndarray | None, theirs: np.ndarray | None) -> tuple[str, ...]:
    """The runtime's output is another kind of tensor than PyTorch's."""
    if ours is None or theirs is None:
        return ()
    if theirs.shape != ours.shape:
        return (f"output {name} has shape {list(theirs.shape)} in the runtime, and {list(ours.shape)} in PyTorch",)
    floats = [value.dtype.name in dtypes.FLOAT_TYPES for value in (ours, theirs)]
    if floats[0] != floats[1]:
        return (f"output {name} is {theirs.dtype.name} in the file, and {ours.dtype.name} in PyTorch",)
    return ()


def _unrun(name: str, sides: Sides) -> list[str]:
    unrun, held = [], sides.held
    for value, side in ((sides.ours, "PyTorch's"), (sides.theirs, "the runtime's"), (sides.exact, "the float64")):
        if value is None:
            unrun.append(f"{side} output {name} is missing")
        elif held is not None and value.shape != held.shape:
            unrun.append(f"{side} output {name} has shape {list(value.shape)}, not {list(held.shape)}")
    if sides.exact is not None and _empty(sides.exact):
        unrun.append(f"output {name} is NaN or infinite throughout, which shows nothing; give other inputs")
    return unrun


def _empty(value: np.ndarray) -> bool:
    """Whether no element says anything."""
    return bool(value.size) and not np.any(np.isfinite(_wide(value)))


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64)


def _nonfinite(value: np.ndarray | None, reference: np.ndarray | None) -> int:
    """How many elements are NaN or infinite where the reference's are finite."""
    if value is None or reference is None or value.shape != reference.shape:
        return 0
    return int(np.sum(~np.isfinite(_wide(value)) & np.isfinite(_wide(reference))))


def _finite_faults(name: str, sides: Sides, bad: int, lost: int) -> tuple[str, ...]:
    faults = []
    if bad:
        faults.append(f"output {name}: {bad} elements are NaN or infinite in the runtime and should be finite")
    if lost:
        exact = _nonfinite(sides.exact, sides.theirs)
        also = " and in float64" if exact else ", which leaves its type's range" if sides.exact is not None else ""
        faults.append(f"output {name}: {lost} elements are NaN or infinite in PyTorch{also}, and finite in the file")
    elif not bad and (exact := _nonfinite(sides.exact, sides.theirs)):
        faults.append(f"output {name}: {exact} elements are NaN or infinite in float64, and finite in the file")
    return tuple(faults)


def _judged(name: str, sides: Sides) -> tuple[float | None, tuple[str, ...]]:
    """The error that the runtime's output may have, in ulp, and the fault where it has a larger one."""
    reference, theirs = sides.exact if sides.exact is not None else sides.ours, sides.theirs
    if theirs is None or sides.ours is None or reference is None or reference.shape != theirs.shape:
        return None, ()
    wide = _wide(reference)
    where = np.isfinite(wide) & np.isfinite(_wide(theirs)) & np.isfinite(_wide(sides.ours))
    if not where.any():
        return None, ()
    kinds = [theirs.dtype.name, sides.ours.dtype.name]
    ulp = max(float(spacing(np.max(np.abs(wide[where])), kind)) for kind in kinds)
    own, error = (_largest(np.abs(_wide(side) - wide)[where]) for side in (sides.ours, theirs))
    allowed = MULTIPLE * own + FLOOR * ulp
    if error > allowed:
        moved = [value for value in sides.moved() if value.shape == wide.shape]
        steps = [_largest(np.abs(_wide(value) - wide)[where]) for value in moved]
        allowed = MULTIPLE * max([own, *steps]) + FLOOR * ulp
    unit = float(spacing(np.max(np.abs(wide[where])), theirs.dtype.name))
    if error <= allowed or (sides.exact is None and not sides.moved()):
        return allowed / unit, ()
    if sides.exact is None:
        beside = "PyTorch's, and there is no float64 run"
    else:
        beside = f"float64, and PyTorch {own / unit:.3g} ulp"
    return allowed / unit, (
        f"output {name}: the file is {error / unit:.3g} ulp from {beside}; up to {allowed / unit:.3g} is rounding, so "
        "another weight, or another computation outside the norms",
    )


def _largest(error: np.ndarray) -> float:
    return float(np.max(error[np.isfinite(error)], initial=0.0))


def _discrete_faults(name: str, sides: Sides) -> tuple[str, ...]:
    ours, theirs, exact = sides.ours, sides.theirs, sides.exact
    if ours is None or theirs is None:
        return ()
    wrong = ours != theirs
    if exact is not None and exact.shape == ours.shape:
        wrong &= exact == ours
    if wrong.any():
        for value in sides.moved():
            wrong &= (value == ours) if value.shape == ours.shape else True
    count = int(np.sum(wrong))
    return (f"output {name}: {count} of {wrong.size} elements are not the module's",) if count else ()
