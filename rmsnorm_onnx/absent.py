"""The norms of a PyTorch module that a file has nothing for.

A norm is a module whose class the inventory knows; or one without parts whose class is called a norm of some kind and
whose result is, on the example, an RMSNorm of its input: y * rms(x) / x is the same in each row. It is missing from a
file when the module calls it, no norm of the file is traced to it, and the outputs depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.capture import Call, Capture, capture
from rmsnorm_onnx.counterparts import Pair
from rmsnorm_onnx.site import Declined
from rmsnorm_onnx.torchrun import TorchRun

if TYPE_CHECKING:
    import torch

_SPREAD = 2e-3  # an epsilon of 1e-5 beside a mean square of 0.01 is a quarter of it


def candidates(module: torch.nn.Module) -> dict[str, str]:
    """The modules that may be norms, by name: each under its first name, as `capture` takes it."""
    from rmsnorm_onnx.models import inventory

    known = {norm.name for norm in inventory.norms(module, strict=False)}
    return {
        name: name
        for name, part in module.named_modules()
        if name in known or ("norm" in type(part).__name__.lower() and not any(part.children()))
    }


def faults(
    run: TorchRun, pairs: Sequence[Pair], declined: Sequence[Declined], likely: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a file lacks, and what should be known of it, each one sentence.

    Args:
        run: The module's runs, in which the candidates were watched.
        pairs: The norms of the file.
        declined: What was declined in the file.
        likely: The candidates.
    """
    norms = _norms(run, likely)
    if not pairs:
        more = f", and {len(declined)} candidates were declined: inspect tells why" if declined else ""
        return (f"no norm was found in the file{more}; the module has {_some(norms)}",), ()
    calls_one = any(run.plain.functions.values()) or any(p.key is not None for p in pairs)
    if not norms and not calls_one:
        names = [p.module or p.match.name for p in pairs]
        return (f"no norm was found in the module; the file has {_some(names)}",), ()
    untraced = sum(p.key is None for p in pairs)
    refused = {site.module for site in declined}
    missing = [name for name in norms if not any(_covers(p.key, name) for p in pairs if p.key is not None)]
    missing = [name for name in missing if name not in refused and _matters(run, name)]
    if len(missing) <= untraced:
        # The file does not tell which modules its norms are of: these may be the ones.
        return (), ()
    return tuple(f"{name or 'the module itself'}: the file has no norm for it" for name in missing), ()


def _covers(key: str, name: str) -> bool:
    """Whether a norm that is traced to a module may be that of another: of a part of it, or of what it is a part of."""
    return key == name or not key or not name or key.startswith(f"{name}.") or name.startswith(f"{key}.")


def _norms(run: TorchRun, likely: Mapping[str, str]) -> list[str]:
    """The candidates that are called and are norms."""
    from rmsnorm_onnx.models import inventory

    known = {norm.name for norm in inventory.norms(run.module, strict=False)}
    exact = run.plain if isinstance(run.exact, str) else run.exact
    return [name for name in likely if run.plain.modules.get(name) and (name in known or _is_norm(exact, name))]


def _is_norm(held: Capture, name: str) -> bool:
    return all(_normalises(call) for call in held.modules.get(name, ()))


def _normalises(call: Call) -> bool:
    """Whether y * rms(x) / x is the same in rows of different sizes, which neither a factor nor a LayerNorm gives."""
    if call.y is None or call.y.shape != call.x.shape or call.x.ndim < 2 or call.y.dtype.name not in dtypes.FLOAT_TYPES:
        return False
    x, y = (side.astype(np.float64).reshape(-1, call.x.shape[-1]) for side in (call.x, call.y))
    rms = np.sqrt(np.mean(x * x, axis=1, keepdims=True))
    # Where epsilon, or a value near zero, weighs, the quotient says nothing.
    rows = (rms > 0.1)[:, 0] & np.isfinite(rms)[:, 0]
    if np.sum(rows) < 2:
        return False
    x, y, rms = x[rows], y[rows], rms[rows]
    with np.errstate(all="ignore"):
        gain = np.where(np.abs(x) > 0.1 * rms, y * rms / x, np.nan)
    apart = np.abs(gain - _middle(gain)) > _SPREAD * np.abs(_middle(gain))
    sizes = float(np.ptp(rms) / np.mean(rms))
    return bool(not np.any(apart & np.isfinite(gain)) and np.any(np.isfinite(gain)) and sizes > 10 * _SPREAD)


def _middle(gain: np.ndarray) -> np.ndarray:
    held = np.where(np.isfinite(gain), gain, 0.0)
    count = np.maximum(np.sum(np.isfinite(gain), axis=0, keepdims=True), 1)
    return np.asarray(np.sum(held, axis=0, keepdims=True) / count)


def _matters(run: TorchRun, name: str) -> bool:
    """Whether the outputs depend on a module; an exporter drops one that they do not."""
    from torch.utils import _pytree as pytree

    def doubled(part: Any, args: Any, result: Any) -> Any:
        import torch

        return pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, result)

    handle = run.module.get_submodule(name).register_forward_hook(doubled)
    try:
        changed = capture(run.module, run.args, run.kwargs, {}).outputs
    except Exception:  # the user's code, which may raise anything, ran before: so something reads what was doubled
        return True
    finally:
        handle.remove()
    before = run.plain.outputs
    return len(changed) != len(before) or any(a.tobytes() != b.tobytes() for a, b in zip(changed, before, strict=True))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name or "the module itself" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none either"
