#!/usr/bin/env bash
# Fetches what the GPU machine may lack into build/carry: TensorRT's headers, and the peer that is no part of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
"${PYTHON:-python3}" -m pip install --quiet --no-deps --upgrade --target build/carry \
  -r tests/headers.txt liger-kernel==0.8.5
du -sh build/carry
