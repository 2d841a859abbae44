"""Every form: what it writes is valid and right, what it cannot say it refuses, and what it wrote it reads back."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from form_kit import ONCE, PLAIN, SPECS, Known, Site, assert_right, build, double, replace, write

from rmsnorm_onnx.dtypes import ir_dtype
from rmsnorm_onnx.forms import FORMS, Reading, contrib, plugin
from rmsnorm_onnx.forms import onnx as onnx_form
from rmsnorm_onnx.functions import FunctionLibrary
from rmsnorm_onnx.site import DeclineCode, Declined
from rmsnorm_onnx.spec import RMSNormSpec
from rmsnorm_onnx.writer import Names, Writer

NEWEST = onnx.defs.onnx_opset_version()
TYPES = ("float32", "float16", "bfloat16", "float64")
RUNNABLE = ("function", "primitive", "onnx", "contrib")


def check(name: str, x_type: str, form: str, opset: int, gain_type: str | None = None) -> bool:
    """Writes a spec of the matrix, checks and runs it; False where the form refuses it."""
    spec = double(SPECS[name]) if x_type == "float64" else SPECS[name]
    site = Site(spec, x_type, gain_type=gain_type)
    _, (match,) = build([site], opset)
    if FORMS[form].refusal(match, opset) is not None:
        return False
    model = write([site], form, opset)
    if form != "contrib":
        onnx.checker.check_model(model, full_check=True)
    if form != "onnx" or not any(_is_bfloat16(n, model) for n in model.graph.node):
        assert_right(model, [site])
    return True


def _is_bfloat16(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    """Whether a node is RMSNormalization on bfloat16, which onnxruntime's CPU has no kernel for."""
    if node.op_type != "RMSNormalization":
        return False
    types = {i.name: i.type.tensor_type.elem_type for i in onnx.shape_inference.infer_shapes(model).graph.value_info}
    return types.get(node.input[0]) == onnx.TensorProto.BFLOAT16


