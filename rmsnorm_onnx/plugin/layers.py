"""Engine layers as TensorRT's builder prints them, and what became of each norm in them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from rmsnorm_onnx.site import Match, node_name

Kind: TypeAlias = Literal["plugin", "fused", "loose", "gone"]
"""plugin: the plugin runs it; fused: one kernel of TensorRT's own; loose: several layers; gone: no layer names it."""

_LINE = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w*), .*?Metadata: ?(?P<metadata>.*)$")
_NODE = re.compile(r"^\[ONNX Layer: (.*)\]$")
_SEPARATORS = re.compile("[\x1e\x1f]")  # between the entries of a layer's metadata
_PLUGINS = ("custom_layer", "plugin", "pluginv2", "pluginv3", "plugin_v2", "plugin_v3")
# They move nothing but shapes or formats, or hold numbers.
_IDLE = ("shape_call", "constant", "noop", "no_op", "reformat", "shape")
_SLICE_LIMIT = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an engine.

    Attributes:
        name: Its name in the engine.
        kind: TensorRT's word for it: "kgen" for a generated kernel, "custom_layer" or "PluginV3" for a plugin.
        nodes: The ONNX nodes that it computes, by name; those of a function's body by the node that calls it.
    """

    name: str
    kind: str
    nodes: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class NormLayers:
    """What became of one norm.

    Attributes:
        name: The norm's node, or its root's.
        module: The PyTorch module that it comes from, where the exporter left a trace of it.
        form: The form that it has in the file.
        kind: What runs it.
        layers: The names of its layers.
        shared: How many nodes beside the norm's own its layers compute.
    """

    name: str
    module: str | None
    form: str
    kind: Kind
    layers: tuple[str, ...]
    shared: int

    def __str__(self) -> str:
        """A few words."""
        if self.kind == "loose":
            return f"{len(self.layers)} layers"
        beside = f", with {self.shared} more node{'s' if self.shared > 1 else ''}" if self.shared else ""
        return {"plugin": "the plugin", "fused": "one kernel", "gone": "no layer names it"}[self.kind] + beside

    def to_json(self) -> dict[str, Any]:
        """It as JSON-ready data."""
        return {**dataclasses.asdict(self), "layers": list(self.layers)}


def parse(text: str) -> tuple[Layer, ...]:
    """The layers in what the builder prints, verbosely and with detailed profiling, below "Layers:"."""
    found = []
    for line in text.split("\n"):  # splitlines() would also split at the separators
        match = _LINE.match(line)
        if match is not None:
            entries = map(_NODE.match, _SEPARATORS.split(match["metadata"]))
            found.append(Layer(match["name"], match["kind"], frozenset(_caller(e[1]) for e in entries if e)))
    return tuple(found)


def norms(matches: Iterable[Match], layers: Sequence[Layer]) -> tuple[NormLayers, ...]:
    """What became of each norm of a model in an engine's layers."""
    return tuple(_of(match, nodes_of(match), layers) for match in matches)


def nodes_of(match: Match) -> frozenset[str]:
    """The names of a norm's nodes, from its result back to its inputs; TensorRT names an unnamed one by its output."""
    stops = {match.x, match.gain, match.bias, match.residual}
    pending, seen = [match.output], {match.output}
    names: dict[str, None] = {}
    while pending and len(names) < _SLICE_LIMIT:
        node = pending.pop(0).producer()
        if node is None:
            continue
        names |= dict.fromkeys((node_name(node), *(f"node_of_{v.name}" for v in node.outputs if not node.name)))
        before: list[ir.Value] = [v for v in node.inputs if v is not None and v not in stops and v not in seen]
        pending += before
        seen |= set(before)
    return frozenset(names)


def _of(match: Match, own: frozenset[str], layers: Sequence[Layer]) -> NormLayers:
    found = [layer for layer in layers if layer.nodes & own and layer.kind.lower() not in _IDLE]
    kind: Kind = "fused" if len(found) == 1 else "loose" if found else "gone"
    if any(layer.kind.lower() in _PLUGINS for layer in found):
        kind = "plugin"
    shared = len({node for layer in found for node in layer.nodes} - own)
    return NormLayers(match.name, match.module, match.form, kind, tuple(layer.name for layer in found), shared)


def _caller(entry: str) -> str:
    """The node of the main graph that an entry speaks of: "Pow_3 | norm0/RMSNorm (RMSNorm)" is of the call.

    >>> _caller("Pow_3 | norm0/RMSNorm (RMSNorm)"), _caller("norm0/Pow")
    ('norm0/RMSNorm', 'norm0/Pow')
    """
    _, bar, call = entry.rpartition(" | ")
    return re.sub(r" \([^()]*\)$", "", call) if bar else entry
