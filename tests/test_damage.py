"""No claim about a damaged graph is false, and no harmless change hides a norm."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import Counter

import onnx_ir as ir
import pytest
from changes import CHANGES, HARMLESS
from claims import falsehood
from damage import Damaged, damage
from evaluate import evaluate
from hypothesis import given
from hypothesis import strategies as st
from spellings import Spelling, draw, spellings
from test_spellings import assert_same_spec, repeatable

from rmsnorm_onnx import Declined, Match, find_rms_norms

DAMAGES = 4  # harmful tries for each harmless one: 80 % and 20 %
CHUNKS, IN_CHUNK = 6, 75  # full run: 6 * 75 * 5 = 2,250 damaged graphs
SAMPLE = 32
READERS = {"value_read_elsewhere", "value_is_output"}


def assert_claims_hold(damaged: Damaged) -> list[Match]:
    """Every claim about a graph is true in all executions, and nothing crashes."""
    model = ir.from_proto(damaged.model)
    sites = find_rms_norms(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        frames = evaluate(model, damaged.feeds)
        matches = [site for site in sites if isinstance(site, Match)]
        for match in matches:
            assert falsehood(match, frames) is None, (falsehood(match, frames), damaged.changes)
    assert all(isinstance(site, Match) or (isinstance(site, Declined) and site.reason) for site in sites)
    return matches


def ends_early(match: Match, damaged: Damaged, spelling: Spelling) -> bool:
    """Whether a norm ends before a bias or a last rounding, because a value in between has a further reader now."""
    same = match.spec.axes == spelling.spec.axes and match.spec.leading == spelling.spec.leading
    return same and match.output.name != spelling.y and bool(READERS & set(damaged.changes))


def assert_damage_is_seen(spelling: Spelling, rng: random.Random, seen: Counter[str]) -> None:
    """Four damaged graphs of a spelling, and one that was changed without harm and is still found."""
    for i in range(DAMAGES + 1):
        harmless = i == DAMAGES
        damaged = damage(spelling, rng, harmless=harmless)
        assert damaged is not None
        matches = assert_claims_hold(damaged)
        seen.update(["harmless" if harmless else "harmful", *damaged.changes])
        if harmless:
            assert len(matches) == 1, damaged.changes
            if not ends_early(matches[0], damaged, spelling):
                assert_same_spec(matches[0], spelling)
        else:
            seen["claimed" if matches else "not claimed"] += 1


def run(examples: int, seed: int) -> Counter[str]:
    """Damages that many spellings in five ways each."""
    seen: Counter[str] = Counter()

    @repeatable(examples)
    @given(spellings(), st.integers(0, 2**32 - 1))
    def check(spelling: Spelling, number: int) -> None:
        assert_damage_is_seen(spelling, random.Random(number + seed), seen)

    check()
    assert seen["harmful"] == DAMAGES * seen["harmless"]
    return seen


def test_sample_of_damaged_graphs() -> None:
    """A hundred and sixty damaged graphs: no false claim, some claims, some refusals."""
    seen = run(SAMPLE, 0)
    assert seen["harmful"] + seen["harmless"] >= SAMPLE * (DAMAGES + 1)
    assert seen["claimed"] and seen["not claimed"]


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damaged_graphs(chunk: int) -> None:
    """More than two thousand damaged graphs: no false claim and no crash."""
    assert CHUNKS * IN_CHUNK * (DAMAGES + 1) >= 2000
    seen: Counter[str] = Counter()
    rng = random.Random(chunk)
    for _ in range(IN_CHUNK):
        assert_damage_is_seen(draw(rng), rng, seen)
    assert seen["harmful"] == DAMAGES * IN_CHUNK


@pytest.mark.parametrize("kind", [*CHANGES, *HARMLESS])
def test_every_kind_of_damage(kind: str) -> None:
    """Each kind of damage can be done, and no claim about its graphs is false."""
    rng, done = random.Random(3), 0
    for _ in range(100):
        damaged = damage(draw(rng), rng, harmless=kind in HARMLESS, kinds=[kind])
        if damaged is not None:
            assert set(damaged.changes) == {kind}
            assert_claims_hold(damaged)
            done += 1
        if done == 3:
            return
    raise AssertionError(f"{kind} was done {done} times")


def test_a_false_claim_is_noticed() -> None:
    """The measure itself bites: a claim with another epsilon, axis, offset or x is false."""
    for seed in range(40):
        spelling = draw(random.Random(seed), ("container", "main"))
        model = ir.from_proto(spelling.model)
        frames = evaluate(model, spelling.feeds)
        match = next(s for s in find_rms_norms(model) if isinstance(s, Match))
        wrong = [match.spec.replace(epsilon=match.spec.epsilon + 100)]
        if match.spec.leading is not None:
            wrong.append(match.spec.replace(leading=None))
        if match.spec.has_gain:
            wrong.append(match.spec.replace(gain_offset=match.spec.gain_offset + 1))
        for spec in wrong:
            assert falsehood(dataclasses.replace(match, spec=spec), frames) is not None