@pytest.mark.parametrize("x_type", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("form", RUNNABLE)
def test_a_form_computes_what_it_does_not_refuse(form: str, x_type: str) -> None:
    """Every spec of the matrix at opset 23: checker-clean, and within the bound where the runtime has the kernel."""
    written = {name for name in SPECS if check(name, x_type, form, 23)}
    always = {"llama", "torch", "gemma", "no epsilon", "no gain", "bias", "two axes"}
    assert written == set(SPECS) if form in ("function", "primitive") else always <= written < set(SPECS)


@pytest.mark.full
@pytest.mark.parametrize("opset", (11, 13, 17, 18, 21, 23, NEWEST))
@pytest.mark.parametrize("form", RUNNABLE)
def test_every_form_at_every_opset(form: str, opset: int) -> None:
    """The full matrix: every spec, type, type of the gain, form and opset."""
    written = 0
    for name, x_type in itertools.product(SPECS, TYPES):
        for gain_type in sorted({x_type, "float32", "float16"}):
            written += check(name, x_type, form, opset, gain_type)
    assert written == 0 if form == "onnx" and opset < 23 else written > 40


@pytest.mark.parametrize("opset", (13, 18, 23, NEWEST))
def test_plugin_nodes_pass_the_checker(opset: int) -> None:
    """Plugin nodes of every spec without doubles are checker-clean."""
    for x_type, (name, spec) in itertools.product(("float32", "float16", "bfloat16"), SPECS.items()):
        if name != "double statistic":
            onnx.checker.check_model(write([Site(spec, x_type)], "plugin", opset), full_check=True)


def test_a_lone_plugin_node_carries_its_body() -> None:
    """A file that needs one body has it under the node's name, and runs in onnxruntime without the plugin."""
    sites = [Site(SPECS["gemma"]), Site(SPECS["gemma"].replace(epsilon=0.1))]
    model = write(sites, "plugin", 18)
    assert [f.name for f in model.functions] == ["RMSNorm"]
    onnx.checker.check_model(model, full_check=True)
    assert_right(model, sites)


def test_plugin_nodes_of_two_bodies_carry_none() -> None:
    """A file that needs two bodies carries neither, since both nodes bear one name."""
    assert not write([Site(SPECS["gemma"]), Site(SPECS["outside"])], "plugin", 18).functions


def test_plugin_nodes_for_onnxruntime_stand_in_its_domain() -> None:
    """For onnxruntime's TensorRT provider the domain is trt.plugins, imported, without a function."""
    model = write([Site(PLAIN)], "plugin", 18, plugin_domain="trt.plugins")
    assert [n.domain for n in model.graph.node] == ["trt.plugins"]
    assert {o.domain for o in model.opset_import} == {"", "trt.plugins"}
    assert not model.functions


def test_every_field_of_the_spec_is_on_a_plugin_node() -> None:
    """Each field of RMSNormSpec is a typed attribute, with the name, version and namespace that TensorRT looks up."""
    (node,) = write([Site(SPECS["leading"])], "plugin", 18).graph.node
    written = {a.name: a for a in node.attribute}
    assert {f.name for f in dataclasses.fields(RMSNormSpec)} == set(plugin.FIELDS) <= set(written)
    assert all(written[name].type == kind.value for name, kind in plugin.FIELDS.items())
    assert (node.op_type, node.domain) == ("RMSNorm", "rmsnorm_onnx")
    assert (written["plugin_version"].s, written["plugin_namespace"].s) == (b"1", b"rmsnorm_onnx")
    assert written["leading"].i == 5


@pytest.mark.parametrize(
    ("form", "name", "opset", "words"),
    (
        ("onnx", "llama", 22, "from opset 23 on, and this site is at opset 22"),
        ("onnx", "outside", 23, "epsilon inside the root, and this norm has it outside"),
        ("contrib", "clamp", 18, "epsilon inside the root, and this norm has it clamp"),
        ("onnx", "leading", 23, "over their first 5 elements"),
        ("contrib", "inner axis", 18, "over axis -2 alone"),
        ("onnx", "half factor", 23, "rounds it to float16"),
        ("contrib", "double statistic", 18, "with 1e-06"),
        ("plugin", "double statistic", 18, "no float64"),
    ),
)
def test_what_a_form_cannot_say_it_refuses(form: str, name: str, opset: int, words: str) -> None:
    """One sentence that names the field at fault."""
    _, (match,) = build([Site(SPECS[name])], opset)
    assert words in str(FORMS[form].refusal(match, opset))


def test_the_contrib_op_is_never_written_in_a_function() -> None:
    """onnxruntime crashes on a model-local function that holds SimplifiedLayerNormalization: it is refused there."""
    _, (match,) = build([Site(PLAIN)], 18)
    inside = dataclasses.replace(match, scope="function acme::Block/cond/then_branch")
    assert "crashes" in str(contrib.refusal(inside, 18))
    assert contrib.refusal(dataclasses.replace(match, scope="branch/then_branch"), 18) is None
    assert onnx_form.refusal(inside, 23) is None


@pytest.mark.parametrize("name", ("llama", "torch", "no gain", "bias", "float32 gain after rounding"))
@pytest.mark.parametrize("x_type", ("float32", "float16", "bfloat16"))
def test_only_the_contrib_op_moves_a_rounding(name: str, x_type: str) -> None:
    """It rounds once, so it says so where a half norm rounds before its gain; the other forms move none."""
    _, (match,) = build([Site(SPECS[name], x_type)], 23)
    assert all(FORMS[f].rounding_change(match) is None for f in ("function", "onnx", "plugin", "primitive"))
    rounds_before = name == "float32 gain after rounding" or (name in ("llama", "bias") and x_type != "float32")
    said = FORMS["contrib"].rounding_change(match)
    assert ("before it rounds" in str(said)) == rounds_before


@pytest.mark.parametrize(
    ("form", "x_type", "name", "expected"),
    (
        ("onnx", "float16", "llama", ["RMSNormalization"]),
        ("onnx", "float16", "torch", ["Cast", "Cast", "RMSNormalization", "Cast"]),
        ("onnx", "float32", "torch", ["RMSNormalization"]),
        ("contrib", "float16", "torch", ["SimplifiedLayerNormalization"]),
        ("onnx", "float16", "gemma", ["Cast", "RMSNormalization", "Cast"]),
        ("contrib", "float32", "gemma", ["SimplifiedLayerNormalization"]),
        ("contrib", "float16", "gemma", ["SimplifiedLayerNormalization", "Cast"]),
    ),
)
def test_where_a_native_node_rounds(form: str, x_type: str, name: str, expected: list[str]) -> None:
    """Llama's order is a node in x's type; torch's and Gemma's a float32 node between Casts, or the contrib op."""
    nodes = write([Site(SPECS[name], x_type)], form, 23).graph.node
    assert [n.op_type for n in nodes if n.op_type != "Constant"] == expected


@pytest.mark.parametrize("form", ("onnx", "contrib"))
@pytest.mark.parametrize(("formed", "wanted"), (("float32", 1 + 2.0**-12), ("float16", 1.0)))
def test_an_offset_is_folded_into_a_constant_gain(form: str, formed: str, wanted: float) -> None:
    """1 + g is one constant, formed where the norm forms it: float32 keeps a small g, float16 loses it."""
    spec = ONCE.replace(gain_offset=1.0, gain_type=formed)
    model, (match,) = build([Site(spec, "float16")], 23)
    match.gain.const_value = ir.tensor(np.full(16, 2.0**-12, np.float16), name="gain0")
    replace(model, match, form, Names(model), FunctionLibrary(model))
    node = next(n for n in model.graph if n.op_type == FORMS[form].OPERATOR)
    scale = node.inputs[1].const_value.numpy()
    assert scale.dtype == np.float32
    assert (scale == wanted).all()
    assert not any(n.op_type == "Add" for n in model.graph)


@pytest.mark.parametrize("form", ("onnx", "contrib"))
def test_an_offset_is_added_to_a_gain_that_callers_may_replace(form: str) -> None:
    """An initializer that is an input as well is no constant: 1 + g stays a sum of the graph."""
    model, (match,) = build([Site(SPECS["gemma"])], 23)
    model.graph.inputs.append(match.gain)
    replace(model, match, form, Names(model), FunctionLibrary(model))
    assert [n.op_type for n in model.graph if n.op_type != "Constant"] == ["Add", FORMS[form].OPERATOR]


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("name", SPECS)
def test_x_and_scale_are_of_one_type(name: str, x_type: str) -> None:
    """RMSNormalization never gets an X and a scale of two types, whatever the gain's type."""
    for gain_type in ("float32", "float16", "float64"):
        spec = double(SPECS[name]) if x_type == "float64" else SPECS[name]
        site = Site(spec, x_type, gain_type=gain_type)
        _, (match,) = build([site], 23)
        if onnx_form.refusal(match, 23) is None:
            model = ir.from_proto(onnx.shape_inference.infer_shapes(write([site], "onnx", 23)))
            (node,) = (n for n in model.graph if n.op_type == "RMSNormalization")
            assert node.inputs[0].dtype == node.inputs[1].dtype is not None


@pytest.mark.parametrize("form", ("onnx", "contrib", "plugin"))
@pytest.mark.parametrize("x_type", ("float32", "float16"))
def test_a_bare_native_node_reads_as_what_was_written(form: str, x_type: str) -> None:
    """A node that needs nothing around it reads back as the same operator."""
    read = 0
    for name, spec in SPECS.items():
        site = Site(spec, x_type)
        model, (match,) = build([site], 23)
        form_ = FORMS[form]
        if form_.refusal(match, 23) or form_.rounding_change(match):
            continue
        replace(model, match, form, Names(model), FunctionLibrary(model))
        nodes = [n for n in model.graph if n.op_type != "Constant"]
        if len(nodes) > 1:
            continue
        reading = form_.read(nodes[0], Known())
        assert isinstance(reading, Reading), reading
        held = spec.replace(epsilon=float(np.float32(spec.epsilon)))
        if form != "plugin" and spec.gain_offset:  # now in the gain
            held = held.replace(gain_offset=0.0)
        assert reading.spec.canonical(x_type) == held.canonical(x_type), name
        assert reading.x is match.x
        read += 1
    assert read >= {"onnx": 3, "contrib": 2, "plugin": 15}[form]


def native(op_type: str, domain: str = "", x: str = "float32", scale: tuple[int, ...] = (8,), **attributes) -> ir.Node:
    """A native node on x [2, 3, 8]."""
    values = [ir.val("x", ir_dtype(x), [2, 3, 8]), ir.val("scale", ir_dtype(x), list(scale))]
    return ir.node(op_type, values, attributes, domain=domain, name="norm")


@pytest.mark.parametrize("op_type", ("RMSNormalization", "SimplifiedLayerNormalization"))
def test_left_out_attributes_have_their_defaults(op_type: str) -> None:
    """axis -1, epsilon 1e-5 (as float32), stash_type float32; a positive axis is counted from the end."""
    form = FORMS["onnx" if op_type == "RMSNormalization" else "contrib"]
    plain = form.read(native(op_type), Known())
    assert isinstance(plain, Reading)
    assert (plain.spec.axes, plain.spec.epsilon) == ((-1,), float(np.float32(1e-5)))
    assert plain.spec.statistic_type == "float32"
    positive = form.read(native(op_type, axis=1, epsilon=0.5), Known())
    assert isinstance(positive, Reading)
    assert (positive.spec.axes, positive.spec.epsilon) == ((-2, -1), 0.5)


def test_stash_type_is_the_statistic() -> None:
    """stash_type 10 reads as a float16 statistic; a double norm as float64, whatever it says, with a note."""
    half = onnx_form.read(native("RMSNormalization", x="float16", stash_type=10), Known())
    assert isinstance(half, Reading)
    assert half.spec.statistic_type == "float16"
    wide = onnx_form.read(native("RMSNormalization", x="float64"), Known())
    assert isinstance(wide, Reading)
    assert wide.spec.statistic_type == "float64"
    assert "float64" in wide.notes[0]


def test_mixed_types_read_as_torch_means_them() -> None:
    """A float16 X with a float32 scale, as torch's exporter writes: multiplied in float32, with a note."""
    node = native("RMSNormalization", x="float16")
    node.replace_input_with(1, ir.val("scale", ir.DataType.FLOAT, [8]))
    reading = onnx_form.read(node, Known())
    assert isinstance(reading, Reading)
    assert reading.spec.canonical("float16") == ONCE.replace(
        result_type="float32", epsilon=float(np.float32(1e-5))
    ).canonical("float16")
    assert "refuse" in reading.notes[0]


@pytest.mark.parametrize(
    ("node", "code", "words"),
    (
        (native("RMSNormalization", scale=(1, 1, 1, 8)), DeclineCode.INVALID, "rank 4"),
        (native("RMSNormalization", scale=(3, 5)), DeclineCode.INVALID, "does not broadcast"),
        (native("RMSNormalization", axis=3), DeclineCode.INVALID, "axis 3"),
        (native("RMSNormalization", axis=1.0), DeclineCode.INVALID, "axis is FLOAT"),
        (native("RMSNormalization", epsilon=-1.0), DeclineCode.EPSILON, "not negative"),
        (native("RMSNormalization", stash_type=7), DeclineCode.INVALID, "stash_type 7"),
        (native("SimplifiedLayerNormalization", epsilon=0), DeclineCode.INVALID, "epsilon is INT"),
        (native("SimplifiedLayerNormalization", scale=(1, 1, 1, 8)), DeclineCode.INVALID, "rank 4"),
    ),
)
def test_invalid_native_nodes_are_declined(node: ir.Node, code: DeclineCode, words: str) -> None:
    """What the operator's own definition does not allow is declined, with the field at fault."""
    form = FORMS["onnx" if node.op_type == "RMSNormalization" else "contrib"]
    found = form.read(node, Known())
    assert isinstance(found, Declined)
    assert (found.code, words in found.reason) == (code, True), found.reason


def test_other_operators_are_nobodys() -> None:
    """A form reads its own operator only."""
    for node in (native("LayerNormalization"), native("RMSNormalization", domain="acme"), native("RMSNorm", "acme")):
        assert all(form.read(node, Known()) is None for form in FORMS.values() if hasattr(form, "read"))


def plugin_node(**changes: object) -> ir.Node:
    """A plugin node whose attributes are changed; None removes one."""
    model, (match,) = build([Site(PLAIN)], 18)
    writer = Writer(model, model.graph, 18, before=match.node, names=Names(model), functions=FunctionLibrary(model))
    value = plugin.write(match, writer)
    node = value.producer()
    assert node is not None
    for name, change in changes.items():
        if change is None:
            del node.attributes[name]
        else:
            node.attributes[name] = ir.node("X", [], {name: change}).attributes[name]  # type: ignore[dict-item]
    return node


@pytest.mark.parametrize("field", (*plugin.FIELDS, "plugin_version", "plugin_namespace"))
def test_a_plugin_node_without_a_field_is_declined(field: str) -> None:
    """Each field that is missing, or has another type, is named."""
    for change in (None, [1.5]):
        found = plugin.read(plugin_node(**{field: change}), Known())
        assert isinstance(found, Declined)
        assert found.code == DeclineCode.INVALID
        assert field in found.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"plugin_version": "2"}, "plugin_version is '2'"),
        ({"plugin_namespace": "acme"}, "plugin_namespace is 'acme'"),
        ({"epsilon_placement": "below"}, "epsilon_placement"),
        ({"has_bias": 1}, "2 inputs"),
        ({"epsilon": 1}, "epsilon is INT"),
    ),
)
def test_a_plugin_node_with_a_wrong_value_is_declined(changes: dict[str, object], words: str) -> None:
    """A value without meaning, a wrong type or a wrong number of inputs is named."""
    found = plugin.read(plugin_node(**changes), Known())
    assert isinstance(found, Declined)
    assert words in found.reason


