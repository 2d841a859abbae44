"""The script for machines with a GPU, as far as it runs without one: what it measures is measured there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU), str(ROOT / "tests" / "plugins")]

import measure as script  # noqa: E402
import parity  # noqa: E402
import torch  # noqa: E402
from kernel_build import library  # noqa: E402
from kernel_call import TYPES  # noqa: E402
from memory import Host, Unavailable  # noqa: E402
from parity import ByKernels, matrix, measure, sample  # noqa: E402

KERNELS = {
    *(("WARP_ROWS", wide, *split) for wide in (True, False) for split in ((1, 4), (8, 1))),
    *(("WARP_ROWS", True, *split) for split in ((2, 2), (4, 1))),
    ("BLOCK_ROW", True, 4, 1),
    *((name, wide, 8, 1) for name in ("BLOCK_ROW", "COLUMNS") for wide in (True, False)),
    *((name, wide, 4, 1) for name in ("RELOAD_ROW", "RELOAD_COLUMNS") for wide in (True, False)),
}
"""Every kernel of a type: its name, whether an access takes 16 bytes, accesses and rows a thread."""

CUDART = """
#include <stdlib.h>
#include <string.h>
/* The runtime over plain memory. FAIL names the call that returns FAIL_CODE, from its FAIL_FROM-th time on. */
static int failing(const char* name) {
    static int times;
    const char* fail = getenv("FAIL");
    if (!fail || strcmp(fail, name)) return 0;
    return ++times >= atoi(getenv("FAIL_FROM")) ? atoi(getenv("FAIL_CODE")) : 0;
}
const char* cudaGetErrorString(int code) { return code == 700 ? "an illegal memory access was encountered" : "other"; }
int cudaGetDeviceCount(int* count) { *count = 1; return failing("cudaGetDeviceCount"); }
int cudaMalloc(void** p, size_t size) { int r = failing("cudaMalloc"); return r ? r : posix_memalign(p, 256, size); }
int cudaFree(void* p) { free(p); return 0; }
int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
    memcpy(to, from, size);
    return failing(kind == 1 ? "cudaMemcpy to the device" : "cudaMemcpy to the host");
}
int cudaDeviceSynchronize(void) { return failing("cudaDeviceSynchronize"); }
int cudaStreamCreate(void** stream) { *stream = 0; return failing("cudaStreamCreate"); }
int cudaStreamBeginCapture(void* stream, int mode) { return failing("cudaStreamBeginCapture"); }
int cudaStreamEndCapture(void* stream, void** graph) { return failing("cudaStreamEndCapture"); }
int cudaGraphInstantiate(void** r, void* graph, unsigned long long f) { return failing("cudaGraphInstantiate"); }
int cudaGraphLaunch(void* ready, void* stream) { return failing("cudaGraphLaunch"); }
int cudaStreamSynchronize(void* stream) { return failing("cudaStreamSynchronize"); }
int cudaGraphExecDestroy(void* ready) { return 0; }
int cudaGraphDestroy(void* graph) { return 0; }
int cudaStreamDestroy(void* stream) { return 0; }
"""

Fail = Callable[..., None]


@pytest.fixture
def fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """A CUDA runtime without a device, and a function that has one of its calls fail."""
    home = tmp_path / "cuda"
    (home / "lib64").mkdir(parents=True)
    (home / "cudart.c").write_text(CUDART)
    words = ["gcc", "-shared", "-fPIC", "-o", str(home / "lib64" / "libcudart.so"), str(home / "cudart.c")]
    subprocess.run(words, check=True, capture_output=True)
    monkeypatch.setenv("CUDA_HOME", str(home))

    def set_failure(name: str, code: int = 700, since: int = 1) -> None:
        for key, value in {"FAIL": name, "FAIL_CODE": code, "FAIL_FROM": since}.items():
            monkeypatch.setenv(key, str(value))

    return set_failure


def session(tmp_path: Path) -> script.Session:
    """A session with the kernels built."""
    made = script.Session(tmp_path / "results.json", time.monotonic() + 300, False, library())
    made.results |= {"stages": {}, "machine": {"device": "none"}}
    return made


def test_a_rehearsal(tmp_path: Path) -> None:
    """From any folder, everything that needs no GPU runs and is written; what needs one is named, with the reason."""
    words = [sys.executable, str(GPU / "measure.py"), "--rehearse", "-o", "results.json"]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    stages = results["stages"]
    assert results["rehearsal"] and results["machine"]["device"] == "none: a rehearsal"
    assert stages["parity"]["ok"] and min(stages["parity"]["held"].values()) > 200
    assert stages["parity"]["kernels"] == dict.fromkeys(TYPES, len(KERNELS))
    assert stages["plugin"]["ok"] and stages["plugin"]["held"] == stages["parity"]["held"]
    assert stages["graph"]["unrun"] == "a rehearsal has no CUDA graphs"
    rows = stages["speed"]["rows"]
    assert stages["speed"]["ok"] and [r["d"] for r in rows] == [64, 256]
    assert {"copy", "torch", "ours"} <= set(rows[0]["microseconds"])
    assert "missed" not in stages["speed"] and "goal" not in rows[0], "its times are no measure of a goal"
    assert rows[0]["left_out"] == ["torch.compile"] and "torch.compile" not in rows[0]["absent"]
    assert "unrun" in stages["memcheck"] and "unrun" in stages["racecheck"]
    assert (tmp_path / "results.png").stat().st_size > 1000


def test_without_a_gpu() -> None:
    """Without a GPU the script ends with exit code 4 and one line, and so do the checks of numbers."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    answer = subprocess.run([sys.executable, str(GPU / "measure.py")], capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 4
    assert answer.stderr == "measure.py: torch sees no CUDA GPU here\n"


