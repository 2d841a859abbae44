"""The fields of a node of this package's plugin: each there, of its one ONNX type, and in its range.

TensorRT's parser takes a field's type from the attribute, not from the plugin's declaration, and passes absent ones
over: `epsilon = 0` reaches a plugin as an integer's bits, and a misspelt name as nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from rmsnorm_onnx import dtypes, functions
from rmsnorm_onnx.errors import SpecError
from rmsnorm_onnx.forms.plugin import FIELDS, NAMESPACE, OPERATOR, VERSION
from rmsnorm_onnx.plugin.faults import Fault
from rmsnorm_onnx.plugin.nodes import DOMAINS, IDENTITY, PluginNode
from rmsnorm_onnx.plugin.nodes import RESULTS as _TYPES
from rmsnorm_onnx.spec import PLACEMENTS, RMSNormSpec

_IDENTITY_VALUES: Mapping[str, str] = {"plugin_version": VERSION, "plugin_namespace": NAMESPACE}
_ALL: Mapping[str, ir.AttributeType] = {**FIELDS, **dict.fromkeys(IDENTITY, ir.AttributeType.STRING)}
# What a node of the function has too, for readers and for runs without the plugin.
_OTHERS: Mapping[str, ir.AttributeType] = {
    "axis": ir.AttributeType.INT,
    "trailing": ir.AttributeType.INT,
    "gain": ir.AttributeType.TENSOR,
}
_INT32 = (-(2**31), 2**31 - 1)


def check_identity(node: PluginNode) -> Iterator[Fault]:
    """The names by which TensorRT finds the plugin: operator, domain and its import, version and namespace."""
    if node.node.op_type != OPERATOR:
        what = f"the operator is {node.node.op_type!r}, and the plugin is registered as {OPERATOR!r}"
        yield node.fault("op_type", what, f"name the node's operator {OPERATOR}")
    if node.node.domain not in DOMAINS:
        what = f"the domain is {node.node.domain!r}, which the checker and onnxruntime refuse for {OPERATOR}"
        yield node.fault("domain", what, f"use {DOMAINS[0]!r}, or {DOMAINS[1]!r} for onnxruntime's TensorRT provider")
    yield from check_import(node)
    for name, expected in _IDENTITY_VALUES.items():
        said = node.text(name)
        if said is not None and said != expected:
            what = f"it is {said!r}, and the plugin is registered with {expected!r}"
            yield node.fault(name, what, f"write {name} = {expected!r}")


def check_import(node: PluginNode) -> Iterator[Fault]:
    """The domain must be imported where the node stands."""
    domain = node.node.domain
    if domain and domain not in node.imports:
        what = f"the domain {domain!r} is not imported where the node stands"
        yield node.fault("domain", what, f"add {domain!r}, version 1, to opset_import")


def check_fields(node: PluginNode) -> Iterator[Fault]:
    """Presence, type and range of every field."""
    unknown = [name for name in node.node.attributes if name not in {**_ALL, **_OTHERS}]
    for name, kind in {**_ALL, **_OTHERS}.items():
        found = node.attributes.get(name)
        if found is not None and found.type != kind:
            what = f"it is {found.type.name} and must be {kind.name}: TensorRT takes a field's type from the attribute"
            yield node.fault(name, what, f"write {name} as {kind.name}")
        elif found is None and (name in _ALL or name in node.node.attributes):
            yield node.fault(name, *_missing(node, name, kind, unknown))
    yield from check_integers(node)
    yield from _check_values(node)


def unknown_names(node: PluginNode, function: ir.Function | None) -> list[str]:
    """A node's attributes that neither the plugin nor the function of the node's name has."""
    known = {**_ALL, **_OTHERS}.keys() | (set() if function is None else set(function.attributes))
    return [name for name in node.node.attributes if name not in known]


def check_integers(node: PluginNode) -> Iterator[Fault]:
    """Integers that change on their way: TensorRT's parser hands a plugin the lower 32 bits of each, silently."""
    for name, found in node.attributes.items():
        if found.type not in (ir.AttributeType.INT, ir.AttributeType.INTS):
            continue
        held = found.value if found.type == ir.AttributeType.INTS else [found.value]
        for value in (v for v in held if not _INT32[0] <= v <= _INT32[1]):
            what = f"{value} does not fit into 32 bits, and TensorRT hands a plugin the lower ones alone: "
            what += f"{(value - _INT32[0]) % 2**32 + _INT32[0]}"
            yield node.fault(name, what, f"write a number from {_INT32[0]} to {_INT32[1]}")


def spec_of(node: PluginNode) -> RMSNormSpec | None:
    """The spec that a node's fields say; None where they say none."""
    values = {name: node.number(name) for name in FIELDS}
    if any(value is None for value in values.values()):
        return None
    values["axes"] = tuple(values["axes"])
    values["leading"] = values["leading"] or None
    values["has_gain"], values["has_bias"] = bool(values["has_gain"]), bool(values["has_bias"])
    try:
        return RMSNormSpec(**values)
    except SpecError:
        return None


