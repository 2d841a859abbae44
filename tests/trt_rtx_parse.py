"""Parses an ONNX file in TensorRT-RTX and prints its layers as JSON; a process of its own, for its failures abort."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx_bindings as trt


class Quiet(trt.ILogger):
    """Keeps errors for the report."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.Severity.ERROR:
            self.errors.append(message)


def describe(layer: Any) -> str:
    """A layer's kind, and its operation where it has one."""
    kind = str(layer.type).removeprefix("LayerType.")
    for name in ("ElementWise", "Unary", "Reduce"):
        if kind == name.upper():
            layer.__class__ = getattr(trt, f"I{name}Layer")
            return f"{kind} {str(layer.op).rpartition('.')[2]}"
    return kind


def main(path: str) -> None:
    """Parses one file."""
    logger = Quiet()
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(Path(path).read_bytes())
    layers = [describe(network.get_layer(i)) for i in range(network.num_layers)]
    errors = [str(parser.get_error(i)) for i in range(parser.num_errors)]
    outputs = [list(network.get_output(i).shape) for i in range(network.num_outputs)]
    json.dump({"parsed": parsed, "layers": layers, "errors": errors + logger.errors, "outputs": outputs}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
