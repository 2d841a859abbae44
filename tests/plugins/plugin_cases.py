"""Checks of the plugin against the tables of what it takes and refuses.

`python tests/plugins/plugin_cases.py LIBRARY HARNESS` runs all of them on a library for the CPU, and exits 1 at the
first that fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from plugin_call import (
    BARE,
    CHW2,
    NAMELESS,
    NO_FINDER,
    SILENT,
    VERSIONED,
    Collection,
    Field,
    Library,
    Plugin,
    field,
    fields_of,
)
from plugin_tables import PLAIN, Fit, bad_fields, fits, int64, variants


def one_line(text: str, *words: str) -> bool:
    """Whether one line was logged, with all the words."""
    return text.count("\n") == 1 and text.startswith("rmsnorm_onnx RMSNorm: ") and all(w in text for w in words)


def wrong_fields(library: Library) -> Iterator[str]:
    """Fields that are not refused as they must be."""
    for name, change, words in bad_fields():
        fields = {n: f for n, f in (fields_of(PLAIN) | dict(change)).items() if f is not None}
        made, log = library.create(fields, "layer 7"), library.log()
        if made is not None or not one_line(log, f"layer 7: field {name}: ", words):
            yield f"{name} {change}: {'created' if made else 'refused'}, {log!r}, not {words!r}"
    twice = [*fields_of(PLAIN).items(), ("epsilon", field(1.0))]
    if library.create(twice) is not None or not one_line(library.log(), "field epsilon: it is given twice"):
        yield "a field that stands twice is taken"
    for collection in (None, Collection(1, None)):
        if library.create_raw(collection) is not None or not one_line(library.log(), "field axes: it is missing"):
            yield f"no list of fields: {collection}"


def wrong_finders(library: Library) -> Iterator[str]:
    """Hosts that do not get the line by their own way."""
    for finder, hears in ((BARE, True), (VERSIONED, True), (NAMELESS, True), (NO_FINDER, True), (SILENT, False)):
        library.lend(finder)
        library.create({})
        if one_line(library.log(), "field axes: it is missing") != hears:
            yield f"finder {finder}: the logger heard it is {not hears}"
    library.lend(BARE)
    library.lend(NAMELESS)
    library.create({})
    if not one_line(library.log(), "field axes: it is missing"):
        yield "a finder without a name takes the place of another"
    library.lend(VERSIONED)


def wrong_variants(library: Library) -> Iterator[str]:
    """Specs that are not created, kept, cloned and told apart as they must be."""
    ids: dict[str, str] = {}
    for name, spec, gain in variants():
        fields = fields_of(spec, gain)
        plugin = library.create(fields)
        if plugin is None:
            yield f"{name} {spec}: refused, {library.log()}"
            continue
        again, other = library.create(plugin.stored()), plugin.clone()
        for p in (again, other):
            if (
                p is None
                or p.stored() != fields
                or p.timing_id() != plugin.timing_id()
                or p.metadata() != p.timing_id()
            ):
                yield f"{name} {spec}: not the same again, {library.log()}"
        if plugin.timing_id() in ids:
            yield f"{name} {spec}: the timing id of {ids[plugin.timing_id()]}"
        ids[plugin.timing_id()] = f"{name} {spec}"
        plugin.destroy()
        if other.stored() != fields:
            yield f"{name} {spec}: a clone does not outlive its original"
        other.destroy()
    long = {
        n: int64(*np.frombuffer(f.data or b"", np.int32)) if f.type == "INT32" else f
        for n, f in fields_of(PLAIN).items()
    }
    bare = {n: Field(f.data[:-1], "CHAR", f.length - 1) if f.type == "CHAR" and f.data else f for n, f in long.items()}
    for fields in (long, bare):
        made = library.create(fields)
        if made is None or made.stored() != fields_of(PLAIN):
            yield f"INT64, or strings without their end, are not taken: {library.log()}"


def wrong_fits(library: Library) -> Iterator[str]:
    """Tensors that are not taken or refused as they must be."""
    for fit in fits():
        plugin = library.create(fields_of(fit.spec, fit.gain))
        assert plugin is not None, library.log()
        found = _misfit(library, plugin, fit)
        if found is not None:
            yield f"{fit}: {found}"


def _misfit(library: Library, plugin: Plugin, fit: Fit) -> str | None:
    types = [t.type for t in fit.tensors[: -fit.outputs]]
    known = all(n >= 0 for t in fit.tensors for n in t.shape)
    steps: list[tuple[str, Callable[[], int]]] = [
        ("configure", lambda: plugin.configure(*fit.tensors, outputs=fit.outputs))
    ]
    if known or fit.later:
        shape_change = lambda: plugin.shape_change(*fit.tensors, outputs=fit.outputs)  # noqa: E731
        # An overflow of bytes is the kernels' to refuse.
        steps += [("shape change", shape_change)] if "bytes" not in fit.words else []
        if fit.words and fit.outputs == 1 and "its fields ask for x" not in fit.words:
            addresses = [4096 * (i + 1) for i in range(len(fit.tensors))]  # never read
            attached = plugin.attach()
            assert attached is not None, library.log()
            steps.append(("enqueue", lambda: attached.enqueue(fit.tensors, addresses)))
    for name, step in steps:
        status, log = step(), library.log()
        refused = bool(fit.words) and not (fit.later and name == "configure")
        if (status != 0) != refused or (one_line(log, fit.words) if refused else log == "") is False:
            return f"{name}: status {status}, {log!r}"
    if plugin.workspace(*fit.tensors, outputs=fit.outputs) != 0:
        return "it asks for a workspace"
    if not fit.words or fit.later:
        return _unlike(plugin, fit, types)
    # A type that the question for y's type refuses has no format either.
    refused = fit.outputs == 1 and plugin.output_type(*types) is None
    supported = refused and all(plugin.supports(*fit.tensors))
    library.log()
    return "types that are refused are supported" if supported else None


def _unlike(plugin: Plugin, fit: Fit, types: list[str]) -> str | None:
    """What else is wrong with tensors that fit."""
    if not all(plugin.supports(*fit.tensors)):
        return "its formats are not supported"
    for at in range(len(fit.tensors)):
        changed = [dataclasses.replace(t, format=CHW2 if i == at else t.format) for i, t in enumerate(fit.tensors)]
        if plugin.supports(*changed)[at]:
            return f"tensor {at} in another format is supported"
        for name in ("int8", "float16", "bfloat16"):
            other = [dataclasses.replace(t, type=name if i == at else t.type) for i, t in enumerate(fit.tensors)]
            gain = None if fit.gain is None else fit.gain.dtype.name
            same = (
                name == fit.tensors[at].type
                or (0 < at < len(types) and name == types[0])
                or (at == 0 and name != "int8" and gain in (None, "float32", name))
            )
            if plugin.supports(*other)[at] != same:
                return f"tensor {at} as {name}: supported is {not same}"
    result = fit.spec.resolve(types[0]).result_type
    if plugin.output_type(*types) != result:
        return f"y's type is {plugin.output_type(*types)}, not {result}"
    shapes = [t.shape for t in fit.tensors[:-1]]
    if plugin.output_shape(*shapes) != tuple(range(len(shapes[0]))):
        return f"y's shape is {plugin.output_shape(*shapes)}"
    return None


def all_wrong(library: Library) -> Iterator[str]:
    """Everything that is wrong with a library."""
    from plugin_runs import wrong_runs

    for check in (wrong_fields, wrong_finders, wrong_variants, wrong_fits, wrong_runs):
        yield from check(library)


def without_guard(library: Library, number: int) -> bool:
    """Whether everything holds without a guard, in a process of its own."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        library.plugin.standinWithout(number)
        os._exit(1 if next(all_wrong(library), None) else 0)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    """Runs all checks on a library."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("harness", type=Path)
    parser.add_argument(
        "--guards", type=int, default=0, help="name the guards up to this one whose absence nothing shows"
    )
    chosen = parser.parse_args()
    library = Library(chosen.harness, chosen.library, VERSIONED)
    for problem in all_wrong(library):
        print(problem)
        return 1
    print("all cases hold")
    for number in range(1, chosen.guards + 1):
        if without_guard(library, number):
            print(f"unnoticed: {number}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
