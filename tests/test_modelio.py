"""Models in and out: what survives, what is copied, what is never read, what is never written."""

import copy
import io
import os
import types
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from rmsnorm_onnx import modelio, passes
from rmsnorm_onnx import weights as data_files
from rmsnorm_onnx.errors import ModelError, UsageError

WEIGHTS = np.arange(64, dtype=np.float32)


def model(opset: int = 18) -> onnx.ModelProto:
    """y = x * w + c, with metadata, a doc string and an IR version to keep."""
    proto = onnx.parser.parse_model(
        f"""
        <ir_version: 9, opset_import: ["" : {opset}, "unused.domain" : 3], producer_name: "here", model_version: 7,
         doc_string: "kept", metadata_props: ["key" : "value"]>
        g (float[N, 64] x) => (float[N, 64] y) <float[64] w, float c = {{2}}>
        {{
            [scale] s = Mul(x, w)
            y = Add(s, c)
        }}
        """
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHTS, "w"))
    for node in proto.graph.node:
        node.ClearField("domain")  # the parser writes the default out
    del proto.graph.value_info[:]
    return proto


def external(folder: Path, location: str = "weights.bin", data: bytes | None = None) -> Path:
    """The model on disk, its weights in a data file after 16 bytes of padding."""
    proto = model()
    tensor = next(t for t in proto.graph.initializer if t.name == "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "16", "length": str(WEIGHTS.nbytes)}.items():
        tensor.external_data.add(key=key, value=value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / location).parent.mkdir(parents=True, exist_ok=True)
    (folder / location).write_bytes(bytes(16) + WEIGHTS.tobytes() if data is None else data)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def weights(path: Path) -> np.ndarray:
    """The weights of a file as onnx reads them."""
    return onnx.numpy_helper.to_array(next(t for t in onnx.load(path).graph.initializer if t.name == "w"))


def names(folder: Path) -> list[str]:
    """Every file in a folder and below."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    """IR version, opsets (an unused one too), producer, doc string, metadata, names and types come back."""
    path = tmp_path / "in.onnx"
    path.write_bytes(model().SerializeToString())
    modelio.save(modelio.load(path), tmp_path / "out.onnx")
    before, after = onnx.load(path), onnx.load(tmp_path / "out.onnx")
    for proto in (before, after):
        proto.opset_import.sort(key=lambda o: o.domain)
        proto.graph.initializer.sort(key=lambda t: t.name)
    onnx.checker.check_model(after, full_check=True)
    assert [t.name for t in after.graph.initializer] == ["c", "w"]
    for a, b in zip(after.graph.initializer, before.graph.initializer, strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b))
    del before.graph.initializer[:], after.graph.initializer[:], after.graph.value_info[:]
    assert after == before


@pytest.mark.parametrize("suffix", ["onnx", "textproto", "json"])
def test_text_forms(tmp_path: Path, suffix: str) -> None:
    """The format follows the extension, as in onnx itself."""
    source = tmp_path / "in.onnx"
    source.write_bytes(model().SerializeToString())
    target = tmp_path / f"out.{suffix}"
    modelio.save(modelio.load(source), target)
    assert onnx.load(target).graph.node[0].name == modelio.load(target).graph[0].name == "scale"


def test_weights_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading and saving in the same folder open no data file (trap 28)."""
    path = external(tmp_path)
    monkeypatch.setattr(ir.ExternalTensor, "_load", lambda self: pytest.fail(f"{self.name} was read"))
    modelio.save(modelio.load(path), tmp_path / "out.onnx")
    assert names(tmp_path) == ["model.onnx", "out.onnx", "weights.bin"]
    monkeypatch.undo()
    np.testing.assert_array_equal(weights(tmp_path / "out.onnx"), WEIGHTS)


def test_loading_is_independent_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model loaded by a bare file name still finds its data after a change of directory."""
    external(tmp_path)
    monkeypatch.chdir(tmp_path)
    loaded = modelio.load("model.onnx")
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(loaded.graph.initializers["w"].const_value.numpy(), WEIGHTS)


def test_save_over_itself(tmp_path: Path) -> None:
    """Writing over the file that was read keeps the weights, and leaves nothing behind."""
    path = external(tmp_path)
    mode = path.stat().st_mode
    loaded = modelio.load(path)
    loaded.graph.doc_string = "changed"
    modelio.save(loaded, path)
    assert onnx.load(path).graph.doc_string == "changed" and path.stat().st_mode == mode
    np.testing.assert_array_equal(weights(path), WEIGHTS)
    assert names(tmp_path) == ["model.onnx", "weights.bin"]


@pytest.mark.parametrize("location", ["weights.bin", "data/deep/weights.bin"])
def test_save_elsewhere_copies_plainly(tmp_path: Path, location: str) -> None:
    """Data of another folder is copied, never linked, under its own name; the model in hand stays as it was."""
    loaded = modelio.load(external(tmp_path / "in", location))
    out = tmp_path / "out"
    out.mkdir()
    modelio.save(loaded, out / "model.onnx")
    copied = out / location
    assert names(out) == sorted(["model.onnx", location])
    assert not copied.is_symlink() and copied.stat().st_nlink == 1
    assert copied.read_bytes() == (tmp_path / "in" / location).read_bytes()
    np.testing.assert_array_equal(weights(out / "model.onnx"), WEIGHTS)
    assert Path(loaded.graph.initializers["w"].const_value.path) == tmp_path / "in" / location


def test_name_collisions(tmp_path: Path) -> None:
    """A file of another content is never written over, and one of the same content serves again."""
    loaded = modelio.load(external(tmp_path / "in"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "weights.bin").write_bytes(b"someone else's")
    for _ in range(2):
        modelio.save(loaded, out / "model.onnx")
        assert names(out) == ["model.onnx", "weights-1.bin", "weights.bin"]
        assert (out / "weights.bin").read_bytes() == b"someone else's"
        np.testing.assert_array_equal(weights(out / "model.onnx"), WEIGHTS)


def test_constants_in_branches_and_functions_are_found(tmp_path: Path) -> None:
    """External tensors in attributes, branches and functions are copied as initializers are."""
    proto = onnx.parser.parse_model(
        """
        <ir_version: 9, opset_import: ["" : 18, "own" : 1]>
        g (float[64] x, bool b) => (float[64] y)
        {
            z = If(b) <then_branch = t () => (float[64] p)
                                     { k = Constant<value: tensor = float[1] {1}>() p = Add(x, k) },
                       else_branch = e () => (float[64] q) { q = own.F(x) }>
            y = Identity(z)
        }
        <domain: "own", opset_import: ["" : 18]>
        F (x) => (y) { k = Constant<value: tensor = float[1] {1}>() y = Add(x, k) }
        """
    )
    held = [proto.graph.node[0].attribute[0].g.node[0].attribute[0].t, proto.functions[0].node[0].attribute[0].t]
    for i, tensor in enumerate(held):
        tensor.ClearField("float_data")
        tensor.name, tensor.data_location = f"k{i}", onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"k{i}.bin")
        (tmp_path / f"k{i}.bin").write_bytes(np.float32(3).tobytes())
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "out").mkdir()
    modelio.save(modelio.load(tmp_path / "m.onnx"), tmp_path / "out" / "m.onnx")
    assert names(tmp_path / "out") == ["k0.bin", "k1.bin", "m.onnx"]


def test_weights_too_large_for_a_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in memory that a protobuf cannot hold go to a data file beside the model."""
    monkeypatch.setattr(data_files, "_PROTO_LIMIT", 100)
    monkeypatch.setattr(data_files, "_SMALL_TENSOR", 16)
    given = ir.from_proto(model())
    modelio.save(given, tmp_path / "big.onnx")
    assert names(tmp_path) == ["big.onnx", "big.onnx.data"]
    np.testing.assert_array_equal(weights(tmp_path / "big.onnx"), WEIGHTS)
    assert not isinstance(given.graph.initializers["w"].const_value, ir.ExternalTensor)


@pytest.mark.parametrize("step", ["write", "replace", "copy"])
def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A full disk at any step leaves the old output as it was and no other file."""
    loaded = modelio.load(external(tmp_path / "in"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.onnx").write_bytes(b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    real = os.replace
    if step == "write":
        monkeypatch.setattr(modelio, "_write", full)
    elif step == "copy":
        monkeypatch.setattr(data_files.shutil, "copyfile", full)
    else:
        monkeypatch.setattr(os, "replace", lambda a, b: full() if Path(b).suffix == ".onnx" else real(a, b))
    with pytest.raises(UsageError, match=r"cannot write .*No space left on device"):
        modelio.save(loaded, out / "model.onnx")
    assert names(out) == ["model.onnx"] and (out / "model.onnx").read_bytes() == b"old"


@pytest.mark.parametrize(("target", "words"), [("absent/x.onnx", "does not exist; create it"), (".", "it is a folder")])
def test_targets_that_cannot_be(tmp_path: Path, target: str, words: str) -> None:
    """A target that cannot be written is a usage error that says what to do."""
    with pytest.raises(UsageError, match=words):
        modelio.save(ir.from_proto(model()), tmp_path / target)
    assert names(tmp_path) == []


def test_missing_data_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    """A data file that vanished after loading is named, and no output appears."""
    loaded = modelio.load(external(tmp_path / "in"))
    (tmp_path / "in" / "weights.bin").unlink()
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"weights\.bin does not exist"):
        modelio.save(loaded, tmp_path / "out" / "model.onnx")
    assert names(tmp_path / "out") == []


def test_a_proto_is_copied_before_it_is_changed() -> None:
    """Renaming a value of the result leaves the caller's proto alone, though onnx_ir shares tensors."""
    given = model()
    before = copy.deepcopy(given)
    graph, kind = modelio.to_ir(given)
    graph.graph.initializers["w"].const_value.name = "renamed"
    graph.graph.remove(graph.graph[1], safe=False)
    assert kind == "proto" and given == before
    back = modelio.from_ir(graph, kind, given)
    assert isinstance(back, onnx.ModelProto) and len(back.graph.node) == 1


def test_an_ir_model_is_cloned() -> None:
    """An onnx_ir.Model comes back as one, and the caller's keeps its nodes."""
    given = ir.from_proto(model())
    clone, kind = modelio.to_ir(given)
    clone.graph[0].name = "other"
    assert kind == "ir" and given.graph[0].name == "scale"
    assert modelio.from_ir(clone, kind, given) is clone


def test_a_program_keeps_its_kind_and_other_fields() -> None:
    """Whatever has a `model` and a `model_proto`, as torch's ONNXProgram, comes back as its own kind."""
    given = types.SimpleNamespace(model=ir.from_proto(model()), model_proto=None, exported_program="kept")
    graph, kind = modelio.to_ir(given)
    graph.graph[0].name = "other"
    back = modelio.from_ir(graph, kind, given)
    assert (back.model, back.exported_program) == (graph, "kept") and given.model.graph[0].name == "scale"


def test_a_path_gives_an_ir_model(tmp_path: Path) -> None:
    """A path, as text or as an object, gives an onnx_ir.Model."""
    path = external(tmp_path)
    for given in (path, str(path)):
        graph, kind = modelio.to_ir(given)
        assert kind == "path" and modelio.from_ir(graph, kind, given) is graph


@pytest.mark.parametrize("given", [None, 3, b"bytes", object()])
def test_other_kinds_are_named(given: object) -> None:
    """Anything else is a usage error that lists the four kinds."""
    with pytest.raises(UsageError, match=rf"{type(given).__name__} is no model; give a path"):
        modelio.to_ir(given)


def annotated(folder: Path, **entries: str) -> Path:
    """The model on disk with more entries of its external data."""
    path = external(folder)
    proto = onnx.load(path, load_external_data=False)
    held = next(t for t in proto.graph.initializer if t.name == "w")
    for key, value in entries.items():
        held.external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())
    return path


