"""The route through the TorchScript exporter: opsets 13 to 20, and models that torch.export cannot take.

The module is run once on the example and every operator is written down. What Python decides on the way (a branch, an
`int(x.shape[1])`) is in the file for good, so the trace is repeated at other sizes: where it differs, sizes are baked
in. Weights stay outside of torch's protobuf, as inputs, and are attached afterwards without a copy: nothing here has a
limit of 2 GiB. torch's constant folding stays off, so that no norm is touched before it is found.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from rmsnorm_onnx import modelio
from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import sizes
from rmsnorm_onnx.exporters.decisions import Watch
from rmsnorm_onnx.exporters.job import Job, Routed, check_written_names, own_weight
from rmsnorm_onnx.exporters.steps import forward_replaced, step
from rmsnorm_onnx.site import SCOPES_KEY

if TYPE_CHECKING:
    import torch

    from rmsnorm_onnx.exporters.example import Leaf

ROUTE = "TorchScript, torch.onnx"
"""This route in words."""

NEWEST_OPSET = 20
"""The newest opset that torch's TorchScript exporter writes; it has been frozen."""


def export_traced(job: Job, opset: int) -> Routed:
    """Trace a module on its example, and compare the trace with others at other sizes.

    Raises:
        ExportError: a step failed, the file gives other results than PyTorch, or sizes that the caller asked to be
            dynamic are baked in.
        UsageError: a name cannot be used.
    """
    if job.module is None or job.example is None:
        raise ExportError("TorchScript tracing failed: it takes a module, not a program that is traced already")
    watch = Watch(len(job.example.leaves))
    tracer = _Tracer(job, opset, watch)
    open_sizes = {n for leaf in job.example.leaves for n in sizes.dynamic_sizes(leaf)}
    graph, states = tracer.trace(job.example.tensors, open_sizes)
    read = watch.reads

    def again(tensors: Sequence[torch.Tensor]) -> onnx.ModelProto:
        return tracer.trace(tensors, open_sizes)[0]

    survey = sizes.survey(job, open_sizes, graph, again)
    if read.doubts:
        sizes.check_values(job, graph, again)
    asked = job.example.shapes is not None
    if survey.baked and asked:
        named = " and ".join(f"dimension {a} of input {n} ({s})" for n, a, s in tracer.dimensions(survey.baked))
        raise ExportError(
            f"TorchScript tracing failed: {named} would be baked in, and dynamic_shapes asks otherwise; leave it fixed"
        )
    fixed = survey.baked | (set() if asked else set(survey.stuck))
    if fixed:
        graph, states = tracer.trace(job.example.tensors, open_sizes - fixed)
    with step("reading TorchScript's file"):
        known = {name for name, _ in job.module.named_modules()}
        model = _assembled(graph, states, len(job.example.leaves), known)
        _name_outputs(model, len(job.output_names))
    for name in job.changed:
        own_weight(model, name)
    check_written_names(model, job.names)
    written = model.opset_imports.get("")
    if written != opset:
        raise ExportError(f"TorchScript's exporter wrote opset {written}, not {opset}; ask for opset {written}")
    checked = sizes.agreement(job, model, survey)
    places = ", ".join(read.sizes)
    decided = [f"Python read a size or a weight at {places}: what it decided there is in the file"] if places else []
    told = [
        f"dimension {axis} of input {name} {'was tried at no other size than' if asked else 'is fixed at'} {size}: "
        + (f"PyTorch takes no other ({survey.stuck[size]})" if size in survey.stuck else "the tracer bakes it in")
        for name, axis, size in tracer.dimensions(survey.baked | survey.stuck.keys())
    ]
    buffers = job.change_notes()
    baked = len(list(tracer.dimensions(survey.baked)))
    return Routed(
        model, (f"traced on the example: {checked}", *decided, *read.doubts, *survey.notes, *told, *buffers), baked
    )


