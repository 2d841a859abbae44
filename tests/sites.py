"""What is found in a model, each claim measured before a test looks at it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from claims import falsehood
from evaluate import evaluate
from kit import parse
from spellings import samples

from rmsnorm_onnx import Declined, Match, find_rms_norms
from rmsnorm_onnx.site import DeclineCode


def find(model: ir.Model) -> tuple[list[Match], list[Declined]]:
    """Matches, all of them true on numbers, and declined sites."""
    sites = find_rms_norms(model)
    matches = [s for s in sites if isinstance(s, Match)]
    if matches:
        feeds = feed(model)
        frames = evaluate(model, feeds)
        for match in matches:
            assert falsehood(match, frames) is None, falsehood(match, frames)
    return matches, [s for s in sites if isinstance(s, Declined)]


def feed(model: ir.Model) -> dict[str, np.ndarray]:
    """Rows of very different size for every input, a mean square near epsilon and a zero row among them."""
    rng = np.random.default_rng(5)
    sizes = {"N": 5, "S": 4}
    feeds = {}
    for value in model.graph.inputs:
        shape = [sizes.get(str(d), d) if isinstance(d, int) else sizes[str(d.value)] for d in value.shape]
        dtype = value.dtype.numpy()
        if np.issubdtype(dtype, np.integer) or dtype.kind == "b":
            feeds[value.name] = np.full(shape, 1, dtype)
        else:
            feeds[value.name] = samples(rng, shape, 1e-6, dtype)
    return feeds


def one(model: str | ir.Model, **kw: Any) -> Match:
    """The one match of a model in which nothing is declined."""
    matches, declined = find(parse(model, **kw) if isinstance(model, str) else model)
    assert len(matches) == 1 and not declined, [d.reason for d in declined]
    return matches[0]


def refused(text: str, code: DeclineCode, *words: str, **kw: Any) -> Declined:
    """The one refusal of a model in which nothing is found; its sentence holds the words and its node stands in it."""
    model = parse(text, **kw)
    matches, declined = find(model)
    assert not matches, matches[0].spec
    assert [d.code for d in declined] == [code], [(d.code, d.reason) for d in declined]
    reason = declined[0].reason
    for word in words:
        assert word in reason, reason
    assert "\n" not in reason and declined[0].node is not None
    return declined[0]