def entries(proto: onnx.ModelProto) -> dict[str, str]:
    """What a model says of its external data."""
    held = next(t for t in proto.graph.initializer if t.name == "w")
    return {entry.key: entry.value for entry in held.external_data}


@pytest.mark.parametrize("place", [".", "elsewhere"])
@pytest.mark.filterwarnings("error")
def test_other_entries_of_external_data_survive(tmp_path: Path, place: str) -> None:
    """A checksum, and a key that nobody knows, in the same folder and in another; nobody is warned of them."""
    path = annotated(tmp_path / "in", checksum="abc", weird="1")
    target = tmp_path / "in" / place / "out.onnx"
    target.parent.mkdir(exist_ok=True)
    modelio.save(modelio.load(path), target)
    wanted = {"location": "weights.bin", "offset": "16", "length": "256", "checksum": "abc", "weird": "1"}
    assert entries(onnx.load(target, load_external_data=False)) == wanted
    given = onnx.load(path, load_external_data=False)
    assert entries(modelio.from_ir(*modelio.to_ir(given), given)) == wanted


def test_metadata_is_not_doubled(tmp_path: Path) -> None:
    """A tensor's metadata survives any number of round trips as it is, of a proto and of a file alike."""
    proto = model()
    held = next(t for t in proto.graph.initializer if t.name == "w")
    held.metadata_props.add(key="from", value="here")
    first = modelio.from_ir(*modelio.to_ir(proto), proto)
    kept = next(t for t in first.graph.initializer if t.name == "w").metadata_props
    assert [(e.key, e.value) for e in kept] == [("from", "here")]
    assert modelio.from_ir(*modelio.to_ir(first), first).SerializeToString() == first.SerializeToString()
    (tmp_path / "0.onnx").write_bytes(proto.SerializeToString())
    for n in range(2):
        modelio.save(modelio.load(tmp_path / f"{n}.onnx"), tmp_path / f"{n + 1}.onnx")
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()


