"""Both ways between forms for whole models: every norm of every tiny model, through each form and back."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from export_kit import run
from test_round_trips import NEWEST, meaning

import rmsnorm_onnx
from rmsnorm_onnx import opsets
from rmsnorm_onnx.models import texts, tiny
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec

STEPS = (("function", 18), ("onnx", 23), ("contrib", 24), ("primitive", NEWEST), ("onnx", NEWEST), ("function", 17))
"""Forms, each at an opset: up where the standard operator exists, and down again."""


def norms(model: ir.Model) -> list[tuple[str, str | None, RMSNormSpec]]:
    """The norms of a model: x's type, the module, and what is computed but for where an offset is added."""
    found = [site for site in rmsnorm_onnx.find_rms_norms(model) if isinstance(site, Match)]
    return [(site.x_type, site.module, meaning(site.spec, site.x_type)) for site in found]


def check(name: str) -> None:
    """Takes a model through the steps in float32; its norms stay what they are, and so does what it computes."""
    built = tiny.build(name, "float32")
    model = rmsnorm_onnx.export(
        built.module, built.args, opset=18, form="primitive", dynamic_shapes=built.dynamic_shapes
    ).model
    wanted, feeds = norms(model), [a.numpy() for a in built.inputs(3, 5, seed=1)]
    assert len(wanted) == sum(norm.sites for norm in built.norms)
    first = run(model, *feeds)
    for form, opset in STEPS:
        model, report = opsets.convert(model, opset, form=form)
        assert report.found == len(wanted), (form, opset)
        assert all(site.action == "rewritten" or site.form == form for site in report.sites if site.spec), (form, opset)
        held = norms(model)
        assert [item[:2] for item in held] == [item[:2] for item in wanted], (form, opset)
        if form in ("function", "primitive"):  # beside a native operator stand Casts and offsets that it cannot hold
            assert held == wanted, (form, opset)
    for ours, theirs in zip(run(model, *feeds), first, strict=True):
        # As far as the norms' own bound lets a model drift; the demo measures each norm in ulp.
        scale = np.abs(theirs).max()
        assert np.abs(ours - theirs).max() <= np.sqrt(np.finfo(np.float32).eps) * scale


@pytest.mark.parametrize("name", ["gemma"])
def test_a_model_survives_the_round(name: str) -> None:
    """A model with offsets comes back with the norms and modules that it had."""
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in texts.DESIGNS if name not in ("gemma", "cohere", "nemotron")])
def test_every_language_model_survives_the_round(name: str) -> None:
    """The same for every other language model; elsewhere stand norms that a native operator cannot hold."""
    check(name)
