"""Both ways between forms: function, onnx, contrib, primitive, function; the same norm and its numbers after each."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from form_kit import Site, assert_right, write

import rmsnorm_onnx
from rmsnorm_onnx import cli
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.models.variants import LOOKALIKES, VARIANTS, variant
from rmsnorm_onnx.passes import raise_statistic
from rmsnorm_onnx.spec import RMSNormSpec

ROUND = ("function", "onnx", "contrib", "primitive", "function")
NEWEST = onnx.defs.onnx_opset_version()
FEW = ("llama", "gemma", "olmo", "t5")


@functools.cache
def specs(name: str, dtype: str) -> list[tuple[str, RMSNormSpec]]:
    """What the norms of a variant compute, each with the type of its x."""
    return [(part.x_type, part.spec) for part in variant(name, dtype).parts]


def meaning(spec: RMSNormSpec, x_type: str) -> RMSNormSpec:
    """A spec as every form writes it: the statistic raised, an offset folded into the gain."""
    raised = raise_statistic(spec.resolve(x_type))
    return raised.replace(gain_offset=0.0).canonical(x_type)


def same_norm(model: onnx.ModelProto, site: Site, form: str) -> bool:
    """Whether the model's one norm is in a form, and the site's norm.

    Casts, offsets and biases that a native operator cannot hold stand around it, and are no part of the norm that is
    found then: what is left of the spec is the same.
    """
    [norm] = rmsnorm_onnx.find_rms_norms(ir.from_proto(model))
    found, wanted = meaning(norm.spec, norm.x_type), meaning(site.spec, site.x_type)
    if not (norm.x.is_graph_input() and norm.output.is_graph_output()):
        fields = ("axes", "epsilon", "epsilon_placement", "leading", "statistic_type", "factor_type")
        return norm.form == form and all(getattr(found, f) == getattr(wanted, f) for f in fields)
    return (norm.form, norm.x_type, found) == (form, site.x_type, wanted)


def check(site: Site, opset: int, forms: Sequence[str] = ROUND) -> list[str]:
    """Takes one norm through the forms that can hold it, and returns those; nothing else about it may change."""
    model, taken = write([site], "primitive", opset), []
    for form in forms:
        old = model
        model, report = rmsnorm_onnx.fuse(model, form=form)
        [told] = report.sites
        if told.action != "rewritten":
            assert f"the form {form} cannot hold it" in told.why or "a rounding would change" in told.why, told
            assert model == old
            continue
        taken.append(form)
        assert same_norm(model, site, form), form
        assert_right(model, [site])
    return taken


def site_of(spec: RMSNormSpec, x_type: str, gain_type: str | None = None) -> Site:
    """Where such a norm stands: rows of 64, or channels of 8 before two axes."""
    inner = min(spec.axes) < -len(spec.axes)
    spec = raise_statistic(spec.resolve(x_type))
    spec = spec.replace(epsilon=spec.epsilon or 1e-6)  # float16 loses 1e-8, and zeros over zero compare with nothing
    return Site(spec, x_type, gain_type, shape=(3, 8, 2, 4) if inner else (3, 2, 64))


def trip(name: str, dtype: str, opset: int) -> list[list[str]]:
    """The forms that each norm of a variant went through."""
    gain_type = "float32" if VARIANTS[name].keeps_gain else dtype
    return [check(site_of(spec, x_type, gain_type), opset) for x_type, spec in specs(name, dtype)]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("opset", "native"), [(13, False), (24, True)])
def test_a_norm_survives_the_round(name: str, opset: int, native: bool) -> None:
    """In float32 every form holds it that exists at the opset, and each has the same norm and numbers."""
    without = [form for form in ROUND if form != "onnx"]
    assert trip(name, "float32", opset) == [list(ROUND) if native else without]


def test_a_norm_in_half_survives_the_round() -> None:
    """Llama's rounding before the gain is not moved: the contrib operator, which lacks it, is passed over."""
    assert trip("llama", "float16", 23) == [["function", "onnx", "primitive", "function"]]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23, 24, NEWEST])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in LOOKALIKES])
def test_all_round_trips(name: str, opset: int, dtype: str) -> None:
    """Every variant at every opset: whatever forms hold it, it comes back as a function, and the same norm."""
    for taken in trip(name, dtype, opset):
        assert taken[0] == taken[-1] == "function"
        assert set(taken) <= set(FORMS)


def test_expand_is_fuse_to_plain_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`expand` writes what `fuse --form primitive` writes, at another opset too, and says so in its report."""
    [(x_type, spec)] = specs("gemma", "float32")
    onnx.save(write([site_of(spec, x_type)], "function", 18), tmp_path / "m.onnx")
    for flags in ([], ["--opset", "13"]):
        outputs = [tmp_path / "expanded.onnx", tmp_path / "fused.onnx"]
        assert cli.main(["expand", str(tmp_path / "m.onnx"), "-o", str(outputs[0]), "--json", *flags]) == 0
        said = capsys.readouterr().out
        whole = ["fuse", str(tmp_path / "m.onnx"), "-o", str(outputs[1]), "--form", "primitive", "--json", *flags]
        assert cli.main(whole) == 0
        assert capsys.readouterr().out == said
        assert json.loads(said)["sites"][0]["form"] == "primitive"
        assert outputs[0].read_bytes() == outputs[1].read_bytes()
        assert not onnx.load(outputs[0]).functions