class _Tracer:
    """Traces one module at one opset, again and again."""

    def __init__(self, job: Job, opset: int, watch: Watch) -> None:
        assert job.module is not None and job.example is not None
        self._job, self._opset, self._watch = job, opset, watch
        self._module, self._example = job.module, job.example
        self.names = _input_names(job, set(self._module.state_dict(keep_vars=True)))

    def trace(self, tensors: Sequence[torch.Tensor], dynamic: set[int]) -> tuple[onnx.ModelProto, dict[str, Any]]:
        """The file for some inputs, with weights as inputs, and the weights by name.

        Args:
            tensors: The inputs.
            dynamic: The sizes of the example whose dimensions are dynamic.

        Raises:
            ExportError: torch cannot, or Python reads values of the inputs on the way.
        """
        import torch

        axes = {
            name: {
                axis: symbol or f"{name}_dim_{axis}"
                for axis, symbol in leaf.dynamic.items()
                if leaf.tensor.shape[axis] in dynamic
            }
            for name, leaf in zip(self.names, self._example.leaves, strict=True)
        }
        file, states = io.BytesIO(), dict(self._module.state_dict(keep_vars=True))
        with (
            step("TorchScript tracing"),
            self._state_kept(),
            forward_replaced(self._module, self._flat()),
            _symbolics(self._opset),
            _no_log(),
        ):
            torch.onnx.export(
                self._module,
                tuple(tensors),
                file,
                dynamo=False,
                opset_version=self._opset,
                input_names=self.names,
                output_names=list(self._job.output_names) or None,
                dynamic_axes={name: dims for name, dims in axes.items() if dims},
                export_params=False,
                do_constant_folding=False,
            )
        if self._watch.reads.values:
            where = ", ".join(self._watch.reads.values)
            raise ExportError(
                f"TorchScript tracing failed: Python reads values of the inputs at {where}, and what it makes of the "
                "example's would be in the file for good"
            )
        return onnx.load_from_string(file.getvalue()), states

    @contextlib.contextmanager
    def _state_kept(self) -> Iterator[None]:
        """Each trace begins with the buffers as they were, and the file holds them so."""
        try:
            yield
        finally:
            self._job.restore()

    def dimensions(self, among: Set[int]) -> Iterator[tuple[str, int, int]]:
        """The dynamic dimensions of some sizes: the input's name, the axis, the size."""
        for name, leaf in zip(self.names, self._example.leaves, strict=True):
            for axis in leaf.dynamic:
                if leaf.tensor.shape[axis] in among:
                    yield name, axis, int(leaf.tensor.shape[axis])

    def _flat(self) -> Any:
        """A forward of tensors only, which gives tensors only: no structure survives tracing."""
        import torch
        from torch.utils import _pytree as pytree

        forward, wanted, watch = self._module.forward, self._job.output_names, self._watch

        def flat(*tensors: torch.Tensor) -> Any:
            _name_scopes(self._module)
            args, kwargs = self._example.around(tensors)
            with watch.running(tensors):
                found = pytree.tree_leaves(forward(*args, **kwargs))
            outputs = tuple(value for value in found if isinstance(value, torch.Tensor))
            if len(outputs) < len(wanted):
                name = wanted[len(outputs)]
                raise UsageError(f"there is no input or output left for the name {name!r}; give fewer names")
            return outputs[0] if len(outputs) == 1 else outputs

        flat.__signature__ = inspect.signature(flat)  # type: ignore[attr-defined]
        return flat


def _input_names(job: Job, weights: set[str]) -> list[str]:
    """The caller's names for the inputs, then those of forward's parameters."""
    assert job.example is not None
    leaves: Sequence[Leaf] = job.example.leaves
    if len(job.input_names) > len(leaves):
        name = job.input_names[len(leaves)]
        raise UsageError(f"there is no input or output left for the name {name!r}; give fewer names")
    borne = next((name for name in job.names if name in weights), None)
    if borne is not None:
        raise UsageError(f"the name {borne!r} is borne by a weight; choose another")
    names, taken = list(job.input_names), {*weights, *job.names}
    for leaf in leaves[len(names) :]:
        name, number = leaf.name, 1
        while name in taken:
            number += 1
            name = f"{leaf.name}_{number}"
        taken.add(name)
        names.append(name)
    return names


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    """Keep torch from printing the graph of a failure past Python's streams; it turns its own log on for each call."""
    import torch

    enabled, log = torch._C._jit_is_onnx_log_enabled(), torch._C._jit_onnx_log
    torch._C._jit_onnx_log = lambda *parts: None
    try:
        yield
    finally:
        torch._C._jit_onnx_log = log
        torch._C._jit_set_onnx_log_enabled(enabled)


