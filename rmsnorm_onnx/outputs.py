"""The outputs of a file and of its PyTorch module, against a float64 run of the module."""

from __future__ import annotations

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.comparison import OutputComparison, difference, ulp_of_largest


def compare_output(
    name: str, ours: np.ndarray | None, theirs: np.ndarray | None, exact: np.ndarray | None
) -> OutputComparison:
    """One output on both sides."""
    held = next((value for value in (theirs, ours) if value is not None), None)
    kind = "" if held is None else held.dtype.name
    if held is not None and kind not in dtypes.FLOAT_TYPES:
        apart = None if theirs is None or ours is None else difference(theirs, ours)
        why = () if apart is not None else (f"output {name} was not compared: a side is missing, or of another shape",)
        return OutputComparison(name=name, dtype=kind, difference=apart, unrun=why)
    unrun = []
    for value, side in ((ours, "PyTorch's"), (theirs, "the runtime's"), (exact, "the float64")):
        if value is None:
            unrun.append(f"{side} output {name} is missing")
        elif held is not None and value.shape != held.shape:
            unrun.append(f"{side} output {name} has shape {list(value.shape)}, not {list(held.shape)}")
    finite = exact if exact is not None else ours
    bad = 0
    if theirs is not None and finite is not None and finite.shape == theirs.shape:
        bad = int(np.sum(~np.isfinite(theirs.astype(np.float64)) & np.isfinite(finite.astype(np.float64))))
    return OutputComparison(
        name=name,
        dtype=kind,
        torch_ulp=None if ours is None or exact is None else ulp_of_largest(ours, exact),
        torch_error=None if ours is None or exact is None else difference(ours, exact),
        runtime_ulp=None if theirs is None or exact is None else ulp_of_largest(theirs, exact),
        runtime_error=None if theirs is None or exact is None else difference(theirs, exact),
        difference=None if theirs is None or ours is None else difference(theirs, ours),
        nonfinite=bad,
        unrun=tuple(unrun),
    )
