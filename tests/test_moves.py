"""Norms as others write them, moved to every form: the same numbers within the bound, or the reason why not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from form_kit import ONCE, SPECS, Site, assert_right, double, write
from move_kit import NUMBERS, OPERATORS, SCALES, Foreign, as_written, assert_within, outputs, runs

import rmsnorm_onnx
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.report import SiteReport
from rmsnorm_onnx.site import Declined

HALVES = ("float16", "bfloat16")
LOADS = ("onnx", "contrib", "skip")


def reason(norm: Foreign, form: str) -> str | None:
    """Why a norm is not written in a form, by what the operators can hold; None where it is."""
    if norm.form == form and norm.source in LOADS and not (norm.source == "onnx" and norm.mixed):
        return f"already in the form {form}"
    if norm.scale == "rows" and norm.form != form:
        return "its scale also varies along axes that are not normalised"
    if form == "onnx" and norm.opset < 23:
        return "RMSNormalization exists from opset 23 on"
    if form == "plugin":
        if "float64" in (norm.x_type, norm.scale_type) or "float64" in norm.spec().statistic_type:
            return "TensorRT has no float64 plugins"
        gain = norm.scale != "scalar one"  # which is no gain
        if gain and norm.scale_type not in (norm.x_type, "float32"):
            return "the plugin takes a gain of x's type or float32"
        if gain and norm.scale in ("scalar", "[1]"):
            return "with a value for each normalised element"
    once = norm.source != "onnx" or norm.mixed or norm.scale == "scalar one"
    if (form == "contrib" and norm.x_type in HALVES and not once) or (norm.has_skip and norm.x_type in HALVES):
        return "a rounding would change"
    return None


def moved(model: onnx.ModelProto, form: str, **options: Any) -> tuple[onnx.ModelProto, SiteReport]:
    """The model with its one norm asked for in a form; what is not the contrib operator's passes the full check."""
    new, report = rmsnorm_onnx.fuse(model, form=form, **options)
    [told] = report.sites
    if told.action == "rewritten" and form != "contrib":
        onnx.checker.check_model(new, full_check=True)
    return new, told


def check(norm: Foreign, form: str, **options: Any) -> str | None:
    """Moves one norm to a form, runs it, finds it there and keeps it on a second run; the reason where it stays."""
    model = norm.model()
    new, told = moved(model, form, **options)
    if told.action != "rewritten":
        assert new == model
        return told.why
    [found] = rmsnorm_onnx.find_rms_norms(ir.from_proto(new))
    assert not isinstance(found, Declined) and (form == found.form), found
    again, report = rmsnorm_onnx.fuse(new, form=form, **options)
    assert again == new and [site.why for site in report.sites] == [f"already in the form {form}"]
    if runs(new):
        y = outputs(new, norm.arrays())["y"]
        assert_within(y, norm.spec(), norm.normalized(), norm.arrays().get("scale"))
    return None


def table(source: str, scale: str, x_types: tuple[str, ...], opset: int) -> int:
    """Every type of the scale and every form, each as the operators' definitions have it; how many were moved."""
    rewritten = 0
    for x_type, form in itertools.product(x_types, FORMS):
        for scale_type in sorted({x_type, "float32", "float16"}):
            norm = Foreign(source, scale, x_type, scale_type, opset)
            why, expected = check(norm, form), reason(norm, form)
            assert (why is None) == (expected is None) and (expected or "") in (why or ""), (norm, form, why, expected)
            rewritten += why is None
    return rewritten


SHAPED = [scale for scale in SCALES if scale != "missing"]


@pytest.mark.parametrize("scale", SHAPED)
@pytest.mark.parametrize("source", OPERATORS)
def test_native_norms_move_to_every_form(source: str, scale: str) -> None:
    """In float16, with a scale of either type: within the bound, or kept with the reason that the operators give."""
    rewritten = table(source, scale, ("float16",), 23)
    assert rewritten or scale == "rows" or source.startswith("skip")


