"""Engine layers as TensorRT's builder prints them, and what became of each norm in them."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import onnx_ir as ir

from rmsnorm_onnx.site import Match

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
        nodes: The ONNX nodes that it computes: each by its name, followed by those of the calls and branches around it.
    """

    name: str
    kind: str
    nodes: frozenset[tuple[str, ...]]


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
            found.append(Layer(match["name"], match["kind"], frozenset(_path(e[1]) for e in entries if e)))
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
        names |= dict.fromkeys([node.name] if node.name else [f"node_of_{v.name}" for v in node.outputs])
        before: list[ir.Value] = [v for v in node.inputs if v is not None and v not in stops and v not in seen]
        pending += before
        seen |= set(before)
    return frozenset(names)


def _of(match: Match, own: frozenset[str], layers: Sequence[Layer]) -> NormLayers:
    found = [layer for layer in layers if layer.kind.lower() not in _IDLE and _places(layer, own)]
    # A function that is called twice has its norm in two places, each with layers of its own.
    crowded = collections.Counter(place for layer in found for place in _places(layer, own))
    kind: Kind = "gone" if not found else "fused" if max(crowded.values()) == 1 else "loose"
    if any(layer.kind.lower() in _PLUGINS for layer in found):
        kind = "plugin"
    around = {name for layer in found for place in _places(layer, own) for name in place}
    others = {path[-1] for layer in found for path in layer.nodes if not own & set(path)} - around
    return NormLayers(match.name, match.module, match.form, kind, tuple(layer.name for layer in found), len(others))


def _places(layer: Layer, own: frozenset[str]) -> set[tuple[str, ...]]:
    """The calls and branches around a norm's nodes in a layer; empty where it has none of them."""
    return {path[i + 1 :] for path in layer.nodes for i, name in enumerate(path) if name in own}


def _path(entry: str) -> tuple[str, ...]:
    """The node that an entry speaks of, and the calls and branches around it.

    >>> _path("Pow_3 | norm0/RMSNorm (RMSNorm)"), _path("norm0/Pow")
    (('Pow_3', 'norm0/RMSNorm'), ('norm0/Pow',))
    """
    first, *rest = entry.split(" | ")
    return (first, *(re.sub(r" \([^()]*\)$", "", part) for part in rest))
