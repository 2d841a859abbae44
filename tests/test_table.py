"""The page of models: complete, as in PyTorch, as it can be measured again; and how its rows are gathered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import standin
from standin import FOLDER

from rmsnorm_onnx.models import page, peers, table, tiny
from rmsnorm_onnx.models.peers import TOOLS, Finding
from rmsnorm_onnx.models.rows import OWN, Key, Request
from rmsnorm_onnx.models.variants import LOOKALIKES, VARIANTS, variant

PAGE = Path(__file__).parents[1] / "models" / "README.md"
LAYER_NORM_MODELS = {"cohere", "nemotron"}


@pytest.fixture(autouse=True)
def torchvision_for_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are measured in processes of their own; timm's looks for torchvision."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))


@pytest.fixture(scope="module")
def cells() -> dict[Key, dict[str, str]]:
    """The rows of the page."""
    return page.read(PAGE.read_text())


def test_every_row_is_there(cells: dict[Key, dict[str, str]]) -> None:
    """Each model is there at each opset and in each type, and each variant."""
    assert page.missing(PAGE.read_text()) == set()
    assert set(cells) == set(table.all_keys())
    for name in tiny.NAMES:
        rows = [key for key in table.all_keys() if key.name == name]
        types = set(tiny.DTYPES) - ({"bfloat16"} if name == "x-transformers" else set())
        assert {key.opset for key in rows} == {17, 18, 23, 24} and {key.dtype for key in rows} == types
    assert {key.name for key in table.all_keys() if key.kind == "variant"} == set(VARIANTS)


def test_every_norm_is_found_as_it_is(cells: dict[Key, dict[str, str]]) -> None:
    """In each row as many norms are found as PyTorch has, each with the spec of its module."""
    wrong = {k: c for k, c in cells.items() if not c["norms"] == c["found"] == c["equal"] or not c["norms"].isdecimal()}
    assert wrong == {}


def test_nothing_is_beyond_its_bound(cells: dict[Key, dict[str, str]]) -> None:
    """No rewritten norm is beyond its bound; the files load, or onnxruntime lacks a kernel for an operator."""
    assert [k for k, c in cells.items() if not (page.is_number(c["ulp"]) or c["ulp"] == "-")] == []
    assert {c["loads"] for c in cells.values()} <= {"yes", "no kernel"}


def test_layer_norms_are_left_alone(cells: dict[Key, dict[str, str]]) -> None:
    """Models whose norms subtract the mean hold no RMSNorm: nothing is claimed, with the reason."""
    models = {k: c for k, c in cells.items() if k.kind == "model" and c["norms"] == "0"}
    assert {k.name for k in models} == LAYER_NORM_MODELS
    assert all(c["found"] == "0" and "layer-norm" in c["declined"] for c in models.values())


def test_look_alikes_are_declined(cells: dict[Key, dict[str, str]]) -> None:
    """Nothing is claimed of a variant that merely looks like the norm, and each of its codes is in its row."""
    for key, row in cells.items():
        if key.kind == "variant" and key.name in LOOKALIKES:
            codes = {code.value for code in VARIANTS[key.name].declined}
            assert row["found"] == "0" and {part.split()[-1] for part in row["declined"].split(", ")} == codes, key


def has_bias(key: Key) -> bool:
    """Whether a norm of the row adds a bias."""
    if key.kind == "model":
        return any(norm.spec.has_bias for norm in standin.build(key.name, key.dtype).norms)
    return any(part.spec.has_bias for part in variant(key.name, key.dtype).parts)


def again(cells: dict[Key, dict[str, str]], *keys: Key) -> None:
    """Measures rows of one model anew and holds the page to them: counts exactly, ulps by the bound of the spec."""
    for key, row in table.measured(keys):
        said, now = cells[key], page.cells_of(row)
        exact = [c for c in said if c not in (*page.ULPS, "computed by")]
        assert {c: said[c] for c in exact} == {c: now[c] for c in exact}, key
        for column in page.ULPS:
            assert (said[column] == "-") == (now[column] == "-"), key
        if row["ulp"] is not None:
            assert row["within"], key
            # Where a bias cancels the product, no number of ulps is a bound; the page marks what is beyond its own.
            assert float(said["ulp"]) <= row["tolerance"] or has_bias(key), key


@pytest.mark.parametrize("key", [Key("model", "mlp", "float32", 18)], ids=lambda key: key.name)
def test_a_row_measured_again(key: Key, cells: dict[Key, dict[str, str]]) -> None:
    """A row of the page is what is measured now, by this package and by every other tool."""
    again(cells, key)


SPREAD = [key for i, key in enumerate(page.read(PAGE.read_text())) if i % 13 == 0]
"""Rows of every type, opset and kind, the same ones each time."""


@pytest.mark.full
@pytest.mark.parametrize("key", SPREAD, ids=lambda key: f"{key.name}-{key.dtype}-{key.opset}")
def test_a_spread_of_rows_measured_again(key: Key, cells: dict[Key, dict[str, str]]) -> None:
    """The same for rows of many models and variants."""
    again(cells, key)


def row(found: int = 2, **changes: Any) -> dict[str, Any]:
    """A measured row, made up."""
    own = {
        "route": "torch.export, torch.onnx at opset 18, lowered to 17",
        "expected": 2,
        "found": found,
        "equal": found,
        "held": 0,
        "declined": {"layer-norm": 3},
        "layer_norms": 0,
        "differences": [],
        "ulp": 0.5,
        "torch_ulp": None,
        "tolerance": 1.0,
        "within": True,
        "valid": True,
        "loads": True,
        "why": "",
        "notes": [],
        "peers": {tool: Finding(1, "does not load", "/some/folder/a | b").to_json() for tool in TOOLS},
    }
    return {**own, **changes}


def test_a_page_can_be_read_back() -> None:
    """What is written can be read: types side by side, opsets with the same cells on one line, the worst ulp."""
    rows = {Key("model", "m", t, o): row(ulp=o / 40, **_unlike(t)) for t in tiny.DTYPES for o in (17, 18)}
    rows |= {Key("model", "m", t, 23): {"failed": "it broke"} for t in tiny.DTYPES}
    rows[Key("model", "m", "float16", 24)] = row()
    rows |= {Key("variant", "llama", t, 18): row() for t in tiny.DTYPES}
    text = page.render(rows, {"processor": "p", "torch": "1"})
    line = "| m | 17, 18 | float32 / float16 / bfloat16 | dynamo+ | 2 | 2 / 2 / 1 | 2 / 2 / 1 | 3 layer-norm |"
    assert f"{line} 1 (does not load) |" in text
    assert "- not exported: it broke: m float32 opset 23, m float16 opset 23, m bfloat16 opset 23" in text
    assert f"- {next(iter(TOOLS))}, does not load: 10 files, for example m float32 opset 17: `a / b`" in text
    assert "| m | 24 | float16 | dynamo+ | 2 | 2 | 2 |" in text
    cells = page.read(text)
    assert set(cells) == set(rows)
    assert [cells[Key("model", "m", t, 17)]["found"] for t in tiny.DTYPES] == ["2", "2", "1"]
    assert cells[Key("model", "m", "float16", 17)]["ulp"] == "0.45"  # that of opset 18
    assert cells[Key("model", "m", "bfloat16", 23)]["found"] == "not exported"


def _unlike(dtype: str) -> dict[str, Any]:
    return {"found": 1, "equal": 1} if dtype == "bfloat16" else {}


def test_a_crash_costs_one_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies in a tool is replaced by one that is asked for what is left; the tool's cell says it."""
    first, second, *others = TOOLS
    key = Key("model", "m", "float32", 18)
    at = {"kind": "model", "name": "m", "dtype": "float32", "opset": 18}
    asked: list[Sequence[Request]] = []
    own = row()
    del own["peers"]

    def events(requests: Sequence[Request], seconds: int) -> Iterator[dict[str, Any]]:
        asked.append(requests)
        if len(asked) == 1:
            yield from ({"key": at, "begin": OWN}, {"key": at, "own": own}, {"key": at, "begin": first})
            yield from ({"key": at, "peer": first, "finding": Finding(2).to_json()}, {"key": at, "begin": second})
            yield {"ended": "ended by signal 11"}
        for tool in others:
            yield from ({"key": at, "begin": tool}, {"key": at, "peer": tool, "finding": Finding(1).to_json()})

    monkeypatch.setattr(table, "_events", events)
    ((got, measured),) = table.measured([key])
    assert got == key and measured["found"] == 2
    assert [str(Finding(**measured["peers"][tool])) for tool in TOOLS] == ["2", "crashes", *["1"] * len(others)]
    assert asked[1] == [Request(key, tuple(others))]


