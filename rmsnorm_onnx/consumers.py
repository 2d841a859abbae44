"""Which form a runtime is best at: a literal table, and `choose`, which reads it for one site.

The table lists each consumer's forms in order of preference; a site takes the first that can say its spec exactly and
is worth writing for its type. Each rule says what is behind it: see `Evidence`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from rmsnorm_onnx import functions
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.forms.plugin import ONNXRUNTIME_DOMAIN
from rmsnorm_onnx.site import Match

Evidence: TypeAlias = Literal["run here", "built here", "read in source", "unrun"]
"""What is behind a rule.

run here: the tests load the form in this runtime, run it, and hold its numbers to the bound or name what breaks it.
built here: the tests parse it and build an engine of it; nothing was executed, since that takes a GPU.
read in source: the runtime's source, or its release notes, say so; it was not started.
unrun: neither.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table.

    Attributes:
        form: The form.
        why: Why this consumer wants it, one sentence.
        evidence: What is behind that.
        x_types: The types of x that it is wanted for; empty for all.
        since: The first version of the consumer that takes it; empty for all.
        before: The first version of the consumer that it is no longer wanted for; empty for none.
        bare: Wanted only where one node says the norm: a gain of x's type, not offset.
        newest_opset: The newest opset at which the consumer reads it; None for all.
        domain: The domain of plugin nodes.
    """

    form: str
    why: str
    evidence: Evidence
    x_types: tuple[str, ...] = ()
    since: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    bare: bool = False
    newest_opset: int | None = None
    domain: str = functions.DOMAIN


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The form for one site.

    Attributes:
        form: Its name; None when no form can say the site's spec exactly.
        why: Why this one with its evidence, and why not those that the consumer would rather have.
        domain: The domain of plugin nodes: `Writer`'s plugin_domain.
        evidence: What is behind the choice; None where no rule made it.
    """

    form: str | None
    why: str
    domain: str = functions.DOMAIN
    evidence: Evidence | None = None


_EXPANDS = "TensorRT reads functions since 9, and fuses plain operators by itself"
_FUSED = "onnxruntime inlines it, and fuses the body where it has a kernel: the last axis, a gain, epsilon inside"
_BODY = (
    "the file carries the function's body: onnxruntime, onnx.reference, TensorRT-RTX and TensorRT from 9 on expand it; "
    "OpenVINO and TensorRT 8.6 do not"
)
_OPENVINO_NODE = "it becomes OpenVINO's RMS kernel; set INFERENCE_PRECISION_HINT to f32, or it may run in bfloat16"
_OPENVINO_PLAIN = (
    "OpenVINO reads no function; over the last axis, epsilon inside, plain operators become its RMS kernel"
)
_OPENVINO_HALF = (
    "as in float32, but OpenVINO cuts to bfloat16 in place of rounding where the last bit kept is 0: 1 ulp off per Cast"
)
_HALVES = ("float16", "bfloat16")

TABLE: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "any": (Rule("function", _BODY, "run here"),),
        "onnxruntime": (
            Rule(
                "contrib",
                "its kernel of float16 needs no Casts, which cost the fused function 1.4 to 5 times the time",
                "run here",
                ("float16",),
                bare=True,
            ),
            Rule(
                "onnx",
                "its kernel of float16 needs no Casts, which cost the fused function 1.4 to 5 times the time",
                "run here",
                ("float16",),
                bare=True,
            ),
            Rule(
                "function",
                "the fastest: RMSNormalization has no kernel of bfloat16, and the contrib operator's takes 1 to 3.2 "
                "times as long",
                "run here",
                ("bfloat16",),
            ),
            Rule("function", _FUSED, "run here"),
        ),
        "onnxruntime-cuda": (
            Rule("contrib", "the fused kernel of half types", "read in source", _HALVES, bare=True),
            Rule("function", _FUSED, "read in source"),
        ),
        "onnxruntime-tensorrt": (
            Rule(
                "plugin",
                "its TensorRT provider takes plugins from trt.plugins",
                "read in source",
                domain=ONNXRUNTIME_DOMAIN,
            ),
            Rule("function", _EXPANDS, "unrun"),
        ),
        "onnxruntime-web": (
            Rule("function", "its wasm provider has the CPU's kernels; WebGPU and WebNN were not tried", "run here"),
        ),
        "tensorrt": (
            Rule(
                "onnx",
                "TensorRT imports it since 10.15 (TensorRT-RTX's parser does, see there)",
                "unrun",
                since=(10, 15),
            ),
            Rule("function", _EXPANDS, "read in source", since=(9,)),
            Rule(
                "primitive",
                "the parser of TensorRT 8.6 reads no functions, nor axes that are an input, as from opset 18 on",
                "read in source",
                ("float16", "float32"),
                before=(9,),
                newest_opset=17,
            ),
        ),
        "tensorrt-rtx": (
            Rule("onnx", "TensorRT-RTX 1.7 builds one kernel of it", "built here"),
            Rule("function", "TensorRT-RTX 1.7 inlines it and builds one kernel", "built here"),
        ),
        "tensorrt-plugin": (
            Rule("plugin", "the plugin was asked for (TensorRT-RTX builds engines with it)", "built here"),
            Rule("function", _EXPANDS, "read in source"),
        ),
        "openvino": (
            Rule("onnx", _OPENVINO_HALF, "run here", ("bfloat16",)),
            Rule("primitive", _OPENVINO_HALF, "run here", ("bfloat16",)),
            Rule("onnx", _OPENVINO_NODE, "run here"),
            Rule("primitive", _OPENVINO_PLAIN, "run here"),
        ),
        "onnx-reference": (
            Rule(
                "function",
                "onnx.reference runs the body in the types that it states; its RMSNormalization squares in x's type",
                "run here",
            ),
        ),
    }
)
"""Per consumer its forms, the preferred first. Times are of onnxruntime 1.32 on one thread of a CPU."""

