"""What the recogniser says of one place in a graph: `Match`, or `Declined` with the reason."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import fnmatch
import functools
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.spec import RMSNormSpec

SCOPES_KEY = "pkg.torch.onnx.name_scopes"
"""Where torch.onnx keeps the modules that a node was traced in, in a node's metadata_props."""


class DeclineCode(enum.Enum):
    """Why a candidate was left alone. The value is stable: it is what JSON reports hold."""

    LAYER_NORM = "layer-norm"  # the mean is subtracted: LayerNorm, or its variance
    OTHER_NORM = "other-norm"  # GroupNormalization, InstanceNormalization and the like
    EXPONENT = "exponent"  # not a square, not a square root, or an exponent known only at run time
    COEFFICIENT = "coefficient"  # what is left over is not 1: a sum for a mean, an L2 norm without sqrt(d)
    EPSILON = "epsilon"  # a vector, a run-time value, one that can be overridden, or negative
    NUMERATOR = "numerator"  # the value divided is not the value squared
    AXES = "axes"  # axes that no operator shares one statistic over, or known only at run time
    SHAPE = "shape"  # shapes known, and they do not prove the claim (a statistic broadcast along another axis)
    SHAPE_UNKNOWN = "shape-unknown"  # shapes that the proof needs are missing
    TYPE = "type"  # a cast to an integer, or a type that no norm is computed in
    INTERIOR = "interior"  # what a norm that is one operator already computes before its gain, kept for other readers
    LIMIT = "limit"  # too many values or calls to look at all of them
    UNUSED = "unused"  # a reduction of a square that no root or division follows
    MISMATCH = "mismatch"  # a node whose attributes and function body disagree
    INVALID = "invalid"  # a native node that its own definition does not allow


_TRACE_STEPS = 3  # nodes that are asked for the module of a site


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A norm that was found.

    Attributes:
        spec: Its mathematics; statistic_type and factor_type are the graph's own.
        form: How it is written now: "primitive", or the name of a native form.
        node: The root: the node whose first output is the norm's result.
        x: The value that is normalised.
        gain: The gain before its offset and its casts, broadcasting against x; None without one.
        bias: The bias, broadcasting against x; None without one.
        output: The norm's result.
        x_type: x's float type by name.
        gain_type: The gain's own float type by name; None without one.
        bias_type: The bias's own float type by name; None without one.
        x_dims: The dimensions of x as they are proven, declared or not; None where the rank is unknown.
        gain_dims: The same of the gain; None without one too.
        bias_dims: The same of the bias.
        scope: Where it stands: "" for the main graph, else a path of branches and functions.
        rounding_changes: Roundings of the graph that the spec cannot say, each one sentence. A site that has any is
            rewritten on request only.
        notes: What a reader should know, each one sentence: a half statistic, no epsilon, reordered float32 steps.
        wide_gain: Whether the gain also varies along axes that are not normalised; only its native form holds it.
        residual: The value added to x first, for a native form that contains the addition.
        statistic_module: The PyTorch module that the statistic comes from: another than `module` where what multiplies
            the result is the parent's. None for a node that is the norm already, and without a trace.
        stranded: Whether the node stands among values of a half type while its function's body gives float32: the file
            was converted around the body, and no runtime takes it. A rewrite mends it.
    """

    spec: RMSNormSpec
    form: str
    node: ir.Node
    x: ir.Value
    gain: ir.Value | None
    bias: ir.Value | None
    output: ir.Value
    x_type: str
    gain_type: str | None
    bias_type: str | None = None
    x_dims: Dims | None = None
    gain_dims: Dims | None = None
    bias_dims: Dims | None = None
    scope: str = ""
    rounding_changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    residual: ir.Value | None = None
    wide_gain: bool = False
    statistic_module: str | None = None
    stranded: bool = False

    @property
    def name(self) -> str:
        """The root node's name, or its output's where the node has none."""
        return node_name(self.node)

    @property
    def module(self) -> str | None:
        """The PyTorch module that it comes from, where the exporter left a trace of it."""
        return module_name(self.node)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Declined:
    """A candidate that was left alone.

    Attributes:
        code: The kind of reason.
        reason: One precise sentence.
        node: The node at fault.
        scope: Where it stands, as in `Match`.
    """

    code: DeclineCode
    reason: str
    node: ir.Node
    scope: str = ""

    @property
    def name(self) -> str:
        """The node's name, or its first output's where the node has none."""
        return node_name(self.node)

    @property
    def module(self) -> str | None:
        """The PyTorch module that it comes from, where the exporter left a trace of it."""
        return module_name(self.node)


def node_name(node: ir.Node) -> str:
    """How reports name a node: by its name, else by its first named output, else by its operator."""
    if node.name:
        return node.name
    return next((o.name for o in node.outputs if o.name), node.op_type)


def module_name(node: ir.Node) -> str | None:
    """The qualified name of the innermost module that torch traced a node in; None for a node without a trace.

    torch.onnx keeps it in the metadata, TorchScript in the node's name. A node that an optimiser made bears no trace;
    then what it reads tells.
    """
    names: list[str] = []
    pending = [node]
    for _ in range(_TRACE_STEPS):
        if not names and pending:
            current = pending.pop(0)
            names = scopes(current)
            producers = (v.producer() for v in current.inputs if v is not None)
            pending += [p for p in producers if p is not None]
    named = len(names) > 1 and isinstance(names[-2], str)
    return names[-2] if named else None  # the last is the operation itself


def scopes(node: ir.Node) -> list[str]:
    """The modules that torch traced a node in, outermost first, and the operation; empty without a trace."""
    return _written_scopes(node) or scopes_of_name(node.name)


def _written_scopes(node: ir.Node) -> list[str]:
    """What torch.onnx wrote into a node's metadata."""
    return list(_literal_names(node.metadata_props.get(SCOPES_KEY) or "[]"))


