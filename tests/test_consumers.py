"""Which form each consumer gets, and why: the table, read for single sites."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from form_kit import ONCE, PLAIN, SPECS, Site, build

from rmsnorm_onnx.consumers import CONSUMERS, TABLE, Evidence, choose, parse_consumer
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
        ("onnxruntime", "float16", ONCE, 23, "contrib"),
        ("onnxruntime", "float16", SPECS["gemma"], 23, "function"),
        ("onnxruntime", "float16", SPECS["no gain"], 23, "function"),
        ("onnxruntime", "bfloat16", ONCE, 23, "function"),
        ("onnxruntime", "bfloat16", PLAIN, 23, "function"),
        ("onnxruntime-cuda", "float16", ONCE, 18, "contrib"),
        ("onnxruntime-cuda", "float32", ONCE, 18, "function"),
        ("onnxruntime-cuda", "float16", SPECS["no gain"], 18, "function"),
        ("onnxruntime-tensorrt", "float16", PLAIN, 18, "plugin"),
        ("onnxruntime-web", "float16", PLAIN, 23, "function"),
        ("openvino", "float32", PLAIN, 23, "onnx"),
        ("openvino", "bfloat16", PLAIN, 22, "primitive"),
        ("openvino", "float16", SPECS["outside"], 23, "primitive"),
        ("onnx-reference", "float16", PLAIN, 23, "function"),
        ("tensorrt-rtx", "bfloat16", PLAIN, 23, "onnx"),
        ("tensorrt-rtx", "float32", SPECS["inner axis"], 23, "function"),
        ("tensorrt:8.6", "float16", PLAIN, 17, "primitive"),
        ("tensorrt:10.x", "float32", PLAIN, 23, "function"),
        ("tensorrt:11.x", "bfloat16", PLAIN, 23, "onnx"),
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
    assert "before it rounds" in choose("onnxruntime", match_of(PLAIN, "float16"), 18).why
    assert "not onnx: RMSNormalization adds epsilon inside" in choose("openvino", match_of(SPECS["outside"]), 23).why


def test_why_ends_with_its_evidence() -> None:
    """What is behind a choice is a field of it, and is said in its reason."""
    for consumer in CONSUMERS:
        choice = choose(consumer, match_of(PLAIN, "float16"), 23)
        assert choice.evidence in typing.get_args(Evidence)
        assert f"({choice.evidence})" in choice.why


def test_tensorrt_8_gets_nothing_that_it_would_misread() -> None:
    """Above opset 17 it passes over a reduction's axes in silence, and it has no bfloat16: no form, and the mend."""
    newer = choose("tensorrt:8.6", match_of(PLAIN), 18)
    assert newer.form is None and "--opset 17" in newer.why
    assert choose("tensorrt:8.6", match_of(PLAIN, "bfloat16"), 17).form is None


def test_a_rounding_is_moved_only_when_allowed() -> None:
    """In Llama's order in float16, the contrib op is taken with the permission alone."""
    match = match_of(PLAIN, "float16")
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


def test_every_rule_is_whole() -> None:
    """Every form named is one, and each consumer's last rule but TensorRT's takes every type at every opset."""
    for name, rules in TABLE.items():
        assert all(rule.form in FORMS and rule.evidence in typing.get_args(Evidence) for rule in rules)
        last = rules[-1 if name != "tensorrt" else -2]
        assert last.form in ("function", "primitive")
        assert not last.x_types and not last.bare and last.newest_opset is None
