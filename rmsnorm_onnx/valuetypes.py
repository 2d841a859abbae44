"""Element types and dimensions of all values of a model, function bodies included, by onnx's own inference.

A value of a function body may be of another type in every call: it is known only where all calls agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from rmsnorm_onnx.inference import Dims, Info, declared, infer
from rmsnorm_onnx.view import MAX_CALL_DEPTH, graph_nodes

_NUMBERS = {
    "value_float": ir.DataType.FLOAT,
    "value_floats": ir.DataType.FLOAT,
    "value_int": ir.DataType.INT64,
    "value_ints": ir.DataType.INT64,
    "value_string": ir.DataType.STRING,
    "value_strings": ir.DataType.STRING,
}


class ValueTypes:
    """Answers "which type, which dimensions" for any value of a model.

    Args:
        model: The model; what is inferred holds for it as it is now, and stays when nodes are replaced later.
    """

    def __init__(self, model: ir.Model) -> None:
        """Infers the main graph, and each function's body once for each kind of call."""
        self._model = model
        self._known: dict[ir.Value, Info] = {}
        self._bodies: set[ir.Value] = set()  # a file may declare types there, which say nothing of a call
        self._seen: set[tuple[object, ...]] = set()
        for function in model.functions.values():
            for node in graph_nodes(function.graph):
                self._bodies.update(node.outputs)
            self._bodies.update(function.inputs)
        self._visit(model.graph, infer(model, model.graph), 0)
        self._names = self._by_name()

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type; None where it is unknown, or differs between calls."""
        return self._info(value)[0]

    def dims(self, value: ir.Value) -> Dims | None:
        """The dimensions, as numbers and symbols; None where the rank is unknown, or differs between calls."""
        return self._info(value)[1]

    def note(self, value: ir.Value, info: Info) -> None:
        """Remembers what is known of a new value."""
        self._known[value] = info

    def adopt(self) -> None:
        """Takes new values that bear the name of an old one for the same: rewrites keep the names of results."""
        for place, value in self._values():
            info = self._names.get((place, value.name))
            if info is not None and value not in self._known and None in (value.dtype, declared(value)):
                self._known[value] = info

    def _by_name(self) -> dict[tuple[object, str | None], Info | None]:
        """What is known of values by their place, the main graph or a function, and name; None for two of one name."""
        names: dict[tuple[object, str | None], Info | None] = {}
        for place, value in self._values():
            names[place, value.name] = None if (place, value.name) in names else self._info(value)
        return names

    def _values(self) -> Iterator[tuple[object, ir.Value]]:
        for place, graph in ((None, self._model.graph), *((k, f.graph) for k, f in self._model.functions.items())):
            for node in graph_nodes(graph):
                for value in node.outputs:
                    yield place, value

    def note_all(self, model: ir.Model) -> None:
        """Remembers what onnx infers of a model whose nodes will become part of this one."""
        self._known.update(infer(model, model.graph))

    def _info(self, value: ir.Value) -> Info:
        if value.const_value is not None:
            return value.const_value.dtype, tuple(value.const_value.shape)  # type: ignore[arg-type]
        found = self._known.get(value)
        if found is None and value not in self._bodies:
            found = value.dtype, declared(value)
        dtype, dims = found or (None, None)
        node = value.producer()
        if dtype is None and node is not None and node.op_type == "Constant":
            dtype = next((_NUMBERS[name] for name in node.attributes if name in _NUMBERS), None)
        if dtype is None and value not in self._bodies:
            dtype = value.dtype
        return dtype, dims

    def _visit(self, graph: ir.Graph, found: dict[ir.Value, Info], depth: int) -> None:
        for value, info in found.items():
            self._record(value, info)
        for node in graph_nodes(graph):
            function = self._model.functions.get(node.op_identifier())
            if function is None or depth > MAX_CALL_DEPTH:
                continue
            given = [self._at_call(v, found) for v in node.inputs]
            given += [(None, None)] * (len(function.inputs) - len(given))
            key = (function.identifier(), *given)
            if key not in self._seen:
                self._seen.add(key)
                arguments = dict(zip(function.inputs, given, strict=False))
                body = {**infer(self._model, function.graph, arguments), **arguments}
                self._visit(function.graph, body, depth + 1)

    def _at_call(self, value: ir.Value | None, found: dict[ir.Value, Info]) -> Info:
        if value is None:
            return None, None
        return found[value] if value in found else self._info(value)

    def _record(self, value: ir.Value, info: Info) -> None:
        """Keeps what this call and earlier ones agree on."""
        if value not in self._known:
            self._known[value] = info
            return
        old = self._known[value]
        self._known[value] = (old[0] if old[0] == info[0] else None, old[1] if old[1] == info[1] else None)
