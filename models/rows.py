"""One row of the table of models: a model in a type at an opset, measured in a process of its own.

`python -m rmsnorm_onnx.models.rows FOLDER REQUESTS` measures the requests, a JSON list, and writes events to stdout,
one JSON object a line, as soon as each is known: a crash or a time-out then costs what was being measured, no more.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rmsnorm_onnx import dtypes, modelio
from rmsnorm_onnx.errors import RMSNormError
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.models import tiny
from rmsnorm_onnx.models.inventory import Norm
from rmsnorm_onnx.models.measure import measure_export, torch_ulp
from rmsnorm_onnx.models.peers import TOOLS, find, one_line
from rmsnorm_onnx.models.variants import VARIANTS, Built, variant
from rmsnorm_onnx.oracle import reference, ulp_distance
from rmsnorm_onnx.report import describe
from rmsnorm_onnx.site import Declined, Match

if TYPE_CHECKING:
    import torch

KINDS = ("model", "variant")
OWN = "own"
"""The stage of an event in which our own norms are measured; the other stages are the tools'."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
    """What a row is of.

    Attributes:
        kind: One of `KINDS`: a tiny model, or a variant of the norm.
        name: Its name.
        dtype: The type of its weights.
        opset: The opset that it is exported at.
    """

    kind: str
    name: str
    dtype: str
    opset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What to measure of a row.

    Attributes:
        key: The row.
        stages: `OWN` and tools, in order.
    """

    key: Key
    stages: tuple[str, ...] = (OWN, *TOOLS)


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What a row is measured on: a `TinyModel`, or what looks like one to `measure_export`.

    Attributes:
        name: Its name.
        dtype: The type of its weights.
        module: The module, in inference mode.
        args: Example inputs.
        norms: Every RMSNorm that it holds.
        dynamic_shapes: As `export` takes them.
        layer_norms: The names of its norms that subtract the mean.
    """

    name: str
    dtype: str
    module: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    norms: tuple[Norm, ...]
    dynamic_shapes: Any = None
    layer_norms: tuple[str, ...] = ()

    def inputs(self, batch: int, sequence: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Its example inputs: those of a variant have shapes of their own."""
        return self.args


def subject(key: Key) -> Any:
    """The model or variant of a row."""
    if key.kind == "model":
        return tiny.build(key.name, key.dtype)
    built = variant(key.name, key.dtype)
    norms = tuple(
        Norm(name=p.name, kind=type(p.module).__name__, spec=p.spec, x_type=p.x_type, shape=tuple(p.module.shape))
        for p in built.parts
    )
    return Subject(key.name, key.dtype, built.module, built.args, norms)


def in_order(sites: Sequence[Match | Declined], norms: Sequence[Norm]) -> tuple[str, ...]:
    """How what was found in a variant differs from its parts, which run in the order of the graph."""
    found = [site for site in sites if isinstance(site, Match)]
    lines = []
    for site, norm in itertools.zip_longest(found, norms):
        if norm is None:
            lines.append(f"{site.name} is no norm of the variant")
        elif site is None:
            lines.append(f"{norm.kind} was not found")
        elif (site.x_type, site.spec.canonical(site.x_type)) != (norm.x_type, norm.spec.canonical(norm.x_type)):
            said, meant = describe(site.spec, site.x_type), describe(norm.spec, norm.x_type)
            lines.append(f"{norm.kind} was found as: {said}; it is: {meant}")
    return tuple(lines)


def variant_ulp(built: Built) -> float | None:
    """PyTorch's own worst distance from float64 over the norms of a variant; None where it has none."""
    import torch

    worst = None
    for part in built.parts:
        inner = -1 - part.spec.axes[-1]
        shape = (*([8] if inner else [2, 4]), *part.module.shape, *[2] * inner)
        for x in RowKinds(part.spec, part.x_type, shape).batches(np.random.default_rng(0)):
            with torch.no_grad():
                y = part.module(torch.from_numpy(x.astype(np.float32)).to(getattr(torch, part.x_type)))
            exact = reference(part.spec, x, _numpy(part.module.weight), _numpy(part.module.bias))
            distance = ulp_distance(_numpy(y), exact)
            worst = max(worst or 0.0, float(np.max(distance)))
    return worst


def _numpy(tensor: Any) -> Any:
    if tensor is None:
        return None
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.detach().float().numpy().astype(dtypes.numpy_dtype(name))


def measure(request: Request, folder: Path, tell: Callable[[dict[str, Any]], None]) -> None:
    """Measure what is asked for of one row, and tell each result as soon as it is there."""
    key, made = dataclasses.asdict(request.key), subject(request.key)
    tell({"key": key, "begin": request.stages[0]})
    start = time.monotonic()
    try:
        exported = export(
            made.module, made.args, opset=request.key.opset, dynamic_shapes=made.dynamic_shapes, fuse=False
        )
    except RMSNormError as error:
        tell({"key": key, "own": {"failed": one_line(error, 500)}})
        return
    plain = folder / f"{request.key.name.replace(' ', '-')}-{request.key.dtype}-{request.key.opset}-plain.onnx"
    modelio.save(exported.model, plain)
    for stage in request.stages:
        tell({"key": key, "begin": stage})
        if stage == OWN:
            own = _own(request.key, made, exported, folder)
            tell({"key": key, "own": {**own, "seconds": round(time.monotonic() - start, 1)}})
        else:
            inputs = [t.numpy() if not t.is_floating_point() else _numpy(t) for t in made.inputs(3, 5, seed=1)]
            finding = find(stage, plain, folder, inputs, request.key.dtype)
            tell({"key": key, "peer": stage, "finding": finding.to_json()})


def _own(key: Key, made: Any, exported: Any, folder: Path) -> dict[str, Any]:
    """The fields of a row that tell of our own norms."""
    if key.kind == "model":
        row = dataclasses.replace(measure_export(made, exported, folder), torch_ulp=torch_ulp(made))
    else:
        row = measure_export(made, exported, folder, compare=in_order)
        row = dataclasses.replace(row, torch_ulp=variant_ulp(variant(key.name, key.dtype)))
        wanted = [code.value for code in VARIANTS[key.name].declined]
        got = [code for code, count in row.reasons.items() for _ in range(count)]
        if sorted(wanted) != sorted(got):
            row = dataclasses.replace(row, differences=(*row.differences, f"declined as {got}, not as {wanted}"))
    missed = sum("was not found" in line or "was found as" in line for line in row.differences)
    return {
        "route": row.route,
        "expected": row.expected,
        "found": row.found,
        "equal": row.expected - missed,
        "held": row.held,
        "declined": dict(row.reasons),
        "layer_norms": row.layer_norms,
        "differences": list(row.differences),
        "ulp": _number(row.ulp),
        "torch_ulp": _number(row.torch_ulp),
        "tolerance": _number(row.tolerance),
        "within": row.within,
        "valid": row.valid,
        "loads": row.loads,
        "why": row.why,
        "notes": list(row.notes),
        "ok": row.ok,
    }


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def main(arguments: Sequence[str]) -> int:
    """Measure the requests and write their events; nothing else reaches stdout."""
    folder, text = Path(arguments[0]), arguments[1]
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as channel:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        def tell(event: dict[str, Any]) -> None:
            channel.write(json.dumps(event) + "\n")
            channel.flush()

        for item in json.loads(text):
            measure(Request(Key(**item["key"]), tuple(item["stages"])), folder, tell)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
