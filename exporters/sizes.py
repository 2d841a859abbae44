"""Whether a trace holds at other sizes than its example's: traces are compared, and the file is run beside PyTorch."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from rmsnorm_onnx import dtypes, modelio
from rmsnorm_onnx.errors import ExportError, RMSNormError
from rmsnorm_onnx.exporters.job import Job
from rmsnorm_onnx.exporters.steps import words
from rmsnorm_onnx.runtimes import missing_kernels

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.exporters.example import Leaf


_DEPENDS = (
    "TorchScript tracing failed: the trace depends on the values of the inputs (a branch, or numbers that left torch)"
)


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the traces at other sizes showed.

    Attributes:
        baked: The sizes of the example that the trace holds as numbers.
        stuck: The sizes that PyTorch takes no other value for, and its words.
        tried: Inputs that PyTorch takes, of other sizes where that is possible; None without any.
        notes: What could not be tried, each one sentence.
    """

    baked: set[int]
    stuck: Mapping[int, str]
    tried: tuple[torch.Tensor, ...] | None
    notes: tuple[str, ...] = ()


def dynamic_sizes(leaf: Leaf) -> list[int]:
    """The example's sizes along the dimensions that are to be dynamic."""
    return [int(leaf.tensor.shape[axis]) for axis in leaf.dynamic]


def survey(
    job: Job,
    open_sizes: set[int],
    graph: onnx.ModelProto,
    trace: Callable[[Sequence[torch.Tensor]], onnx.ModelProto],
) -> Survey:
    """Trace at other sizes and other values, and compare operator by operator, constants included.

    Dimensions of one size in the example keep one size, as a batch does that several inputs share.

    Args:
        job: What is exported.
        open_sizes: The sizes of dynamic dimensions.
        graph: The trace of the example.
        trace: Traces other inputs.

    Raises:
        ExportError: the trace depends on the values of the inputs.
    """
    together, _ = _accepted(job, open_sizes, values=True)
    if together is not None and _same(trace(together), graph):
        return Survey(set(), {}, together if open_sizes else None)
    changed, why = _accepted(job, set(), values=True)
    if changed is not None and not _same(trace(changed), graph):
        raise ExportError(_DEPENDS)
    notes = [] if changed is not None else [f"traced with no other values: PyTorch says {why}"]
    baked: set[int] = set()
    stuck: dict[int, str] = {}
    for size in sorted(open_sizes):
        tensors, why = _accepted(job, {size})
        if tensors is None:
            stuck[size] = why
        elif not _same(trace(tensors), graph):
            baked.add(size)
    free = open_sizes - baked - stuck.keys()
    together = _accepted(job, free)[0] if free else None
    if together is not None and not _same(trace(together), graph):
        return Survey(free | baked, stuck, None, tuple(notes))  # sizes that matter only together
    return Survey(baked, stuck, together, tuple(notes))


def check_values(job: Job, graph: onnx.ModelProto, trace: Callable[[Sequence[torch.Tensor]], onnx.ModelProto]) -> None:
    """Trace at many other values of the example's sizes, where Python may have read some.

    Raises:
        ExportError: the trace depends on the values of the inputs.
    """
    for tensors in other_inputs(job):
        if not _same(trace(tensors), graph):
            raise ExportError(_DEPENDS)


def other_inputs(job: Job) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs of the example's sizes that PyTorch takes: small, large, zero, in the other order, of the other sign."""
    import torch

    assert job.example is not None
    for change in (
        lambda x: x * 1e-3 if x.is_floating_point() else x,
        lambda x: x * 30 if x.is_floating_point() else x,
        torch.zeros_like,
        lambda x: x.flip(tuple(range(x.dim()))),
        lambda x: torch.ones_like(x) if x.is_floating_point() else _other_values(x),
        _other_values,
    ):
        tensors = tuple(change(tensor) for tensor in job.example.tensors)
        try:
            outputs(job, tensors)
        except Exception:  # the user's code may raise anything; inputs that it refuses decide nothing
            continue
        yield tensors