def _missing(node: PluginNode, name: str, kind: ir.AttributeType, unknown: list[str]) -> tuple[str, str]:
    if name in node.node.attributes:
        what = "it refers to an attribute of the function around it, which the call does not give"
        return what, f"write {name} on the node itself"
    near = difflib.get_close_matches(name, unknown, n=1)
    what = "it is missing, and TensorRT passes absent fields over"
    if near:
        return f"{what}; {near[0]!r} is no field", f"rename {near[0]} to {name}"
    value = f" = {_IDENTITY_VALUES[name]!r}" if name in _IDENTITY_VALUES else ""
    return what, f"write {name}{value} ({kind.name}), or let `rmsnorm-onnx fuse --for tensorrt-plugin` write the node"


def _check_values(node: PluginNode) -> Iterator[Fault]:
    """The range of each field alone, then of the fields together."""
    alone = list(_check_alone(node))
    yield from alone
    wrong = {fault.field for fault in alone}
    values = {name: node.number(name) for name in FIELDS}
    if not wrong and all(value is not None for value in values.values()):
        yield from _check_together(node)
    axes = values["axes"]
    if axes and "axes" not in wrong:
        yield from _check_readers(node, tuple(axes))


def _check_alone(node: PluginNode) -> Iterator[Fault]:
    for name in ("has_gain", "has_bias"):
        if node.number(name) not in (None, 0, 1):
            yield node.fault(name, f"it is {node.number(name)}", f"write {name} as 0 or 1")
    leading, epsilon = node.number("leading"), node.number("epsilon")
    if leading is not None and leading < 0:
        yield node.fault("leading", f"it is {leading}", "write a positive count, or 0 for all elements")
    if epsilon is not None and not (math.isfinite(epsilon) and epsilon >= 0):
        yield node.fault("epsilon", f"it is {epsilon!r}", "write a finite number that is not negative")
    offset, placement = node.number("gain_offset"), node.number("epsilon_placement")
    if offset is not None and not math.isfinite(offset):
        yield node.fault("gain_offset", f"it is {offset!r}", "write a finite number")
    if placement is not None and placement not in PLACEMENTS:
        yield node.fault("epsilon_placement", f"it is {placement!r}", f"write one of {', '.join(PLACEMENTS)}")
    axes = node.number("axes")
    if axes is not None:
        try:
            RMSNormSpec(axes=tuple(axes))
        except SpecError as error:
            yield node.fault("axes", str(error), "write trailing axes in ascending order, or one inner axis, negative")
    for name in (name for name in FIELDS if name.endswith("_type")):
        yield from _check_type(node, name)


def _check_type(node: PluginNode, name: str) -> Iterator[Fault]:
    said = node.number(name)
    if said is None:
        return
    if said == "float64":
        yield node.fault(name, "it is 'float64', and TensorRT has no float64", "use the function form for this norm")
    elif said not in ("x", *_TYPES):
        yield node.fault(name, f"it is {said!r}", f"write x, {', '.join(_TYPES)}")
    elif name == "statistic_type":
        x_type = x_name(node)
        if said != "float32" and not (said == "x" and x_type in (None, "float32")):
            what = f"it is {said!r}, and the plugin computes the statistic in float32"
            yield node.fault(name, what, f"write {name} = 'float32'")


def _check_together(node: PluginNode) -> Iterator[Fault]:
    """What only several fields together show; `RMSNormSpec` says it, and its message begins with the field."""
    values = {name: node.number(name) for name in FIELDS}
    values["axes"] = tuple(values["axes"])
    values["leading"] = values["leading"] or None
    values["has_gain"], values["has_bias"] = bool(values["has_gain"]), bool(values["has_bias"])
    try:
        RMSNormSpec(**values)
    except SpecError as error:
        yield node.fault(str(error).split()[0], str(error), "let the fields agree")


def _check_readers(node: PluginNode, axes: tuple[int, ...]) -> Iterator[Fault]:
    """`axis` and `trailing`, which readers of the function take, must say what the fields say."""
    expected = functions.node_attributes(RMSNormSpec(axes=axes))
    for name in ("axis", "trailing"):
        found = node.attributes.get(name)
        if found is None or found.type != ir.AttributeType.INT:
            continue
        wanted = expected.get(name, 1)
        said = bool(found.value) if name == "trailing" else found.value
        if said != wanted:
            what = f"it is {found.value}, and axes is {list(axes)}"
            yield node.fault(name, what, f"write {name} = {wanted}, or leave it out")


def x_name(node: PluginNode) -> str | None:
    """x's float type by name; None where it is unknown or none."""
    x = node.node.inputs[0] if node.node.inputs else None
    return None if x is None else dtypes.float_name(node.types.get(x))
