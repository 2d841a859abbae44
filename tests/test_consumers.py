"""Which form each consumer gets, and why: the table, read for single sites."""

from __future__ import annotations

import dataclasses

import pytest
from form_kit import ONCE, PLAIN, SPECS, Site, assert_right, build, write

from rmsnorm_onnx.consumers import CONSUMERS, TABLE, choose, parse_consumer
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec


def match_of(spec: RMSNormSpec, x_type: str = "float32") -> Match:
    """A site of a spec."""
    _, (match,) = build([Site(spec, x_type)], 18)
    return match


@pytest.mark.parametrize(
    ("consumer", "x_type", "spec", "opset", "form"),
    (
        ("any", "float32", PLAIN, 23, "function"),
        ("any", "bfloat16", PLAIN, 18, "function"),
        ("onnxruntime", "float32", PLAIN, 18, "function"),
        ("onnxruntime", "float32", PLAIN, 23, "function"),
        ("onnxruntime", "float16", PLAIN, 23, "onnx"),
        ("onnxruntime", "float16", ONCE, 18, "contrib"),
        ("onnxruntime", "float16", PLAIN, 18, "function"),
        ("onnxruntime", "float16", SPECS["outside"], 23, "function"),
        ("onnxruntime", "bfloat16", ONCE, 23, "contrib"),
        ("onnxruntime", "bfloat16", PLAIN, 23, "function"),
        ("onnxruntime-cuda", "float16", ONCE, 18, "contrib"),
        ("onnxruntime-cuda", "float32", ONCE, 18, "function"),
        ("onnxruntime-tensorrt", "float16", PLAIN, 18, "plugin"),
        ("tensorrt", "float32", PLAIN, 23, "function"),
        ("tensorrt:10.14", "float32", PLAIN, 23, "function"),
        ("tensorrt:10.15", "float32", PLAIN, 23, "onnx"),
        ("tensorrt:11", "float16", PLAIN, 23, "onnx"),
        ("tensorrt:10.15", "float32", PLAIN, 22, "function"),
        ("tensorrt:10.15", "float32", SPECS["inner axis"], 23, "function"),
        ("tensorrt-plugin", "bfloat16", SPECS["leading"], 18, "plugin"),
        ("tensorrt-plugin", "float32", SPECS["double statistic"], 18, "function"),
    ),
)
def test_the_form_for_a_site(consumer: str, x_type: str, spec: RMSNormSpec, opset: int, form: str) -> None:
    """Per consumer, type, spec and opset: the form of the table."""
    choice = choose(consumer, match_of(spec, x_type), opset)
    assert choice.form == form
    assert choice.why


def test_why_names_what_was_passed_over() -> None:
    """The reason says which preferred form was not taken, and how to get it."""
    assert "not onnx: RMSNormalization exists from opset 23" in choose("tensorrt:10.15", match_of(PLAIN), 18).why
    assert "say tensorrt:10.15" in choose("tensorrt", match_of(PLAIN), 23).why
    assert "before it rounds" in choose("onnxruntime", match_of(PLAIN, "bfloat16"), 18).why


def test_a_rounding_is_moved_only_when_allowed() -> None:
    """In Llama's order in bfloat16, the contrib op is taken with the permission alone."""
    match = match_of(PLAIN, "bfloat16")
    assert choose("onnxruntime", match, 18).form == "function"
    assert choose("onnxruntime", match, 18, allow_rounding_change=True).form == "contrib"


def test_a_site_in_a_function_never_gets_the_contrib_op() -> None:
    """onnxruntime would crash on it."""
    match = dataclasses.replace(match_of(ONCE, "float16"), scope="function acme::Block")
    assert choose("onnxruntime", match, 18).form == "function"


def test_a_spec_that_no_form_writes_has_no_form() -> None:
    """Then the choice says why, and nothing is guessed."""
    choice = choose("any", match_of(PLAIN.replace(result_type="x"), "float32"), 9)
    assert choice.form is None
    assert "opset 9" in choice.why


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_every_choice_can_be_written_and_run(consumer: str) -> None:
    """For every consumer and half type: the chosen form writes the site, and where onnxruntime can run it, right."""
    for x_type in ("float32", "float16", "bfloat16"):
        site = Site(SPECS["gemma"], x_type)
        choice = choose(consumer, match_of(site.spec, x_type), 23)
        assert choice.form is not None
        model = write([site], choice.form, 23, plugin_domain=choice.domain)
        if not any(n.domain == "trt.plugins" for n in model.graph.node):
            assert_right(model, [site])


def test_only_onnxruntime_gets_plugins_in_its_own_domain() -> None:
    """trt.plugins for its TensorRT provider; rmsnorm_onnx for TensorRT itself."""
    assert choose("onnxruntime-tensorrt", match_of(PLAIN), 18).domain == "trt.plugins"
    assert choose("tensorrt-plugin", match_of(PLAIN), 18).domain == "rmsnorm_onnx"


@pytest.mark.parametrize("consumer", ("tensorflow", "", "any:1", "onnxruntime:1.20", "tensorrt:", "tensorrt:new"))
def test_an_unknown_consumer_names_the_choices(consumer: str) -> None:
    """A name or version that is none is a usage error that says what to write."""
    with pytest.raises(UsageError, match=r"tensorrt\[:version\]|tensorrt:10\.15"):
        choose(consumer, match_of(PLAIN), 18)


def test_versions_are_numbers() -> None:
    """10.9 is older than 10.15."""
    assert parse_consumer("tensorrt:10.9")[1] < parse_consumer("tensorrt:10.15")[1]
    assert choose("tensorrt:10.9", match_of(PLAIN), 23).form == "function"


def test_the_table_ends_with_a_form_that_says_everything() -> None:
    """Each consumer's last resort is the function, and every form named is one."""
    for rules in TABLE.values():
        assert rules[-1].form == "function"
        assert not rules[-1].x_types
        assert all(rule.form in FORMS for rule in rules)