@pytest.mark.full
@pytest.mark.parametrize("opset", [17, 18, 21, 23, 24])
@pytest.mark.parametrize("scale", SHAPED)
@pytest.mark.parametrize("source", OPERATORS)
def test_all_native_norms_move_to_every_form(source: str, scale: str, opset: int) -> None:
    """Every type of x and of the scale, at every opset that the operator has."""
    if source == "onnx" and opset < 23:
        return
    assert table(source, scale, tuple(NUMBERS), opset) or scale == "rows"


@pytest.mark.parametrize("x_type", HALVES)
@pytest.mark.parametrize("source", ["onnx", "skip", "skip elsewhere"])
def test_a_rounding_moves_on_request(source: str, x_type: str) -> None:
    """What is kept since a rounding would change is written on request, as the form has it: it rounds once."""
    norm = Foreign(source, "full", x_type, x_type)
    form = "contrib" if source == "onnx" else "primitive"
    assert "a rounding would change" in str(check(norm, form))
    new, told = moved(norm.model(), form, allow_rounding_change=True)
    assert told.action == "rewritten" and len(told.rounding_changes) == 1
    spec = ONCE.replace(epsilon=norm.spec().epsilon)
    run = outputs if form == "contrib" else as_written
    assert_within(run(new, norm.arrays())["y"], spec, norm.normalized(), norm.arrays()["scale"])


@pytest.mark.parametrize("source", OPERATORS)
def test_a_missing_scale_is_declined(source: str) -> None:
    """No operator is defined without its scale: the input is named."""
    [found] = rmsnorm_onnx.find_rms_norms(ir.from_proto(Foreign(source, "missing").model()))
    assert isinstance(found, Declined)
    assert found.reason.endswith(f"the input {'gamma' if source.startswith('skip') else 'scale'} is missing")


@pytest.mark.parametrize("source", ["contrib elsewhere", "skip elsewhere"])
def test_a_node_in_the_other_domain_is_mended(source: str) -> None:
    """What onnxruntime does not know in this domain says so, and is no norm that a consumer keeps as it is."""
    norm = Foreign(source)
    with pytest.raises(Exception, match=r"is not a registered function/op|No Op registered"):
        outputs(norm.model(), norm.arrays())
    for consumer in ("onnxruntime", "onnxruntime-cuda"):
        new, report = rmsnorm_onnx.fuse(norm.model(), consumer=consumer)
        [told] = report.sites
        assert told.action == "rewritten" and "this node does not load" in told.notes[0]
        assert_within(outputs(new, norm.arrays())["y"], norm.spec(), norm.normalized(), norm.arrays()["scale"])


@pytest.mark.parametrize("x_type", NUMBERS)
@pytest.mark.parametrize("stash_type", NUMBERS)
@pytest.mark.parametrize("source", ["onnx", "contrib"])
def test_stash_type(source: str, stash_type: str, x_type: str) -> None:
    """A half one is raised to float32, a double one is kept, and the contrib operator heeds none."""
    norm = Foreign(source, "full", x_type, x_type, stash_type=NUMBERS[stash_type])
    for form in ("function", "primitive", "plugin"):
        assert (expected := reason(norm, form) or "") in (why := check(norm, form) or "") and bool(why) == bool(
            expected
        )
    if source == "onnx" and stash_type in HALVES and x_type != "float64":
        _, told = moved(norm.model(), "function")
        assert f"stash_type says {stash_type}" in told.notes[0] and told.spec is not None
        assert told.spec.statistic_type == "float32"


