"""Nodes of ours inside local functions of others: one norm each, where it stands, its body's claims held to it."""

from __future__ import annotations

import itertools

import onnx
import onnx_ir as ir
import pytest
from form_kit import PLAIN, Site, assert_right, write
from onnx import helper

import rmsnorm_onnx
from rmsnorm_onnx.site import DeclineCode, Declined, Match

SITE = Site(PLAIN, shape=(3, 2, 8))
BOTH = pytest.mark.parametrize("form", ["plugin", "function"])


def block(form: str, calls: int = 1, drop: str | None = None, refer: str | None = None, **attributes: float):
    """A model whose norm stands in a function `acme::Block`, called in a row; the node's body is in the file too."""
    model = write([SITE], form, 18)
    norm = next(node for node in model.graph.node if node.domain)
    at = list(model.graph.node).index(norm)
    inner = helper.make_node("RMSNorm", ["x", "gain"], ["y"], norm.name, domain=norm.domain)
    inner.attribute.extend(a for a in norm.attribute if a.name not in (drop, refer, *attributes))
    inner.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    if refer is not None:
        inner.attribute.add(name=refer, type=onnx.AttributeProto.FLOAT, ref_attr_name="outer")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(norm.domain, 1)]
    names = [] if refer is None else ["outer"]
    function = helper.make_function("acme", "Block", ["x", "gain"], ["y"], [inner], imports, names)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("acme", 1))
    del model.graph.node[at]
    between = ["x0", *(f"between{i}" for i in range(1, calls)), "y0"]
    for index, (source, result) in enumerate(itertools.pairwise(between)):
        outer = {} if refer is None else {"outer": PLAIN.epsilon * (1 + index)}
        call = helper.make_node("Block", [source, "gain0"], [result], f"call{index}", domain="acme", **outer)
        model.graph.node.insert(at + index, call)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("calls", [1, 2])
@BOTH
def test_a_node_in_a_function_is_one_norm(form: str, calls: int) -> None:
    """Not one by its fields and another by its body: a Match of its form, in the function's scope."""
    model = block(form, calls)
    [found] = rmsnorm_onnx.find_rms_norms(ir.from_proto(model))
    assert isinstance(found, Match)
    assert (found.form, found.node.op_type, found.scope) == (form, "RMSNorm", "function acme::Block")
    assert rmsnorm_onnx.fuse(model, form=form)[0] == model


@pytest.mark.parametrize("target", ["function", "plugin", "primitive"])
@BOTH
def test_it_moves_once(form: str, target: str) -> None:
    """Each form is written in the function, for one site, with the same numbers, and found there again."""
    new, report = rmsnorm_onnx.fuse(block(form), form=target)
    onnx.checker.check_model(new, full_check=True)
    assert [(site.form, site.action) for site in report.sites] == [
        (target, "kept" if target == form else "rewritten")
    ]  # fmt: skip
    assert [node.op_type for node in new.graph.node] == ["Block"]
    assert_right(new, [SITE])
    assert rmsnorm_onnx.fuse(new, form=target)[0] == new


@BOTH
def test_a_node_that_its_body_denies_is_a_mismatch(form: str) -> None:
    """What a node in a function says of itself is held to its body, as it is in the graph."""
    [found] = rmsnorm_onnx.find_rms_norms(ir.from_proto(block(form, axis=-2)))
    assert isinstance(found, Declined) and found.code is DeclineCode.MISMATCH
    assert found.reason.endswith("the node says axis -2, its function's body normalises over (-1,)")


@pytest.mark.parametrize("field", ["plugin_namespace", "normalized_type"])
def test_a_broken_plugin_node_is_named_once(field: str) -> None:
    """A field that is missing declines the node, and its body is no norm beside it."""
    [found] = rmsnorm_onnx.find_rms_norms(ir.from_proto(block("plugin", drop=field)))
    assert isinstance(found, Declined) and f"the attribute {field} is missing" in found.reason


def test_what_the_callers_set_is_found_at_the_calls() -> None:
    """A node whose epsilon is its callers' is one norm a call, each with its own epsilon."""
    found = rmsnorm_onnx.find_rms_norms(ir.from_proto(block("function", 2, refer="epsilon")))
    epsilons = [site.spec.epsilon for site in found if isinstance(site, Match)]
    assert epsilons == pytest.approx([PLAIN.epsilon, 2 * PLAIN.epsilon], rel=1e-6)
    assert [site.node.op_type for site in found] == ["Block", "Block"]
