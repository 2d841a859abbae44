"""Registered norms: module classes that the user vouches for are kept whole, whatever their forward is made of.

During an export the forward of each instance calls one operator, `rmsnorm_onnx::rms_norm(x, gain, bias, spec)`, which
every route writes as plain operators that say the spec, so that the recogniser proves them as it proves any norm. What
the user claims is checked first, on the module itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import claimed
from rmsnorm_onnx.exporters.example import Example
from rmsnorm_onnx.exporters.steps import forward_replaced, step, words
from rmsnorm_onnx.spec import PRESETS, RMSNormSpec

if TYPE_CHECKING:
    import torch

_NAMESPACE, _OPERATOR = "rmsnorm_onnx", "rms_norm"


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What a user says of one module class.

    Attributes:
        spec: What it computes, or a function from the module to that.
        gain: The name of its gain, where the spec has one.
        bias: The name of its bias, where the spec has one.
    """

    spec: RMSNormSpec | Callable[[Any], RMSNormSpec]
    gain: str | None = "weight"
    bias: str | None = "bias"

    @classmethod
    def of(cls, said: Any, kind: str = "a class") -> Kept:
        """From a Kept, a spec, or a function from a module to a spec.

        Args:
            said: One of them.
            kind: The class that it is said of, for the message.

        Raises:
            UsageError: it is none of them.
        """
        kept = said if isinstance(said, Kept) else cls(said)
        spec = kept.spec
        if not isinstance(spec, RMSNormSpec) and (isinstance(spec, type) or not callable(spec)):
            what = f"the class {spec.__name__}" if isinstance(spec, type) else f"a {type(spec).__name__}"
            known = isinstance(spec, str) and spec in PRESETS
            mend = f"rmsnorm_onnx.spec.preset({spec!r})" if known else "an RMSNormSpec"
            raise UsageError(f"norms holds {what} for {kind}; give {mend}, a function from the module to it, or a Kept")
        for what, name in (("gain", kept.gain), ("bias", kept.bias)):
            if name is not None and not isinstance(name, str):
                raise UsageError(f"the Kept for {kind} names its {what} {name!r}; give an attribute's name, or None")
        return kept

    def read(self, module: Any) -> Reading:
        """The spec, gain and bias of one instance.

        Raises:
            UsageError: there is no such spec, or no such parameter.
        """
        import torch

        kind = type(module).__name__
        try:
            spec = self.spec if isinstance(self.spec, RMSNormSpec) else self.spec(module)
        except Exception as error:  # the user's own function may raise anything
            raise UsageError(f"the function that norms gives for {kind} failed: {words(error)}") from error
        if not isinstance(spec, RMSNormSpec):
            raise UsageError(f"the function that norms gives for {kind} returned a {type(spec).__name__}, no spec")
        found = []
        for what, wanted, name in (("gain", spec.has_gain, self.gain), ("bias", spec.has_bias, self.bias)):
            value = getattr(module, name, None) if wanted and name else None
            if wanted and not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"{kind} has no tensor {name!r} for the {what} that its spec has; name it in a Kept, or say "
                    f"has_{what}=False"
                )
            if wanted and not value.is_floating_point():
                raise UsageError(f"{name!r} of {kind} is of type {_name(value)}; a {what} is of a float type")
            found.append(value)
        return Reading(spec, *found)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One instance: its spec and its parameters."""

    spec: RMSNormSpec
    gain: torch.Tensor | None
    bias: torch.Tensor | None

    def laid_out(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """A parameter so that it broadcasts along the normalised axes, also along an inner one."""
        inner = -self.spec.axes[-1] - 1
        if value is None or not inner or value.dim() != len(self.spec.axes):
            return value
        return value.reshape(*value.shape, *[1] * inner)


def registered(norms: Any) -> dict[type, Kept]:
    """What `norms` says, by class.

    Raises:
        UsageError: a key is no class of modules, or a value says nothing; the message names the key.
    """
    import torch

    if not isinstance(norms, Mapping):
        raise UsageError(f"norms must map module classes to specs, got a {type(norms).__name__}; use {{MyNorm: spec}}")
    for kind in norms:
        if isinstance(kind, torch.nn.Module):
            raise UsageError(f"norms names a module, a {type(kind).__name__}; use its class")
        if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module):
            raise UsageError(f"norms names {kind!r}, which is no class of torch.nn.Module; use the norm's class itself")
    return {kind: Kept.of(value, kind.__name__) for kind, value in norms.items()}


@contextlib.contextmanager
def kept_whole(module: torch.nn.Module, example: Example, norms: Mapping[type, Any]) -> Iterator[None]:
    """Keep the registered modules whole while the block runs, and restore them whatever happens.

    Raises:
        UsageError: what is registered cannot be used, or no instance of it is in the module.
        ExportError: a module is not what it is said to be, or is called with more than x.
    """
    said = registered(norms)
    parts = {name: part for name, part in module.named_modules() if type(part) in said}
    for kind in said:
        if not any(type(part) is kind for part in parts.values()):
            raise UsageError(f"no module is a {kind.__name__}, which norms names; subclasses are named themselves")
    readings = {name: said[type(part)].read(part) for name, part in parts.items()}
    with contextlib.ExitStack() as stack:
        if parts:
            _define_operator()
            for name, calls in _calls(module, example, parts).items():
                for shape, x_type in calls:
                    claimed.check(name, parts[name], readings[name], shape, x_type)
        for name, part in parts.items():
            stack.enter_context(forward_replaced(part, _forward(part, readings[name])))
        yield


def _forward(part: Any, reading: Reading) -> Callable[..., Any]:
    """A forward that calls the operator."""
    import torch

    signature = inspect.signature(part.forward)
    text = json.dumps(reading.spec.to_json())

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = _only_input(part, signature, args, kwargs)
        gain, bias = reading.laid_out(reading.gain), reading.laid_out(reading.bias)
        return getattr(torch.ops.rmsnorm_onnx, _OPERATOR)(x, gain, bias, text)

    return forward


def _only_input(part: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
    """x, where nothing else is given that is not a default."""
    import torch

    (_, x), *others = [*signature.bind(*args, **kwargs).arguments.items()] or [("", None)]
    if isinstance(x, tuple) and len(x) == 1:  # forward(self, *inputs)
        [x] = x
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        given = _name(x) if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ExportError(
            f"{type(part).__name__} is called on {given}; it can be kept whole where x is a tensor of a float type"
        )
    for name, value in others:
        if value is not None and value is not signature.parameters[name].default:
            raise ExportError(
                f"{type(part).__name__} is called with {name}, which no RMSNormSpec knows; a module can be kept whole "
                "where x is its only input"
            )
    return x


def _calls(
    module: torch.nn.Module, example: Example, parts: Mapping[str, Any]
) -> dict[str, set[tuple[tuple[int, ...], str]]]:
    """The shapes and types that each registered module is called with, from one run of the example."""
    calls: dict[str, set[tuple[tuple[int, ...], str]]] = {name: set() for name in parts}
    handles = []
    for name, part in parts.items():

        def note(part: Any, args: Any, kwargs: Any, name: str = name) -> None:
            x = _only_input(part, inspect.signature(part.forward), args, kwargs)
            calls[name].add((tuple(x.shape), str(x.dtype).removeprefix("torch.")))

        handles.append(part.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with step("running the module on its example"):
            module(*example.args, **example.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _define_operator() -> None:
    """Define the operator in torch, once in a process: torch keeps its operators for good."""
    import torch

    if hasattr(torch.ops.rmsnorm_onnx, _OPERATOR):
        return

    def rms_norm(x: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None, spec: str) -> torch.Tensor:
        return evaluate(RMSNormSpec.from_json(json.loads(spec)), x, gain, bias)

    def shapes(x: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None, spec: str) -> torch.Tensor:
        r = RMSNormSpec.from_json(json.loads(spec)).resolve(_name(x))
        return torch.empty_like(x, dtype=getattr(torch, r.result_type))

    schema = "(Tensor x, Tensor? gain, Tensor? bias, str spec) -> Tensor"
    operator = torch.library.custom_op(f"{_NAMESPACE}::{_OPERATOR}", rms_norm, mutates_args=(), schema=schema)
    operator.register_fake(shapes)


def evaluate(
    spec: RMSNormSpec, x: torch.Tensor, gain: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The formula of `rmsnorm_onnx.spec` in torch, each step rounded to its type.

    Args:
        spec: What to compute.
        x: [..., d], of a float type.
        gain: Broadcasts against x.
        bias: Broadcasts against x.

    Returns:
        Of x's shape and of result_type.
    """
    import torch

    x_type = _name(x)
    r = spec.resolve(x_type)
    statistic, factor, normalized, gain_type, result = (
        getattr(torch, name)
        for name in (r.statistic_type, r.factor_type, r.normalized_type, r.gain_type, r.result_type)
    )
    product = getattr(torch, spec.product_type(x_type))
    s = x.to(statistic)
    s = s if r.leading is None else s[..., : r.leading]
    mean = (s * s).mean(dim=r.axes, keepdim=True)
    if r.epsilon_placement == "inside":
        root = torch.sqrt(mean + r.epsilon)
    else:
        root = torch.sqrt(mean)
        root = root + r.epsilon if r.epsilon_placement == "outside" else root.clamp(min=r.epsilon)
    f = torch.reciprocal(root).to(factor)
    wide = getattr(torch, dtypes.wider(dtypes.wider(x_type, r.factor_type), "float32"))
    y = (x.to(wide) * f.to(wide)).to(normalized)
    if gain is not None:
        y = y.to(product) * (gain.to(gain_type) + r.gain_offset if r.gain_offset else gain.to(gain_type)).to(product)
    if bias is not None:
        y = y.to(product) + bias.to(product)
    return y.to(result)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
