"""Every legal spelling of an RMSNorm is found, and found as what it is."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from claims import disagreement, falsehood
from emit import HALVES
from evaluate import Frame, evaluate
from fused import assert_within_bound, load, run, runnable
from hypothesis import HealthCheck, given, settings
from kit import NUMPY
from spellings import PRODUCTIONS, Spelling, draw, spellings

from rmsnorm_onnx import Declined, Match, RMSNormSpec, find_rms_norms, fuse

EACH = 50  # examples of every production in the full run


def repeatable(examples: int) -> settings:
    """Settings under which every run draws the same examples, however long one takes."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=slow,
        print_blob=False,
    )


def executions(spelling: Spelling, model: ir.Model) -> tuple[list[Frame], list[Frame]]:
    """All frames, and those in which the norm itself is computed."""
    frames = evaluate(model, spelling.feeds)
    return frames, [f for f in frames if any(value.name == spelling.y for value in f.maps[0])]


def named(frame: Frame, name: str) -> np.ndarray:
    """A value of an execution by its name."""
    return next(cell.array for value, cell in frame.items() if value.name == name)


def assert_found(spelling: Spelling) -> Match:
    """The one norm of a spelling is found, with its spec, its x, its gain and its bias."""
    onnx.checker.check_model(spelling.model, full_check=True)
    model = ir.from_proto(spelling.model)
    sites = find_rms_norms(model)
    declined = [f"{s.code.value}: {s.reason}" for s in sites if isinstance(s, Declined)]
    matches = [s for s in sites if isinstance(s, Match)]
    assert len(matches) == 1, f"{len(matches)} matches, declined {declined}"
    assert not declined
    match = matches[0]
    frames, inner = executions(spelling, model)
    assert falsehood(match, frames) is None
    assert_same_spec(match, spelling)
    for frame in (f for f in frames if match.output in f.maps[0]):
        assert any(np.array_equal(frame[match.x].array, named(f, spelling.x), equal_nan=True) for f in inner)
        assert any(np.array_equal(frame[match.output].array, named(f, spelling.y), equal_nan=True) for f in inner)
        for value, expected in ((match.gain, spelling.gain), (match.bias, spelling.bias)):
            assert (value is None) == (expected is None)
            if expected is not None:
                held = frame[value].array
                kept = (e.astype(np.float64).reshape(held.shape) for e in acceptable(spelling, expected))
                assert any(np.array_equal(held, e) for e in kept)
    if spelling.rounded:
        statistic, spelled = match.spec.resolve(match.x_type).statistic_type, spelling.spec.statistic_type
        assert match.rounding_changes or statistic != spelled  # a narrower statistic is a rounding that a spec can say
    return match


def acceptable(spelling: Spelling, gain: np.ndarray) -> list[np.ndarray]:
    """A gain as it may be found: raw; behind a Cast that narrows it; as a half sum 1 + w that was multiplied early."""
    formed = NUMPY[spelling.spec.resolve(spelling.x_type).gain_type]
    added = [gain.astype(formed) + formed.type(1), gain.astype(np.float64) + 1]
    sums = added if spelling.reordered and spelling.spec.gain_offset else []
    return [gain, gain.astype(formed), *sums]


def assert_same_spec(match: Match, spelling: Spelling) -> None:
    """The claimed spec gives the same numbers as the one spelled; epsilon is the stored one, to the last bit."""
    assert match.x_type == spelling.x_type
    found, spelled = match.spec, spelling.spec
    if spelling.exact:
        assert found.epsilon == spelled.epsilon
    assert found.epsilon == pytest.approx(spelled.epsilon, rel=1e-6, abs=0)
    same: dict[str, object] = {"epsilon": spelled.epsilon}
    if spelled.epsilon == 0:
        same["epsilon_placement"] = spelled.epsilon_placement  # without an epsilon it has no place
    if spelling.rounded or spelling.reordered:
        same |= {f.name: "x" for f in dataclasses.fields(RMSNormSpec) if f.name.endswith("_type")}
    if spelling.reordered and not found.gain_offset:
        same["gain_offset"] = 0.0
    if products_are_exact(match):
        same["gain_type"] = "x"
    assert found.replace(**same).canonical(match.x_type) == spelled.replace(**same).canonical(match.x_type)


def products_are_exact(match: Match) -> bool:
    """Whether z * w is rounded once, to a half type that both factors are of: then it may be formed in a wider type."""
    spec = match.spec.resolve(match.x_type)
    types = {spec.normalized_type, spec.result_type, match.gain_type}
    return len(types) == 1 and types <= set(HALVES) and not spec.gain_offset and not spec.has_bias


