"""The plugin where the host runs out of memory: each call fails with a line, ends nothing, and does well afterwards.

`python tests/plugins/plugin_memory.py LIBRARY HARNESS`, with the library of shim/out_of_memory.cpp preloaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from plugin_call import BARE, Library, Tensor, fields_of
from plugin_tables import GAIN, PLAIN

X, W, ROW = Tensor((2, 16), "float32"), Tensor((16,), "float32"), Tensor((1, 16), "float32")
LONG = "a layer with a long name " * 40


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the plugin's: `good` where it succeeds while there is memory."""

    name: str
    make: Callable[[], bool]
    good: bool


def calls(library: Library) -> Iterator[Call]:
    """The methods that allocate, on what they take and on what they refuse. Each tells whether it succeeded."""
    plain, fielded = library.create(fields_of(PLAIN)), library.create(fields_of(PLAIN, GAIN))
    assert plain is not None and fielded is not None
    yield Call("createPlugin", lambda: library.create(fields_of(PLAIN, GAIN), LONG) is not None, good=True)
    yield Call("createPlugin without fields", lambda: library.create({}, LONG) is not None, good=False)
    yield Call("clone", lambda: bool(plain.clone().address), good=True)
    yield Call("attachToContext", lambda: fielded.attach() is not None, good=True)
    yield Call("getOutputDataTypes", lambda: plain.output_type("float16", "bfloat16") is not None, good=False)
    yield Call("configurePlugin", lambda: plain.configure(X, W, ROW) == 0, good=False)
    yield Call("onShapeChange", lambda: plain.shape_change(X, W, ROW) == 0, good=False)
    yield Call("enqueue", lambda: plain.enqueue([X, W, ROW], [4096, 8192, 12288]) == 0, good=False)


def wrong_calls(library: Library) -> Iterator[str]:
    """What is wrong with calls whose first, second, third... allocation fails, and all after it."""
    host = ctypes.CDLL(None)
    host.memoryFor.argtypes, host.memoryFailed.restype = (ctypes.c_int64,), ctypes.c_int64
    for call in calls(library):
        for count in range(1000):
            live = library.plugin.standinLive()
            host.memoryFor(count)
            done = call.make()
            failed = host.memoryFailed()
            host.memoryFor(-1)
            log, live = library.log(), library.plugin.standinLive() - live
            if failed == 0:
                break
            line = log.startswith("rmsnorm_onnx RMSNorm: ") and log.count("\n") == 1
            if done or not line or live != 0:
                yield f"{call.name} with {count} allocations: succeeded {done}, {live} copies stay, {log!r}"
            elif count == 0 and call.good and "the host is out of memory" not in log:
                yield f"{call.name}: {log!r}"
        if done != call.good or count == 0:
            yield f"{call.name} with memory: succeeded {done} with {count} allocations, {log!r}"


def main() -> int:
    """Runs all calls on a library."""
    library = Library(Path(sys.argv[2]), Path(sys.argv[1]), BARE)
    for problem in wrong_calls(library):
        print(problem)
        return 1
    print("all calls hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
