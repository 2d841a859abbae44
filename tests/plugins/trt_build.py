"""Loads the plugin's library into a TensorRT, parses a file and builds engines; prints what it found as JSON.

`python trt_build.py BINDINGS LIBRARY MODEL [SM...]`, with an empty LIBRARY for none. A process of its own: failures in
TensorRT end it. No GPU is needed; engines are read from the builder's own list of layers.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

SIZES = ((1, 1), (2, 5), (4, 8))
"""Of a file's dynamic dimensions, batch and sequence: the least, the likely and the greatest."""


def logger_of(trt: Any) -> Any:
    """A logger that keeps everything, by severity."""

    class Keeping(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.verbose: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            (self.errors if severity <= trt.ILogger.Severity.ERROR else self.verbose).append(message)

    return Keeping()


def profile_of(builder: Any, network: Any) -> Any:
    """Sizes for the dynamic dimensions."""
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        shape = tuple(network.get_input(i).shape)
        ranges = [tuple(s[min(a, 1)] if n == -1 else n for a, n in enumerate(shape)) for s in SIZES]
        profile.set_shape(network.get_input(i).name, *ranges)
    return profile


def engine(trt: Any, builder: Any, network: Any, logger: Any, sm: str) -> dict[str, Any]:
    """The engine's bytes and the names and kinds of its layers, for one architecture."""
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
    config.add_optimization_profile(profile_of(builder, network))
    logger.verbose.clear()
    plan = builder.build_serialized_network(network, config)
    layers = [text for text in logger.verbose if "Layers:" in text]
    names = re.findall(r"Name: ([^,]+), LayerType: (\w+)", layers[-1]) if layers else []
    return {"layers": names, "plan": "" if plan is None else bytes(plan).hex()}


def main(bindings: str, library: str, model: str, *architectures: str) -> None:
    """Parses one file, and builds it for each architecture."""
    trt = importlib.import_module(bindings)
    logger = logger_of(trt)
    builder = trt.Builder(logger)
    if library:
        trt.get_plugin_registry().load_library(library)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(Path(model).read_bytes())
    kinds = [str(network.get_layer(i).type).removeprefix("LayerType.") for i in range(network.num_layers)]
    errors = [str(parser.get_error(i)) for i in range(parser.num_errors)]
    report: dict[str, Any] = {"parsed": parsed, "kinds": kinds, "errors": errors, "engines": {}}
    for sm in architectures if parsed else ():
        report["engines"][sm] = engine(trt, builder, network, logger, sm)
    report["log"] = logger.errors
    report["outputs"] = [str(network.get_output(i).dtype) for i in range(network.num_outputs)]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
