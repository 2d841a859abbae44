"""`check`: the epsilons of a file beside those that a transformers config states."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.exporters.pairing import PairedNorm

_CONFIG_FIELD = re.compile(r"(^|_)(eps|epsilon)$")


def check(pairs: Sequence[PairedNorm], config: Any) -> tuple[str, ...]:
    """Hold the norms of a file, paired with their modules, to the config.

    Args:
        pairs: What `pairing.pair` gave; it has refused another epsilon in a norm of a class that it knows.
        config: The transformers config of the model.

    Returns:
        One note for each norm that has another epsilon than all of the config's, because its module has.

    Raises:
        ExportError: a norm has another epsilon than its module, or none where the config has one.
    """
    stated = config_epsilons(config)
    notes = []
    for pair in pairs:
        if pair.found is None:
            continue
        value = pair.found.epsilon
        lost = pair.epsilon is None and not value and stated and 0.0 not in stated
        if lost or pair.same_epsilon is False:
            wanted = " or ".join(map(str, sorted(stated))) if pair.epsilon is None else pair.epsilon
            raise ExportError(
                f"{pair.site} (of {pair.module or 'no known module'}) has epsilon {value:g} in the graph "
                f"and {wanted} in PyTorch; the exporter changed it"
            )
        if stated and not any(np.float32(value) == np.float32(epsilon) for epsilon in stated):
            names = " or ".join(map(str, sorted(stated)))
            notes.append(f"{pair.module or pair.site} has epsilon {value:g}, the config {names}")
    return tuple(notes)


def config_epsilons(config: Any) -> set[float]:
    """The epsilons that a config's text part states (rms_norm_eps, layer_norm_epsilon and their like)."""
    fields = config.get_text_config().to_dict()
    return {float(value) for name, value in fields.items() if _CONFIG_FIELD.search(name) and _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
