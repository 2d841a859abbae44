"""Files of ours that other tools convert to float16: right, or refused; never a square in half."""

from __future__ import annotations

import form_kit
import numpy as np
import onnx
import pytest
from form_kit import ONCE, Site
from halves import (
    EVERY_TOOL,
    EVERY_WAY,
    LOST,
    SUBNORMAL,
    D,
    assert_refused,
    assert_right,
    block_list,
    convert,
    plain,
    run,
    the_match,
    written,
)

from rmsnorm_onnx import RMSNormSpec, fuse, verify
from rmsnorm_onnx.functions import DOMAIN

SPECS = {
    "lost epsilon": RMSNormSpec(epsilon=LOST),
    "subnormal epsilon": RMSNormSpec(epsilon=SUBNORMAL),
    "no gain": RMSNormSpec(epsilon=LOST, has_gain=False),
    "gemma": ONCE.replace(epsilon=1e-6, gain_offset=1.0),
}
"""One of each kind in float32, where the rounding points make no difference."""


@EVERY_WAY
@EVERY_TOOL
@pytest.mark.parametrize(("form", "opset"), [("onnx", 23), ("contrib", 18), ("contrib", 23)])
def test_native_operators_stay_right(form: str, opset: int, tool: str, keep: bool) -> None:
    """A native operator converted after us squares in float32 and keeps its epsilon, which is an attribute."""
    for spec in SPECS.values():
        half = convert(tool, written(spec, form, opset), keep)
        assert_right(half, spec.epsilon, shape=(-1, 3, D))
        assert the_match(half).form == form


@EVERY_WAY
@EVERY_TOOL
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("form", ["function", "plugin", "primitive"])
def test_bodies_are_refused(form: str, opset: int, tool: str, keep: bool) -> None:
    """No tool converts a function's body, and the plain operators hold epsilon as an attribute: nothing loads."""
    for spec in SPECS.values():
        model = written(spec, form, opset)
        if (form, tool, keep) == ("primitive", "onnxconverter-common", True):
            with pytest.raises(AttributeError, match="'list' object has no attribute 'input'"):  # it stumbles itself
                convert(tool, model, keep)
            continue
        assert_refused(convert(tool, model, keep))


@pytest.mark.full
@EVERY_WAY
@EVERY_TOOL
@pytest.mark.parametrize("form", ["function", "plugin", "primitive", "onnx", "contrib"])
def test_no_spec_squares_in_half(form: str, tool: str, keep: bool) -> None:
    """Whatever the norm (clamped, outside, partial, biased, channel-first): what loads has a float32 statistic."""
    import onnxruntime as ort

    for name, spec in form_kit.SPECS.items():
        for opset in (18, 23):
            try:
                half = convert(tool, written(spec, form, opset), keep)
            except AssertionError:
                continue  # the form cannot hold the spec
            except (AttributeError, ValueError):
                continue  # the tool stumbles, or says that the file holds float16 already
            try:
                for optimise in (True, False):
                    run(half, np.zeros((2, 3, D)), optimise=optimise)
            except ort.capi.onnxruntime_pybind11_state.Fail:
                continue
            statistic = the_match(half).spec.statistic_type
            assert statistic in ("float32", "float64"), (name, opset)


MENDED = {
    **SPECS,
    "outside": RMSNormSpec(epsilon=LOST, epsilon_placement="outside"),
    "clamp": RMSNormSpec(epsilon=LOST, epsilon_placement="clamp"),
    "leading": RMSNormSpec(epsilon=LOST, leading=5),
    "bias": RMSNormSpec(epsilon=LOST, has_bias=True),
}


@EVERY_WAY
@EVERY_TOOL
@pytest.mark.parametrize("form", [None, "primitive"])
def test_fuse_mends_a_converted_function(form: str | None, tool: str, keep: bool) -> None:
    """`fuse` gives nodes whose file was converted around their body one for float16, epsilon as it was, and says so."""
    for name, spec in MENDED.items():
        half = convert(tool, written(spec, "function", 18), keep)
        mended, report = fuse(half, form=form)
        (site,) = report.sites
        assert site.action == "rewritten" and site.form == (form or "function"), name
        assert any(note.startswith("the file declares float16 for what the function's body") for note in site.notes)
        onnx.checker.check_model(mended, full_check=True)
        assert_right(mended, spec.epsilon, shape=(-1, 3, D))
        assert verify(mended, half).sites[0].within
        again, report = fuse(mended, form=form)
        assert report.rewritten == 0 and again.SerializeToString() == mended.SerializeToString()


def test_fuse_mends_a_gain_that_is_an_attribute() -> None:
    """The same where the gain is the node's own tensor, which the tool converted."""
    model, _ = fuse(plain(LOST), gain_attribute=True)
    half = convert("onnxruntime", model, keep=False)
    assert_refused(half)
    mended, report = fuse(half)
    assert report.rewritten == 1 and the_match(mended).spec.epsilon == np.float32(LOST)
    assert verify(mended, half).sites[0].within


def test_a_kept_function_says_that_it_does_not_load() -> None:
    """Where the mending is not wanted, the site's note still says what is wrong with the file."""
    half = convert("onnxruntime", written(SPECS["gemma"], "function", 18), keep=False)
    _, report = fuse(half, skip="*")
    assert report.sites[0].action == "kept" and "which runtimes refuse" in report.sites[0].notes[0]


def test_a_float16_file_of_ours_stays_right() -> None:
    """A half file converted once more: the function's body is left alone, and it was for float16 already."""
    half = form_kit.write([Site(RMSNormSpec(epsilon=LOST), "float16", shape=(2, 3, D))], "function", 18)
    for tool in ("onnxruntime", "OnnxModel"):
        assert_right(convert(tool, half, keep=False), LOST, shape=(-1, 3, D))
    primitive = form_kit.write([Site(RMSNormSpec(epsilon=LOST), "float16", shape=(2, 3, D))], "primitive", 18)
    assert_refused(convert("onnxruntime", primitive, keep=False))  # its Casts to float32 became Casts to float16


@EVERY_WAY
@EVERY_TOOL
def test_function_nodes_on_the_block_list_stay_in_float32(tool: str, keep: bool) -> None:
    """With the names of our functions on op_block_list the file loads and is right between two Casts."""
    model, _ = fuse(plain(LOST))
    names = [f.name for f in model.functions if f.domain == DOMAIN]
    half = convert(tool, model, keep, op_block_list=block_list(tool, *names))
    assert the_match(half).form == "function"
    assert_right(half, LOST)
