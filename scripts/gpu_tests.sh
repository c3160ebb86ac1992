#!/usr/bin/env bash
# All tests that look at a GPU, at full sizes, on the machine's CUDA device: scripts/gpu_tests.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
unset TRITON_INTERPRET
python3 -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
exec python3 -m pytest tests/ops/test_triton_*.py tests/gpu "$@"
