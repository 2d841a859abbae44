"""The recogniser on graphs that are large, deep or undeclared, and on calls that multiply."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from kit import NORM, edit, parse
from sites import find, one

from rmsnorm_onnx import Declined, Match, find_rms_norms, view
from rmsnorm_onnx.shapes import Shapes

FUNCTION = """
<domain: "own", opset_import: ["" : 18, "own" : 1]> norm (a) => (b) {
 two = Constant <value = float {2.0}> () last = Constant <value_ints = [-1]> ()
 eps = Constant <value = float {1e-6}> () sq = Pow (a, two) ms = ReduceMean (sq, last) me = Add (ms, eps)
 rms = Sqrt (me) n = Div (a, rms) b = Relu (n) }
"""


def deep(relus: int) -> ir.Model:
    """A norm behind a long row of elementwise operators, none of whose types is declared."""
    row = "\n".join(f" c{i} = Relu (c{i - 1})" for i in range(1, relus + 1))
    text = edit(NORM, "float[N,4] x", "float[N,4] c0", " sq = Pow (x", f"{row}\n sq = Pow (x", "(x,", f"(c{relus},")
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>' + text)
    return ir.from_proto(model)


@pytest.mark.parametrize("relus", [1, 30, 400, pytest.param(4000, marks=pytest.mark.full)])
def test_types_are_inferred_over_any_distance(relus: int) -> None:
    """However far back the declared types are, the norm is found."""
    (site,) = find_rms_norms(deep(relus))
    assert isinstance(site, Match) and site.spec.has_gain


def test_only_a_constant_of_one_shape_is_folded_as_a_shape() -> None:
    """TorchScript reads sizes by Gather and Unsqueeze; the Reshape that they make is known."""
    text = """
m (float[2,6] x) => (float[2,2,3] y)
<float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}, int64 zero = {0}, int64[1] none = {0},
 int64[2] rest = {2, 3}>
{
 s = Shape (x)
 rows = Gather (s, zero)
 row = Unsqueeze (rows, none)
 target = Concat <axis = 0> (row, rest)
 g = Reshape (x, target)
 sq = Pow (g, two)
 ms = ReduceMean (sq, last)
 me = Add (ms, eps)
 rms = Sqrt (me)
 y = Div (g, rms)
}"""
    model = ir.from_proto(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>' + text))
    assert Shapes(view.View(model)).shape(view.Ref(model.graph[4].outputs[0])) == (2, 2, 3)
    assert one(parse(text)).spec.axes == (-1,)


def test_calls_that_multiply_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four calls on each of fourteen levels are 4^14 bodies: the search ends, and claims nothing it has not seen."""
    levels = "".join(
        f'<domain: "own", opset_import: ["" : 18, "own" : 1]> f{i} (a) => (e) {{ b = own.{called} (a) '
        f"c = own.{called} (b) d = own.{called} (c) e = own.{called} (d) }}\n"
        for i in range(14)
        for called in [f"f{i - 1}" if i else "norm"]
    )
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "own" : 1]> m (float[3,4] x) => (float[3,4] y) { y = own.f13 (x) }'
        + levels
        + FUNCTION
    )
    monkeypatch.setattr(view, "MAX_CALLS", 500)
    seen = view.View(ir.from_proto(proto))
    assert sum(1 for _ in seen.nodes()) < 20 * 500 and seen.truncated
    sites = find_rms_norms(ir.from_proto(proto))
    assert sites and all(isinstance(site, Declined) for site in sites)


def test_a_function_called_twice_is_found_once() -> None:
    """The norm inside a body that two callers agree on is one site, in the function."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "own" : 1]> m (float[3,4] x) => (float[3,4] z) '
        "{ y = own.norm (x) z = own.norm (y) }" + FUNCTION
    )
    matches, declined = find(ir.from_proto(proto))
    assert [m.scope for m in matches] == ["function own::norm"] and not declined


def test_many_gains_on_one_value_end() -> None:
    """One normalised value under more gains than anybody has: the search stops growing with them."""
    lines = "\n".join(f" y{i} = Mul (n, w)" for i in range(3000))
    text = edit(NORM, " y = Mul (n, w)", f"{lines}\n y = Mul (n, w)")
    sites = find_rms_norms(ir.from_proto(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>' + text)))
    assert 1000 < len(sites) < 1100 and all(isinstance(site, Match) for site in sites)
