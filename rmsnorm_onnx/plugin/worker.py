"""One engine build, in a process of its own: TensorRT aborts its process where a build fails badly.

`python -m rmsnorm_onnx.plugin.worker JOB RESULT` reads the job as JSON, writes the engine, and writes the result as
JSON: whether it went well, TensorRT's errors, and the layers that it printed. `--import RUNTIME` only imports one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

MODULES = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
"""The modules of each TensorRT, the first that can be imported."""

IMPORT = "--import"
"""In a job's place: import a TensorRT, and say this word when it went well."""


def main(job_file: str, result_file: str) -> None:
    """Does one job."""
    if job_file == IMPORT:
        _module(result_file)
        print(IMPORT)
        return
    job = json.loads(Path(job_file).read_text())
    result = _build(job)
    Path(result_file).write_text(json.dumps(result))


def _build(job: dict[str, Any]) -> dict[str, Any]:
    trt = _module(job["runtime"])
    logger, said = _logger(trt)
    builder = trt.Builder(logger)
    problem = _load_plugin(builder, job["library"])
    if problem:
        return {"problem": problem, "errors": said["errors"]}
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job["model"]):
        return {"problem": "its parser refuses the model", "errors": _parser_errors(parser) or said["errors"]}
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job["capability"] is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{job['capability']}"), 0)
    if job["library"] and job["serialize"]:
        config.plugins_to_serialize = [job["library"]]
        if job["runtime"] == "tensorrt":  # whose headers store libraries in version-compatible engines
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if job["profiles"]:
        profile = builder.create_optimization_profile()
        for shape in job["profiles"]:
            profile.set_shape(shape["name"], shape["min"], shape["opt"], shape["max"])
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        return {"problem": "its builder refuses the network", "errors": said["errors"]}
    Path(job["engine"]).write_bytes(memoryview(engine))
    return {"problem": None, "errors": [], "layers": said["layers"], "version": trt.__version__}


def _module(runtime: str) -> Any:
    there = [name for name in MODULES[runtime] if importlib.util.find_spec(name)]
    return importlib.import_module(there[0])


def _logger(trt: Any) -> tuple[Any, dict[str, Any]]:
    """A logger that keeps errors and the list of layers."""
    said: dict[str, Any] = {"errors": [], "layers": ""}

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                said["errors"].append(message)
            elif message.startswith("Layers:"):
                said["layers"] = message

    return Logger(), said


def _load_plugin(builder: Any, library: str | None) -> str | None:
    """Loads the plugin's library; None where it went well."""
    if library is None:
        return None
    handle = builder.get_plugin_registry().load_library(library)
    return None if handle is not None else f"it cannot load the plugin's library {library}"


def _parser_errors(parser: Any) -> list[str]:
    """What the parser says, each with its node."""
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        node = f"node {error.node_name()!r}: " if error.node_name() else ""
        found.append(f"{node}{error.desc()}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
