"""Which form a runtime is best at: a literal table, and `choose`, which reads it for one site.

The table lists each consumer's forms in order of preference; a site takes the first that can say its spec exactly and
is worth writing for its type. Measured unless the row says otherwise (one thread, onnxruntime 1.32 on CPU).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

from rmsnorm_onnx import functions
from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.forms.plugin import ONNXRUNTIME_DOMAIN
from rmsnorm_onnx.site import Match

_HALVES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table.

    Attributes:
        form: The form.
        why: Why this consumer wants it, one sentence.
        x_types: The types of x that it is wanted for; empty for all.
        since: The first version of the consumer that takes it; empty for all.
        domain: The domain of plugin nodes.
    """

    form: str
    why: str
    x_types: tuple[str, ...] = ()
    since: tuple[int, ...] = ()
    domain: str = functions.DOMAIN


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The form for one site.

    Attributes:
        form: Its name; None when no form can say the site's spec exactly.
        why: Why this one, and why not those that the consumer would rather have.
        domain: The domain of plugin nodes: `Writer`'s plugin_domain.
    """

    form: str | None
    why: str
    domain: str = functions.DOMAIN


_INLINED = "onnxruntime inlines it, and fuses the body where it has a kernel: the last axis, a gain, epsilon inside"
_FUNCTION = Rule("function", "the file carries the function's body, so every runtime can expand it")

TABLE: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "any": (_FUNCTION,),
        "onnxruntime": (
            Rule("onnx", "its float16 kernel needs no Casts, which the fused function keeps", x_types=("float16",)),
            Rule("contrib", "its kernel of half types needs no Casts; the file loads in onnxruntime alone", _HALVES),
            Rule(
                "function",
                _INLINED,
            ),
        ),
        "onnxruntime-cuda": (
            Rule("contrib", "the fused kernel of half types (by its source, not measured here)", _HALVES),
            Rule(
                "function",
                _INLINED,
            ),
        ),
        "onnxruntime-tensorrt": (
            Rule("plugin", "its TensorRT provider takes plugins from trt.plugins", domain=ONNXRUNTIME_DOMAIN),
            Rule("function", "TensorRT inlines it and fuses plain operators by itself"),
        ),
        "tensorrt": (
            Rule("onnx", "TensorRT imports it since 10.15 and fuses it by itself", since=(10, 15)),
            Rule("function", "TensorRT inlines it and fuses plain operators by itself"),
        ),
        "tensorrt-plugin": (
            Rule("plugin", "the plugin was asked for"),
            Rule("function", "TensorRT inlines it and fuses plain operators by itself"),
        ),
    }
)
"""Per consumer its forms, the preferred first."""

CONSUMERS: tuple[str, ...] = tuple(TABLE)
"""Names of the consumers; `tensorrt` takes a version behind a colon."""


def parse_consumer(consumer: str) -> tuple[str, tuple[int, ...]]:
    """A consumer's name and its version, empty where none was given.

    >>> parse_consumer("tensorrt:10.15")
    ('tensorrt', (10, 15))

    Raises:
        UsageError: no such consumer, or a version that is none; the message names the choices.
    """
    name, colon, version = consumer.partition(":")
    if name not in TABLE or (colon and name != "tensorrt"):
        names = ", ".join("tensorrt[:version]" if n == "tensorrt" else n for n in CONSUMERS)
        raise UsageError(f"no consumer {consumer!r}; choose one of {names}")
    if colon and not re.fullmatch(r"\d+(\.\d+)*", version):
        raise UsageError(f"{version!r} is no version of TensorRT; write tensorrt:10.15")
    return name, tuple(int(part) for part in version.split(".")) if colon else ()


def takes(consumer: str, form: str) -> bool:
    """Whether a form is among those that a consumer is given.

    >>> takes("tensorrt:10.15", "onnx"), takes("tensorrt", "onnx")
    (True, False)

    Raises:
        UsageError: no such consumer.
    """
    name, version = parse_consumer(consumer)
    return any(rule.form == form and version >= rule.since for rule in TABLE[name])


def choose(consumer: str, match: Match, opset: int, *, allow_rounding_change: bool = False) -> Choice:
    """The form for a site, by the table, and why.

    Args:
        consumer: One of `CONSUMERS`; `tensorrt:10.15` says a version. Without one, TensorRT is taken to be older.
        match: The site.
        opset: The version of the default domain at the site.
        allow_rounding_change: Also take a form that moves a rounding to a half type.

    Raises:
        UsageError: no such consumer.
    """
    name, version = parse_consumer(consumer)
    passed_over: list[str] = []
    for rule in TABLE[name]:
        if rule.x_types and match.x_type not in rule.x_types:
            continue
        objection = _objection(rule, version, match, opset, allow_rounding_change)
        if objection is None:
            return Choice(rule.form, "; ".join([rule.why, *passed_over]), rule.domain)
        passed_over.append(f"not {rule.form}: {objection}")
    return Choice(None, "; ".join(passed_over))


def _objection(rule: Rule, version: tuple[int, ...], match: Match, opset: int, allowed: bool) -> str | None:
    """Why a rule does not hold for a site; None when it does."""
    if rule.since and version < rule.since:
        since = ".".join(map(str, rule.since))
        return f"it takes TensorRT {since} (say tensorrt:{since} if yours is)"
    form = FORMS[rule.form]
    return form.refusal(match, opset) or (None if allowed else form.rounding_change(match))
