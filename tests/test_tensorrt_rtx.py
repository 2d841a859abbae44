"""Our functions in TensorRT-RTX's parser, without any plugin: every node gets the body it names.

The parser keys local functions by name alone; no CPU runtime shows what it makes of two bodies of one name. The layers
it builds do, and it needs no GPU to build them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from form_kit import PLAIN, SPECS, Site, build, replace, write

from rmsnorm_onnx.functions import DOMAIN, FunctionLibrary
from rmsnorm_onnx.writer import Names

PARSE = Path(__file__).with_name("trt_rtx_parse.py")
SHUFFLES = ("CONSTANT", "SHUFFLE", "CAST")

BODIES = {
    "llama": ["ELEMENTWISE POW", "REDUCE AVG", "ELEMENTWISE SUM", "UNARY SQRT", "ELEMENTWISE DIV", "ELEMENTWISE PROD"],
    "outside": [
        "ELEMENTWISE POW", "REDUCE AVG", "UNARY SQRT", "ELEMENTWISE SUM", "ELEMENTWISE DIV", "ELEMENTWISE PROD",
    ],
    "clamp": ["ELEMENTWISE POW", "REDUCE AVG", "UNARY SQRT", "ELEMENTWISE MAX", "ELEMENTWISE DIV", "ELEMENTWISE PROD"],
    "gemma": [
        "ELEMENTWISE POW", "REDUCE AVG", "ELEMENTWISE SUM", "UNARY SQRT", "ELEMENTWISE DIV", "ELEMENTWISE SUM",
        "ELEMENTWISE PROD",
    ],
    "no gain": ["ELEMENTWISE POW", "REDUCE AVG", "ELEMENTWISE SUM", "UNARY SQRT", "UNARY RECIP", "ELEMENTWISE PROD"],
}  # fmt: skip
"""The arithmetic of each spec's body, in TensorRT's words."""


def parse(model: onnx.ModelProto, folder: Path) -> dict[str, Any]:
    """What TensorRT-RTX makes of a file, in a process of its own."""
    path = folder / "model.onnx"
    onnx.save(model, path)
    done = subprocess.run([sys.executable, str(PARSE), str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def arithmetic(layers: Sequence[str]) -> list[str]:
    """The layers that compute."""
    return [layer for layer in layers if layer not in SHUFFLES]


@pytest.mark.parametrize("opset", (13, 18, 23))
def test_four_specs_in_one_file_are_four_bodies(opset: int, tmp_path: Path) -> None:
    """Four specs, no plugin: the layer list is the four bodies, one behind the other, each as its spec asks."""
    names = ("llama", "outside", "clamp", "gemma")
    found = parse(write([Site(SPECS[n]) for n in names], "function", opset), tmp_path)
    assert found["parsed"], found["errors"]
    assert arithmetic(found["layers"]) == [layer for n in names for layer in BODIES[n]]


def test_the_order_of_the_bodies_does_not_matter(tmp_path: Path) -> None:
    """In reverse order, where another body is the first, each node still gets its own."""
    names = ("gemma", "clamp", "outside", "llama")
    found = parse(write([Site(SPECS[n]) for n in names], "function", 18), tmp_path)
    assert arithmetic(found["layers"]) == [layer for n in names for layer in BODIES[n]]


def test_a_foreign_function_of_the_same_name_keeps_its_body(tmp_path: Path) -> None:
    """Trap: two domains with one function name. Ours takes another name, and both bodies are in the layer list."""
    model, matches = build([Site(PLAIN), Site(PLAIN)], 18)
    graph = ir.Graph([ir.Value(name="a")], [], nodes=[], opset_imports={"": 18})
    graph.append(ir.node("Abs", [graph.inputs[0]]))
    graph.outputs.append(graph[0].outputs[0])
    graph.outputs[0].name = "b"
    model.functions["acme", "RMSNorm", ""] = ir.Function("acme", "RMSNorm", graph=graph, attributes=[])
    model.graph.opset_imports["acme"] = 1
    foreign = matches[0].node
    foreign.domain, foreign.op_type = "acme", "RMSNorm"
    replace(model, matches[1], "function", Names(model), FunctionLibrary(model))
    found = parse(ir.to_proto(model), tmp_path)
    assert found["parsed"], found["errors"]
    assert arithmetic(found["layers"]) == ["UNARY ABS", *BODIES["llama"]]


def test_one_name_for_two_bodies_would_go_wrong(tmp_path: Path) -> None:
    """The fault that the names guard against is there: under one name, the parser runs one body twice, silently."""
    model = write([Site(SPECS["llama"]), Site(SPECS["clamp"])], "function", 18)
    for function, node in zip(model.functions, model.graph.node, strict=True):
        node.op_type = function.name = "RMSNorm"
        if function is model.functions[1]:
            node.domain = function.domain = "acme"
    model.opset_import.append(onnx.helper.make_opsetid("acme", 1))
    found = parse(model, tmp_path)
    assert arithmetic(found["layers"]) in (BODIES["llama"] * 2, BODIES["clamp"] * 2)


def test_a_node_without_a_gain_has_a_function_without_one(tmp_path: Path) -> None:
    """Trap: a node whose gain is left out. Beside a norm with a gain, its function has one input and its own body."""
    found = parse(write([Site(SPECS["llama"]), Site(SPECS["no gain"])], "function", 18), tmp_path)
    assert found["parsed"], found["errors"]
    assert arithmetic(found["layers"]) == BODIES["llama"] + BODIES["no gain"]


def test_a_gain_attribute_parses(tmp_path: Path) -> None:
    """A self-contained node, with its gain as a tensor attribute, gets the same body."""
    found = parse(write([Site(SPECS["llama"])], "function", 18, gain_attribute=True), tmp_path)
    assert found["parsed"], found["errors"]
    assert arithmetic(found["layers"]) == BODIES["llama"]


@pytest.mark.parametrize("x_type", ("float16", "bfloat16"))
@pytest.mark.parametrize("name", ("leading", "two axes", "inner axis", "bias", "half factor", "torch"))
def test_half_bodies_parse(name: str, x_type: str, tmp_path: Path) -> None:
    """Bodies of half types with their Casts, slices and biases all parse, to an output of x's shape."""
    found = parse(write([Site(SPECS[name], x_type)], "function", 18), tmp_path)
    assert found["parsed"], found["errors"]
    assert found["outputs"] == [[-1, 2, 16]]
    assert DOMAIN not in " ".join(found["errors"])