def test_a_wrong_number_is_told() -> None:
    """Kernels that forget a rounding point fail the matrix, which names the case and the element."""
    from kernel_build import KERNELS

    text = (KERNELS / "statistic.cuh").read_text()
    assert "epsilon" in text
    damaged = library(changed={"statistic.cuh": text.replace("sqrtf(", "2.0f * sqrtf(")})
    result = measure(ByKernels(damaged), Host(), draw=5, small=True, graph=False)
    assert result["ok"] is False
    assert "dtype=float32" in result["failed"] and " for " in result["failed"]


def test_a_graph_needs_a_gpu() -> None:
    """On the host nothing can be captured, and that is said rather than passed over."""
    with pytest.raises(Unavailable, match="no CUDA graphs"):
        measure(ByKernels(library()), Host(), draw=1, small=True, graph=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_kernel_is_reached(dtype: str) -> None:
    """The matrix has a case of each kernel of a type, and so have its samples for graphs and for the sanitizers."""
    route = ByKernels(library())
    chosen = {
        "parity": list(matrix(dtype, 60)),
        "graph": list(sample(matrix(dtype, 60), route.kernel)),
        "sanitizers": list(sample(matrix(dtype, 20), route.kernel)),
    }
    for stage, cases in chosen.items():
        reached = {(name, wide > 1, *rest) for name, wide, *rest in map(route.kernel, cases)}
        assert reached == KERNELS, stage
    assert len(chosen["sanitizers"]) < 40 < len(chosen["parity"])


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_odd_addresses(dtype: str, fail: Fail) -> None:
    """An array that is asked for at an odd address lies there, whole, and what is written there comes back."""
    import numpy as np
    from memory import Cuda

    for memory in (Host(), Cuda()):
        for odd in (False, True):
            array = np.arange(5, dtype=dtype)
            with memory.placed(array, odd=odd) as address:
                assert address % 16 == (array.itemsize if odd else 0)
                there = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * array.nbytes).from_address(address))
                assert there.tobytes() == array.tobytes()
                there.view(dtype)[:] += 1
            assert array.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("call", "words"), [("cudaGetDeviceCount", "looking for a GPU"), ("cudaMalloc", "allocation")])
