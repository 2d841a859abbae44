"""Which nodes of a model are meant for a TensorRT plugin, and what is known around each.

TensorRT's ONNX parser takes a node for a plugin when its attribute `plugin_namespace` and its operator name one that is
registered. A node whose fields are damaged says less than that, so a node of this package's plugin is known by any
field that no function's node has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import onnx_ir as ir

from rmsnorm_onnx import dtypes, functions
from rmsnorm_onnx.forms.plugin import FIELDS, NAMESPACE, ONNXRUNTIME_DOMAIN, OPERATOR
from rmsnorm_onnx.inference import Dims
from rmsnorm_onnx.plugin.faults import Fault
from rmsnorm_onnx.shapes import Shapes
from rmsnorm_onnx.site import node_name
from rmsnorm_onnx.view import Ref, View

IDENTITY = ("plugin_version", "plugin_namespace")
DOMAINS = (functions.DOMAIN, ONNXRUNTIME_DOMAIN)
RESULTS = ("float32", "float16", "bfloat16")
"""The float types that the plugin takes and gives."""

Known: TypeAlias = tuple[ir.DataType, Dims | None]
"""The element type of a value, and its shape as far as it is known."""

CONTRIB = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")

# Axes and epsilon are common words; the rest of the fields is ours alone.
TELLING = frozenset(FIELDS) - {"axes", "epsilon"}
_ENOUGH = 3  # of them, and a node is ours under whatever name and domain


@dataclasses.dataclass(frozen=True, eq=False)
class PluginNode:
    """A node, and what is known of its inputs at one place where it runs.

    Attributes:
        node: The node.
        calls: The calls of functions that lead to it, outermost first.
        scope: Where it stands, as reports say it.
        attributes: Its attributes; one that refers to the function around it is the call's, or is absent.
        types: The element type of each input and of each output, as far as it is known.
        shapes: Their shapes.
        imports: The version of each domain where the node stands.
        absent: The inputs that a call of the function around the node leaves out.
    """

    node: ir.Node
    calls: tuple[ir.Node, ...]
    scope: str
    attributes: Mapping[str, ir.Attr]
    types: Mapping[ir.Value, ir.DataType | None]
    shapes: Mapping[ir.Value, Dims | None]
    imports: Mapping[str, int]
    absent: frozenset[ir.Value]

    @property
    def op(self) -> str:
        """The operator with its domain."""
        return f"{self.node.domain}::{self.node.op_type}" if self.node.domain else self.node.op_type

    def fault(self, field: str, what: str, mend: str) -> Fault:
        """A fault of this node."""
        return Fault(node_name(self.node), field, what, mend, self.scope, self.op)

    def text(self, name: str) -> str | None:
        """A string attribute; None where it is absent or of another type."""
        found = self.attributes.get(name)
        return str(found.value) if found is not None and found.type == ir.AttributeType.STRING else None

    def number(self, name: str) -> Any:
        """An attribute of the type that `FIELDS` names; None where it is absent or of another type."""
        found = self.attributes.get(name)
        return found.value if found is not None and found.type == FIELDS[name] else None


class Nodes:
    """The nodes of a model, with what is known around them.

    Args:
        model: The model; types that it does not declare are noted on its values.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._view = View(model)
        self._results: dict[Ref, Known] = {}
        self._shapes = _Shapes(self._view, self._results)

    def __iter__(self) -> Iterator[tuple[ir.Node, tuple[ir.Node, ...]]]:
        """Every node that can run, with the calls that lead to it."""
        yield from self._view.nodes()

    def is_ours(self, node: ir.Node) -> bool:
        """Whether a node is, or was meant to be, one of this package's plugin."""
        telling = sum(name in TELLING for name in node.attributes)
        namespace = node.attributes.get("plugin_namespace")
        said = None if namespace is None or namespace.is_ref() else namespace.value
        if said == NAMESPACE or telling >= _ENOUGH:
            return True
        if node.domain not in DOMAINS or not node.op_type.startswith(OPERATOR):
            return False
        if telling or (node.domain == functions.DOMAIN and any(name in node.attributes for name in IDENTITY)):
            return True
        return node.domain == functions.DOMAIN and self._view.function_of(node) is None

    def describe(self, node: ir.Node, calls: tuple[ir.Node, ...]) -> PluginNode:
        """What is known of a node."""
        found = {name: self._view.attribute(node, calls, name) for name in node.attributes}
        attributes = {
            name: ir.Attr(name, attr.type, attr.value)  # the call may have it under another name
            for name, attr in found.items()
            if attr is not None and not attr.is_ref()
        }
        types: dict[ir.Value, ir.DataType | None] = {}
        shapes: dict[ir.Value, Dims | None] = {}
        absent = set()
        for index, value in enumerate(node.inputs):
            ref = self._view.input(node, calls, index)
            if value is not None and ref is None:
                absent.add(value)
            elif value is not None and ref is not None:
                held = ref.value.const_value  # what a file declares of a stored tensor may be wrong
                types[value] = self._shapes.dtype(ref)
                shapes[value] = self._shapes.shape(ref) if held is None else tuple(held.shape)  # type: ignore[arg-type]
        for value in node.outputs:
            types[value] = value.dtype
            shapes[value] = (
                None if value.shape is None else tuple(d if isinstance(d, int) else None for d in value.shape)
            )
        container = self._view.container(node)
        imports = dict(container.opset_imports)
        return PluginNode(node, calls, self._view.scope(node), attributes, types, shapes, imports, frozenset(absent))

    def note_output(self, node: PluginNode) -> None:
        """Let what is known of x hold for a result that the file declares nothing of: the next norm may read it.

        Inside a function it holds for this call alone.
        """
        x = node.node.inputs[0] if node.node.inputs else None
        if x is None or not node.node.outputs:
            return
        result = node.node.outputs[0]
        dtype, shape = _result_type(node, node.types.get(x)), node.shapes.get(x)
        if result.dtype is not None or dtype is None:
            return
        if node.calls:
            self._results[Ref(result, node.calls)] = (dtype, shape)
        else:
            result.dtype = dtype
            result.shape = result.shape or (None if shape is None else ir.Shape(shape))
        self._shapes = _Shapes(self._view, self._results)  # what was inferred before does not know it


class _Shapes(Shapes):
    """Shapes and types, with what is known of the results of plugin nodes inside functions."""

    def __init__(self, view: View, results: Mapping[Ref, Known]) -> None:
        super().__init__(view)
        self._results = results

    def dtype(self, ref: Ref) -> ir.DataType | None:
        return self._results[ref][0] if ref in self._results else super().dtype(ref)

    def shape(self, ref: Ref) -> Dims | None:
        return self._results[ref][1] if ref in self._results else super().shape(ref)


def _result_type(node: PluginNode, x_type: ir.DataType | None) -> ir.DataType | None:
    """The type of a node's result: x's, or the one that its field names; of another plugin's node x's."""
    said = node.number("result_type")
    if said is None or said == "x":
        return x_type
    return dtypes.ir_dtype(said) if said in RESULTS else None
