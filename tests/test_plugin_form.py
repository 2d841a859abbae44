"""What the form of the TensorRT plugin refuses, because the plugin does."""

from __future__ import annotations

import onnx
import pytest
from form_kit import SPECS, Site, build

from rmsnorm_onnx import fuse
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.plugin.checker import check


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


OTHERS = """<ir_version: 10, opset_import: ["" : 18, "acme" : 1]>
g (float[2,8] x, float[8] w) => (float[2,8] y) {{ {nodes} }}
<domain: "acme", opset_import: ["" : 18]>
RMSNorm (x, w) => (y) {{
    two = Constant <value_float = 2.0> ()  s = Pow (x, two)  last = Constant <value_ints = [-1]> ()
    m = ReduceMean (s, last)  e = Constant <value_float = 1e-5> ()  a = Add (m, e)  r = Sqrt (a)  d = Div (x, r)
    y = Mul (d, w)
}}
<domain: "acme", opset_import: ["" : 18, "acme" : 1]>
Block (x, w) => (y) {{ y = acme.RMSNorm (x, w) }}
"""


@pytest.mark.parametrize("nodes", ["y = acme.RMSNorm (x, w)", "h = acme.RMSNorm (x, w)  y = acme.RMSNorm (h, w)"])
def test_a_function_of_the_plugins_name_goes_with_its_last_call(nodes: str) -> None:
    """TensorRT looks functions up by name alone: one that nobody calls any more would be in the way."""
    text = OTHERS.format(nodes=nodes)
    proto = onnx.parser.parse_model(text[: text.rindex("<domain")])
    fused, report = fuse(proto, form="plugin")
    assert report.rewritten == nodes.count("acme.")
    assert [(f.domain, f.name) for f in fused.functions] == [("rmsnorm_onnx", "RMSNorm")]
    assert check(fused).ok


def test_a_function_of_the_plugins_name_that_was_not_called_stays() -> None:
    """What was dead before is the file's own, and the checker names it."""
    plain = "y = RMSNormalization <axis = -1> (x, w)"
    text = OTHERS.format(nodes=plain).replace('["" : 18, "acme" : 1]>\ng', '["" : 23, "acme" : 1]>\ng')
    fused, report = fuse(onnx.parser.parse_model(text[: text.rindex("<domain")]), form="plugin")
    assert report.rewritten == 1
    assert ("acme", "RMSNorm") in [(f.domain, f.name) for f in fused.functions]
    assert not check(fused).ok