def test_a_plugin_gain_may_be_an_attribute() -> None:
    """Asked for, the gain is the tensor attribute; it reads back, and another form writes it as a Constant."""
    site = Site(SPECS["gemma"])
    model, (match,) = build([site], 18)
    names, library = Names(model), FunctionLibrary(model)
    replace(model, match, "plugin", names, library, gain_attribute=True)
    (node,) = model.graph
    assert len(node.inputs) == 1
    reading = plugin.read(node, Known())
    assert isinstance(reading, Reading)
    assert reading.gain is not None
    again = dataclasses.replace(match, node=node, gain=None, output=node.outputs[0])
    replace(model, again, "primitive", names, library)
    assert_right(ir.to_proto(model), [site])


def skip_model(x_type: int, opset: int = 17) -> onnx.ModelProto:
    """A skip form whose sum is read too; inputs in float32, cast to the type."""
    h = onnx.helper
    gain = onnx.numpy_helper.from_array(np.linspace(0.5, 2, 8, dtype=np.float32), "g32")
    nodes = [h.make_node("Cast", [a], [a[0]], to=x_type) for a in ("x32", "skip32", "g32")]
    nodes.append(
        h.make_node("SkipSimplifiedLayerNormalization", ["x", "s", "g"], ["y", "", "", "sum"], "norm",
                    domain="com.microsoft", epsilon=1e-6)
    )  # fmt: skip
    nodes += [h.make_node("Cast", [a], [f"{a}32"], to=1) for a in ("y", "sum")]
    infos = [h.make_tensor_value_info(n, 1, [2, 3, 8]) for n in ("x32", "skip32", "y32", "sum32")]
    values = [h.make_tensor_value_info(n, x_type, s) for n, s in (("x", [2, 3, 8]), ("s", [2, 3, 8]), ("g", [8]))]
    graph = h.make_graph(nodes, "g", infos[:2], infos[2:], [gain], value_info=values)
    imports = [h.make_opsetid("", opset), h.make_opsetid("com.microsoft", 1)]
    return h.make_model(graph, opset_imports=imports, ir_version=10)


