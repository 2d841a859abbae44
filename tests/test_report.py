"""Reports: counts, stable JSON keys, and text that no node name can break."""

import dataclasses
import io
import json
from typing import Any

import onnx_ir as ir
import pytest
from rich.console import Console

from rmsnorm_onnx import report
from rmsnorm_onnx.report import FusionReport, InspectionReport, SiteReport
from rmsnorm_onnx.site import SCOPES_KEY, DeclineCode, Declined, Match
from rmsnorm_onnx.spec import preset

SITE_KEYS = {
    *(
        "name",
        "module",
        "statistic_module",
        "scope",
        "action",
        "form",
        "why",
        "spec",
        "x_type",
        "code",
        "notes",
        "rounding_changes",
        "parity",
    ),
}


@dataclasses.dataclass
class Measured:
    """Stands for a measurement."""

    ulp: float | None
    within: bool | None

    def to_json(self) -> dict[str, Any]:
        return {"ulp": self.ulp}


def fusion() -> FusionReport:
    """One site of each outcome."""
    rewritten = SiteReport(
        name="norm[0]",
        scope="then_branch",
        action="rewritten",
        form="function",
        why="runs everywhere",
        spec=preset("llama"),
        x_type="float16",
        notes=("a note",),
        rounding_changes=("a rounding moved",),
        parity=Measured(float("inf"), False),
    )
    kept = SiteReport(
        name="b", action="kept", form="onnx", why="it is one already", spec=preset("t5"), x_type="float32"
    )
    declined = SiteReport(name="c", action="declined", why="the mean is subtracted", code="layer-norm")
    return FusionReport(sites=(rewritten, kept, declined), consumer="any", missing_kernels=("Mul(14) has none",))


def text(shown: FusionReport | InspectionReport, **options: Any) -> str:
    """A report as printed."""
    stream = io.StringIO()
    report.print_report(shown, Console(file=stream, width=120, **options))
    return stream.getvalue()


def test_counts() -> None:
    """A kept norm is found; a declined candidate is not."""
    shown = fusion()
    assert (shown.found, shown.rewritten, shown.kept, shown.declined) == (2, 1, 1, 1)


def test_json_keys_are_stable() -> None:
    """The keys of version 1; removing or renaming one needs another version."""
    data = fusion().to_json()
    assert data["version"] == report.VERSION == 1 and data["kind"] == "fusion"
    assert set(data) == {
        "version",
        "kind",
        "consumer",
        "opset",
        "found",
        "rewritten",
        "declined",
        "missing_kernels",
        "sites",
    }
    assert all(set(site) == SITE_KEYS for site in data["sites"])
    assert data["sites"][0]["spec"]["version"] == 1


@pytest.mark.parametrize(
    ("scopes", "module"),
    [
        ("['', 'model', 'model.norm', 'mul']", "model.norm"),
        ("['mul']", None),
        ("[1, 2]", None),
        ("not python", None),
        ("", None),
    ],
)
def test_a_site_names_its_module(scopes: str, module: str | None) -> None:
    """The module that torch.onnx traced a node in is reported, and patterns choose by it; other text is no trace."""
    node = ir.node("Mul", [ir.Value(name="a"), ir.Value(name="b")])
    node.name, node.metadata_props[SCOPES_KEY] = "node_mul", scopes
    declined = Declined(DeclineCode.UNUSED, "nothing follows", node)
    found = report.InspectionReport.of([declined])
    assert found.sites[0].module == module
    assert len(report.select(found, only=["model.*"]).sites) == (module is not None)
    assert len(report.select(found, skip=["*.norm"]).sites) == (module is None)


def test_json_is_json() -> None:
    """An infinite measurement does not leave a bare word in the output."""
    back = json.loads(report.dumps(fusion().to_json()), parse_constant=lambda word: pytest.fail(word))
    assert back["sites"][0]["parity"] == {"ulp": "inf"} and back["sites"][2]["code"] == "layer-norm"


def test_sites_of_the_recogniser() -> None:
    """A Match is found with its spec, a Declined keeps its code, reason and node."""
    x, y = ir.val("x"), ir.val("y")
    node = ir.node("RMSNormalization", [x], outputs=[y], name="n")
    match = Match(preset("llama"), "onnx", node, x, None, None, y, "float16", None, scope="f", notes=("a half",))
    declined = Declined(DeclineCode.EPSILON, "epsilon is a vector", node)
    shown = InspectionReport.of([match, declined])
    first, second = shown.sites
    assert (first.name, first.scope, first.action, first.form, first.notes) == ("n", "f", "found", "onnx", ("a half",))
    assert (second.action, second.code, second.why, second.spec) == ("declined", "epsilon", "epsilon is a vector", None)
    assert set(shown.to_json()) == {"version", "kind", "found", "rewritten", "declined", "missing_kernels", "sites"}


def test_text_says_everything() -> None:
    """Names (brackets and all), reasons, notes, rounding changes, kernels and counts are in the text."""
    shown = text(fusion())
    for words in ("then_branch/norm[0]", "rounds before the gain", "layer-norm: the mean is subtracted", "a note"):
        assert words in shown
    for words in (
        "a rounding moved",
        "Mul(14) has none",
        "2 found, 1 rewritten for any, 1 kept, 1 declined, 1 beyond their bound",
    ):
        assert words in shown


def test_text_repeats_no_note() -> None:
    """A note that many sites share is said once, with their number."""
    site = fusion().sites[0]
    shown = text(FusionReport(sites=(site,) * 3, consumer="any"))
    assert shown.count("a note") == 1 and "a note (3 sites)" in shown


def test_measured_sites() -> None:
    """What was measured stands in a column: a number, whether it is beyond its bound, or that it was not run."""
    site = fusion().sites[0]
    sites = [dataclasses.replace(site, parity=Measured(*m)) for m in ((0.5, True), (7.0, False), (None, None))]
    shown = FusionReport(sites=tuple(sites), consumer="any")
    assert shown.beyond == 1
    assert [word in text(shown) for word in (" 0.5 ", " 7 beyond ", " not run ")] == [True] * 3
    assert " ulp " not in text(FusionReport(sites=(dataclasses.replace(site, parity=None),), consumer="any"))


def test_text_without_sites() -> None:
    """A model without norms has a closing line and no table."""
    assert text(InspectionReport(sites=())).strip() == "0 found, 0 declined"


def test_colour_only_where_wanted() -> None:
    """No escape sequence reaches a file, and a terminal gets some."""
    assert "\x1b" not in text(fusion())
    assert "\x1b" in text(fusion(), force_terminal=True)
    assert "\x1b[3" not in text(fusion(), force_terminal=True, no_color=True)


def test_explanation() -> None:
    """Everything that is known of a site, a field a line, absent ones left out."""
    stream = io.StringIO()
    report.print_explanation(fusion().sites[:1], Console(file=stream, width=400))
    shown = stream.getvalue()
    assert "name  norm[0]" in shown and "epsilon 1e-06" in shown and "code" not in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon_placement": "clamp"}, "epsilon 1e-06 as a clamp"),
        ({"leading": 32}, "statistic of the first 32"),
        ({"has_gain": False}, "no gain"),
        ({"has_bias": True}, "bias"),
        ({"statistic_type": "float16"}, "statistic in float16"),
        ({"axes": (-2, -1)}, "axes -2, -1"),
    ],
)
def test_describe(changes: dict[str, Any], words: str) -> None:
    """Whatever differs from the usual norm is said."""
    assert words in report.describe(preset("llama", **changes), "float16")
