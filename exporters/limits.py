"""`limit_notes`: the sizes that a program of torch.export was made for, where a module decides by sizes.

torch.export runs Python once: of `if x.shape[0] > 4` the example's branch alone is in the program, with a guard beside
it that says for which sizes it holds. A file has no place for a guard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TORCH = f"{os.sep}torch{os.sep}"
_PARTS = ("split", "chunk", "unbind", "tensor_split")
"""Operators of torch that make as many results as sizes say; their other guards fail in the file as they do there."""
_BROADCASTS = "infer_size"
"""Where torch finds whether a size is 1 and repeated: an equality there is what the program holds."""
_TRIED = 64
"""The largest size that such equalities, which no reader could read, are tried at."""
_LEAST = 2
"""torch.export takes sizes of 0 and 1 for constants, and so begins at 2."""

_SAID = 6
"""Ranges of sizes that a note lists."""


def limit_notes(program: Any, names: Sequence[str]) -> tuple[str, ...]:
    """One note for each size, or relation of sizes, that a program is limited to.

    Args:
        program: A torch.export.ExportedProgram, before it is translated.
        names: What the file's inputs are called, in their order.
    """
    from torch.utils._sympy.printers import PythonPrinter

    tensors = list(_inputs(program))
    places: dict[Any, tuple[str, int]] = {}
    for name, tensor in zip(names, tensors, strict=False):
        for axis, size in enumerate(tensor.shape):
            symbol = None if isinstance(size, int) else size.node.expr
            if symbol is not None and symbol.is_Symbol:
                places.setdefault(symbol, (name, axis))
    printer, notes, told = PythonPrinter(), [], set()
    for expression, where in _decisions(tensors):
        symbols = sorted(expression.free_symbols, key=str)
        if not symbols or any(symbol not in places for symbol in symbols):
            continue  # a size that values decide, or one that became a number and is noted as fixed
        said = {symbol: f"{places[symbol][0]}.shape[{places[symbol][1]}]" for symbol in symbols}
        printer._print_Symbol = lambda symbol, said=said: said.get(symbol, str(symbol))
        dims = " and ".join(f"dimension {places[s][1]} of input {places[s][0]}" for s in symbols)
        verb = "is" if len(symbols) == 1 else "are"
        notes.append(
            f"{dims} {verb} limited to sizes with {printer.doprint(expression)}: the module decides by {where}"
        )
        told.update(symbols)
    notes += _broadcast_notes(tensors, places)
    for symbol, values in program.range_constraints.items():
        if symbol in places and symbol not in told and (bounds := _bounds(values)):
            name, axis = places[symbol]
            notes.append(f"dimension {axis} of input {name} is limited to {bounds}: torch or the module asks for it")
    return tuple(dict.fromkeys(notes))


def _inputs(program: Any) -> Iterator[Any]:
    """The tensors that a program takes, in order."""
    import torch

    wanted = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in wanted and isinstance(node.meta.get("val"), torch.Tensor):
            yield node.meta["val"]


def _decisions(tensors: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """The guards that the module's own Python made, and those of how many parts a size makes; each with its place."""
    mode = _mode(tensors)
    for guard in () if mode is None else mode.shape_env.guards:
        frame = guard.sloc.framework_loc
        if not hasattr(frame, "filename"):
            continue
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        if _TORCH not in frame.filename:
            yield mode.shape_env.replace(guard.expr), f"it at {place}"
        elif frame.name in _PARTS and guard.expr.func.__name__ == "Equality":
            yield mode.shape_env.replace(guard.expr), "it how many parts there are"


def _broadcast_notes(tensors: Sequence[Any], places: Mapping[Any, tuple[str, int]]) -> Iterator[str]:
    """One note for each dimension of which some sizes would be broadcast otherwise than the program does."""
    mode = _mode(tensors)
    guards = () if mode is None else mode.shape_env.guards
    wanted = (g for g in guards if getattr(g.sloc.framework_loc, "name", None) == _BROADCASTS)
    equalities = {mode.shape_env.replace(g.expr) for g in wanted if g.expr.func.__name__ == "Equality"}
    hints = getattr(mode.shape_env, "backed_var_to_val", {}) if mode is not None else {}
    known = [e for e in equalities if e.free_symbols and e.free_symbols <= set(places)]
    for symbol in dict.fromkeys(s for e in known for s in sorted(e.free_symbols, key=str)):
        mine = [e for e in known if symbol in e.free_symbols]
        others = {s: hints.get(s, _LEAST) for e in mine for s in e.free_symbols if s != symbol}
        sizes = range(_LEAST, _TRIED + 1)
        held = [n for n in sizes if all(e.subs({**others, symbol: n}) == True for e in mine)]  # noqa: E712  (sympy's)
        if len(held) < len(sizes):
            name, axis = places[symbol]
            tried = f"of {_LEAST} to {_TRIED} it holds for {_ranges(held)}"
            yield f"dimension {axis} of input {name} is limited: torch decides by it what is broadcast, and {tried}"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words.

    >>> _ranges([2, 3, 4, 8]), _ranges([])
    ('2 to 4, 8', 'none')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    return ", ".join([*said[:_SAID], *(("...",) if len(said) > _SAID else ())]) or "none"


def _mode(tensors: Sequence[Any]) -> Any:
    """The fake mode that a program was traced in, with its guards; None without one."""
    mode = next((tensor.fake_mode for tensor in tensors if hasattr(tensor, "fake_mode")), None)
    return None if mode is None or mode.shape_env is None else mode


def _bounds(values: Any) -> str:
    """A range in words; nothing where it is the whole one."""
    lower, upper = values.lower, values.upper
    above = bool(lower.is_Integer) and int(lower) > _LEAST
    below = bool(upper.is_Integer)
    if above and below:
        return f"{lower} to {upper}"
    return f"{lower} and more" if above else f"{upper} and less" if below else ""
