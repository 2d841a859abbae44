"""Loads the plugin's library into a TensorRT's registry and makes plugins there; prints what came of it as JSON.

`python trt_registry.py BINDINGS LIBRARY`. No runtime is created: that needs a driver.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np
from plugin_call import Field, field, fields_of

from rmsnorm_onnx.forms.plugin import NAMESPACE, OPERATOR, VERSION
from rmsnorm_onnx.spec import RMSNormSpec

GAIN = np.ones(16, np.float16)
TRIALS: dict[str, tuple[RMSNormSpec, dict[str, Field | None], np.ndarray | None]] = {
    "good": (RMSNormSpec(epsilon=1e-6), {}, None),
    "good gain": (RMSNormSpec(gain_offset=1.0), {}, GAIN),
    "epsilon is missing": (RMSNormSpec(), {"epsilon": None}, None),
    "epsilon is an integer": (RMSNormSpec(), {"epsilon": field(1)}, None),
    "axes are positive": (RMSNormSpec(), {"axes": field([1])}, None),
    "gain without has_gain": (RMSNormSpec(has_gain=False), {}, GAIN),
}
NUMPY = {"INT32": np.int32, "FLOAT32": np.float32, "CHAR": np.int8, "FLOAT16": np.float16}


def main(bindings: str, library: str) -> None:
    """Tries each set of fields."""
    trt: Any = importlib.import_module(bindings)
    registry = trt.get_plugin_registry()
    before = len(registry.all_creators)
    handle = registry.load_library(library)
    creator = registry.get_creator(OPERATOR, VERSION, NAMESPACE)
    report: dict[str, Any] = {"version": trt.__version__, "fields": [f.name for f in creator.field_names], "made": {}}
    report["added"] = len(registry.all_creators) - before
    for name, (spec, change, gain) in TRIALS.items():
        fields = {n: f for n, f in (fields_of(spec, gain) | change).items() if f is not None and f.data is not None}
        arrays = {n: np.frombuffer(f.data or b"", NUMPY[f.type]).copy() for n, f in fields.items()}
        given = [
            trt.PluginField(n, arrays[n], getattr(trt.PluginFieldType, f.type.replace("FLOAT", "FLOAT")))
            for n, f in fields.items()
        ]
        plugin = creator.create_plugin(name, trt.PluginFieldCollection(given), trt.TensorRTPhase.BUILD)
        report["made"][name] = plugin is not None
        del plugin
    registry.deregister_library(handle)
    report["left"] = len(registry.all_creators) - before
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