@contextlib.contextmanager
def _symbolics(opset: int) -> Iterator[None]:
    """Register our symbolic functions with the TorchScript exporter, and put back what was there."""
    from torch.onnx import register_custom_op_symbolic, unregister_custom_op_symbolic
    from torch.onnx._internal.torchscript_exporter.registration import registry

    from rmsnorm_onnx.exporters.translations import symbolics

    ours = symbolics(opset)
    groups = {name: registry.get_function_group(name) for name in ours}
    held = {name: None if group is None else group.get(opset) for name, group in groups.items()}
    for name, function in ours.items():
        register_custom_op_symbolic(name, function, opset)
    try:
        yield
    finally:
        for name in ours:
            unregister_custom_op_symbolic(name, opset)
            group = registry.get_function_group(name)
            if held[name] is not None and (group is None or group.get(opset) is not held[name]):
                register_custom_op_symbolic(name, held[name], opset)
            elif groups[name] is None:
                registry._registry.pop(name, None)  # of an empty group torch asks its oldest opset, and falls over


def _name_scopes(module: torch.nn.Module) -> None:
    """Have the running trace name each module's scope in full: torch's own "pre" for "layers.0.pre" names several."""
    import torch

    scopes = getattr(torch.jit._trace, "_trace_module_map", None)
    for name, part in module.named_modules() if scopes is not None else ():
        if name:
            scopes[part] = torch._C._jit_onnx_create_full_scope_name(torch.typename(type(part)), name)


def _assembled(proto: onnx.ModelProto, states: Mapping[str, Any], inputs: int, known: Set[str]) -> ir.Model:
    """The model, its weights attached without a copy, each node with the modules that it was traced in."""
    model, _ = modelio.to_ir(proto)
    graph = model.graph
    for value in list(graph.inputs[inputs:]):
        graph.inputs.remove(value)
        assert value.name is not None
        value.const_value = ir.tensor(states[value.name].detach(), name=value.name)
        if value.uses() or value.is_graph_output():
            graph.register_initializer(value)
    taken: set[str] = set()
    for node in graph.all_nodes():
        if node.name and node.name.startswith("/"):
            *modules, operation = node.name[1:].split("/")
            # A module that is called again bears a number in its scope.
            modules = [name if name in known else re.sub(r"_\d+$", "", name) for name in modules]
            node.metadata_props[SCOPES_KEY] = repr(["", *modules, operation])
        node.name = _shortened(node.name, taken)
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = _shortened(value.name, taken)
    return model


def _shortened(name: str | None, taken: set[str]) -> str | None:
    """The innermost scope and the operation: each scope's name is full already."""
    if not name or not name.startswith("/"):
        return name
    wish, number = "/" + "/".join(name.split("/")[-2:]).lstrip("/"), 1
    name = wish
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    taken.add(name)
    return name


def _name_outputs(model: ir.Model, named: int) -> None:
    """Give the outputs that the caller has no names for better ones than TorchScript's numbers."""
    unnamed = model.graph.outputs[named:]
    taken = {value.name for value in (*model.graph.inputs, *model.graph.outputs)} | set(model.graph.initializers)
    taken |= {value.name for node in model.graph.all_nodes() for value in node.outputs}
    for i, value in enumerate(unnamed):
        wish = "output" if len(unnamed) == 1 else f"output_{i}"
        if value.producer() is not None and wish not in taken:
            value.name = wish
