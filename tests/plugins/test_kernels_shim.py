"""The shim that runs kernels on the CPU: it ends a process that does what a device leaves undefined."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from kernel_build import SHIM, compiler, cuda_include

SHUFFLES = "for (int o = 16; o > 0; o /= 2) { value += __shfl_xor_sync(0xffffffffU, value, o); }"
GOOD = {
    "sum": SHUFFLES
    + " if (lane == 0) { shared[threadIdx.x / 32] = value; } __syncthreads(); value = shared[0] + shared[1];",
    "never written": "value = shared[threadIdx.x];",
}
BARRIER = "a barrier that not every thread of the block reaches"
SHUFFLE = "a shuffle that not every lane of the warp takes part in"
BAD = {
    "one warp alone": ("if (threadIdx.x < 32) { __syncthreads(); }", BARRIER),
    "threads that ended": ("if (threadIdx.x < 5) { return; } __syncthreads();", BARRIER),
    "two barriers": ("if (threadIdx.x < 32) { __syncthreads(); } else {\n__syncthreads(); }", BARRIER),
    "lanes that ended": ("if (lane > 3) { return; } " + SHUFFLES, SHUFFLE),
    "lanes at a barrier": ("if (lane > 3) { __syncthreads(); } " + SHUFFLES, SHUFFLE),
    "two offsets": ("value = __shfl_xor_sync(0xffffffffU, value, lane < 7 ? 1 : 2);", SHUFFLE),
    "a mask": ("value = __shfl_xor_sync(0xffffU, value, 1);", "a shuffle whose mask leaves lanes out"),
    "an unaligned read": ("value = __ldg(reinterpret_cast<uint4 const*>(a.out + 1)).x;", "not aligned to its size"),
    "an unaligned write": (
        "rmsnorm::storePlain(reinterpret_cast<uint2*>(a.out + 1), uint2{});",
        "not aligned to its size",
    ),
}
BODIES = GOOD | {name: body for name, (body, _) in BAD.items()}

PROGRAM = """
#include "cuda_shim.h"
struct Args { float* out; int which; };
__global__ void kernel(Args const a)
{
    int const lane = threadIdx.x % 32;
    float value = static_cast<float>(lane);
    RMSNORM_SHARED(float, shared, 64);
    switch (a.which)
    {
    CASES
    }
    a.out[threadIdx.x] = value;
}
int main(int, char** arguments)
{
    alignas(16) static float out[64] = {};
    int const status = shim::launch(kernel, 1, 64, Args{out, std::atoi(arguments[1])});
    std::printf("%d %g %g", status, out[0], out[63]);
    return 0;
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that runs one kernel of 64 threads, by number."""
    folder = tmp_path_factory.mktemp("shim")
    cases = [f"case {i}: {{\n{body}\nbreak; }}" for i, body in enumerate(BODIES.values())]
    (folder / "one.cpp").write_text(PROGRAM.replace("CASES", "\n".join(cases)))
    command = [compiler(), "-std=c++17", "-w", f"-I{SHIM}", f"-I{cuda_include()}", "one.cpp", "-o", "one"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "one"


def execute(built: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Runs the kernel of a name."""
    return subprocess.run([built, str(list(BODIES).index(name))], capture_output=True, text=True)


def test_a_good_kernel_runs(built: Path) -> None:
    """Shuffles within warps and values through shared memory across a barrier arrive as on a device."""
    answer = execute(built, "sum")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "0 992 992", "")


@pytest.mark.parametrize("name", BAD)
def test_what_a_device_leaves_undefined_ends_the_process(built: Path, name: str) -> None:
    """Divergent barriers, lanes that are absent from a shuffle and unaligned accesses abort with a message."""
    answer = execute(built, name)
    assert answer.returncode == -signal.SIGABRT
    assert answer.stderr.startswith("shim: ") and BAD[name][1] in answer.stderr


def test_shared_memory_starts_as_nan(built: Path) -> None:
    """A value that was never written is not by chance the right one."""
    assert "nan" in execute(built, "never written").stdout
