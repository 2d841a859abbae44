"""`check`: each norm of a graph has the epsilon of its module, which is the config's unless a note says so."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.site import Match

_FIELDS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps", "layer_norm_epsilon")
_CONFIG_FIELD = re.compile(r"(^|_)(eps|epsilon)$")


def check(graph: ir.Model, module: Any) -> tuple[str, ...]:
    """Hold every norm of a graph to the module that it was traced in.

    Args:
        graph: The exported model.
        module: The transformers model that it was exported from.

    Returns:
        One note for each norm that has another epsilon than all of the config's, because its module has.

    Raises:
        ExportError: a norm has another epsilon than its module, or none where the config has one.
    """
    stated = config_epsilons(module.config)
    notes = []
    for site in find_rms_norms(graph):
        if not isinstance(site, Match):
            continue
        meant = _of(module, site.module)
        lost = meant is None and not site.spec.epsilon and stated and 0.0 not in stated
        if lost or (meant is not None and not _same(site.spec.epsilon, meant)):
            wanted = meant if meant is not None else " or ".join(map(str, sorted(stated)))
            raise ExportError(
                f"{site.name} (of {site.module or 'no known module'}) has epsilon {site.spec.epsilon:g} in the graph "
                f"and {wanted} in PyTorch; the exporter changed it"
            )
        if stated and not any(_same(site.spec.epsilon, value) for value in stated):
            names = " or ".join(map(str, sorted(stated)))
            notes.append(f"{site.module or site.name} has epsilon {site.spec.epsilon:g}, the config {names}")
    return tuple(notes)


def config_epsilons(config: Any) -> set[float]:
    """The epsilons that a config's text part states (rms_norm_eps, layer_norm_epsilon and their like)."""
    fields = config.get_text_config().to_dict()
    return {float(value) for name, value in fields.items() if _CONFIG_FIELD.search(name) and _is_number(value)}


def _of(module: Any, name: str | None) -> float | None:
    """The epsilon that a module states; None where it is unknown or states none."""
    try:
        part = module.get_submodule(name or "?")
    except AttributeError:
        return None
    return next((float(v) for f in _FIELDS if _is_number(v := getattr(part, f, None))), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(written: float, meant: float) -> bool:
    """Whether a graph holds an epsilon, as a double or in float32."""
    return written == meant or np.float32(written) == np.float32(meant)
