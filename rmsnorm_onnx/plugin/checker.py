"""`check`: every plugin node of a model, held to what TensorRT's parser and the plugin will make of it, offline.

onnx's checker passes nearly every fault of such a node, since it knows nothing of a custom operator's attributes; and
TensorRT tells of the few that it notices only that the plugin was not found.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from rmsnorm_onnx import files, integrity, modelio
from rmsnorm_onnx.errors import ModelError, UsageError
from rmsnorm_onnx.forms.plugin import ONNXRUNTIME_DOMAIN
from rmsnorm_onnx.plugin.bodies import check_body, check_name
from rmsnorm_onnx.plugin.faults import CheckedNode, CheckReport, Fault
from rmsnorm_onnx.plugin.fields import check_fields, check_identity, unknown_names
from rmsnorm_onnx.plugin.foreign import Described, check_foreign
from rmsnorm_onnx.plugin.inputs import check_inputs, unknowns
from rmsnorm_onnx.plugin.nodes import CONTRIB, IDENTITY, TELLING, Nodes, PluginNode
from rmsnorm_onnx.site import node_name


def check(
    model: Any,
    *,
    op: str | None = None,
    domain: str | None = None,
    namespace: str | None = None,
    version: str | None = None,
) -> CheckReport:
    """Check every plugin node of a model, in branches, loops and functions too; TensorRT is not needed.

    Of this package's plugin everything is checked: name, version, namespace and domain with its import; presence, type
    and range of each field; number, types and shapes of the inputs; the function that the node runs as without the
    plugin, and functions that hide it. Of other plugins only what can be known.

    Args:
        model: A path, an onnx.ModelProto or an onnx_ir.Model; it is not changed, and weights are not read.
        op: Also check nodes of this operator, of another plugin for RMSNorm.
        domain: The domain of that plugin's nodes.
        namespace: The namespace that it is registered with.
        version: The version that it is registered with.

    Returns:
        All nodes and all faults; `ok` says whether there are none.

    Raises:
        ModelError: the model is unreadable, or invalid in another way than its plugin nodes are.
        UsageError: domain, namespace or version without op.
    """
    if op is None and not (domain is namespace is version is None):
        raise UsageError("domain, namespace and version describe another plugin; name its operator too (--op)")
    described = None if op is None else Described(op, domain, namespace, version)
    read, names, invalid = _read(model)
    report = _check(Nodes(read), described, names)
    if invalid is not None and report.ok:
        raise invalid
    return report


def _read(model: Any) -> tuple[ir.Model, list[ir.OperatorIdentifier], ModelError | None]:
    """A model of our own, its functions' names, and what is invalid: a damaged node may be, and is to be named as one.

    The names are the file's, since onnx_ir keeps the last of two functions of one name.
    """
    if isinstance(model, str | os.PathLike):
        files.check_input(model)
        name, file = files.shown(model), os.path.abspath(model)
        proto = modelio.parse(model)
    elif isinstance(model, onnx.ModelProto):
        name, file, proto = "the model", None, onnx.ModelProto()
        proto.CopyFrom(model)
    else:
        read = modelio.to_ir(model)[0]
        return read, list(read.functions), None
    invalid = None
    try:
        integrity.check_proto(proto, name, None if file is None else Path(file))
    except ModelError as error:
        invalid = error
    try:
        with warnings.catch_warnings(), modelio.quiet():
            warnings.simplefilter("ignore")
            return ir.from_proto(proto), [(f.domain, f.name, f.overload) for f in proto.functions], invalid
    except Exception as error:  # whatever it is, the file's contents are its cause
        raise invalid or ModelError(f"{name} is not a valid ONNX model ({error}); export it again") from error


def _check(nodes: Nodes, described: Described | None, names: Sequence[ir.OperatorIdentifier]) -> CheckReport:
    checked: dict[CheckedNode, None] = {}
    faults: dict[Fault, None] = {}  # a node of a function is visited once a call
    notes: dict[str, None] = {}
    contrib = []
    op = "" if described is None else str(described)
    for node, calls in nodes:
        ours = nodes.is_ours(node) and not (described is not None and described.means(node))
        if not ours and node.op_type in CONTRIB:
            contrib.append(nodes.describe(node, calls))
        if not ours and not _is_foreign(node, described):
            continue
        seen = nodes.describe(node, calls)
        checked[CheckedNode(node_name(node), seen.op, seen.scope, ours)] = None
        found = _check_ours(seen, nodes) if ours else _check_foreign(seen, described)
        faults |= dict.fromkeys([*found, *check_name(seen, names)])
        notes |= dict.fromkeys(_remarks(seen, nodes) if ours else ())
        if ours and described is not None and described.op == node.op_type and not described.is_ours():
            notes[f"{node_name(node)}: it is a node of this package's plugin, and was checked as one, not as {op}"] = (
                None
            )
        nodes.note_output(seen)
    if not any(node.op.startswith(f"{ONNXRUNTIME_DOMAIN}::") for node in checked):  # there onnxruntime runs the rest
        faults |= dict.fromkeys(map(_contrib_fault, contrib))
    if described is not None and not faults and not any(_operator(node) == described.op for node in checked):
        what = f"no node of the model has the operator {described.op}"
        faults[Fault("the model", "op_type", what, "name the operator as the file has it", op=described.op)] = None
    return CheckReport(tuple(checked), tuple(faults), tuple(notes))


def _check_ours(node: PluginNode, nodes: Nodes) -> Iterator[Fault]:
    if not any(name in node.node.attributes for name in (*IDENTITY, *TELLING)):
        what = "the node has no field of the plugin, and the file has no function of its name"
        mend = "let `rmsnorm-onnx fuse` write it anew from the model that it was made of"
        yield node.fault("plugin_namespace", what, mend)
        return
    yield from check_identity(node)
    yield from check_fields(node)
    wrong = list(check_inputs(node))
    yield from wrong
    if not wrong:  # else the body is no norm of these inputs for that reason
        yield from check_body(node, nodes.model)


def _check_foreign(node: PluginNode, described: Described | None) -> Iterator[Fault]:
    meant = described if described is not None and node.node.op_type == described.op else None
    yield from check_foreign(node, meant)


def _operator(node: CheckedNode) -> str:
    return node.op.rpartition("::")[2]


def _is_foreign(node: ir.Node, described: Described | None) -> bool:
    if described is not None and node.op_type == described.op:
        return True
    return any(name in node.attributes for name in IDENTITY)


def _remarks(node: PluginNode, nodes: Nodes) -> Iterator[str]:
    for name in unknown_names(node, nodes.model.functions.get(node.node.op_identifier())):
        yield f"{node_name(node.node)}: {name!r} is no field of the plugin, and TensorRT passes it over"
    first, *others = node.node.inputs or (None,)
    if first is not None and first in others:
        yield f"{node_name(node.node)}: one value is both x and its gain or bias; is that meant?"
    for name in unknowns(node):
        what = f"the type or the rank of {name} is unknown, so that it was not checked; TensorRT needs both"
        yield f"{node_name(node.node)}: {what}"
    if node.calls and node.node.op_identifier() in nodes.model.functions:  # measured on TensorRT-RTX 1.7
        yield (
            f"{node_name(node.node)}: inside a function TensorRT runs the function of the node's name, not the plugin; "
            f"remove the function {node.op} if the plugin is to run"
        )


def _contrib_fault(node: PluginNode) -> Fault:
    what = f"{node.node.op_type} is onnxruntime's own operator, and TensorRT has none of that name"
    return node.fault("op_type", what, "rewrite it: rmsnorm-onnx fuse --for tensorrt-plugin, or --for tensorrt")
