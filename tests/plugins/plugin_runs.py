"""The plugin's launches on the CPU: numbers within the oracle's bound, and a gain that lies on the device in time."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator

import kernel_cases
import numpy as np
from kernel_call import TYPES, numpy_type, placed
from kernel_cases import Case
from plugin_call import Library, Plugin, Tensor, fields_of, result_of

from rmsnorm_onnx.spec import RMSNormSpec, preset

PLAIN = RMSNormSpec(epsilon=1e-6)


def cases(count: int) -> Iterator[tuple[Case, bool]]:
    """Norms, and whether the gain is a field: families, axes, and drawn options."""
    for dtype in TYPES:
        for name in ("torch", "llama", "gemma", "t5"):
            for gain in {dtype, "float32"}:
                yield Case((3, 40), dtype, preset(name), gain, dtype), False
        more = [
            Case((2, 3, 4, 8), dtype, PLAIN.replace(axes=(-3, -2, -1)), dtype, dtype),
            Case((2, 5, 7, 3), dtype, PLAIN.replace(axes=(-3,), has_bias=True), "float32", "float32"),
            Case((40,), dtype, PLAIN.replace(leading=7), dtype, dtype),
            Case((3, 40), dtype, PLAIN.replace(has_gain=False, has_bias=True), dtype, dtype),
            Case((3, 40), dtype, PLAIN.replace(has_gain=False, result_type="float32"), dtype, dtype),
        ]
        for case in more:
            for as_field in (False, case.spec.has_gain):
                yield case, as_field
        for number, case in enumerate(kernel_cases.drawn(dtype, count, seed=7)):
            gain = case.gain if case.gain == dtype else "float32"
            bias = case.bias if case.bias == dtype else "float32"
            case = dataclasses.replace(case, gain=gain, bias=bias, in_place=False, descending=False)
            yield case, number % 3 == 0 and case.spec.has_gain


def run(library: Library, case: Case, as_field: bool) -> str | None:
    """Creates, clones, attaches and launches; what is wrong, or None."""
    rng = np.random.default_rng(sum(case.shape))
    spec, x = case.spec, kernel_cases.values(case, rng)
    dims = tuple(case.shape[a] for a in spec.axes)
    gain = rng.uniform(-2, 2, dims).astype(numpy_type(case.gain)) if spec.has_gain else None
    bias = rng.uniform(-1, 1, dims).astype(numpy_type(case.bias)) if spec.has_bias else None
    made = library.create(fields_of(spec, gain if as_field else None))
    attached = made.clone().attach() if made is not None else None
    if attached is None:
        return f"not created, or not attached: {library.log()}"
    arrays = {"x": x, "gain": None if as_field else gain, "bias": bias, "y": result_of(spec, x)}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    later = (1,) * (-spec.axes[-1] - 1)
    tensors = [Tensor(a.shape if name in "xy" else (*dims, *later), a.dtype.name) for name, a in arrays.items()]
    with contextlib.ExitStack() as stack:
        places = {
            name: stack.enter_context(placed(a, aligned=name not in case.odd.split())) for name, a in arrays.items()
        }
        before = library.plugin.standinCalls()
        status = attached.enqueue(tensors, [place.address for place in places.values()])
        if status != 0:
            return f"status {status}: {library.log()}"
        if library.plugin.standinCalls() != before:
            return "the launch itself called CUDA's memory functions"
        if not all(place.untouched() for place in places.values()):
            return "something was written beside a tensor"
        return kernel_cases.judge(case, places["y"].array.astype(np.float64), x, gain, bias)


def wrong_runs(library: Library, count: int = 40) -> Iterator[str]:
    """Launches that do not hold."""
    for case, as_field in cases(count):
        problem = run(library, case, as_field)
        if problem is not None:
            yield f"{case}, gain as a field: {as_field}: {problem}"
    yield from wrong_gains(library)
    yield from wrong_launches(library)


def with_gain(library: Library) -> Plugin:
    """A plugin with its gain as a field."""
    made = library.create(fields_of(PLAIN, np.arange(16, dtype=np.float32)))
    assert made is not None, library.log()
    return made


def wrong_gains(library: Library) -> Iterator[str]:
    """What is wrong with the copies of a gain on devices."""
    cuda = library.plugin
    start = cuda.standinLive()
    first = with_gain(library)
    plugins = [first, first.clone(), first.attach(), first.clone().attach()]
    if cuda.standinLive() != start + 1:
        yield f"{cuda.standinLive() - start} copies on one device for clones of one plugin, not 1"
    cuda.standinDevice(1)
    plugins.append(first.attach())
    if cuda.standinLive() != start + 2:
        yield f"{cuda.standinLive() - start} copies on two devices, not 2"
    cuda.standinDevice(0)
    plugins = [p for p in plugins if p is not None]
    clones = [p.clone() for p in plugins]
    cuda.standinCapturing(1)
    for plugin in (*plugins, *clones):
        plugin.destroy()
    # The clone of a clone above, which no name holds, still has the gain.
    yield from _captures(library)
    cuda.standinCapturing(0)
    yield from _failures(library)


def _captures(library: Library) -> Iterator[str]:
    cuda = library.plugin
    before = cuda.standinLive()
    plugin = with_gain(library)
    attached = plugin.attach()
    if attached is None:
        yield f"a stream's capture keeps a plugin from being attached: {library.log()}"
        return
    attached.destroy()
    plugin.destroy()
    if cuda.standinLive() != before:
        yield "a gain is not freed with the last plugin"
    if cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1) == 0:
        yield "the thread's mode of capture is not as it was"


def _failures(library: Library) -> Iterator[str]:
    cuda = library.plugin
    for call in range(1, 7):
        live = cuda.standinLive()
        plugin = with_gain(library)
        cuda.standinFailAt(call)
        attached, log = plugin.attach(), library.log()
        cuda.standinFailAt(0)
        if call == 6:
            if attached is None:
                yield f"five calls of CUDA's are all that there are to fail: {log}"
        elif attached is not None or log.count("\n") != 1 or "field gain: " not in log or "stand-in" not in log:
            yield f"call {call} of CUDA's fails: {attached}, {log!r}"
        elif cuda.standinLive() != live:
            yield f"call {call} of CUDA's fails: the allocation stays"


def _empty(library: Library, plugin: Plugin, biased: Plugin, fielded: Plugin) -> Iterator[str]:
    """Empty tensors have no memory, and nothing is to be done."""
    offset = library.create(fields_of(PLAIN.replace(gain_offset=1.0)))
    assert offset is not None, library.log()
    rows, none = Tensor((0, 16), "float32"), Tensor((2, 0), "float32")
    full, bare = Tensor((16,), "float32"), Tensor((0,), "float32")
    for p, tensors in (
        (plugin, [rows, full, rows]),
        (plugin, [none, bare, none]),
        (offset, [none, bare, none]),
        (biased, [rows, full, full, rows]),
        (biased, [none, bare, bare, none]),
        (fielded, [rows, rows]),
    ):
        status, log = p.enqueue(tensors, [None] * len(tensors)), library.log()
        if status != 0 or log:
            yield f"an empty tensor is not done without a launch: {tensors}, status {status}, {log!r}"


def wrong_launches(library: Library) -> Iterator[str]:
    """What is wrong with launches that cannot succeed."""
    x = np.ones((2, 16), np.float32)
    y, gain = np.zeros_like(x), np.ones(16, np.float32)
    t, w = Tensor(x.shape, "float32"), Tensor(gain.shape, "float32")
    at = [array.ctypes.data for array in (x, gain, y)]
    plugin, biased = library.create(fields_of(PLAIN)), library.create(fields_of(PLAIN.replace(has_bias=True)))
    assert plugin is not None and biased is not None
    fielded = with_gain(library)
    refused = [
        ("gain is not on the device", fielded, [t, t], [at[0], at[2]]),
        ("gain is not on the device", plugin, [t, w, t], [at[0], None, at[2]]),
        ("bias is not on the device", biased, [t, w, w, t], [at[0], at[1], None, at[2]]),
        ("the launch failed: a pointer is null", plugin, [t, w, t], [None, at[1], at[2]]),
        ("the launch failed: y overlaps an input", plugin, [t, w, t], [at[0], at[1], at[0] + 4]),
    ]
    for words, p, tensors, addresses in refused:
        status, log = p.enqueue(tensors, addresses), library.log()
        if status == 0 or log.count("\n") != 1 or words not in log:
            yield f"{words}: status {status}, {log!r}"
    library.kernels.shimFailNext(700)
    status, log = plugin.enqueue([t, w, t], at), library.log()
    library.kernels.shimFailNext(0)
    if status == 0 or log != "rmsnorm_onnx RMSNorm: enqueue: the launch failed: an error of the shim's\n":
        yield f"a launch that CUDA refuses: status {status}, {log!r}"
    if library.lib.harnessEnqueue(plugin.address, None, None, None, None, None) == 0 or "is null" not in library.log():
        yield "lists that are null are taken"
    yield from _empty(library, plugin, biased, fielded)
    # TensorRT may time a plugin that it attached to no context.
    if fielded.shape_change(t, t) != 0 or fielded.enqueue([t, t], [at[0], at[2]]) != 0:
        yield f"a change of shape does not put the gain on the device: {library.log()}"
