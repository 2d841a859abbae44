"""Where onnxruntime's CPU rounds, measured per form and type: the README's table.

`python tests/test_roundings.py` prints the table as it is measured on this machine.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from form_kit import ONCE, PLAIN, Site, run, write

from rmsnorm_onnx.oracle import reference

FORMS = ("function", "primitive", "onnx", "contrib")
HALVES = ("float16", "bfloat16")
NO_KERNEL = ("onnx", "bfloat16")

ROUNDINGS = {
    ("function", "float16"): ("once", "float32"),
    ("primitive", "float16"): ("once", "float32"),
    ("onnx", "float16"): ("once", "float32"),
    ("contrib", "float16"): ("once", "float32"),
    ("function", "bfloat16"): ("twice", "float32"),
    ("primitive", "bfloat16"): ("twice", "float32"),
    ("contrib", "bfloat16"): ("once", "float32"),
}
"""How often a norm is rounded whose spec rounds before the gain and after it, and the type that x is squared in."""


def measure(form: str, x_type: str) -> tuple[str, str]:
    """The hypothesis, among once or twice and the types of the statistic, that onnxruntime's numbers bear out."""
    site = Site(PLAIN, x_type, shape=(64, 1, 64))
    a = site.arrays()
    (y,) = run(write([site], form, 23), [site])
    shares = {}
    for rounds, statistic in itertools.product(("once", "twice"), ("float32", x_type)):
        spec = (PLAIN if rounds == "twice" else ONCE).replace(statistic_type=statistic, factor_type="float32")
        expected = reference(spec, a["x"], a["gain"], rounded=True)
        shares[rounds, statistic] = np.mean(y.astype(np.float64) == expected)
    best = max(shares, key=lambda key: shares[key])
    others = max(share for key, share in shares.items() if key != best)
    assert shares[best] > 0.999 > 0.9 > others, shares
    return best


@pytest.mark.parametrize(("form", "x_type"), ROUNDINGS)
def test_where_onnxruntime_rounds(form: str, x_type: str) -> None:
    """Of four hypotheses exactly one gives 99.9 % of the bits, and it is the table's."""
    assert measure(form, x_type) == ROUNDINGS[form, x_type]


def test_the_table_leaves_out_what_has_no_kernel() -> None:
    """RMSNormalization in bfloat16 has no kernel on CPU; every other form and half type is in the table."""
    assert set(itertools.product(FORMS, HALVES)) - set(ROUNDINGS) == {NO_KERNEL}
    site = Site(PLAIN, "bfloat16")
    with pytest.raises(Exception, match="Could not find an implementation"):
        run(write([site], "onnx", 23), [site])


def table() -> list[str]:
    """The table in Markdown, measured now."""
    lines = ["| form | float16 | bfloat16 |", "|---|---|---|"]
    for form in FORMS:
        cells = []
        for half in HALVES:
            if (form, half) == NO_KERNEL:
                cells.append("no kernel")
            else:
                rounds, statistic = measure(form, half)
                cells.append(f"{statistic} statistic, rounds {rounds}")
        lines.append(f"| `{form}` | {cells[0]} | {cells[1]} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
