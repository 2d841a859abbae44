#!/usr/bin/env bash
# Fetches what the GPU machine may lack into build/carry (or the folder named): TensorRT's headers, and the peer that is
# no part of torch.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
target="${1:-$root/build/carry}"
# Two calls: a requirement with a hash makes pip ask for a hash of every requirement of that call.
for what in "--requirement=$root/tests/headers.txt" "liger-kernel==0.8.5"; do
  "${PYTHON:-python3}" -m pip install --quiet --no-deps --upgrade --target "$target" "$what"
done
du -sh "$target"