@pytest.mark.parametrize("form", [form for form in FORMS if form != "contrib"])
@pytest.mark.parametrize(
    ("source", "extra"),
    [("contrib", ("inverse",)), ("skip", ("", "inverse")), ("skip", ("", "inverse", "sum")), ("skip", ("mean",))],
)
def test_an_inverse_that_is_read_keeps_the_node(source: str, extra: tuple[str, ...], form: str) -> None:
    """No other form gives 1 / rms or the mean: the site stays whole, and names the output."""
    norm = Foreign(source, extra=extra)
    read = next(filter(None, extra))
    assert check(norm, form) == f"its output {read} is read too, which only contrib gives"
    model = norm.model()
    model.graph.node.append(onnx.helper.make_node("Identity", [read], ["copy"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("copy", 1, ["n", 2, 1]))
    del model.graph.output[1]
    assert moved(model, form)[1].why == f"its output {read} is read too, which only contrib gives"


@pytest.mark.parametrize("skip_shape", [(3, 2, 16), (1, 2, 16), (2, 16)])
@pytest.mark.parametrize("x_type", ["float32", "float16", "bfloat16"])
def test_the_sum_is_kept_exactly(x_type: str, skip_shape: tuple[int, ...]) -> None:
    """The skip form's sum, where it is read, is the Add's that is written for it: the same bits, rounded once."""
    norm = Foreign("skip", x_type=x_type, scale_type=x_type, extra=("", "", "sum"), skip_shape=skip_shape)
    for form in ("function", "primitive"):
        new, told = moved(norm.model(), form, allow_rounding_change=True)
        assert told.action == "rewritten"
        got = as_written(new, norm.arrays())
        np.testing.assert_array_equal(got["sum"], norm.normalized())
        assert_within(got["y"], norm.spec(), norm.normalized(), norm.arrays()["scale"])


def carried(site: Site, source: str, opset: int, **options: Any) -> list[str]:
    """Takes a norm of ours to each other form, and gives those that hold it; another one names what it cannot."""
    model, taken = write([site], source, opset, **options), []
    for form in (form for form in FORMS if form != source):
        new, told = moved(model, form)
        if told.action != "rewritten":
            assert told.why.startswith((f"the form {form} cannot hold it: ", "a rounding would change")), told
            continue
        taken.append(form)
        if runs(new):
            assert_right(new, [site])
    return taken


@pytest.mark.parametrize("attribute", [False, True])
@pytest.mark.parametrize("source", ["function", "plugin", "primitive"])
def test_a_gain_that_the_norm_rounds_first(source: str, attribute: bool) -> None:
    """A float32 gain of a norm in half that multiplies in half: the body's Cast of it is no part of another form's."""
    for x_type in HALVES:
        site = Site(SPECS["llama"], x_type, gain_type="float32")
        both = {"function", "plugin", "primitive"} - {source}
        assert set(carried(site, source, 23, gain_attribute=attribute)) == both | {"onnx"}


def test_a_bias_that_the_norm_rounds_first() -> None:
    """The same of a float32 bias."""
    site = Site(SPECS["bias"], "float16", gain_type="float32", bias_type="float32")
    assert carried(site, "function", 23) == ["onnx", "plugin", "primitive"]


@pytest.mark.full
@pytest.mark.parametrize("gain_shape", [(), (1,), (1, 1, 16), (16,)])
@pytest.mark.parametrize("x_type", NUMBERS)
@pytest.mark.parametrize("source", ["function", "plugin", "primitive"])
def test_all_of_ours_move_to_every_form(source: str, x_type: str, gain_shape: tuple[int, ...]) -> None:
    """Every type and shape of the gain, both orders of rounding, below and from opset 23 on."""
    for name, gain_type, opset in itertools.product(("llama", "torch", "gemma"), NUMBERS, (18, 23)):
        spec = double(SPECS[name]) if x_type == "float64" else SPECS[name]
        if source == "plugin" and ("float64" in (x_type, gain_type) or len(gain_shape) == 0 or gain_shape == (1,)):
            continue
        if source == "plugin" and gain_type not in (x_type, "float32"):
            continue
        taken = carried(Site(spec, x_type, gain_type, gain_shape=gain_shape), source, opset)
        assert set(taken) >= {"function", "primitive"} - {source}


@pytest.mark.parametrize("source", ["function", "primitive"])
@pytest.mark.parametrize("epsilon", [1e-6, 2.0**-20])
def test_a_double_epsilon(source: str, epsilon: float) -> None:
    """Native operators hold epsilon as float32: they refuse another by its number, and hold one that is exact."""
    site = Site(double(SPECS["torch"]).replace(epsilon=epsilon), "float64")
    exact = epsilon == 2.0**-20
    forms = {"function", "primitive"} - {source}
    assert set(carried(site, source, 23)) == (forms | {"onnx", "contrib"} if exact else forms)
    for form in () if exact else ("onnx", "contrib"):
        told = moved(write([site], source, 23), form)[1]
        assert told.why.endswith("holds epsilon as float32, and this norm is in float64 with 1e-06")
