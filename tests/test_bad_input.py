"""Files that are no valid models: one clear line each, and nothing written (trap 43)."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from test_modelio import external, model, names

from rmsnorm_onnx import modelio
from rmsnorm_onnx.errors import ModelError, UsageError

Damage = Callable[[onnx.ModelProto], None]


def refused(path: Path | str) -> str:
    """The one line that loading raises."""
    with pytest.raises(ModelError) as caught:
        modelio.load(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500 and caught.value.exit_code == 3
    assert str(path) in message
    return message


def saved(folder: Path, damage: Damage) -> Path:
    """A damaged model on disk."""
    proto = model()
    damage(proto)
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_missing(tmp_path: Path) -> None:
    """A path at which there is nothing."""
    assert "does not exist" in refused(tmp_path / "absent.onnx")


def test_folder(tmp_path: Path) -> None:
    """A folder in place of a file."""
    assert "is a folder; name the .onnx file" in refused(tmp_path)


def test_empty(tmp_path: Path) -> None:
    """A file of no bytes, which protobuf would read as an empty message."""
    (tmp_path / "m.onnx").touch()
    assert "is empty" in refused(tmp_path / "m.onnx")


def test_dangling_link(tmp_path: Path) -> None:
    """A link to nothing."""
    (tmp_path / "m.onnx").symlink_to("nowhere")
    assert "cannot be read" in refused(tmp_path / "m.onnx")


@pytest.mark.parametrize("suffix", ["onnx", "textproto", "json"])
def test_random_bytes(tmp_path: Path, suffix: str) -> None:
    """Random bytes, whatever the extension promises."""
    path = tmp_path / f"m.{suffix}"
    for seed in range(50):
        path.write_bytes(random.Random(seed).randbytes(1 + seed * 7))
        assert "is not an ONNX model" in refused(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    """A file cut at any byte before the last import is refused; behind it, only metadata is gone."""
    whole = model()
    del whole.metadata_props[:]
    data = whole.SerializeToString()
    head = onnx.ModelProto()
    head.CopyFrom(whole)
    del head.opset_import[:]
    path = tmp_path / "m.onnx"
    for size in range(1, len(head.SerializeToString()) + 1):
        path.write_bytes(data[:size])
        refused(path)


def test_no_nodes(tmp_path: Path) -> None:
    """An empty graph."""
    assert "has an empty graph" in refused(saved(tmp_path, lambda m: m.graph.ClearField("node")))


def cycle(proto: onnx.ModelProto) -> None:
    """The product reads the sum that is computed from it."""
    proto.graph.node[0].input[1] = "y"


def branch_cycle(proto: onnx.ModelProto) -> None:
    """A cycle through a branch: the If reads in its branch what is computed from its own output."""
    branch = helper.make_graph([helper.make_node("Identity", ["y"], ["p"])], "b", [], [vi("p")])
    proto.graph.input.append(helper.make_tensor_value_info("b", TensorProto.BOOL, []))
    proto.graph.node.insert(0, helper.make_node("If", ["b"], ["q"], then_branch=branch, else_branch=branch))
    proto.graph.node[1].input[1] = "q"


def vi(name: str) -> onnx.ValueInfoProto:
    """A float output of unknown shape."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def constant(proto: onnx.ModelProto) -> onnx.TensorProto:
    """The scalar, which stands in a typed field."""
    return next(t for t in proto.graph.initializer if t.name == "c")


