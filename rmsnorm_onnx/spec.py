"""`RMSNormSpec`: the mathematics of one norm, with its rounding points.

The formula, where round_T is rounding to type T and every type may be "x", the input's own::

    s = round_statistic(x)                       over `axes`, or over their first `leading` elements
    m = mean(s * s)                              in statistic_type
    f = 1 / sqrt(m + epsilon)    "inside"        rounded to factor_type
        1 / (sqrt(m) + epsilon)  "outside"
        1 / max(sqrt(m), epsilon) "clamp"
    z = round_normalized(x * f)                  x itself is not rounded to statistic_type
    w = gain_offset + gain                       formed in gain_type
    p = z * w + bias                             in the wider of normalized_type and gain_type
    y = round_result(p)

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equations 4 and 5; ONNX RMSNormalization
(opset 23); and the model sources named at each preset.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import SpecError

JSON_VERSION = 1

Placement = Literal["inside", "outside", "clamp"]
PLACEMENTS: tuple[Placement, ...] = ("inside", "outside", "clamp")

_TYPE_FIELDS = ("statistic_type", "factor_type", "normalized_type", "gain_type", "result_type")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RMSNormSpec:
    """One RMSNorm operator, without its tensors. See the module for the formula.

    Attributes:
        axes: The axes that share one statistic, negative and ascending: trailing axes, or one inner axis.
        epsilon: Exactly as the graph holds it.
        epsilon_placement: Inside the root, outside it, or as a lower clamp of the root: three operators.
        leading: pRMSNorm: the statistic is taken over the first `leading` elements of the last axis.
        has_gain: Whether the normalised value is multiplied by a gain.
        gain_offset: Added to the gain first: 1 for Gemma.
        has_bias: Whether a bias is added after the gain.
        statistic_type: x is cast to it before it is squared.
        factor_type: 1 / rms is rounded to it.
        normalized_type: x / rms is rounded to it before the gain.
        gain_type: offset + gain is formed in it.
        result_type: The output's type.

    Raises:
        SpecError: a field has a value without meaning; the message names the field.

    >>> RMSNormSpec(epsilon=1e-6).axes
    (-1,)
    """

    axes: tuple[int, ...] = (-1,)
    epsilon: float = 1e-5
    epsilon_placement: Placement = "inside"
    leading: int | None = None
    has_gain: bool = True
    gain_offset: float = 0.0
    has_bias: bool = False
    statistic_type: str = "float32"
    factor_type: str = "float32"
    normalized_type: str = "x"
    gain_type: str = "x"
    result_type: str = "x"

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple | list):
            raise SpecError(f"axes must be a tuple of negative integers, got {self.axes!r}")
        axes = tuple(self.axes)
        object.__setattr__(self, "axes", axes)
        if not axes or any(not isinstance(a, int) or a >= 0 for a in axes):
            raise SpecError(f"axes must be negative integers, at least one, got {self.axes!r}")
        if axes != tuple(range(axes[0], axes[0] + len(axes))) or (len(axes) > 1 and axes[-1] != -1):
            raise SpecError(f"axes must be trailing axes in ascending order, or one inner axis, got {self.axes!r}")
        for name, kinds in (("epsilon", (int, float)), ("gain_offset", (int, float)), ("leading", (int, type(None)))):
            if not isinstance(getattr(self, name), kinds):
                raise SpecError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not math.isfinite(self.epsilon) or self.epsilon < 0:
            raise SpecError(f"epsilon must be finite and not negative, got {self.epsilon!r}")
        if self.epsilon_placement not in PLACEMENTS:
            raise SpecError(f"epsilon_placement must be one of {PLACEMENTS}, got {self.epsilon_placement!r}")
        if self.leading is not None and (self.leading < 1 or axes != (-1,)):
            raise SpecError(f"leading must be positive, over the last axis alone, got {self.leading!r} over {axes}")
        if not math.isfinite(self.gain_offset) or (self.gain_offset and not self.has_gain):
            raise SpecError(f"gain_offset must be finite, and 0 without a gain, got {self.gain_offset!r}")
        for field in _TYPE_FIELDS:
            name = getattr(self, field)
            if name != "x" and name not in dtypes.FLOAT_TYPES:
                raise SpecError(f'{field} must be "x" or a float type, got {name!r}')

    def replace(self, **changes: Any) -> RMSNormSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def resolve(self, x_type: str) -> RMSNormSpec:
        """The same spec with "x" replaced by a type's name.

        >>> RMSNormSpec().resolve("float16").result_type
        'float16'
        """
        return _resolved(self, x_type)

    def product_type(self, x_type: str) -> str:
        """The type in which the normalised value is multiplied by the gain and the bias is added."""
        r = self.resolve(x_type)
        return dtypes.wider(r.normalized_type, r.gain_type) if r.has_gain else r.normalized_type

    def canonical(self, x_type: str) -> RMSNormSpec:
        """The representative of all specs that give the same numbers for inputs of `x_type`.

        Types are resolved, and those that make no difference take one value: the gain's type when nothing is added
        to the gain, the type before a rounding that is at least as narrow, epsilon beyond float32's precision when
        the statistic is no wider. Two norms are the same operator on `x_type` when their canonical specs are equal.

        >>> torch, llama = preset("torch", epsilon=1e-6), preset("llama")
        >>> [torch.canonical(t) == llama.canonical(t) for t in ("float32", "float16")]
        [True, False]
        """
        return _canonical(self, x_type)

    def _canonical(self, x_type: str) -> RMSNormSpec:
        r = self.resolve(x_type)
        changes: dict[str, Any] = {}
        if dtypes.holds(r.factor_type, r.statistic_type):
            changes["factor_type"] = r.statistic_type
        normalized, product = r.normalized_type, self.product_type(x_type)
        if not r.has_gain and not r.has_bias and dtypes.holds(normalized, r.result_type):
            changes["normalized_type"] = normalized = product = r.result_type
        if not r.gain_offset:
            changes["gain_type"] = product
        if dtypes.holds("float32", r.statistic_type):
            changes["epsilon"] = float(np.float32(r.epsilon))
        return r.replace(**changes)

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON-ready data, with the version of this layout.

        >>> RMSNormSpec.from_json(RMSNormSpec().to_json()) == RMSNormSpec()
        True
        """
        data = dataclasses.asdict(self)
        data["axes"] = list(self.axes)
        return {"version": JSON_VERSION, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RMSNormSpec:
        """The inverse of `to_json`; absent fields take their defaults.

        Raises:
            SpecError: another version, an unknown field, or a value without meaning.
        """
        fields = dict(data)
        version = fields.pop("version", None)
        if version != JSON_VERSION:
            raise SpecError(f"spec version {version!r} is not supported, expected {JSON_VERSION}")
        unknown = sorted(fields.keys() - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise SpecError(f"unknown spec fields: {', '.join(unknown)}")
        if "axes" in fields:
            fields["axes"] = tuple(fields["axes"])
        return cls(**fields)


# Asked for once a site, and a model's sites share a few specs.


@functools.lru_cache(maxsize=256)
def _resolved(spec: RMSNormSpec, x_type: str) -> RMSNormSpec:
    dtypes.numpy_dtype(x_type)
    return spec.replace(**{f: x_type if getattr(spec, f) == "x" else getattr(spec, f) for f in _TYPE_FIELDS})


@functools.lru_cache(maxsize=256)
def _canonical(spec: RMSNormSpec, x_type: str) -> RMSNormSpec:
    return spec._canonical(x_type)


PRESETS: Mapping[str, RMSNormSpec] = MappingProxyType(
    {
        # torch.nn.RMSNorm and F.rms_norm: computed in float32, rounded once. eps=None is float32's machine epsilon,
        # for half inputs too.
        "torch": RMSNormSpec(epsilon=2.0**-23, normalized_type="float32", gain_type="float32"),
        # transformers' LlamaRMSNorm, and Qwen's, Mistral's, Phi 3's: rounded to x's type before the gain.
        "llama": RMSNormSpec(epsilon=1e-6),
        # transformers' GemmaRMSNorm, Gemma 1 to 3: (1 + w) in float32, rounded once.
        "gemma": RMSNormSpec(epsilon=1e-6, gain_offset=1.0, normalized_type="float32", gain_type="float32"),
        # transformers' T5LayerNorm: rounded to the weight's type, which is x's in a model of one type.
        "t5": RMSNormSpec(epsilon=1e-6),
        # Zhang and Sennrich's own code: no casts, epsilon outside the root.
        "zhang2019": RMSNormSpec(epsilon=1e-8, epsilon_placement="outside", statistic_type="x", factor_type="x"),
    }
)
"""Model families as values of `RMSNormSpec`."""


def preset(name: str, **changes: Any) -> RMSNormSpec:
    """A model family's spec, with some fields changed.

    >>> preset("llama", epsilon=1e-5).epsilon
    1e-05

    Raises:
        SpecError: no such preset.
    """
    if name not in PRESETS:
        raise SpecError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name].replace(**changes)


def leading_count(d: int, p: float) -> int:
    """pRMSNorm's number of leading elements, int(d * p), as in Zhang and Sennrich's code.

    >>> leading_count(512, 0.0625)
    32
    """
    count = int(d * p)
    if not 1 <= count <= d:
        raise SpecError(f"p = {p!r} leaves {count} of {d} elements; it must leave between 1 and all of them")
    return count
