"""Attributes of a file: their types, the fields that are set, and what operators and functions take."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from test_bad_input import Damage, refused, saved, vi

from rmsnorm_onnx import modelio


def attribute(**changes: object) -> Damage:
    """Overwrites fields of the reduction's `keepdims`; None clears one."""

    def damage(proto: onnx.ModelProto) -> None:
        node = helper.make_node("ReduceMean", ["x"], ["mean"], name="mean", keepdims=1)
        for field, value in changes.items():
            if value is None:
                node.attribute[0].ClearField(field)
            else:
                setattr(node.attribute[0], field, value)
        proto.graph.node.append(node)

    return damage


def extra(op_type: str, domain: str = "", **attributes: object) -> Damage:
    """One more node, its attributes as given."""
    return lambda m: m.graph.node.append(helper.make_node(op_type, ["x"], ["e"], "extra", domain=domain, **attributes))


def twice(proto: onnx.ModelProto) -> None:
    """An attribute that is there twice."""
    attribute()(proto)
    proto.graph.node[-1].attribute.append(proto.graph.node[-1].attribute[0])


def in_a_branch(proto: onnx.ModelProto) -> None:
    """An attribute without a type in a branch."""
    branch = helper.make_graph([helper.make_node("Softmax", ["x"], ["p"], "deep", axis=1)], "b", [], [vi("p")])
    branch.node[0].attribute[0].ClearField("type")
    proto.graph.input.append(helper.make_tensor_value_info("b", TensorProto.BOOL, []))
    proto.graph.node.append(helper.make_node("If", ["b"], ["q"], then_branch=branch, else_branch=branch))


def in_a_call(proto: onnx.ModelProto) -> None:
    """A call that gives a float where the function's body needs an integer."""
    node = helper.make_node("ReduceMean", ["a"], ["b"])
    node.attribute.append(onnx.AttributeProto(name="keepdims", ref_attr_name="keep", type=onnx.AttributeProto.INT))
    opsets = [helper.make_opsetid("", 18)]
    proto.functions.append(helper.make_function("own", "F", ["a"], ["b"], [node], opsets, attributes=["keep"]))
    extra("F", "own", keep=0.5)(proto)


def without_a_value(proto: onnx.ModelProto) -> None:
    """A Constant whose tensor is not there."""
    node = helper.make_node("Constant", [], ["k"], "extra")
    node.attribute.append(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR))
    proto.graph.node.append(node)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (attribute(type=None), "ReduceMean 'mean' has the attribute 'keepdims' without a type"),
        (attribute(type=onnx.AttributeProto.FLOATS), "'keepdims' of type FLOATS and a value in the field 'i'"),
        (attribute(f=1.0), "'keepdims' of type INT and a value in the field 'f'"),
        (attribute(i=None, f=1.0, type=onnx.AttributeProto.FLOAT), "'keepdims' as FLOAT, not INT"),
        (attribute(name="axes"), "'axes' as INT, not INTS"),
        (attribute(name=""), "without a name"),
        (attribute(i=None, ref_attr_name="outer"), "'keepdims', which refers to a function's, and it stands in none"),
        (twice, "'keepdims' twice"),
        (in_a_branch, "Softmax 'deep' has the attribute 'axis' without a type"),
        (in_a_call, "F 'extra' has the attribute 'keep' as FLOAT, not INT"),
        (without_a_value, "Constant 'extra' has the attribute 'value' of type TENSOR without a value"),
        (extra("Cast", to=111), "Cast 'extra' has the attribute 'to' = 111, which is no element type"),
        (extra("Cast", to=0), "'to' = 0, which is no element type"),
        (extra("Cast"), "Cast 'extra' lacks the attribute 'to'"),
        (extra("Cast", to="FLOAT"), "'to' as STRING, not INT"),
        (extra("EyeLike", dtype=99), "'dtype' = 99, which is no element type"),
        (extra("RMSNorm", "rmsnorm_onnx", axis=-1.0), "'axis' as FLOAT, not INT"),
    ],
)
def test_attributes_that_contradict_themselves(tmp_path: Path, damage: Damage, words: str) -> None:
    """A type that is missing, that the value is not of, or that the operator does not take is named with its node."""
    assert words in refused(saved(tmp_path, damage))


@pytest.mark.parametrize(
    "damage",
    [
        attribute(),
        attribute(i=None),  # other writers leave out what is 0
        extra("EyeLike", dtype=0),
        extra("Anything", "own", to=111, dtype="mine", axis=0.5),
    ],
)
def test_attributes_that_are_odd_and_valid(tmp_path: Path, damage: Damage) -> None:
    """A value of 0 that is not written, an operator's default, and what foreign operators make of a name."""
    assert len(modelio.load(saved(tmp_path, damage)).graph) == 3
