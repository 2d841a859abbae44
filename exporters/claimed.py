"""Whether a registered module is what is claimed of it, and if not, which field of the claim is wrong.

A hint is a proof too: a field is named only where the claim with this field changed, and nothing else, holds on the
same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.body import refusal
from rmsnorm_onnx.counterparts import stated_epsilon
from rmsnorm_onnx.errors import ExportError, RMSNormError, UsageError
from rmsnorm_onnx.exporters.steps import step
from rmsnorm_onnx.inputs import ROWS, RowKinds, fewer_rows
from rmsnorm_onnx.oracle import error_bound, reference, ulp_distance
from rmsnorm_onnx.spec import RMSNormSpec

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.exporters.kept import Reading

_MOST_ROWS = 64
_EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 2.0**-23, 1e-6, 1e-5, 1e-4, 1e-3)
_SHOWN = 2


@dataclasses.dataclass(frozen=True)
class _Trial:
    """What a module makes of rows that show what goes wrong with norms."""

    x_type: str
    rows: Sequence[tuple[np.ndarray, np.ndarray]]
    gain: np.ndarray | None
    bias: np.ndarray | None

    def beyond(self, spec: RMSNormSpec) -> np.ndarray:
        """[rows, elements]: the distance from the spec in ulp where it is beyond the bound, -1 elsewhere."""
        worst = []
        for x, y in self.rows:
            exact = reference(spec, x, self.gain, self.bias)
            error = np.abs(y.astype(np.float64) - exact)
            with np.errstate(invalid="ignore"):
                over = ~(error <= error_bound(spec, x, self.gain, self.bias))
            distance = np.nan_to_num(ulp_distance(y, exact), nan=np.inf)
            worst.append(_by_row(np.where(over, distance, -1.0), spec))
        return np.concatenate(worst)

    def agreeing(self, spec: RMSNormSpec) -> int:
        """How many elements are the spec's, rounded at its own points."""
        return sum(int(np.sum(y == reference(spec, x, self.gain, self.bias, rounded=True))) for x, y in self.rows)

    def rounds_elsewhere(self, spec: RMSNormSpec) -> tuple[int, int] | None:
        """How many elements agree with the other place before or after the gain, and how many with the spec's.

        None where the spec's place explains as many.
        """
        other = other_rounding(spec, self.x_type)
        moved, same = (0, 0) if other is None else (self.agreeing(other), self.agreeing(spec))
        return (moved, same) if moved > same else None

    def holds(self, claim: RMSNormSpec, changes: Mapping[str, Any]) -> bool:
        """Whether nothing contradicts a claim with some fields changed."""
        try:
            spec = claim.replace(**changes)
            if refusal(spec, self.x_type, 18) is not None:
                return False
            return bool(np.all(self.beyond(spec) < 0)) and self.rounds_elsewhere(spec) is None
        except (RMSNormError, ValueError):  # the spec does not fit these shapes
            return False


def check(name: str, part: Any, reading: Reading, shape: tuple[int, ...], x_type: str) -> None:
    """Hold one module to its claim.

    Raises:
        ExportError: some element is further from the float64 reference than the claim allows, its type is another, or
            it rounds elsewhere; the message names the field that alone is wrong, where there is one.
        UsageError: its gain or bias does not fit its axes.
    """
    spec = reading.spec
    title = f"{type(part).__name__} ({name})" if name else type(part).__name__
    why = refusal(spec, x_type, 18)
    if why is not None:
        raise ExportError(f"{title} cannot be kept whole: {why}")
    if len(shape) < -spec.axes[0]:
        raise ExportError(f"{title} is called on x of shape {list(shape)}, which has no axis {spec.axes[0]}")
    trial = _tried(title, part, reading, shape, x_type)
    beyond = trial.beyond(spec)
    if np.any(beyond >= 0):
        row = int(np.argmax(beyond.max(axis=1)))
        kinds = [kind for kind in ROWS if kind != "zero" or spec.epsilon > 0]
        kind = kinds[row] if row < len(kinds) else "random"
        raise ExportError(
            f"{title} is not what norms says: {beyond.max():.3g} ulp from its spec, beyond the bound, on a row that is "
            f"{kind}; {_hint(trial, part, spec, shape)}"
        )
    moved = trial.rounds_elsewhere(spec)
    if moved is not None:
        early = "before" if spec.resolve(x_type).normalized_type != x_type else "not before"
        raise ExportError(
            f"{title} is not what norms says: it rounds {early} the gain ({moved[0]} elements agree with that, "
            f"{moved[1]} with its spec); {_hint(trial, part, spec, shape)}"
        )