CONSUMERS: tuple[str, ...] = tuple(TABLE)
"""Names of the consumers; `tensorrt` takes a version behind a colon."""

_DEFAULT_VERSION = (10,)  # of TensorRT, where none is said


def parse_consumer(consumer: str) -> tuple[str, tuple[int, ...]]:
    """A consumer's name and its version, empty where none was given.

    >>> parse_consumer("tensorrt:10.15"), parse_consumer("tensorrt:11.x")
    (('tensorrt', (10, 15)), ('tensorrt', (11,)))

    Raises:
        UsageError: no such consumer, or a version that is none; the message names the choices.
    """
    name, colon, version = consumer.partition(":")
    if name not in TABLE or (colon and name != "tensorrt"):
        names = ", ".join("tensorrt[:version]" if n == "tensorrt" else n for n in CONSUMERS)
        raise UsageError(f"no consumer {consumer!r}; choose one of {names}")
    if colon and not re.fullmatch(r"\d+(\.\d+)*(\.x)?", version):
        raise UsageError(f"{version!r} is no version of TensorRT; write tensorrt:10.15")
    return name, tuple(int(part) for part in version.removesuffix(".x").split(".")) if colon else ()


def takes(consumer: str, form: str) -> bool:
    """Whether a form is among those that a consumer is given.

    >>> takes("tensorrt:10.15", "onnx"), takes("tensorrt", "onnx")
    (True, False)

    Raises:
        UsageError: no such consumer.
    """
    name, version = parse_consumer(consumer)
    return any(rule.form == form and _wrong_version(rule, version) is None for rule in TABLE[name])


def choose(consumer: str, match: Match, opset: int, *, allow_rounding_change: bool = False) -> Choice:
    """The form for a site, by the table, and why.

    Args:
        consumer: One of `CONSUMERS`; `tensorrt:10.15` says a version. Without one, TensorRT is taken to be 10.0.
        match: The site.
        opset: The version of the default domain at the site.
        allow_rounding_change: Also take a form that moves a rounding to a half type.

    Raises:
        UsageError: no such consumer.
    """
    name, version = parse_consumer(consumer)
    passed_over: list[str] = []
    for rule in TABLE[name]:
        if not _wanted(rule, match):
            continue
        objection = _wrong_version(rule, version) or _objection(rule, match, opset, allow_rounding_change)
        if objection is None:
            why = f"{rule.why} ({rule.evidence})"
            return Choice(rule.form, "; ".join([why, *passed_over]), rule.domain, rule.evidence)
        passed_over.append(f"not {rule.form}: {objection}")
    return Choice(None, "; ".join(passed_over))


def _wanted(rule: Rule, match: Match) -> bool:
    """Whether a rule is for norms of this kind."""
    spec = match.spec
    bare = spec.has_gain and not spec.gain_offset and match.gain_type in (None, match.x_type)
    return (not rule.x_types or match.x_type in rule.x_types) and (bare or not rule.bare)


def _wrong_version(rule: Rule, version: tuple[int, ...]) -> str | None:
    """Why a rule is not for a version; None when it is."""
    said = version or _DEFAULT_VERSION
    if rule.since and said < rule.since:
        since = ".".join(map(str, rule.since))
        return f"it takes TensorRT {since} (say tensorrt:{since} if yours is)"
    if rule.before and said >= rule.before:
        return f"it is for TensorRT before {'.'.join(map(str, rule.before))}"
    return None


def _objection(rule: Rule, match: Match, opset: int, allowed: bool) -> str | None:
    """Why a rule does not hold for a site; None when it does."""
    if rule.newest_opset is not None and opset > rule.newest_opset:
        return f"it is read at opset {rule.newest_opset} and below (move the model with --opset {rule.newest_opset})"
    form = FORMS[rule.form]
    return form.refusal(match, opset) or (None if allowed else form.rounding_change(match))