def tensor(**fields: object) -> Damage:
    """Overwrites fields of the weights."""

    def damage(proto: onnx.ModelProto) -> None:
        held = next(t for t in proto.graph.initializer if t.name == "w")
        for field, value in fields.items():
            if field == "dims":
                held.dims[:] = value
            else:
                setattr(held, field, value)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cycle, "has a cycle through Mul 'scale'"),
        (branch_cycle, "has a cycle through If"),
        (lambda m: m.graph.node[0].input.__setitem__(0, "ghost"), "reads 'ghost', which nothing computes"),
        (lambda m: m.graph.node[1].output.__setitem__(0, "z"), "output 'y' is computed by nothing"),
        (lambda m: m.graph.node.append(m.graph.node[0]), "'s' is computed twice"),
        (lambda m: m.graph.node[0].ClearField("op_type"), "no operator type"),
        (lambda m: m.ClearField("opset_import"), "lacks an opset"),
        (lambda m: m.ClearField("graph"), "lacks a graph"),
        (tensor(dims=[2**40, 2**40]), "needs"),
        (tensor(dims=[65]), "needs 260 bytes, has 256"),
        (tensor(dims=[-64]), "negative dimension"),
        (tensor(data_type=99), "unknown element type 99"),
        (tensor(raw_data=b""), "needs 256 bytes, has 0"),
        (tensor(raw_data=bytes(300)), "needs 256 bytes, has 300"),
        (lambda m: constant(m).ClearField("float_data"), "needs 1 entries of float_data, has 0"),
        (lambda m: setattr(constant(m), "data_type", TensorProto.INT32), "needs 1 entries of int32_data, has 0"),
        (lambda m: m.training_info.add(), "training information"),
        (lambda m: m.graph.sparse_initializer.add(), "sparse initializers"),
    ],
)
def test_damaged(tmp_path: Path, damage: Damage, words: str) -> None:
    """Each kind of invalid graph or tensor is named."""
    assert words in refused(saved(tmp_path, damage))


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    """A name of arbitrary bytes, which protobuf lets through."""
    path = saved(tmp_path, lambda m: None)
    path.write_bytes(path.read_bytes().replace(b"scale", b"sc\xffle"))
    assert "holds text that is no UTF-8" in refused(path)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes(tmp_path: Path, seed: int) -> None:
    """A file with a few bytes changed is loaded and saved, or refused in one line; nothing else is raised."""
    data = model().SerializeToString()
    path, outcomes = tmp_path / "m.onnx", set()
    for n in range(150):
        random_ = random.Random(1000 * seed + n)
        damaged = bytearray(data)
        for _ in range(random_.choice((1, 1, 3))):
            damaged[random_.randrange(len(damaged))] = random_.randrange(256)
        path.write_bytes(damaged)
        try:
            modelio.save(modelio.load(path), tmp_path / "out.onnx")
            outcomes.add("saved")
        except ModelError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"saved", "refused"}


def test_damage_in_a_function_is_named(tmp_path: Path) -> None:
    """A local function that reads what nothing computes is named as the place."""

    def damage(proto: onnx.ModelProto) -> None:
        body = [helper.make_node("Neg", ["nothing"], ["y"], name="n")]
        proto.functions.append(helper.make_function("own", "F", ["x"], ["y"], body, [helper.make_opsetid("", 18)]))

    assert "function 'F': Neg 'n' reads 'nothing'" in refused(saved(tmp_path, damage))


def test_a_graph_in_another_order_is_sorted(tmp_path: Path) -> None:
    """Nodes out of order, which onnxruntime accepts, are put in order."""

    def swap(proto: onnx.ModelProto) -> None:
        first = onnx.NodeProto()
        first.CopyFrom(proto.graph.node[0])
        del proto.graph.node[0]
        proto.graph.node.append(first)

    assert [n.op_type for n in modelio.load(saved(tmp_path, swap)).graph] == ["Mul", "Add"]


