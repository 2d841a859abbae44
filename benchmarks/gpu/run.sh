#!/usr/bin/env bash
# Builds the native part for the GPU of this machine, checks its numbers there and times it beside its peers.
#
#   benchmarks/gpu/run.sh [-o RESULTS.json] [--budget 480] [--only STAGE]
#
# Needs a CUDA GPU, nvcc, CMake 3.24, and a python3 (PYTHON names another) with torch, numpy, ml-dtypes, onnx and onnx-ir. No
# network: what `benchmarks/gpu/carry.sh` fetched beforehand into build/carry is used where it lies there.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON=${PYTHON:-python3}

for tool in nvcc cmake "$PYTHON"; do
  command -v "$tool" >/dev/null || { echo "run.sh: $tool is not on PATH" >&2; exit 4; }
done
if [ -d "$root/build/carry" ]; then
  export PYTHONPATH="$root/build/carry${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$PYTHON" "$root/benchmarks/gpu/measure.py" "$@"
