"""How far a norm's result may lie from the reference when its x is known only as it was stored.

Between half operators a runtime may work in float32, so that a norm reads an x that is rounded only when it is looked
at. Half a spacing is all that such a rounding hides, and what half a spacing does to a norm can be bounded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rmsnorm_onnx.rounding import spacing
from rmsnorm_onnx.spec import RMSNormSpec

Array = npt.NDArray[np.float64]


def hidden_by_storage(spec: RMSNormSpec, x: np.ndarray, gain: npt.ArrayLike | None = None) -> Array:
    """The largest |reference(x') - reference(x)| over all x' that round to x, or more.

    With h half the spacing of x's type at x, every |x'| lies in [|x| - h, |x| + h] (from 0 on), its mean square
    between those of the ends, and 1 / rms falls with the mean square. So |z'| lies between the lower end over the upper
    root and the upper end over the lower root, and the gain multiplies the distance.

    Args:
        spec: The norm.
        x: As it was stored, of a half type.
        gain: As `reference` takes it, broadcasting against x.

    Returns:
        float64, of x's shape; infinite where some x' has no finite norm.

    >>> x = np.array([1.0, 1.0], np.float16)
    >>> print(np.round(hidden_by_storage(RMSNormSpec(has_gain=False), x) / np.spacing(np.float16(1)), 1))
    [1. 1.]
    """
    size = np.abs(x.astype(np.float64))
    half = spacing(size, x.dtype.name) / 2
    low, high = np.maximum(size - half, 0.0), size + half
    with np.errstate(all="ignore"):
        here = size / _root(spec, size)
        apart = np.maximum(high / _root(spec, low) - here, here - low / _root(spec, high))
    apart = np.where(np.isnan(apart), np.inf, apart)
    if gain is None:
        return np.asarray(apart)
    return np.asarray(apart * np.abs(spec.gain_offset + np.asarray(gain, np.float64)))


def _root(spec: RMSNormSpec, size: Array) -> Array:
    counted = size if spec.leading is None else size[..., : spec.leading]
    mean = np.mean(counted * counted, axis=spec.axes, keepdims=True)
    if spec.epsilon_placement == "inside":
        return np.asarray(np.sqrt(mean + spec.epsilon))
    root = np.sqrt(mean)
    outside = spec.epsilon_placement == "outside"
    return np.asarray(root + spec.epsilon if outside else np.maximum(root, spec.epsilon))