def test_a_negative_dimension_of_an_input_is_unknown(tmp_path: Path) -> None:
    """-1 in an input's shape means "any", as in onnxruntime."""

    def damage(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1

    shape = modelio.load(saved(tmp_path, damage)).graph.inputs[0].shape
    assert not isinstance(shape[0], int) and shape[1] == 64


def test_odd_but_valid_files(tmp_path: Path) -> None:
    """Duplicate and empty node names, an initializer that is an input, and IR 3 are read (trap 29)."""

    def odd(proto: onnx.ModelProto) -> None:
        proto.ir_version = 3
        proto.graph.node[0].name = proto.graph.node[1].name = "same"
        proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [64]))
        proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, []))

    loaded = modelio.load(saved(tmp_path, odd))
    modelio.save(loaded, tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert [i.name for i in written.graph.input] == ["x", "w", "c"] and written.ir_version == 3


def relocate(path: Path, location: str, **entries: str) -> Path:
    """Point the model's external tensor elsewhere."""
    proto = onnx.load(path, load_external_data=False)
    held = next(t for t in proto.graph.initializer if t.name == "w")
    for entry in held.external_data:
        entry.value = {"location": location, **entries}.get(entry.key, entry.value)
    path.write_bytes(proto.SerializeToString())
    return path


def test_external_data_missing(tmp_path: Path) -> None:
    """A data file that is not there."""
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    assert "'weights.bin', which does not exist; put it beside the model" in refused(path)


def test_external_data_too_short(tmp_path: Path) -> None:
    """A data file that ends too early, by one byte."""
    assert "is too short: 271 of 272 bytes" in refused(external(tmp_path, data=bytes(271)))


@pytest.mark.parametrize("location", ["../weights.bin", "sub/../../weights.bin", "{absolute}"])
def test_external_data_outside(tmp_path: Path, location: str) -> None:
    """A path that leaves the model's folder, though the file exists there."""
    external(tmp_path)
    path = external(tmp_path / "inner")
    (tmp_path / "inner" / "sub").mkdir()
    relocate(path, location.format(absolute=tmp_path / "weights.bin"))
    assert "leaves the model's folder" in refused(path)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_external_data_linked(tmp_path: Path, link: Callable[[str, str], None]) -> None:
    """A data file that is a link of either kind, which onnx refuses too."""
    external(tmp_path / "elsewhere")
    path = external(tmp_path / "inner")
    (tmp_path / "inner" / "weights.bin").unlink()
    link(str(tmp_path / "elsewhere" / "weights.bin"), str(tmp_path / "inner" / "weights.bin"))
    assert "link" in refused(path) and "put a copy" in refused(path)


def test_external_data_in_a_linked_folder(tmp_path: Path) -> None:
    """A folder link that leads out of the model's folder."""
    external(tmp_path / "elsewhere")
    path = external(tmp_path / "inner")
    (tmp_path / "inner" / "door").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refused(relocate(path, "door/weights.bin"))


def test_external_data_is_a_folder(tmp_path: Path) -> None:
    """A folder where the data file should be."""
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "weights.bin").mkdir()
    assert "is no file" in refused(path)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"offset": "-1"}, "offset -1"),
        ({"length": "255"}, "length 255"),
        ({"offset": "sixteen"}, "no number"),
        ({"offset": "99999999999999999999"}, "too short"),
    ],
)
def test_external_data_with_absurd_entries(tmp_path: Path, entries: dict[str, str], words: str) -> None:
    """Offsets and lengths that cannot be."""
    assert words in refused(relocate(external(tmp_path), "weights.bin", **entries))


def test_nothing_is_written(tmp_path: Path) -> None:
    """Refusing a file leaves its folder as it was."""
    path = saved(tmp_path, cycle)
    refused(path)
    assert names(tmp_path) == ["m.onnx"]


@pytest.mark.parametrize("calls", [{"f": "f"}, {"f": "g", "g": "f"}])
def test_a_function_that_calls_itself(tmp_path: Path, calls: dict[str, str]) -> None:
    """Directly or by a detour: expanding it would never end."""
    functions = " ".join(
        f'<domain: "own", opset_import: ["" : 18, "own" : 1]> {name} (a) => (b) {{ b = own.{called} (a) }}'
        for name, called in calls.items()
    )
    header = '<ir_version: 8, opset_import: ["" : 18, "own" : 1]> m (float[2] x) => (float[2] y) { y = own.f (x) }'
    proto = onnx.parser.parse_model(header + functions)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    assert "calls itself" in refused(tmp_path / "m.onnx")


def test_two_initializers_of_one_name(tmp_path: Path) -> None:
    """Of which one would be lost."""
    path = saved(tmp_path, lambda m: m.graph.initializer.append(m.graph.initializer[0]))
    assert "two initializers of one name" in refused(path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    """A pipe is refused without being opened, which would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in refused(tmp_path / "pipe")


def test_names_that_cannot_be() -> None:
    """Endless and empty names, and one with a NUL, are one short line each."""
    with pytest.raises(ModelError, match="File name too long") as caught:
        modelio.load("x" * 5000)
    assert len(str(caught.value)) < 300
    with pytest.raises(ModelError, match="null byte"):
        modelio.load("a\0b")
    with pytest.raises(UsageError, match="name is empty"):
        modelio.load("")


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("x" * 400, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: .*null byte"),
        ("model.onnx", "'model.onnx', which is the model itself"),
        ("weights.bin/deeper", "does not exist"),
    ],
)
def test_external_data_at_an_impossible_place(tmp_path: Path, location: str, words: str) -> None:
    """A location that no file system takes, and the model's own file."""
    assert re.search(words, refused(relocate(external(tmp_path), location)))


def test_external_data_that_is_a_pipe(tmp_path: Path) -> None:
    """A pipe where the data file should be is not opened."""
    path = external(tmp_path)
    (tmp_path / "weights.bin").unlink()
    os.mkfifo(tmp_path / "weights.bin")
    assert "is no file" in refused(path)