@repeatable(150)
@given(spellings())
def test_random_spellings_are_found(spelling: Spelling) -> None:
    """A sample of legal spellings is found with the right spec, x, gain and bias."""
    assert_found(spelling)


@pytest.mark.full
@pytest.mark.parametrize("production", PRODUCTIONS, ids=lambda p: f"{p[0]}={p[1]}")
def test_every_production_is_found(production: tuple[str, str]) -> None:
    """Each choice of the grammar is found at least fifty times, in spellings that differ in everything else."""
    seen: Counter[tuple[str, str]] = Counter()

    @repeatable(EACH)
    @given(spellings(production))
    def find(spelling: Spelling) -> None:
        assert_found(spelling)
        seen.update(spelling.productions)

    find()
    assert seen[production] >= EACH


def test_productions_make_enough_spellings() -> None:
    """The productions at fifty examples each are more than two thousand spellings, and none is listed twice."""
    assert len(PRODUCTIONS) == len(set(PRODUCTIONS))
    assert EACH * len(PRODUCTIONS) >= 2000


@pytest.mark.parametrize("seed", range(20))
def test_generator_spells_what_it_says(seed: int) -> None:
    """The evaluated graph of a spelling equals the formula of its spec, so the generator itself is right."""
    spelling = draw(random.Random(seed))
    _, inner = executions(spelling, ir.from_proto(spelling.model))
    assert inner
    for frame in inner:
        gain, offset = spelling.gain, spelling.spec.gain_offset
        if gain is not None:
            types = spelling.spec.resolve(spelling.x_type)
            formed = NUMPY[types.gain_type if offset else spelling.spec.product_type(spelling.x_type)]
            fed = spelling.plan["gain"] == "graph input"
            gain = gain + np.float64(offset) if fed else (gain.astype(formed) + formed.type(offset)).astype(formed)
        x, y = named(frame, spelling.x), named(frame, spelling.y)
        assert disagreement(y, spelling.spec.replace(gain_offset=0.0), x, gain, spelling.bias) is None


def test_evaluator_agrees_with_onnx_reference() -> None:
    """In float64 the evaluator equals onnx's own reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    checked = 0
    for seed in itertools.count():
        spelling = draw(random.Random(seed), ("dtype", "float64"))
        if spelling.plan["container"] not in ("main", "function", "if"):
            continue
        model = ir.from_proto(spelling.model)
        frames = evaluate(model, spelling.feeds)
        with np.errstate(all="ignore"):
            (want,) = ReferenceEvaluator(spelling.model).run(None, spelling.feeds)
        np.testing.assert_allclose(frames[-1][model.graph.outputs[0]].array, want, rtol=1e-9)
        checked += 1
        if checked == 10:
            return


PLAIN = ("last axis", "rank 1", "two axes", "three axes", "channel first 4-D", "channel first 3-D")
ONE_CALL = ("main", "if", "function", "function in if", "per operator")


def assert_fused(spelling: Spelling) -> bool:
    """A spelling is rewritten into a valid file without its root; where kernels exist, its numbers are in bound."""
    fused, report = fuse(spelling.model)
    onnx.checker.check_model(fused, full_check=True)
    assert report.found == 1
    if spelling.rounded or spelling.reordered:
        return False
    assert report.rewritten == 1, [site.why for site in report.sites]
    again, second = fuse(fused)
    assert second.rewritten == 0 and second.found == 1
    assert again.SerializeToString(deterministic=True) == fused.SerializeToString(deterministic=True)
    if not runnable(fused):
        return False
    load(fused)
    comparable = spelling.plan["layout"] in PLAIN and spelling.plan["container"] in ONE_CALL
    if (
        not comparable or spelling.plan["x"] != "input" or spelling.x_type == "bfloat16"
    ):  # numpy has no bfloat16 to feed
        return False
    (got,) = run(fused, spelling.feeds).values()
    assert_within_bound(got, spelling.spec, spelling.feeds["x"], spelling.gain, spelling.bias)
    return True


def test_rewritten_spellings_are_right() -> None:
    """A sample of spellings, rewritten: valid, stable when rewritten again, and within the float64 bound."""
    rng = random.Random(7)
    ran = sum(assert_fused(draw(rng, ("x", "input"))) for _ in range(60))
    assert ran >= 10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_many_rewritten_spellings_are_right(seed: int) -> None:
    """Six hundred spellings, rewritten: valid, stable when rewritten again, and within the float64 bound."""
    rng = random.Random(seed)
    ran = sum(assert_fused(draw(rng)) for _ in range(60))
    assert ran >= 2