@functools.lru_cache(maxsize=4096)  # a site is asked for its module several times, and parsing is not cheap
def _literal_names(text: str) -> tuple[str, ...]:
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ()
    return tuple(names) if isinstance(names, list) else ()


def scopes_of_name(name: str | None) -> list[str]:
    """The modules in a node's name as TorchScript's exporter writes it, outermost first, and the operation.

    A module in a list bears the list's name, and one in a Sequential bears its name again:

    >>> scopes_of_name("/model/layers.0/input_layernorm/Mul_1")
    ['', 'model', 'model.layers.0', 'model.layers.0.input_layernorm', 'Mul_1']
    >>> scopes_of_name("/features/features.3/Conv")
    ['', 'features', 'features.3', 'Conv']
    >>> scopes_of_name("node_mul_3")
    []
    """
    if not name or not name.startswith("/"):
        return []
    *parts, operation = name[1:].split("/")
    while parts and _is_operation(parts[-1]):  # an operator that was written in this one's place
        operation = parts.pop()
    names, before = [""], ""
    for part in parts:
        outer = names[-1]
        if before and part.startswith(f"{before}."):
            outer = outer[: -len(before)].rstrip(".")
        names.append(f"{outer}.{part}" if outer else part)
        before = part
    return [*names, operation]


def _is_operation(part: str) -> bool:
    return onnx.defs.has(part.rstrip("0123456789").removesuffix("_"))


def patterns(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Patterns as a tuple; a string is one pattern, not its letters."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def selected(name: str, module: str | None, only: Sequence[str], skip: Sequence[str]) -> bool:
    """Whether a site's name or module matches some pattern of `only` (all, if there is none) and none of `skip`."""

    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(n, p) for p in patterns for n in (name, module) if n is not None)

    return (not only or matches(only)) and not matches(skip)


def check_chosen(only: str | Sequence[str] | None, sites: Sequence[tuple[str, str | None]], chosen: int) -> None:
    """Refuse patterns that match no site: a check of nothing proves nothing, and most often it is misspelt.

    Args:
        only: The patterns.
        sites: Each site's name and module; where there is none, no pattern is at fault.
        chosen: How many of them the patterns chose.

    Raises:
        UsageError: none; the message has the closest names.
    """
    if sites and not chosen:
        raise UsageError(no_match(patterns(only), [name for site in sites for name in reversed(site) if name]))


def no_match(only: Sequence[str], names: Sequence[str]) -> str:
    """What is said where patterns match no site: the names that come closest.

    >>> no_match(["norm.1"], ["norms.0", "norms.1", "last"])
    "no norm matches 'norm.1'; the closest are norms.1, norms.0"
    """
    known = list(dict.fromkeys(names))
    close = [name for pattern in only for name in difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)]
    said = " or ".join(map(repr, only))
    shown = list(dict.fromkeys(close))[:3]
    if shown:
        return f"no norm matches {said}; the closest are {', '.join(shown)}"
    return f"no norm matches {said}; there are {', '.join(known[:6])}{', ...' if len(known) > 6 else ''}"