def test_the_skip_form_is_read_with_its_residual() -> None:
    """Its spec rounds once, over the last axis, with the skip as residual; in half it says what it rounds late."""
    for x_type, changes in ((1, 0), (10, 1)):
        model = ir.from_proto(skip_model(x_type))
        node = next(n for n in model.graph if n.domain == "com.microsoft")
        reading = contrib.read(node, Known())
        assert isinstance(reading, Reading)
        assert (reading.x.name, reading.residual and reading.residual.name) == ("x", "s")
        assert reading.spec.canonical("float16").normalized_type == "float32"
        assert len(reading.rounding_changes) == changes


def test_the_skip_form_is_written_as_an_add_and_a_norm() -> None:
    """Rewritten, the sum is an Add of its own, whose value the writer hands over."""
    import onnxruntime as ort

    proto = skip_model(1)
    model = ir.from_proto(proto)
    node = next(n for n in model.graph if n.domain == "com.microsoft")
    reading = contrib.read(node, Known())
    assert isinstance(reading, Reading)
    _, (match,) = build([Site(PLAIN)], 17)
    match = dataclasses.replace(match, spec=reading.spec, node=node, x=reading.x, gain=reading.gain,
                                output=node.outputs[0], residual=reading.residual)  # fmt: skip
    total = node.outputs[3]
    writer = Writer(model, model.graph, 17, before=node, names=Names(model), functions=FunctionLibrary(model))
    new = FORMS["function"].write(match, writer)
    model.graph.insert_before(node, writer.nodes)
    assert writer.residual_sum is not None
    ir.convenience.replace_all_uses_with([node.outputs[0], total], [new, writer.residual_sum])
    model.graph.remove(node, safe=True)
    rng = np.random.default_rng(0)
    feeds = {n: rng.normal(size=(2, 3, 8)).astype(np.float32) for n in ("x32", "skip32")}
    before, after = (
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
        for m in (proto, ir.to_proto(model))
    )
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


def test_new_names_are_unique_in_the_whole_file() -> None:
    """Writing two sites of equal names in every form leaves no two values or nodes of one name."""
    for form in FORMS:
        sites = [Site(SPECS["llama"]), Site(SPECS["bias"])]
        model = write(sites, form, 23)
        names = [o for n in model.graph.node for o in n.output] + [i.name for i in model.graph.input]
        assert len(names) == len(set(names))
        assert len({n.name for n in model.graph.node}) == len(model.graph.node)