def agreement(job: Job, model: ir.Model, found: Survey) -> str:
    """Run the file in onnxruntime, on the example and at another size, and compare with PyTorch.

    The two compute the same function when half of the digits of the narrowest float type in the file agree, measured
    at each output's largest element: this tells a wrong graph from roundings, and says nothing of a norm, which
    `verify` measures.

    Returns:
        What was checked, in words.

    Raises:
        ExportError: they do not agree, or onnxruntime cannot run the file though it has a kernel for every operator.
    """
    assert job.example is not None
    tried = found.tried is not None
    same = "its trace at other sizes of what is dynamic is the same" if tried else "no other size was tried"
    precision = _precision(model)
    runs = [job.example.tensors] + ([found.tried] if found.tried is not None else [])
    try:
        import onnxruntime
    except ImportError:
        return f"{same}; not run, since onnxruntime is not installed"
    if any(value.dtype == ir.DataType.BFLOAT16 for value in (*model.graph.inputs, *model.graph.outputs)):
        return f"{same}; not run, since onnxruntime hands out no bfloat16"
    gaps = missing_kernels(model)
    if gaps:
        return f"{same}; not run, since onnxruntime has no kernel for {gaps[0].op}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traced.onnx"
        modelio.save(model, path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = None
        for tensors in runs:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            try:
                if session is None:
                    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
                feeds = zip([i.name for i in session.get_inputs()], tensors, strict=True)
                results = session.run(None, {name: tensor.detach().cpu().numpy() for name, tensor in feeds})
            except RMSNormError:
                raise
            except Exception as error:  # onnxruntime's exceptions have no common base
                raise ExportError(
                    f"running TorchScript's file on inputs of shape {shapes} failed: {words(error)}"
                ) from error
            for value, result, expected in zip(model.graph.outputs, results, outputs(job, tensors), strict=True):
                wrong = disagreement(result, expected, precision)
                if wrong:
                    where = f"TorchScript's file is wrong on inputs of shape {shapes}"
                    raise ExportError(f"{where}: output {value.name} {wrong}")
    return f"{same}, and onnxruntime agrees with PyTorch" + (" there" if tried else "")


def disagreement(result: np.ndarray, tensor: torch.Tensor, precision: float) -> str:
    """How a result differs from PyTorch's by more than half of the digits; nothing where it does not."""
    if tuple(result.shape) != tuple(tensor.shape):
        return f"has shape {list(result.shape)}, PyTorch's {list(tensor.shape)}"
    if not tensor.is_floating_point() or not result.size:
        return ""  # an index may flip with the last digit of what it was chosen by; the traces were compared exactly
    expected = tensor.detach().double().cpu().numpy()
    finite = np.isfinite(expected)
    error = np.abs(np.where(finite, result.astype(np.float64) - expected, 0.0))
    largest = float(np.max(np.abs(expected[finite]), initial=0.0))
    if float(np.max(error)) <= float(np.sqrt(precision)) * largest:
        return ""
    return f"is off by {float(np.max(error)):.3g}, where PyTorch's largest is {largest:.3g}"


def _precision(model: ir.Model) -> float:
    """The coarsest machine epsilon among the float types that a file mentions."""
    kinds = {value.dtype for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph.all_nodes():
        if node.op_type == "Cast":
            kinds.add(ir.DataType(node.attributes["to"].as_int()))
        elif node.op_type == "Constant" and "value" in node.attributes:
            kinds.add(node.attributes["value"].as_tensor().dtype)
    names = [name for kind in kinds if (name := dtypes.float_name(kind)) is not None]
    return max((float(dtypes.finfo(name).eps) for name in names), default=float(dtypes.finfo("float32").eps))


def _accepted(job: Job, changed: set[int], *, values: bool = False) -> tuple[tuple[torch.Tensor, ...] | None, str]:
    """Inputs with some sizes, and values, changed that PyTorch takes, larger sizes first; else its words."""
    assert job.example is not None
    why = ""
    for other in (lambda n: 2 * n + 1, lambda n: n + 1, lambda n: n - 1):
        new = {size: other(size) for size in changed}
        if min(new.values(), default=1) < 1:
            continue
        tensors = tuple(_resized(leaf, new) for leaf in job.example.leaves)
        if values:
            tensors = tuple(_other_values(tensor) for tensor in tensors)
        try:
            outputs(job, tensors)
        except Exception as error:  # whatever the module raises
            why = why or words(error)
        else:
            return tensors, ""
    return None, why


def _resized(leaf: Leaf, new: dict[int, int]) -> torch.Tensor:
    """The example at another size: its own values again, so that ids stay ids."""
    import torch

    tensor = leaf.tensor
    for axis in leaf.dynamic:
        old = int(tensor.shape[axis])
        if old in new:
            index = torch.arange(new[old], device=tensor.device) % old
            tensor = tensor.index_select(axis, index)
    return tensor


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of another size, sign and order, ids in the other order, and masks with another first element."""
    import torch

    if tensor.is_floating_point():
        return -2 * tensor.flip(-1) if tensor.dim() else -2 * tensor
    if tensor.dim() == 0 or not tensor.numel():
        return tensor
    if tensor.dtype != torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
        return tensor.flip(-1)
    other = tensor.clone()
    other[..., 0] = other[..., 0] == 0  # a mask of ones takes branches that no other mask takes
    return other


def outputs(job: Job, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What PyTorch gives, its tensors alone."""
    import torch
    from torch.utils import _pytree as pytree

    assert job.module is not None and job.example is not None
    args, kwargs = job.example.around(tensors)
    try:
        found = pytree.tree_leaves(job.module(*args, **kwargs))
        # A buffer may be an output, and has its first value again below.
        return [value.clone() for value in found if isinstance(value, torch.Tensor)]
    finally:
        job.restore()


def _same(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    """Whether two traces have the same operators, with the same constants and uses, in the same order."""
    return list(_lines(one.graph, {})) == list(_lines(other.graph, {}))


def _lines(graph: onnx.GraphProto, names: dict[str, str]) -> Iterator[bytes]:
    """The operators of a graph, its values numbered: the tracer names some after Python's variables, or not."""
    for value in graph.input:
        names.setdefault(value.name, f"%{len(names)}")
    for node in graph.node:
        plain = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
        plain.input.extend(names.get(name, name) for name in node.input)
        for name in node.output:
            plain.output.append(names.setdefault(name, f"%{len(names)}"))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _lines(attribute.g, names)
            else:
                plain.attribute.append(attribute)
        yield plain.SerializeToString(deterministic=True)
    yield " ".join(names.get(value.name, value.name) for value in graph.output).encode()
