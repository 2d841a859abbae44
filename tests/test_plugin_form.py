"""What the form of the TensorRT plugin refuses, because the plugin does."""

from __future__ import annotations

import pytest
from form_kit import SPECS, Site, build

from rmsnorm_onnx.forms import FORMS


def refusal(site: Site) -> str | None:
    """Why the form refuses a site."""
    _, (match,) = build([site], 18)
    return FORMS["plugin"].refusal(match, 18)


@pytest.mark.parametrize(
    ("name", "gain_shape", "shown"),
    [("llama", (1,), "1"), ("llama", (), ""), ("two axes", (16,), "16"), ("two axes", (1, 16), "1, 16")],
)
def test_a_gain_that_is_spread(name: str, gain_shape: tuple[int, ...], shown: str) -> None:
    """Trap: a gain of fewer values than the normalised elements, of which a kernel reads one value each, is refused."""
    said = refusal(Site(SPECS[name], gain_shape=gain_shape))
    assert said == f"the plugin takes a gain with a value for each normalised element, not of [{shown}]"


def test_a_bias_that_is_spread() -> None:
    """A bias is no different."""
    said = refusal(Site(SPECS["bias alone"], gain_shape=(1,)))
    assert said == "the plugin takes a bias with a value for each normalised element, not of [1]"


def test_one_normalised_element() -> None:
    """Where there is one element only, one value is a value for each."""
    assert refusal(Site(SPECS["llama"], shape=(3, 1), gain_shape=(1,))) is None


@pytest.mark.parametrize(
    ("x_type", "gain_type", "taken"),
    [("float16", "float32", True), ("float32", "float16", False), ("float16", "bfloat16", False)],
)
def test_a_gain_of_another_type(x_type: str, gain_type: str, taken: bool) -> None:
    """A gain is of x's type or float32; any other is refused by name."""
    said = refusal(Site(SPECS["llama"], x_type, gain_type))
    words = f"the plugin takes a gain of x's type or float32, and this one is {gain_type} for x in {x_type}"
    assert said == (None if taken else words)
