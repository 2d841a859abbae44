"""`plugin engine`, with TensorRT-RTX, which builds without a GPU; the plugin is its own sources, built for the CPU.

An engine is never run here. What runs each norm is read from the layers that the builder prints.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from form_kit import SPECS, Site, write
from onnx import TensorProto, helper
from plugin_kit import OUT_OF_RANGE, change_gain, good, in_branch, in_function, norm, set_field
from test_cli import Run, run  # noqa: F401

from rmsnorm_onnx import plugin
from rmsnorm_onnx.errors import CheckFailedError, PluginError, UsageError
from rmsnorm_onnx.forms.plugin import FIELDS, ONNXRUNTIME_DOMAIN
from rmsnorm_onnx.plugin import choice, engine, layers, library

pytestmark = pytest.mark.skipif("tensorrt-rtx" not in engine.installed(), reason="TensorRT-RTX is not installed")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin's library, as RMSNORM_ONNX_PLUGIN names it."""
    from plugin_build import plugin_on_cpu

    path = plugin_on_cpu()
    monkeypatch.setenv(library.VARIABLE, str(path))
    return path


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    """A model on disk."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("form", "opset"), [("function", 18), ("primitive", 18), ("onnx", 23)])
def test_what_tensorrt_fuses_by_itself(form: str, opset: int, tmp_path: Path) -> None:
    """Two norms without the plugin are one generated kernel each, in every form; the engine is there, whole."""
    path = saved(write([Site(SPECS["llama"], "float16"), Site(SPECS["torch"])], form, opset), tmp_path)
    built = plugin.build_engine(path, tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert [(n.kind, n.form, n.shared) for n in built.norms] == [("fused", form, 0)] * 2
    assert built.library is None and (tmp_path / "model.engine").stat().st_size == built.size > 0
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.engine"}


def test_the_plugin_runs_its_nodes(loaded: Path, tmp_path: Path) -> None:
    """Plugin nodes become plugin layers, whichever of the two domains they are in, in branches too."""
    for domain in ("rmsnorm_onnx", ONNXRUNTIME_DOMAIN):
        path = saved(
            write([Site(SPECS[n]) for n in ("llama", "outside")], "plugin", 18, plugin_domain=domain), tmp_path
        )
        built = plugin.build_engine(path, tmp_path / "model.engine", runtime="tensorrt-rtx", capability=120)
        assert [n.kind for n in built.norms] == ["plugin"] * 2
        assert (built.library, built.capability) == (loaded, 120)
    model = good()
    in_branch(model)
    built = plugin.build_engine(saved(model, tmp_path), tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert [n.kind for n in built.norms] == ["plugin"]


def test_a_library_in_the_engine(loaded: Path, tmp_path: Path) -> None:
    """An engine that stores the library is larger by it."""
    path = saved(good(), tmp_path)
    sizes = [
        plugin.build_engine(path, tmp_path / "model.engine", runtime="tensorrt-rtx", serialize=stored).size
        for stored in (False, True)
    ]
    assert sizes[1] - sizes[0] >= loaded.stat().st_size


def test_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugin nodes need the library; without it, they are rewritten on request, and keep their names in the report."""
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "none.so"))
    path = saved(good(), tmp_path)
    with pytest.raises(PluginError, match="no file"):
        plugin.build_engine(path, tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert not (tmp_path / "model.engine").exists()
    built = plugin.build_engine(path, tmp_path / "model.engine", runtime="tensorrt-rtx", without_plugin=True)
    assert [(n.name, n.kind, n.form) for n in built.norms] == [("norm0/RMSNorm", "fused", "function")]


def test_a_function_is_taken_before_the_plugin(loaded: Path, tmp_path: Path) -> None:
    """Inside a function, the function of a node's name runs in place of the plugin, as the check notes."""
    model = good()
    in_function(model)
    (note,) = plugin.check(model).notes
    assert "inside a function" in note
    built = plugin.build_engine(saved(model, tmp_path), tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert {n.kind for n in built.norms} == {"fused"}
    assert any("norm0 is a plugin node, and TensorRT runs it as one kernel" in note for note in built.notes)
    model.functions.remove(next(f for f in model.functions if f.name == "RMSNorm"))
    assert not plugin.check(model).notes
    built = plugin.build_engine(saved(model, tmp_path), tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert [n.kind for n in built.norms] == ["plugin"]


def test_loose_layers(tmp_path: Path) -> None:
    """A norm whose parts another output needs is several layers, and says how many."""
    model = write([Site(SPECS["llama"], shape=(3, 2, 70000), gain_shape=(70000,))], "primitive", 18)
    model.graph.output.append(helper.make_tensor_value_info("norm0/ReduceMean_output", TensorProto.FLOAT, ["n", 2, 1]))
    built = plugin.build_engine(saved(model, tmp_path), tmp_path / "model.engine", runtime="tensorrt-rtx")
    (only,) = built.norms
    assert (only.kind, str(only)) == ("loose", f"{len(only.layers)} layers") and len(only.layers) > 1


def test_profiles(tmp_path: Path) -> None:
    """The shapes that were named are the engine's; those that were not are guessed, and said to be."""
    path = saved(write([Site(SPECS["llama"])], "primitive", 18), tmp_path)
    built = plugin.build_engine(path, tmp_path / "e", runtime="tensorrt-rtx", shapes={"x0": [(2, 2, 16)] * 3})
    assert built.profiles[0].to_json() == {"name": "x0", **{key: [2, 2, 16] for key in ("min", "opt", "max")}}
    assert not built.notes
    assert "n was taken as" in plugin.build_engine(path, tmp_path / "e", runtime="tensorrt-rtx").notes[0]


def test_external_weights(tmp_path: Path) -> None:
    """A model whose weights are in a file beside it is built."""
    model = write([Site(SPECS["llama"], shape=(3, 2, 512))], "function", 18)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=16)
    built = plugin.build_engine(tmp_path / "model.onnx", tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert [n.kind for n in built.norms] == ["fused"]


def test_side_by_side(run: Run, loaded: Path, tmp_path: Path) -> None:  # noqa: F811
    """`--compare` names each norm once, as the model does, with what runs it with the plugin and without."""
    path = saved(write([Site(SPECS["llama"]), Site(SPECS["clamp"])], "primitive", 18), tmp_path)
    data = json.loads(run("plugin", "engine", path, "--compare", "--json")[1])
    assert (data["version"], data["kind"]) == (1, "plugin-comparison")
    for side, kind in (("with", "plugin"), ("without", "fused")):
        assert [(n["name"], n["kind"]) for n in data[side]["norms"]] == [("norm0/Mul", kind), ("norm1/Mul", kind)]
    code, out, _ = run("plugin", "engine", path, "--compare", "--with", "tensorrt-rtx")
    assert code == 0 and out.splitlines()[0].split() == ["norm", "module", "with", "the", "plugin", "without"]
    assert out.count("one kernel") == 2 and out.count("the plugin") >= 3


def test_the_command(run: Run, tmp_path: Path) -> None:  # noqa: F811
    """Text with a line for each norm; JSON with a version; a place is needed, and a capability that there is."""
    path = saved(write([Site(SPECS["llama"])], "primitive", 18), tmp_path)
    target = tmp_path / "model.engine"
    code, out, err = run("plugin", "engine", path, "-o", target, "--shape", "x0=2x2x16", "--sm", "86")
    assert (code, err) == (0, "") and "norm0/Mul" in out and "compute capability 8.6" in out
    data = json.loads(run("plugin", "engine", path, "-o", target, "--json")[1])
    assert (data["version"], data["kind"], data["runtime"]) == (1, "plugin-engine", "tensorrt-rtx")
    assert run("plugin", "engine", path)[0] == 2
    assert run("plugin", "engine", path, "-o", target, "--sm", "90")[0] == 2
    assert run("plugin", "engine", path, "-o", path)[0] == 2
    assert run("plugin", "engine", path, "-o", target, "--compare")[0] == 2


def test_a_faulty_node_is_named_before_the_build(loaded: Path, tmp_path: Path) -> None:
    """A fault that TensorRT would pass over in silence is one line, and the older engine stays."""
    model = good()
    set_field(norm(model), "plugin_namespace", "acme")
    (tmp_path / "model.engine").write_bytes(b"older")
    with pytest.raises(CheckFailedError, match="plugin_namespace: it is 'acme'"):
        plugin.build_engine(saved(model, tmp_path), tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert (tmp_path / "model.engine").read_bytes() == b"older"


def test_a_refused_model_is_one_line(tmp_path: Path) -> None:
    """What TensorRT's parser refuses is one line with the node; nothing is written."""
    model = write([Site(SPECS["llama"])], "primitive", 18)
    model.graph.node.append(helper.make_node("Mystery", ["x0"], ["m"], name="strange", domain="acme"))
    model.opset_import.append(helper.make_opsetid("acme", 1))
    model.graph.output.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, None))
    with pytest.raises(CheckFailedError, match=r"TensorRT-RTX built no engine.*parser.*strange") as caught:
        plugin.build_engine(saved(model, tmp_path), tmp_path / "model.engine", runtime="tensorrt-rtx")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def stand_in(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, name: str = "tensorrt") -> None:
    """A package that does what the text does when it is imported."""
    (folder / "packages").mkdir(exist_ok=True)
    (folder / "packages" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder / "packages")


BUILDER = "class ILogger: pass\ndef Builder(logger):\n    "
"""A package that can be imported, and whose builder does what follows."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os; os.abort()", "ended with signal 6"),
        ("raise RuntimeError('no driver')", "ended with exit code 1.*no driver"),
        ("import os; os._exit(0)", "ended with exit code 0"),
    ],
)
def test_a_build_that_dies_is_one_line(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that aborts, raises or ends early leaves no engine and one line: TensorRT comes before TensorRT-RTX."""
    path = saved(write([Site(SPECS["llama"])], "primitive", 18), tmp_path)
    stand_in(tmp_path, BUILDER + text, monkeypatch)
    with pytest.raises(CheckFailedError, match=f"^TensorRT {words}"):
        plugin.build_engine(path, tmp_path / "model.engine")
    assert not (tmp_path / "model.engine").exists()
    with pytest.raises(UsageError, match="for tensorrt-rtx alone"):
        plugin.build_engine(path, tmp_path / "model.engine", capability=89)


def test_no_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:  # noqa: F811
    """Without any TensorRT: exit 4 and one line with the pip command."""
    path = saved(write([Site(SPECS["llama"])], "primitive", 18), tmp_path)
    monkeypatch.setattr(choice, "is_there", lambda runtime: False)
    assert choice.installed() == ()
    code, _, err = run("plugin", "engine", path, "-o", tmp_path / "e")
    assert code == 4 and "pip install 'tensorrt>=10.15'" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("text", ["raise RuntimeError('no driver')", "import missing_part", "import os; os.abort()"])
def test_a_broken_tensorrt(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:  # noqa: F811
    """A package that is there and cannot be imported is passed over and said; exit 4 and one line where none can be."""
    path = saved(write([Site(SPECS["llama"])], "primitive", 18), tmp_path)
    stand_in(tmp_path, text, monkeypatch)
    assert choice.installed() == ("tensorrt-rtx",)
    built = plugin.build_engine(path, tmp_path / "e", shapes={"x0": (1, 2, 16)})
    assert built.runtime == "tensorrt-rtx" and "importing it fails" in built.notes[0]
    code, _, err = run("plugin", "engine", path, "-o", tmp_path / "e", "--with", "tensorrt")
    assert code == 4 and "tensorrt is installed, and importing it fails" in err and len(err.splitlines()) == 1
    stand_in(tmp_path, text, monkeypatch, "tensorrt_rtx")
    code, _, err = run("plugin", "engine", path, "-o", tmp_path / "e")
    assert code == 4 and "tensorrt-rtx is installed, and" in err and len(err.splitlines()) == 1


def test_a_plugin_node_that_nothing_runs(loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a plugin node have no layer in the engine, whatever the check said, there is no engine but an error."""
    model = good()
    del model.functions[:]
    in_function(model)
    body = [helper.make_node("Mul", ["a", "b"], ["c"])]
    hiding = helper.make_function("other", "Block", ["a", "b"], ["c"], body, [helper.make_opsetid("", 18)])
    model.functions.insert(0, hiding)
    path = saved(model, tmp_path)
    with pytest.raises(CheckFailedError, match="other::Block beside acme::Block"):
        plugin.build_engine(path, tmp_path / "e", runtime="tensorrt-rtx")
    monkeypatch.setattr(engine, "_check_nodes", lambda path: None)
    with pytest.raises(CheckFailedError, match=r"no layer of the engine of .* runs the plugin node norm0"):
        plugin.build_engine(path, tmp_path / "e", runtime="tensorrt-rtx")
    assert not (tmp_path / "e").exists()


def test_a_plugin_node_that_nothing_reads(loaded: Path, tmp_path: Path) -> None:
    """A norm whose result leads nowhere is left out of the engine, which is a note."""
    model = write([Site(SPECS["llama"]), Site(SPECS["torch"])], "plugin", 18)
    dead = model.graph.output.pop(1).name
    path = saved(model, tmp_path)
    built = plugin.build_engine(path, tmp_path / "e", runtime="tensorrt-rtx")
    assert [n.kind for n in built.norms] == ["plugin", "gone"], dead
    assert any("nothing reads the result of norm1" in note for note in built.notes)


def test_a_place_that_takes_no_engine(tmp_path: Path, run: Run) -> None:  # noqa: F811
    """A place that refuses the file when it is written is exit 2 and one line."""
    path = saved(write([Site(SPECS["llama"])], "primitive", 18), tmp_path)
    code, _, err = run("plugin", "engine", path, "-o", "/proc/self/model.engine")
    assert code == 2 and "cannot write /proc/" in err and len(err.splitlines()) == 1


def raw(model: onnx.ModelProto, folder: Path, loaded: Path) -> list[str]:
    """The kinds of the layers of a build that nothing checked before; empty where TensorRT-RTX refuses it."""
    folder.mkdir(exist_ok=True)
    shape = {"name": "x0", "min": [1, 2, 16], "opt": [3, 2, 16], "max": [8, 2, 16]}
    job = {"runtime": "tensorrt-rtx", "capability": 89, "library": str(loaded), "serialize": False}
    job |= {"model": str(saved(model, folder)), "engine": str(folder / "engine"), "profiles": [shape]}
    (folder / "job").write_text(json.dumps(job))
    command = [sys.executable, "-m", "rmsnorm_onnx.plugin.worker", folder / "job", folder / "result"]
    environment = engine._environment("tensorrt-rtx", folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return []
    result: dict[str, Any] = json.loads((folder / "result").read_text())
    return [layer.kind for layer in layers.parse(result["layers"])] if result["problem"] is None else []


def test_the_worker_runs_a_right_node(loaded: Path, tmp_path: Path) -> None:
    """The comparison below means something: an undamaged node becomes the plugin's layer."""
    assert "custom_layer" in raw(good("outside", domain=ONNXRUNTIME_DOMAIN), tmp_path / "build", loaded)


DAMAGE = [
    *((name, None) for name in (*FIELDS, "plugin_namespace")),
    *((name, value) for name, values in OUT_OF_RANGE.items() for value in values),
    *(("gain", dims) for dims in ([15], [1], [], [16, 1], [1, 1, 1, 16])),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param(f, v, marks=() if (f, v) in (("leading", None), ("epsilon", -1.0)) else pytest.mark.full)
        for f, v in DAMAGE
        if f != "result_type" or v not in ("float16", "float32")  # right for the plugin, wrong for the file
    ],
)
def test_the_check_agrees_with_the_plugin(field: str, value: Any, loaded: Path, tmp_path: Path) -> None:
    """What the check names, the plugin refuses, or TensorRT does not take for the plugin at all."""
    model = good("outside", domain=ONNXRUNTIME_DOMAIN)
    if field == "gain":
        change_gain(model, value)
        del model.graph.value_info[:]
    else:
        set_field(norm(model), field, value)
    assert field in {fault.field for fault in plugin.check(model).faults}
    assert "custom_layer" not in raw(model, tmp_path / "build", loaded)


@pytest.mark.parametrize(
    ("name", "x_type"),
    [
        pytest.param(n, t, marks=() if (n, t) == ("bias", "float16") else pytest.mark.full)
        for n in SPECS
        if n not in ("double statistic", "llama")
        for t in ("float32", "float16", "bfloat16")
    ],
)
def test_what_the_check_passes_is_built(name: str, x_type: str, loaded: Path, tmp_path: Path) -> None:
    """A node of any spec and type that the check passes becomes the plugin's layer."""
    model = good(name, x_type)
    assert plugin.check(model).ok
    assert "custom_layer" in raw(model, tmp_path / "build", loaded)


def test_layers_of_the_builder() -> None:
    """The text of TensorRT 10 and 11 is read: the separators between nodes, names with brackets, layers without any."""
    text = (
        "Layers:\nName: a, LayerType: kgen, Inputs: [ { Name: x }], TacticName: t, StreamId: 0, "
        "Metadata: [ONNX Layer: /m/Pow[0]]\x1f[ONNX Layer: Sqrt_1 | f (F) | g (G)]\x1e[ONNX Layer: b]\n"
        "Name: b, LayerType: PluginV3, Outputs: [], Metadata: \n\nI/O Tensors:\n Name: x, IOMode: Input\n"
    )
    found = layers.parse(text)
    assert [(layer.name, layer.kind) for layer in found] == [("a", "kgen"), ("b", "PluginV3")]
    assert found[0].nodes == {("/m/Pow[0]",), ("Sqrt_1", "f", "g"), ("b",)} and not found[1].nodes


def test_norms_inside_functions_side_by_side(loaded: Path, tmp_path: Path) -> None:
    """`--compare` pairs a norm inside a function with what it becomes without the plugin, whatever that is called."""
    model = good()
    del model.functions[:]
    in_function(model)
    pair = plugin.compare_engines(saved(model, tmp_path), runtime="tensorrt-rtx")
    assert [[(n.name, n.kind) for n in e.norms] for e in pair] == [[("norm0", "plugin")], [("norm0", "fused")]]
