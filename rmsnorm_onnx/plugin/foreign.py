"""Nodes of other plugins: what can be known of them without their library.

Of a plugin that the caller describes, its names are known too. Which fields it has is not, except that a norm's epsilon
must be a positive float under some name, and that its scale is never narrower than x.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.forms.plugin import NAMESPACE, OPERATOR, VERSION
from rmsnorm_onnx.plugin.faults import Fault
from rmsnorm_onnx.plugin.fields import check_import, check_integers
from rmsnorm_onnx.plugin.inputs import missing_input
from rmsnorm_onnx.plugin.nodes import DOMAINS, IDENTITY, PluginNode

_DEFAULTS = {"plugin_version": "1", "plugin_namespace": ""}
_EPSILONS = ("epsilon", "eps", "variance_epsilon", "rms_norm_eps", "layer_norm_epsilon")


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """A plugin as the caller describes it.

    Attributes:
        op: The name that it is registered under, and the node's operator.
        domain: The domain of its nodes; None for any but ONNX's own.
        namespace: The namespace that it is registered with; None where it was not said.
        version: The version that it is registered with; None where it was not said.
    """

    op: str
    domain: str | None = None
    namespace: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        """What was said of it."""
        said = {"namespace": self.namespace, "version": self.version}
        words = [f"{name} {value!r}" for name, value in said.items() if value is not None]
        name = f"{self.domain}::{self.op}" if self.domain else self.op
        return f"{name} ({', '.join(words)})" if words else name

    def is_ours(self) -> bool:
        """Whether it can be this package's plugin."""
        names = ((self.op, OPERATOR), (self.namespace, NAMESPACE), (self.version, VERSION))
        return all(said in (None, own) for said, own in names) and self.domain in (None, *DOMAINS)

    def means(self, node: ir.Node) -> bool:
        """Whether a node that could be this package's is meant for the plugin described: it does not say otherwise."""
        said = node.attributes.get("plugin_namespace")
        own = said is not None and not said.is_ref() and said.value == NAMESPACE
        return node.op_type == self.op and not self.is_ours() and not own


def check_foreign(node: PluginNode, described: Described | None) -> Iterator[Fault]:
    """Everything that is wrong about a node of another plugin, as far as it can be known."""
    yield from _check_domain(node, described)
    yield from check_import(node)
    wanted = {"plugin_version": described.version, "plugin_namespace": described.namespace} if described else {}
    yield from check_integers(node)
    for name in IDENTITY:
        yield from _check_identity(node, name, wanted.get(name))
    if described is not None or "rmsnorm" in node.node.op_type.lower():
        yield from _check_epsilon(node)
        yield from _check_scale(node)


def _check_domain(node: PluginNode, described: Described | None) -> Iterator[Fault]:
    domain = node.node.domain
    if domain in ("", "ai.onnx"):
        known = "an operator of ONNX" if onnx.defs.has(node.node.op_type) else "no operator of ONNX"
        mend = f"use the domain {described.domain}" if described and described.domain else "use one of the plugin's own"
        what = f"the node is in ONNX's own domain, and {node.node.op_type} is {known}"
        yield node.fault("domain", what, mend)
    elif described is not None and described.domain is not None and domain != described.domain:
        yield node.fault("domain", f"it is {domain!r}, not {described.domain!r}", f"write {described.domain!r}")


def _check_identity(node: PluginNode, name: str, wanted: str | None) -> Iterator[Fault]:
    found = node.attributes.get(name)
    if found is None:
        if wanted not in (None, _DEFAULTS[name]):
            what = "it is missing, and TensorRT then looks for the defaults, version '1' and namespace ''"
            yield node.fault(name, what, f"write {name} = {wanted!r}")
    elif found.type != ir.AttributeType.STRING:
        what = f"it is {found.type.name} and must be STRING: TensorRT reads it as text"
        yield node.fault(name, what, f"write {name} as STRING")
    elif wanted is not None and found.value != wanted:
        what = f"it is {found.value!r}, and the plugin is registered with {wanted!r}"
        yield node.fault(name, what, f"write {name} = {wanted!r}")


def _check_epsilon(node: PluginNode) -> Iterator[Fault]:
    name = next((name for name in _EPSILONS if name in node.node.attributes), None)
    found = None if name is None else node.attributes.get(name)
    if name is None or found is None:
        what = "it is missing, and TensorRT passes absent fields over: the plugin computes with what it finds"
        yield node.fault("epsilon", what, "write epsilon (or eps, as the plugin names it) as FLOAT")
    elif found.type != ir.AttributeType.FLOAT:
        what = f"it is {found.type.name} and must be FLOAT: TensorRT takes a field's type from the attribute"
        yield node.fault(name, what, f"write {name} as FLOAT")
    elif not (math.isfinite(found.value) and found.value >= 0):
        yield node.fault(name, f"it is {found.value!r}", "write a finite number that is not negative")


def _check_scale(node: PluginNode) -> Iterator[Fault]:
    given = node.node.inputs
    for name, value in zip(("x", "scale"), given, strict=False):
        if value is None or value in node.absent:
            yield missing_input(node, name, value)
    x, scale = (*given, None, None)[:2]
    if x is None or scale is None:
        return
    kinds = dtypes.float_name(node.types.get(x)), dtypes.float_name(node.types.get(scale))
    if kinds[0] and kinds[1] and not dtypes.holds(kinds[1], kinds[0]):
        what = f"{scale.name!r} is {kinds[1]}, and x is {kinds[0]}: plugins read both as one type, or a wider scale"
        yield node.fault("scale", what, f"store {scale.name!r} as {kinds[0]}")