def test_a_row_that_dies_is_told_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies before it has anything costs that row, which says how; the next has a new process."""
    keys = [Key("model", "m", "float32", opset) for opset in (17, 18)]

    def events(requests: Sequence[Request], seconds: int) -> Iterator[dict[str, Any]]:
        yield {"key": table.dataclasses.asdict(requests[0].key), "begin": OWN}
        yield {"ended": "took over 5 s"}

    monkeypatch.setattr(table, "_events", events)
    assert list(table.measured(keys)) == [(key, {"failed": "took over 5 s"}) for key in keys]


def test_a_fault_of_ours_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in our own measurement of a tool stops the run: it must not stand in the tool's cell."""
    key = Key("model", "m", "float32", 18)
    ended = [{"key": table.dataclasses.asdict(key), "begin": next(iter(TOOLS))}, {"ended": "stopped: ValueError: no"}]
    monkeypatch.setattr(table, "_events", lambda *_: iter(ended))
    with pytest.raises(RuntimeError, match=r"measuring onnxruntime on m float32 opset 18: stopped: ValueError: no"):
        list(table.measured([key]))


def test_the_cache_is_of_one_machine(tmp_path: Path) -> None:
    """Rows are kept on disk as they come; those of other versions are forgotten."""
    key, path = Key("model", "m", "float32", 18), tmp_path / "build" / "rows.json"
    table.Cache(path, {"torch": "1"}).put(key, {"failed": "x"})
    assert json.loads(path.read_text())["rows"][0]["key"]["name"] == "m"
    assert table.Cache(path, {"torch": "1"}).rows == {key: {"failed": "x"}}
    assert table.Cache(path, {"torch": "2"}).rows == {}


