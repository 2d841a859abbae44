"""What the runtimes on this machine can do, told before any model is loaded.

A model that onnxruntime has no kernel for fails when it is loaded, with the name of one operator. Here every such
operator is named, with its type and a node.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.kernels import Registry, Walk

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, slots=True)
class MissingKernel:
    """An operator that a runtime cannot run.

    Attributes:
        op: The operator, with its version: "Mul(14)".
        domain: Its domain; "" is ONNX's own.
        type: The element type that no kernel takes ("bfloat16"), or "" for an operator that is not known at all.
        node: The first node at fault, by its name or its output's.
        count: How many nodes there are.
    """

    op: str
    domain: str
    type: str
    node: str
    count: int

    def __str__(self) -> str:
        """One sentence."""
        op = f"{self.domain}::{self.op}" if self.domain else self.op
        lacks = f"has no {self.type} kernel" if self.type else "is not known"
        nodes = f"node {self.node!r}" if self.count == 1 else f"{self.count} nodes, the first is {self.node!r}"
        return f"{op} {lacks} in onnxruntime: {nodes}"


def missing_kernels(model: ir.Model, runtime: str = "onnxruntime") -> list[MissingKernel]:
    """The operators of a model that onnxruntime's CPU provider has no kernel for; empty when it can run all of them.

    Values whose type is neither declared nor follows from the operators are taken to be fine.

    Args:
        model: The model; it is only read, and its weights are not.
        runtime: "onnxruntime", the only runtime whose kernels can be listed without loading a model.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        UsageError: another runtime.
    """
    if runtime != "onnxruntime":
        raise UsageError(f"no kernels can be listed for {runtime!r}; use 'onnxruntime'")
    walk = Walk(Registry.load(), model.functions)
    walk.graph(model.graph, {}, model.opset_imports, {})
    counts = collections.Counter(key for key, _ in walk.gaps)
    first = {key: node for key, node in reversed(walk.gaps)}
    return [MissingKernel(op, domain, kind, first[(op, domain, kind)], n) for (op, domain, kind), n in counts.items()]


def kernel_gaps(model: ir.Model) -> tuple[str, ...]:
    """`missing_kernels`, each as a sentence; empty where onnxruntime is not installed, for then nothing is known."""
    if importlib.util.find_spec("onnxruntime") is None:
        return ()
    return tuple(str(gap) for gap in missing_kernels(model))


@dataclasses.dataclass(frozen=True, slots=True)
class Package:
    """A package that this one works with.

    Attributes:
        name: Its name on PyPI.
        version: The installed version; None when it is missing.
        purpose: What it is needed for.
        install: The command that brings it; "" for one that no pip command brings.
    """

    name: str
    version: str | None
    purpose: str
    install: str


_PACKAGES = (
    ("numpy", "arrays, and the float64 reference", "numpy>=1.26"),
    ("ml-dtypes", "bfloat16 in numpy", "ml-dtypes>=0.5"),
    ("onnx", "reading and writing models", "onnx>=1.20"),
    ("onnx-ir", "the graph that is rewritten", "onnx-ir>=1.0"),
    ("onnxscript", "authoring functions", "onnxscript>=0.7"),
    ("rich", "tables on a terminal", "rich>=13"),
    ("onnxruntime", "verify, and naming missing kernels", "onnxruntime>=1.23"),
    ("torch", "export, and verify --against torch", "torch>=2.9"),
    ("transformers", "checkpoints, and the reference models of the demo", "transformers>=5"),
    ("safetensors", "the weights of checkpoints", "safetensors>=0.5"),
    ("keras", "Keras models", "keras>=3.9"),
    ("matplotlib", "verify --plot", "matplotlib>=3.8"),
    ("tensorrt", "engines, on an NVIDIA GPU", "tensorrt>=10.15"),
    ("tensorrt-rtx", "engines ahead of time, without a GPU", "tensorrt-rtx"),
)
# One module under several names on PyPI.
_ALSO = {
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino"),
    "tensorrt": ("tensorrt-cu13-bindings", "tensorrt-cu12-bindings"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
}


def packages() -> tuple[Package, ...]:
    """The packages that this one works with, present or missing, without importing any."""
    return tuple(
        Package(name, _version(name, *_ALSO.get(name, ())), purpose, f"pip install '{requirement}'")
        for name, purpose, requirement in _PACKAGES
    )


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is here.

    Attributes:
        python: The Python version.
        packages: Packages, present or missing.
        forms: By form and element type, "runs", or why not: in onnxruntime's CPU provider, for a norm over the last
            axis with a gain. Empty without onnxruntime.
        plugin: The TensorRT plugin's library; None where there is none.
        plugin_lacks: What `rmsnorm-onnx plugin build` lacks here, each one sentence with its mend.
    """

    python: str
    packages: tuple[Package, ...]
    forms: Mapping[str, Mapping[str, str]]
    plugin: str | None = None
    plugin_lacks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON-ready data, with its version."""
        forms = {form: dict(types) for form, types in self.forms.items()}
        packages = [dataclasses.asdict(package) for package in self.packages]
        plugin = {"library": self.plugin, "lacks": list(self.plugin_lacks)}
        data = {"python": self.python, "packages": packages, "forms": forms, "plugin": plugin}
        return {"version": 1, "kind": "doctor", **data}


def doctor() -> Diagnosis:
    """Look at the packages, and at what onnxruntime has kernels for; no model is loaded into any runtime."""
    from rmsnorm_onnx.plugin.compilation import missing
    from rmsnorm_onnx.plugin.library import find_library

    library = find_library()
    return Diagnosis(
        python=platform.python_version(),
        packages=packages(),
        forms=_forms(),
        plugin=None if library is None else str(library),
        plugin_lacks=missing(),
    )


def _forms() -> dict[str, dict[str, str]]:
    from rmsnorm_onnx.forms import FORMS

    if importlib.util.find_spec("onnxruntime") is None:
        return {}
    return {form: {kind: _verdict(form, kind) for kind in _ELEMENTS} for form in FORMS}


# The names of element types in ONNX's text syntax.
_ELEMENTS = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16", "float64": "double"}


def _verdict(form: str, kind: str) -> str:
    """Whether a norm of this type in this form runs."""
    from rmsnorm_onnx import passes

    model, report = passes.fuse(_norm(_ELEMENTS[kind]), form=form, allow_rounding_change=True)
    (site,) = report.sites
    if form != "primitive" and site.action != "rewritten":
        return site.why
    gaps = missing_kernels(model)
    if gaps:
        return "; ".join(f"no kernel for {gap.domain + '::' if gap.domain else ''}{gap.op}" for gap in gaps)
    return "runs, with a rounding change" if site.rounding_changes else "runs"


def _norm(element: str) -> ir.Model:
    """A norm as Llama's source has it, at the first opset that has RMSNormalization."""
    wide, narrow = ir.DataType.DOUBLE if element == "double" else ir.DataType.FLOAT, ir.DataType[element.upper()]
    model: ir.Model = ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["" : 23]>
        norm ({element}[n, 64] x, {element}[64] gain) => ({element}[n, 64] y)
            <{"double" if element == "double" else "float"} epsilon = {{1e-6}}, int64[1] axes = {{-1}}>
        {{
            wide = Cast<to = {wide.value}>(x)
            square = Mul(wide, wide)
            mean = ReduceMean(square, axes)
            sum = Add(mean, epsilon)
            root = Sqrt(sum)
            quotient = Div(wide, root)
            narrow = Cast<to = {narrow.value}>(quotient)
            y = Mul(narrow, gain)
        }}
        """
    )
    return model


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis: versions, the pip command of what is missing, and what runs in which type."""
    from rich.table import Table
    from rich.text import Text

    console.print(f"Python {diagnosis.python}", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("package", "version", "needed for", ""):
        table.add_column(column)
    for package in diagnosis.packages:
        version = package.version or Text("missing", style="yellow")
        table.add_row(package.name, version, package.purpose, "" if package.version else package.install)
    console.print(table)
    library = diagnosis.plugin or "; ".join(diagnosis.plugin_lacks or ("not built: rmsnorm-onnx plugin build",))
    console.print(f"TensorRT plugin: {library}", markup=False, highlight=False)
    if not diagnosis.forms:
        return
    table = Table(
        box=None, header_style="bold", pad_edge=False, title="in onnxruntime's CPU provider", title_justify="left"
    )
    for column in ("form", *_ELEMENTS):
        table.add_column(column, overflow="fold")
    for form, kinds in diagnosis.forms.items():
        table.add_row(form, *(Text(verdict, style="green" if verdict == "runs" else "") for verdict in kinds.values()))
    console.print()
    console.print(table)
