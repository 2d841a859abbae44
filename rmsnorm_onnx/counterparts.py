"""Which module of a PyTorch model a norm of a file is, and which of its calls.

The exporter's trace tells it, or else the name of the gain's initializer. A module is the norm itself where the norm's
x comes from outside the module and its result leaves it. Otherwise the norm stands in the module's body, and can be
told there only if the body calls torch.nn.functional.rms_norm.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.capture import Call, Capture, to_numpy
from rmsnorm_onnx.site import Match, scopes

if TYPE_CHECKING:
    import torch

_NO_NUMBERS = ("Cast", "CastLike", "Identity")


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A norm of the file and its calls in PyTorch.

    Attributes:
        match: The norm.
        module: The module's name, as the file has it; None where the file does not tell.
        key: What its calls are captured under; None where there is no such module.
        index: Which of the file's norms of this module it is.
        count: How many there are.
        bare: Why the module is not the norm itself; "" where it is.
    """

    match: Match
    module: str | None
    key: str | None
    index: int = 0
    count: int = 1
    bare: str = ""

    def call(self, capture: Capture) -> Call | str:
        """The norm's call in a run of the module, or why there is none, in one sentence."""
        if self.module is None:
            return "the file does not tell which module it is"
        where = f"module {self.module!r}"
        if self.key is None:
            return f"the model has no {where}"
        functions, calls = capture.functions.get(self.key, ()), capture.modules.get(self.key, ())
        if len(functions) == self.count:
            return functions[self.index]
        if self.bare:
            return f"it is no module of its own, nor a call of F.rms_norm: {self.bare}"
        if len(calls) != self.count:
            return f"{where} is called {len(calls)} times, and the file has {self.count} norms of it"
        return calls[self.index]

    def misses(self, capture: Capture) -> bool:
        """Whether PyTorch calls the norm's module more often than the file has norms of it."""
        functions, calls = (held.get(self.key or "", ()) for held in (capture.functions, capture.modules))
        return len(functions) > self.count or (not self.bare and not functions and len(calls) > self.count)

    def invents(self, capture: Capture) -> bool:
        """Whether the file always computes a norm whose module PyTorch does not run."""
        return self.key in capture.idle and not self.bare and self.match.scope == ""


def pair(matches: Sequence[Match], module: torch.nn.Module) -> list[Pair]:
    """Each norm of a file with the module that it is."""
    modules = dict(module.named_modules(remove_duplicate=False))
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    owners = {name: name.rpartition(".")[0] for name, _ in tensors}
    names = [_module_of(match, owners) for match in matches]
    first: dict[int, str] = {}
    keys = [
        first.setdefault(id(modules[name]), name) if name in modules and name is not None else None for name in names
    ]
    counts = collections.Counter(keys)
    seen: collections.Counter[str | None] = collections.Counter()
    pairs = []
    for match, name, key in zip(matches, names, keys, strict=True):
        bare = "" if name is None else _stands_in(match, name)
        pairs.append(Pair(match, name, key, seen[key], counts[key], bare))
        seen[key] += 1
    return pairs


def _module_of(match: Match, owners: Mapping[str, str]) -> str | None:
    if match.module is not None:
        return match.module
    gain = None if match.gain is None else match.gain.name
    return owners.get(gain) if gain is not None else None


def _stands_in(match: Match, name: str) -> str:
    """Why a norm is not the module itself but a part of its body; "" where it is the module."""
    producer = _origin(match.x).producer()
    if producer is not None and _within(producer, name):
        return f"module {name!r} computes the norm's input itself"
    pending, seen = [match.output], {match.output}
    while pending:
        for node, _ in pending.pop().uses():
            if not _within(node, name):
                continue
            if node.op_type not in _NO_NUMBERS:
                return f"module {name!r} goes on computing with the norm's result"
            pending += [output for output in node.outputs if output not in seen]
            seen.update(node.outputs)
    return ""


def _origin(value: ir.Value) -> ir.Value:
    """A value before casts and copies."""
    node = value.producer()
    while node is not None and node.op_type in _NO_NUMBERS and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _within(node: ir.Node, module: str) -> bool:
    """Whether a node was traced in a module."""
    return module in scopes(node)[:-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Gain:
    """How the gain of a file compares with the module's.

    Attributes:
        verdict: "equal"; "rounded" where it is the module's in a narrower type; "differs"; "none" where the norm has
            none; "unknown" where it could not be compared.
        words: The difference in one sentence, or why it is unknown.
    """

    verdict: str
    words: str = ""


def compare_gain(match: Match, gain: np.ndarray | None, candidates: Iterable[np.ndarray]) -> Gain:
    """Compare a gain of a file, bit for bit, with what the module holds: its weight, or 1 + its weight.

    Args:
        match: The norm.
        gain: The file's gain; None where it is known only at run time.
        candidates: Tensors of the module that may be it.
    """
    if not match.spec.has_gain:
        return Gain("none")
    if gain is None:
        return Gain("unknown", "the gain was not compared: the file computes it")
    fitting = [c for c in candidates if c.size == gain.size and c.dtype.name in dtypes.FLOAT_TYPES]
    if not fitting:
        return Gain("unknown", "the gain was not compared: the module has no tensor of its size")
    flat, worst = gain.reshape(-1), (0, np.inf)
    for candidate in fitting:
        wide = candidate.reshape(-1).astype(np.float32 if candidate.dtype.itemsize < 8 else np.float64)
        # An exporter may fold 1 + weight; the graph's own offset then is 0.
        for held in (wide, np.add(wide, 1, dtype=wide.dtype)) if not match.spec.gain_offset else (wide,):
            different = int(np.sum(_bits(held.astype(flat.dtype)) != _bits(flat)))
            if not different:
                if dtypes.holds(flat.dtype.name, candidate.dtype.name):
                    return Gain("equal")
                return Gain("rounded", f"the file's gain is the module's, rounded to {flat.dtype.name}")
            apart = float(np.max(np.abs(held.astype(np.float64) - flat.astype(np.float64))))
            worst = min(worst, (different, apart), key=lambda w: w[1])
    return Gain("differs", f"its gain is not the module's: {worst[0]} of {flat.size} elements, by up to {worst[1]:.3g}")


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def gain_candidates(module: torch.nn.Module, name: str) -> list[np.ndarray]:
    """A module's own parameters and buffers."""
    part = module.get_submodule(name)
    return [to_numpy(t) for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))]


def module_epsilon(module: torch.nn.Module, name: str) -> float | None:
    """The epsilon that a norm module bears."""
    return stated_epsilon(module.get_submodule(name))


def stated_epsilon(part: object) -> float | None:
    """The epsilon that an object bears under one of its usual names; None where it bears none."""
    for name in ("eps", "epsilon", "variance_epsilon", "norm_eps", "rms_norm_eps", "layer_norm_epsilon"):
        value = getattr(part, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