def test_no_device(call: str, words: str, fail: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine without a device, or one that gives no memory at all, is told apart from kernels that fail: exit 4."""
    fail(call, 100)
    assert parity.main([str(library()), "--small", "--draw", "1"]) == 4
    said = json.loads(capsys.readouterr().out)
    assert words in said["unavailable"] and "CUDA error 100" in said["unavailable"] and "ok" not in said


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cudaMalloc", "allocating"),
        ("cudaMemcpy to the device", "copying to the device"),
        ("cudaDeviceSynchronize", "running"),
        ("cudaMemcpy to the host", "copying from the device"),
        ("cudaStreamCreate", "making a stream"),
        ("cudaStreamBeginCapture", "beginning a capture"),
        ("cudaStreamEndCapture", "ending the capture"),
        ("cudaGraphInstantiate", "instantiating the graph"),
        ("cudaGraphLaunch", "launching the graph"),
        ("cudaStreamSynchronize", "running the graph"),
    ],
)
def test_errors_of_launches(call: str, words: str, fail: Fail, capsys: pytest.CaptureFixture[str]) -> None:
    """Any CUDA error once the device is in use fails the check, which names the case and the step: exit 1."""
    fail(call, 700, since=2)
    assert parity.main([str(library()), "--small", "--draw", "1", "--graph"]) == 1
    said = json.loads(capsys.readouterr().out)
    reason = f": {words}: CUDA error 700, an illegal memory access was encountered"
    assert said["ok"] is False and said["failed"].endswith(reason)
    assert said["failed"].startswith("shape=(3, 24) dtype=float32")


def test_a_crashing_kernel(tmp_path: Path, fail: Fail) -> None:
    """The script fails where a kernel crashes, and the later stages run."""
    made = session(tmp_path)
    fail("cudaDeviceSynchronize")
    assert script.run_stages(made, ["graph", "plot"]) == 1  # nothing was timed: no picture
    written = json.loads(made.output.read_text())["stages"]
    assert written["graph"]["ok"] is False and "running: CUDA error 700" in written["graph"]["failed"]
    assert written["plot"] == {"unrun": "nothing was timed in bfloat16"}


@pytest.mark.parametrize(
    ("code", "out", "want"),
    [
        (0, '{"ok": true}', {"ok": True}),
        (99, '{"ok": true}', "errors under the checker: "),
        (99, '{"unavailable": "x"}', "errors under the checker: "),
        (99, 'Error: Device not supported\n{"unavailable": "x"}', {"unrun": "this device is not supported"}),
        (4, 'Error: Device not supported\n{"unavailable": "x"}', {"unrun": "this device is not supported"}),
        (99, 'Error: Device not supported\n{"ok": true}', "errors under the checker: "),
        (4, '{"unavailable": "x"}', {"unrun": "x"}),
        (1, '{"unavailable": "x"}', "parity.py ended with 1: "),
        (-11, '{"ok": true}', "parity.py ended with -11: "),
        (0, "", "parity.py ended with 0: "),
        (1, "Traceback", "parity.py ended with 1: Traceback"),
    ],
)
def test_exit_codes_come_first(code: int, out: str, want: dict | str) -> None:
    """What a check printed counts only with the exit code that belongs to it, a checker's before all others."""
    result = script.parity_result(subprocess.CompletedProcess([], code, out, ""))
    if isinstance(want, str):
        assert result["ok"] is False and result["failed"].startswith(want)
    elif "unrun" in want:
        assert result["unrun"].endswith(want["unrun"]) and "ok" not in result
    else:
        assert result == want


def test_a_stage_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a stage raises is told by type and words with what it had so far, and the later stages run."""

    def broken(session: script.Session) -> dict:
        session.results["stages"]["graph"] = {"rows": [1], "partial": True}
        raise KeyError("missing")

    def late(session: script.Session) -> dict:
        raise subprocess.TimeoutExpired("x", 7)

    stages = {"parity": late, "graph": broken, "plot": lambda session: {"ok": True}}
    monkeypatch.setattr(script, "STAGES", stages)
    made = session(tmp_path)
    assert script.run_stages(made, [*stages]) == 1
    assert json.loads(made.output.read_text())["stages"] == {
        "parity": {"ok": False, "failed": "stopped after 7 s, its share of the budget"},
        "graph": {"rows": [1], "partial": True, "ok": False, "failed": "KeyError: 'missing'"},
        "plot": {"ok": True},
    }


def test_a_failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a build nothing else is run, and each stage says so."""
    monkeypatch.setattr(script, "STAGES", dict(script.STAGES) | {"build": lambda session: {"ok": False, "failed": "x"}})
    made = session(tmp_path)
    assert script.run_stages(made, ["build", "parity", "plot"]) == 1
    assert made.results["stages"]["parity"] == made.results["stages"]["plot"] == {"unrun": "the build failed"}


def test_the_driver_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nvidia-smi is measured all the same: the driver's version is unknown."""
    made = session(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script._driver(made).startswith("unknown: FileNotFoundError: ")


def test_carry(tmp_path: Path) -> None:
    """No call of pip mixes requirements that have hashes with others, which pip would refuse."""
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    pip.chmod(0o755)
    target = tmp_path / "carried"
    target.mkdir()
    environment = os.environ | {"PYTHON": str(pip)}
    subprocess.run([str(GPU / "carry.sh"), str(target)], check=True, env=environment, cwd=tmp_path, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    start = f"-m pip install --quiet --no-deps --upgrade --target {target} "
    assert calls == [f"{start}--requirement={ROOT}/tests/headers.txt", f"{start}liger-kernel==0.8.5"]
    lines = [line for line in (ROOT / "tests" / "headers.txt").read_text().splitlines() if line[:1] not in ("", "#")]
    assert lines and all("--hash=" in line for line in lines)