def test_a_proto_that_was_not_changed_comes_back_equal() -> None:
    """To the byte, as another object, whatever onnx_ir would write otherwise: here a name for a Constant's tensor."""
    given = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[2] x) => (float[2] y)'
        " { k = Constant<value: tensor = float[1] {1}>() y = Add(x, k) }"
    )
    back = modelio.from_ir(*modelio.to_ir(given), given, changed=False)
    assert back is not given and back.SerializeToString() == given.SerializeToString()
    fused, report = passes.fuse(given)
    assert not report.rewritten and fused is not given and fused.SerializeToString() == given.SerializeToString()


def test_data_of_a_proto_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept by reference, and reading it is a usage error with the mend, even where the name exists by chance."""
    proto = onnx.load(external(tmp_path), load_external_data=False)
    monkeypatch.chdir(tmp_path)
    loaded, kind = modelio.to_ir(proto)
    held = loaded.graph.initializers["w"].const_value
    for read in (held.numpy, held.tobytes, lambda: np.asarray(held), lambda: held.tofile(io.BytesIO())):
        with pytest.raises(UsageError, match=r"tensor 'w' keeps its data in 'weights.bin'.*give the model's path"):
            read()
    assert entries(modelio.from_ir(loaded, kind, proto)) == entries(proto)


def test_data_that_vanished_is_named_when_it_is_read(tmp_path: Path) -> None:
    """For a model of ours and for an onnx_ir.Model of the caller."""
    path = external(tmp_path)
    given = [modelio.load(path), modelio.to_ir(ir.load(path))[0]]
    (tmp_path / "weights.bin").unlink()
    for loaded in given:
        with pytest.raises(
            ModelError, match=r"tensor 'w' keeps its data in 'weights.bin', which cannot be read: No such"
        ):
            loaded.graph.initializers["w"].const_value.numpy()


def test_a_gain_that_a_proto_keeps_elsewhere() -> None:
    """Kept as an input it is not needed; moved into the node it is, and the usage error names it."""
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[n, 8] x) => (float[n, 8] y)'
        " <float epsilon = {1e-6}, int64[1] last = {-1}, float[8] gain = {1, 1, 1, 1, 1, 1, 1, 1}>"
        " { p = Mul(x, x)  m = ReduceMean(p, last)  a = Add(m, epsilon)  r = Sqrt(a)  d = Div(x, r)  y = Mul(d, gain) }"
    )
    held = next(t for t in proto.graph.initializer if t.name == "gain")
    held.ClearField("float_data")
    held.data_location = onnx.TensorProto.EXTERNAL
    held.external_data.add(key="location", value="gone.bin")
    fused, report = passes.fuse(proto)
    assert report.rewritten == 1 and next(t for t in fused.graph.initializer if t.name == "gain") == held
    with pytest.raises(UsageError, match=r"tensor 'gain' keeps its data in 'gone.bin'.*give the model's path"):
        passes.fuse(proto, gain_attribute=True)