def _tried(title: str, part: Any, reading: Reading, shape: tuple[int, ...], x_type: str) -> _Trial:
    """The module on its rows; each y is of the type and shape that its spec says."""
    spec = reading.spec
    gain, bias = (as_array(reading.laid_out(value)) for value in (reading.gain, reading.bias))
    for what, value in (("gain", gain), ("bias", bias)):
        if value is not None and not _fits(value, shape):
            raise UsageError(
                f"the {what} of {title} is of shape {list(value.shape)}, and x of {list(shape)}: they do not fit along "
                f"axes {spec.axes}; mend the spec's axes, or name another tensor in a Kept"
            )
    rows = []
    for x in RowKinds(spec, x_type, fewer_rows(shape, spec.axes, _MOST_ROWS)).batches(np.random.default_rng(0)):
        with step(f"running {title} on rows of its type"):
            y = _run(part, x, x_type)
        kind = spec.resolve(x_type).result_type
        if y.dtype != dtypes.numpy_dtype(kind):
            raise ExportError(f"{title} is not what norms says: it gives {y.dtype.name}, its spec {kind}")
        if y.shape != x.shape:
            raise ExportError(f"{title} is not what norms says: it gives shape {list(y.shape)} for {list(x.shape)}")
        rows.append((x, y))
    return _Trial(x_type, rows, gain, bias)


def _fits(value: np.ndarray, shape: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(value.shape, shape) == shape
    except ValueError:
        return False


def _hint(trial: _Trial, part: Any, spec: RMSNormSpec, shape: tuple[int, ...]) -> str:
    """The changes of one field each that make the claim true; a distance alone does not tell which."""
    found: list[str] = []
    tried = set()
    for fields in _changes(trial, part, spec, shape):
        said = " and ".join(f"{name}={value!r}" for name, value in fields.items())
        if said not in tried and len(found) < _SHOWN and trial.holds(spec, fields):
            found.append(said)
        tried.add(said)
    if not found:
        return "no change of a single field makes its spec true: hold it to the module's code"
    return f"its spec is true with {' or '.join(found)}"


def _changes(trial: _Trial, part: Any, spec: RMSNormSpec, shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Other values of one field, likelier ones first; the rounding before the gain is two fields that go together."""
    stated = stated_epsilon(part)
    if stated is not None and stated >= 0:
        yield {"epsilon": stated}
    yield from ({"epsilon_placement": place} for place in ("inside", "outside", "clamp"))
    yield from ({"epsilon": epsilon} for epsilon in _EPSILONS)
    yield {"gain_offset": 0.0 if spec.gain_offset else 1.0}
    other = other_rounding(spec, trial.x_type)
    if other is not None:
        yield {"normalized_type": other.normalized_type, "gain_type": other.gain_type}
    for name in ("statistic_type", "factor_type", "normalized_type", "gain_type"):
        yield from ({name: kind} for kind in ("float32", "x", "float64"))
    if spec.leading is not None:
        yield {"leading": None}
    yield from ({"axes": tuple(range(-n, 0))} for n in range(1, len(shape)))
    yield from ({"axes": (-n,)} for n in range(2, len(shape)))


def other_rounding(spec: RMSNormSpec, x_type: str) -> RMSNormSpec | None:
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


def _run(part: Any, x: np.ndarray, x_type: str) -> np.ndarray:
    import torch

    device = next((p.device for p in (*part.parameters(), *part.buffers())), torch.device("cpu"))
    y = part(torch.from_numpy(x.astype(np.float64)).to(device=device, dtype=getattr(torch, x_type)))
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"it gives a {type(y).__name__}, no tensor")
    array = as_array(y)
    assert array is not None
    return array


def as_array(tensor: torch.Tensor | None) -> np.ndarray | None:
    """A tensor of a float type as numpy, bfloat16 too."""
    if tensor is None:
        return None
    kind = dtypes.numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    array: np.ndarray = tensor.detach().double().cpu().numpy().astype(kind)
    return array
