"""onnxruntime's kernel registry, and the walk that finds what in a model it has no kernel for.

The rules are onnxruntime's own: a kernel serves the version of an operator that the opset selects; a float16 node
without one is run in float32; an operator without one that ONNX defines as a function is run as that function;
model-local functions are inlined.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from rmsnorm_onnx.errors import MissingDependencyError
from rmsnorm_onnx.site import node_name

Types: TypeAlias = dict[ir.Value, str | None]
"""Element types by value, as onnxruntime spells them: "tensor(float16)"."""

OpKey: TypeAlias = tuple[str, str]
"""(domain, operator)."""

Gap: TypeAlias = tuple[tuple[str, str, str], str]
"""((operator with its version, domain, type), node name)."""

_OPEN_END = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """One version of an operator.

    Attributes:
        name: Its name.
        since: The opset that brought this version.
        inputs: (name, type parameter or type) of each formal input; the last may be variadic.
        outputs: The same of each output.
        types: The types that each type parameter may take.
    """

    name: str
    since: int
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    types: Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Registry:
    """onnxruntime's operators and CPU kernels, and the answers already given."""

    schemas: Mapping[OpKey, Sequence[Any]]
    kernels: Mapping[OpKey, Sequence[Any]]
    _operators: dict[tuple[OpKey, int], Operator | None] = dataclasses.field(default_factory=dict)
    _verdicts: dict[tuple[Any, ...], bool] = dataclasses.field(default_factory=dict)

    @staticmethod
    @functools.cache
    def load() -> Registry:
        """The registry of the installed onnxruntime.

        Raises:
            MissingDependencyError: onnxruntime is not installed.
        """
        try:
            from onnxruntime.capi import onnxruntime_pybind11_state as state
        except ImportError as error:
            raise MissingDependencyError("onnxruntime", "listing kernels", "onnxruntime>=1.23") from error
        schemas: dict[OpKey, list[Any]] = collections.defaultdict(list)
        for schema in state.get_all_operator_schema():
            schemas[_domain(schema.domain), schema.name].append(schema)
        kernels: dict[OpKey, list[Any]] = collections.defaultdict(list)
        for kernel in state.get_all_opkernel_def():
            if kernel.provider == "CPUExecutionProvider":
                kernels[_domain(kernel.domain), kernel.op_name].append(kernel)
        return Registry(schemas, kernels)

    def operator(self, key: OpKey, opset: int) -> Operator | None:
        """The operator's newest version that an opset includes, or None."""
        if (key, opset) not in self._operators:
            versions = [s for s in self.schemas.get(key, ()) if s.since_version <= opset]
            newest = max(versions, key=lambda s: s.since_version, default=None)
            self._operators[key, opset] = None if newest is None else _operator(newest)
        return self._operators[key, opset]

    def runs(self, key: OpKey, operator: Operator, inputs: Sequence[str | None], outputs: Sequence[str | None]) -> bool:
        """Whether some kernel takes these types."""
        question = (key, operator.since, tuple(inputs), tuple(outputs))
        if question not in self._verdicts:
            types = _formal_types(operator, inputs, outputs)
            # The operator itself may not be defined on these types.
            self._verdicts[question] = _fits(types, operator.types) and any(
                _serves(kernel, operator.since) and _fits(types, kernel.type_constraints)
                for kernel in self.kernels.get(key, ())
            )
        return self._verdicts[question]


def _operator(schema: Any) -> Operator:
    return Operator(
        name=schema.name,
        since=schema.since_version,
        inputs=tuple((p.name, p.typeStr) for p in schema.inputs),
        outputs=tuple((p.name, p.typeStr) for p in schema.outputs),
        types={c.type_param_str: c.allowed_type_strs for c in schema.type_constraints},
    )


def _serves(kernel: Any, since: int) -> bool:
    """Whether a kernel is for a version; one with an open end serves the one version that it was written for."""
    start, end = kernel.version_range
    return bool(since == start or (end < _OPEN_END and start <= since <= end))


