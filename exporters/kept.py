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

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.body import refusal
from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters.example import Example
from rmsnorm_onnx.exporters.steps import forward_replaced, step
from rmsnorm_onnx.inputs import ROWS, RowKinds, fewer_rows
from rmsnorm_onnx.oracle import error_bound, reference, ulp_distance
from rmsnorm_onnx.spec import RMSNormSpec

if TYPE_CHECKING:
    import torch

_MOST_ROWS = 64
_NAMESPACE, _OPERATOR = "rmsnorm_onnx", "rms_norm"
_HINTS: Mapping[str, str] = {
    "zero": "epsilon and its place",
    "near epsilon": "epsilon and its place",
    "tiny": "epsilon and its place",
    "huge": "the type of the statistic",
}
_HINT = "the gain and its offset, the axes, mean or sum, and where it rounds"


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
    def of(cls, said: Any) -> Kept:
        """From a Kept, a spec, or a function from a module to a spec.

        Raises:
            UsageError: it is none of them.
        """
        if isinstance(said, Kept):
            return said
        if isinstance(said, RMSNormSpec) or callable(said):
            return cls(said)
        raise UsageError(f"norms holds a {type(said).__name__}; give an RMSNormSpec, a function to one, or a Kept")

    def read(self, module: Any) -> Reading:
        """The spec, gain and bias of one instance.

        Raises:
            UsageError: there is no such spec, or no such parameter.
        """
        spec = self.spec if isinstance(self.spec, RMSNormSpec) else self.spec(module)
        kind = type(module).__name__
        if not isinstance(spec, RMSNormSpec):
            raise UsageError(f"the function that norms gives for {kind} returned a {type(spec).__name__}, no spec")
        found = []
        for what, wanted, name in (("gain", spec.has_gain, self.gain), ("bias", spec.has_bias, self.bias)):
            value = getattr(module, name, None) if wanted and name else None
            if wanted and not hasattr(value, "shape"):
                raise UsageError(f"{kind} has no tensor {name!r} for the {what} that its spec has; name it in a Kept")
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


@contextlib.contextmanager
def kept_whole(module: torch.nn.Module, example: Example, norms: Mapping[type, Any]) -> Iterator[None]:
    """Keep the registered modules whole while the block runs, and restore them whatever happens.

    Raises:
        UsageError: what is registered cannot be used, or no instance of it is in the module.
        ExportError: a module is not what it is said to be, or is called with more than x.
    """
    said = {kind: Kept.of(value) for kind, value in norms.items()}
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
                    _check(name, parts[name], readings[name], shape, x_type)
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
    bound = signature.bind(*args, **kwargs)
    (_, x), *others = bound.arguments.items()
    if isinstance(x, tuple) and len(x) == 1:  # forward(self, *inputs)
        [x] = x
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


def _check(name: str, part: Any, reading: Reading, shape: tuple[int, ...], x_type: str) -> None:
    """Hold one module to its claim, on rows that show what goes wrong with norms.

    Raises:
        ExportError: some element is further from the float64 reference than the claim allows, its type is another, or
            it rounds elsewhere.
    """
    spec = reading.spec
    title = f"{type(part).__name__} ({name})" if name else type(part).__name__
    why = refusal(spec, x_type, 18)
    if why is not None:
        raise ExportError(f"{title} cannot be kept whole: {why}")
    if len(shape) < -spec.axes[0]:
        raise ExportError(f"{title} is called on x of shape {list(shape)}, which has no axis {spec.axes[0]}")
    rows = RowKinds(spec, x_type, fewer_rows(shape, spec.axes, _MOST_ROWS))
    gain, bias = (_array(reading.laid_out(value)) for value in (reading.gain, reading.bias))
    batches = rows.batches(np.random.default_rng(0))
    ulps, over, same, moved = [], [], 0, 0
    other = _other_rounding(spec, x_type)
    for x in batches:
        with step(f"running {title} on rows of its type"):
            y = _run(part, x, reading, x_type)
        kind = spec.resolve(x_type).result_type
        if y.dtype != dtypes.numpy_dtype(kind):
            raise ExportError(f"{title} is not what norms says: it gives {y.dtype.name}, its spec {kind}")
        if y.shape != x.shape:
            raise ExportError(f"{title} is not what norms says: it gives shape {list(y.shape)} for {list(x.shape)}")
        exact = reference(spec, x, gain, bias)
        error = np.abs(y.astype(np.float64) - exact)
        ulps.append(_by_row(ulp_distance(y, exact), spec))
        with np.errstate(invalid="ignore"):
            over.append(_by_row(~(error <= error_bound(spec, x, gain, bias)), spec))
        same += int(np.sum(y == reference(spec, x, gain, bias, rounded=True)))
        moved += 0 if other is None else int(np.sum(y == reference(other, x, gain, bias, rounded=True)))
    beyond, distance = np.concatenate(over), np.concatenate(ulps)
    if beyond.any():
        worst = np.where(beyond, np.nan_to_num(distance, nan=np.inf), -1.0)
        row = int(np.argmax(worst.max(axis=1)))
        kinds = [kind for kind in ROWS if kind != "zero" or spec.epsilon > 0]
        kind = kinds[row] if row < len(kinds) else "random"
        raise ExportError(
            f"{title} is not what norms says: {worst.max():.3g} ulp from its spec, beyond the bound, on a row that is "
            f"{kind}; look at {_HINTS.get(kind, _HINT)}"
        )
    if moved > same:
        early = "before" if spec.resolve(x_type).normalized_type != x_type else "not before"
        raise ExportError(
            f"{title} is not what norms says: it rounds {early} the gain ({moved} elements agree with that, {same} "
            "with its spec); look at normalized_type and gain_type"
        )


def _other_rounding(spec: RMSNormSpec, x_type: str) -> RMSNormSpec | None:
    """The spec that rounds before the gain where this one does not, and the other way round; None for wide types."""
    if not spec.has_gain or dtypes.holds(x_type, "float32"):
        return None
    early = spec.resolve(x_type).normalized_type == x_type
    wide = "float32" if early else "x"
    return spec.replace(normalized_type=wide, gain_type=wide)


def _by_row(values: np.ndarray, spec: RMSNormSpec) -> np.ndarray:
    """[rows, elements], from an array of x's shape."""
    last = np.moveaxis(values, spec.axes, range(-len(spec.axes), 0))
    return last.reshape(-1, int(np.prod(last.shape[last.ndim - len(spec.axes) :])))


def _run(part: Any, x: np.ndarray, reading: Reading, x_type: str) -> np.ndarray:
    import torch

    device = next((p.device for p in (*part.parameters(), *part.buffers())), torch.device("cpu"))
    y = part(torch.from_numpy(x.astype(np.float64)).to(device=device, dtype=getattr(torch, x_type)))
    array = _array(y)
    assert array is not None
    return array


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """A tensor of a float type as numpy, bfloat16 too."""
    if tensor is None:
        return None
    kind = dtypes.numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    array: np.ndarray = tensor.detach().double().cpu().numpy().astype(kind)
    return array


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