def test_an_incomplete_page_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With rows missing the page stays as it was, and the number of those rows is said."""
    output = tmp_path / "README.md"
    assert table.main(["--page-only", "-o", str(output), "--cache", str(tmp_path / "none.json")]) == 0
    assert not output.exists()
    assert f"{len(table.all_keys())} rows are still to be measured" in capsys.readouterr().err


NORM = """<ir_version: 8, opset_import: ["" : 18]> m (float[N,8] x) => (float[N,8] y)
    <float two = {2.0}, int64[1] last = {-1}, float eps = {1e-6}, float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}> {
    sq = Pow (x, two) ms = ReduceMean (sq, last) me = Add (ms, eps) rms = Sqrt (me) z = Div (x, rms) y = Mul (z, w) }"""


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        ("right", "0"),
        ("numbers", "0 (other numbers)"),
        ("invalid", "0 (invalid)"),
        ("unloadable", "1 (does not load)"),
        ("raises", "fails"),
        ("slow", "over 1 s"),
    ],
)
def test_what_a_tool_makes_is_tried(kind: str, cell: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tool's file that is wrong, invalid or does not load is told as such, and so is a tool that raises or hangs."""

    def tool(plain: Path, result: Path) -> None:
        model = onnx.load(plain)
        if kind == "numbers":
            model.graph.initializer[2].float_data[:] = [1.0]
        elif kind == "invalid":
            model.graph.node[0].op_type = "Cast"
        elif kind == "unloadable":
            model.graph.node[0].op_type = "SimplifiedLayerNormalization"
            model.graph.node[0].input[1] = "w"
            model.graph.node[0].attribute.append(onnx.helper.make_attribute("axis", 7))
        elif kind == "raises":
            raise KeyError("x")
        elif kind == "slow":
            time.sleep(5)
        onnx.save(model, result)

    monkeypatch.setattr(peers, "TOOLS", {"tool": tool})
    onnx.save(onnx.parser.parse_model(NORM), tmp_path / "plain.onnx")
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    assert str(peers.find("tool", tmp_path / "plain.onnx", tmp_path, [x], "float32", seconds=1)) == cell