def _fits(types: Mapping[str, set[str]], allowed: Mapping[str, Sequence[str]]) -> bool:
    return all(types.get(name, set()).issubset(kinds) for name, kinds in allowed.items())


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _formals(parameters: Sequence[tuple[str, str]], count: int) -> Iterator[tuple[str, str]]:
    """The formal parameter of each actual one; the last may be variadic and is repeated."""
    for i in range(count):
        if parameters:
            yield parameters[min(i, len(parameters) - 1)]


def _formal_types(
    operator: Operator, inputs: Sequence[str | None], outputs: Sequence[str | None]
) -> dict[str, set[str]]:
    """The actual types by what a kernel's constraint may name: a type parameter, or a parameter's own name."""
    types: dict[str, set[str]] = collections.defaultdict(set)
    for parameters, actual in ((operator.inputs, inputs), (operator.outputs, outputs)):
        for (name, parameter), kind in zip(_formals(parameters, len(actual)), actual, strict=False):
            if kind is not None:
                types[parameter].add(kind)
                types[name].add(kind)
    return types


class Walk:
    """Follows element types through a model and collects what has no kernel.

    Attributes:
        gaps: Once for each node, and in a function for each call of it.
    """

    def __init__(self, registry: Registry, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> None:
        """Start a walk; `functions` are the model's own."""
        self.registry = registry
        self.functions = functions
        self._calls: dict[tuple[Any, ...], tuple[list[str | None], list[Gap]]] = {}
        self.gaps: list[Gap] = []

    def graph(
        self,
        graph: ir.Graph | ir.Function,
        types: Types,
        opsets: Mapping[str, int],
        attributes: Mapping[str, ir.Attr],
    ) -> list[str | None]:
        """Walk nodes in order; `types` holds what is known so far, `attributes` those of the calling node."""
        for node in graph:
            inputs = [None if v is None else _type_of(v, types) for v in node.inputs]
            for value, kind in zip(node.outputs, self.node(node, inputs, types, opsets, attributes), strict=False):
                types[value] = kind or _type_of(value, {})
        return [_type_of(v, types) for v in graph.outputs]

    def node(
        self,
        node: ir.Node,
        inputs: Sequence[str | None],
        types: Types,
        opsets: Mapping[str, int],
        attributes: Mapping[str, ir.Attr],
    ) -> list[str | None]:
        """The types of a node's outputs; a gap is noted."""
        key = (_domain(node.domain), node.op_type)
        bound = _bind(node, attributes)
        if function := self.functions.get(node.op_identifier()):
            return self._call(function, inputs, bound)
        branches = [
            self.graph(g, types, opsets, attributes)
            for a in node.attributes.values()
            if not a.is_ref() and a.type == ir.AttributeType.GRAPH
            for g in (a.as_graph(),)
        ]
        if key == ("", "Constant"):  # stored, not run
            return [_constant_type(bound)]
        opset = opsets.get(node.domain, opsets.get(key[0], 1))
        operator = self.registry.operator(key, opset)
        if operator is None:
            self.gaps.append(((node.op_type, key[0], ""), node_name(node)))
            return [None] * len(node.outputs)
        declared = [_type_of(v, {}) for v in node.outputs]
        outputs = _output_types(operator, inputs, declared, bound, branches)
        if not self._runs(key, operator, node, inputs, outputs, opset, bound):
            kind = _blamed(key, self.registry, [*inputs, *outputs])
            self.gaps.append(((f"{node.op_type}({operator.since})", key[0], kind), node_name(node)))
        return outputs

    def _call(
        self, function: ir.Function, inputs: Sequence[str | None], bound: Mapping[str, ir.Attr]
    ) -> list[str | None]:
        """Walk a function's body for one call of it; calls that agree are walked once."""
        given = {name: a for name, a in function.attributes.items() if a.value is not None} | dict(bound)
        scalars = (ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING)
        values = ((n, a.value if a.type in scalars else id(a)) for n, a in sorted(given.items()))
        key = (id(function), *inputs, *values)
        if key not in self._calls:
            outer, self.gaps = self.gaps, []
            types: Types = dict(zip(function.inputs, inputs, strict=False))
            self._calls[key] = self.graph(function, types, function.opset_imports, given), self.gaps
            self.gaps = outer
        outputs, gaps = self._calls[key]
        self.gaps += gaps
        return outputs

    def _runs(
        self,
        key: OpKey,
        operator: Operator,
        node: ir.Node,
        inputs: Sequence[str | None],
        outputs: Sequence[str | None],
        opset: int,
        bound: Mapping[str, ir.Attr],
    ) -> bool:
        if self.registry.runs(key, operator, inputs, outputs):
            return True
        # onnxruntime casts a float16 node that it has no kernel for to float32 and back.
        wide = [["tensor(float)" if t == "tensor(float16)" else t for t in side] for side in (inputs, outputs)]
        if wide != [list(inputs), list(outputs)] and self.registry.runs(key, operator, *wide):
            return True
        body = _function_body(node, operator, inputs, opset, bound) if key[0] == "" else None
        if body is None:
            return False
        inner = Walk(self.registry, {})
        inner._call(body, inputs, bound)
        return not inner.gaps


def _bind(node: ir.Node, attributes: Mapping[str, ir.Attr]) -> dict[str, ir.Attr]:
    """A node's attributes, references replaced by what the calling node gives; absent where it gives nothing."""
    bound = {}
    for name, attribute in node.attributes.items():
        actual = attributes.get(attribute.ref_attr_name or "") if attribute.is_ref() else attribute
        if actual is not None:
            bound[name] = actual
    return bound


def _type_of(value: ir.Value, types: Types) -> str | None:
    known = types.get(value)
    if known is not None:
        return known
    if isinstance(value.type, ir.TensorType | None):
        dtype = value.dtype if value.dtype is not None else value.const_value.dtype if value.const_value else None
        return None if dtype in (None, ir.DataType.UNDEFINED) else _type_string(dtype)
    return None  # sequences and optionals: no norm and no gap that matters here is made of them


def _type_string(dtype: ir.DataType | None) -> str | None:
    return None if dtype is None else f"tensor({_TYPE_NAMES.get(dtype, dtype.name.lower())})"


_TYPE_NAMES = {
    ir.DataType.FLOAT8E4M3FN: "float8e4m3fn",
    ir.DataType.FLOAT8E4M3FNUZ: "float8e4m3fnuz",
    ir.DataType.FLOAT8E5M2: "float8e5m2",
    ir.DataType.FLOAT8E5M2FNUZ: "float8e5m2fnuz",
}


def _constant_type(attributes: Mapping[str, ir.Attr]) -> str | None:
    if "value" in attributes:
        return _type_string(attributes["value"].as_tensor().dtype)
    for name, kind in (("value_float", "float"), ("value_int", "int64"), ("value_string", "string")):
        if name in attributes or f"{name}s" in attributes:
            return f"tensor({kind})"
    return None


def _output_types(
    operator: Operator,
    inputs: Sequence[str | None],
    declared: Sequence[str | None],
    attributes: Mapping[str, ir.Attr],
    branches: Sequence[Sequence[str | None]],
) -> list[str | None]:
    """The output types that follow from an operator's definition, else those that the file declares."""
    by_parameter: dict[str, str] = {}
    for (_, parameter), kind in zip(_formals(operator.inputs, len(inputs)), inputs, strict=False):
        if kind is not None and not (branches and parameter == "V"):
            by_parameter.setdefault(parameter, kind)
    said = next((attributes[a] for a in ("to", "dtype", "output_dtype") if a in attributes), None)
    types = []
    for i, (_, parameter) in enumerate(_formals(operator.outputs, len(declared))):
        kind = by_parameter.get(parameter)
        if branches:
            kind = _branch_type(branches, i, len(declared))
        elif kind is None and parameter.startswith("tensor("):
            kind = parameter
        elif kind is None and said is not None and said.as_int():
            kind = _type_string(ir.DataType(said.as_int()))
        elif kind is None and "value" in attributes:  # ConstantOfShape
            kind = _type_string(attributes["value"].as_tensor().dtype)
        types.append(kind or declared[i])
    return types + list(declared[len(types) :])


def _branch_type(branches: Sequence[Sequence[str | None]], i: int, count: int) -> str | None:
    """An output of If is its branches' output; Loop's body has the condition before it."""
    for outputs in branches:
        index = i + len(outputs) - count
        if 0 <= index < len(outputs) and outputs[index] is not None:
            return outputs[index]
    return None


def _function_body(
    node: ir.Node, operator: Operator, inputs: Sequence[str | None], opset: int, bound: Mapping[str, ir.Attr]
) -> ir.Function | None:
    """The function that ONNX defines an operator as, or None where onnxruntime would not use it."""
    try:
        definition: Any = onnx.defs.get_schema(operator.name, opset, "")
        if definition.has_function:
            version = max(v for v in definition.function_opset_versions if v <= opset)
            proto = onnx.FunctionProto.FromString(definition.get_function_with_opset_version(version))
            if any(_since(inner, version) != _since(inner, opset) for inner in proto.node):
                return None  # the body was written for operators that have changed since
        elif definition.has_context_dependent_function:
            version = max(v for v in definition.context_dependent_function_opset_versions if v <= opset)
            given = [onnx.helper.make_tensor_type_proto(_element(t), None).SerializeToString() for t in inputs]
            call = _standalone(node, bound).SerializeToString()
            data = definition.get_context_dependent_function_with_opset_version(version, call, given)
            proto = onnx.FunctionProto.FromString(data)
        else:
            return None
    except (ValueError, RuntimeError, onnx.defs.SchemaError):
        return None  # onnxruntime asks onnx for the body, and onnx has none for this opset or these types
    for entry in proto.opset_import:
        entry.version = entry.version if entry.domain else opset
    # A body declares its operator's optional outputs (Attention's present_key) also where it does not make them.
    made = {*proto.input, *(name for inner in proto.node for name in inner.output)}
    asked = [name for name in proto.output if name in made]
    del proto.output[:]
    proto.output.extend(asked)
    function: ir.Function = ir.from_proto(proto)
    return function


def _since(node: onnx.NodeProto, opset: int) -> int:
    return int(onnx.defs.get_schema(node.op_type, opset, node.domain).since_version)


def _standalone(node: ir.Node, bound: Mapping[str, ir.Attr]) -> onnx.NodeProto:
    """A node by itself, its attribute references replaced."""
    call = onnx.NodeProto(op_type=node.op_type, name=node.name or "")
    call.input.extend("" if v is None else f"i{i}" for i, v in enumerate(node.inputs))
    call.output.extend(f"o{i}" for i, _ in enumerate(node.outputs))
    call.attribute.extend(ir.to_proto(a) for a in bound.values())
    return call


def _element(kind: str | None) -> int:
    names = {_type_string(d): d.value for d in ir.DataType}
    return names.get(kind, onnx.TensorProto.UNDEFINED)


def _blamed(key: OpKey, registry: Registry, types: Sequence[str | None]) -> str:
    """The type to name: the first that no kernel of the operator takes, else the first float, else the first."""
    known = [t for t in types if t is not None]
    taken = {t for k in registry.kernels.get(key, ()) for allowed in k.type_constraints.values() for t in allowed}
    first = next((t for t in known if t not in taken), next((t for t in known if "float" in t), (known or [""])[0]))
    return first.removeprefix("tensor(").removesuffix(")").replace("double", "float64") or "matching"
