"""Both ways between forms for whole models: every norm of every tiny model, through each form and back."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import pytest
import standin
from export_kit import run
from test_round_trips import NEWEST, ROUND, meaning

import rmsnorm_onnx
from rmsnorm_onnx import opsets
from rmsnorm_onnx.models import tiny
from rmsnorm_onnx.report import SiteReport
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec

OPSETS = (13, 17, 18, 21, 23, 24, NEWEST)
LAYER_NORMS = ("cohere", "nemotron")

Norm = tuple[str, str | None, RMSNormSpec]


@functools.lru_cache(1)
def exported(name: str) -> tuple[tiny.TinyModel, ir.Model, list[np.ndarray], list[np.ndarray]]:
    """A tiny model in float32, its file in plain operators, feeds of other sizes, and what it gives for them."""
    built = standin.build(name)
    model = rmsnorm_onnx.export(
        built.module, built.args, opset=18, form="primitive", dynamic_shapes=built.dynamic_shapes
    ).model
    feeds = [a.numpy() for a in built.inputs(3, 5, seed=1)]
    return built, model, feeds, run(model, *feeds)


def norms(model: ir.Model) -> list[Norm]:
    """The norms of a model: x's type, the module, and what is computed but for where an offset is added."""
    found = [site for site in rmsnorm_onnx.find_rms_norms(model) if isinstance(site, Match)]
    return [(site.x_type, site.module, meaning(site.spec, site.x_type)) for site in found]


def written(site: SiteReport, form: str) -> bool:
    """Whether a site is in a form now, or is told by name why that cannot hold it."""
    return site.action == "rewritten" or site.form == form or f"the form {form} cannot hold it" in (site.why or "")


def check(name: str, opset: int) -> None:
    """Takes a model through the round at an opset; its norms stay what they are, and so does what it computes."""
    built, model, feeds, first = exported(name)
    wanted = norms(model)
    assert len(wanted) == sum(norm.sites for norm in built.norms)
    for form in ROUND:
        model, report = opsets.convert(model, opset, form=form)
        assert report.found == len(wanted), form
        assert all(written(site, form) for site in report.sites if site.spec), form
        held = norms(model)
        assert [item[:2] for item in held] == [item[:2] for item in wanted], form
        if form in ("function", "primitive"):  # beside a native operator stand Casts, offsets and biases
            assert held == wanted, form
    assert all(site.form == "function" for site in rmsnorm_onnx.find_rms_norms(model) if isinstance(site, Match))
    for ours, theirs in zip(run(model, *feeds), first, strict=True):
        # As far as the norms' own bound lets a model drift; the demo measures each norm in ulp.
        scale = np.abs(theirs).max()
        assert np.abs(ours - theirs).max() <= np.sqrt(np.finfo(np.float32).eps) * scale


@pytest.mark.parametrize("opset", [17, 24])
def test_a_model_survives_the_round(opset: int) -> None:
    """A model with offsets comes back with the norms and modules that it had."""
    check("gemma", opset)


@pytest.mark.full
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", [name for name in tiny.NAMES if name not in LAYER_NORMS])
def test_every_model_survives_the_round(name: str, opset: int) -> None:
    """The same for every other model, at each opset: language, vision, a loop; norms of inner axes and with biases."""
    check(name, opset)
