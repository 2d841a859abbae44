"""`plugin check` on nodes that functions and other norms lead to, and on what TensorRT's parser makes of them there."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from plugin_kit import fields, good, in_function, inner_node, norm, set_field

from rmsnorm_onnx import plugin
from rmsnorm_onnx.forms.plugin import ONNXRUNTIME_DOMAIN

IMPORTS = [helper.make_opsetid("", 18), helper.make_opsetid("rmsnorm_onnx", 1), helper.make_opsetid("acme", 1)]


def in_block() -> onnx.ModelProto:
    """A norm without a body, in the function acme::Block of x and the gain."""
    model = good()
    del model.functions[:]
    in_function(model)
    return model


def another(model: onnx.ModelProto, domain: str = "acme", name: str = "Block", overload: str = "") -> None:
    """A function of two inputs that is no norm, before all others: the one that TensorRT's parser finds."""
    body = [helper.make_node("Mul", ["a", "b"], ["c"])]
    made = helper.make_function(domain, name, ["a", "b"], ["c"], body, IMPORTS[:1], overload=overload)
    functions = [made, *model.functions]
    del model.functions[:]
    model.functions.extend(functions)
    model.ir_version = max(model.ir_version, 10)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"domain": "other"}, "other::Block beside acme::Block, through which"),
        ({"overload": "second"}, "acme::Block, overload 'second', beside acme::Block"),
        ({}, "acme::Block twice"),
        ({"domain": "other", "name": "Block2"}, None),
    ],
)
def test_a_function_that_hides_the_one_around_the_node(other: dict[str, str], words: str | None) -> None:
    """A second function of the name of the one that leads to the node is a fault, whatever its domain or overload."""
    model = in_block()
    assert plugin.check(model).ok
    another(model, **other)
    faults = plugin.check(model).faults
    assert [f.field for f in faults] == ["function"] * bool(words)
    assert not words or (words in faults[0].what and "by name alone" in faults[0].what)


def test_a_function_that_hides_an_outer_one() -> None:
    """Every function on the path to the node counts, not only the innermost."""
    model = in_block()
    call = model.graph.node[-1]
    outer = helper.make_node("Block", ["a", "b"], ["c"], domain="acme")
    model.functions.append(helper.make_function("acme", "Layer", ["a", "b"], ["c"], [outer], IMPORTS))
    call.op_type = "Layer"
    assert plugin.check(model).ok
    another(model, "other", "Layer")
    (fault,) = plugin.check(model).faults
    assert fault.field == "function" and "other::Layer beside acme::Layer" in fault.what


def test_the_nodes_own_function_twice() -> None:
    """Two functions of the node's own name, domain and overload are a fault too."""
    model = good()
    model.functions.append(model.functions[0])
    assert "rmsnorm_onnx::RMSNorm twice" in plugin.check(model).faults[0].what


@pytest.mark.parametrize("result", ["x", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("x_type", ["float32", "bfloat16"])
def test_the_type_of_a_result_that_nothing_declares(x_type: str, result: str) -> None:
    """The next norm's gain is held to the type that the norm before it gives: x's, or the one that its field names."""
    model = good(x_type=x_type, domain=ONNXRUNTIME_DOMAIN)
    first, second = norm(model), onnx.NodeProto()
    second.CopyFrom(first)
    second.name, second.input[0], first.output[0] = "second", "between", "between"
    second.input[1] = "half"
    model.graph.node.append(second)
    set_field(first, "result_type", result)
    model.graph.initializer.append(helper.make_tensor("half", TensorProto.FLOAT16, [16], np.ones(16)))
    del model.graph.value_info[:]
    model.graph.output[0].CopyFrom(helper.make_empty_tensor_value_info(second.output[0]))
    given = x_type if result == "x" else result
    faults = plugin.check(model).faults
    assert [(f.node, f.field) for f in faults] == [("second", "gain")] * (given != "float16")
    assert given == "float16" or f"it is float16, and x is {given}" in faults[0].what


@pytest.mark.parametrize("size", [16, 15])
def test_a_chain_of_calls_is_known_through(size: int) -> None:
    """The result of a norm in one call is known in the next call of the same function, with that call's own gain."""
    model = in_block()
    first, second = model.graph.node[-1], onnx.NodeProto()
    second.CopyFrom(first)
    second.name, second.input[0], first.output[0] = "second", "between", "between"
    second.input[1] = "another"
    model.graph.node.append(second)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(size, np.float16), "another"))
    report = plugin.check(model)
    assert not report.notes and [f.field for f in report.faults] == ["gain"] * (size == 15)
    assert size == 16 or "its shape is [15]" in report.faults[0].what


@pytest.mark.parametrize("empty", [False, True])
def test_an_input_that_the_call_leaves_out(empty: bool) -> None:
    """A call that passes nothing, or an empty name, for the gain of the norm inside is a fault at the gain."""
    model = in_block()
    call = model.graph.node[-1]
    del call.input[1:]
    if empty:
        call.input.append("")
    (fault,) = plugin.check(model).faults
    assert fault.field == "gain" and "which a call leaves out" in fault.what


@pytest.mark.parametrize("rank", [8, 9])
def test_a_rank_that_tensorrt_has_not(rank: int) -> None:
    """TensorRT's tensors have at most 8 dimensions."""
    model = good()
    for value in (model.graph.input[0], model.graph.output[0]):
        shape = value.type.tensor_type.shape
        for _ in range(rank - 3):
            shape.dim.add(dim_value=1)
        sizes = [1] * (rank - 1) + [16]
        for dim, size in zip(shape.dim, sizes, strict=True):
            dim.dim_value = size
    del model.graph.value_info[:]
    faults = plugin.check(model).faults
    assert [f.field for f in faults] == ["x"] * (rank == 9)
    assert rank == 8 or "its rank is 9" in faults[0].what


def test_a_rank_that_the_file_does_not_say() -> None:
    """An x without a shape is a note that says that TensorRT needs one."""
    model = good(domain=ONNXRUNTIME_DOMAIN)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.ClearField("shape")
    report = plugin.check(model)
    assert report.ok and "rank of x is unknown" in report.notes[0] and "TensorRT needs" in report.notes[0]


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("leading", 2**32, 0),
        ("leading", 2**32 + 2, 2),
        ("leading", 2**31, -(2**31)),
        ("leading", -(2**32) + 2, 2),
        ("has_bias", 2**32, 0),
        ("axes", [-(2**32) - 1], -1),
    ],
)
def test_integers_beyond_32_bits(field: str, value: int | list[int], kept: int) -> None:
    """An integer of which TensorRT's parser keeps another number is a fault that names that number."""
    model = in_block()
    set_field(inner_node(model), field, value)
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "d"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    found = [f for f in plugin.check(model).faults if "32 bits" in f.what]
    assert [f.field for f in found] == [field] and found[0].what.endswith(f"alone: {kept}")
    assert field in fields(model)
