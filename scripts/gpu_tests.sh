#!/usr/bin/env bash
# All tests that look at a GPU, at full sizes, on the machine's CUDA device: scripts/gpu_tests.sh [pytest options]
# SHARDS processes share the device (8); tests that measure its memory run alone, last. Logs stay in the folder LOGS.
set -uo pipefail
cd "$(dirname "$0")/.."
unset TRITON_INTERPRET
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
alone=tests/gpu/test_engine.py::test_the_share_of_memory_decides_the_arena
folder=${LOGS:-$(mktemp -d)}
python3 -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
python3 -m pytest --collect-only tests/ops/test_triton_*.py tests/gpu "$@" | grep :: | grep -v "^$alone" > "$folder/all" || exit 1
split -n "l/${SHARDS:-8}" "$folder/all" "$folder/shard."
failed=0
for shard in "$folder"/shard.*; do
  python3 -m pytest -q -p no:cacheprovider --durations=3 "@$shard" > "$shard.log" 2>&1 &
done
for job in $(jobs -p); do wait "$job" || failed=1; done
tail -n 30 "$folder"/*.log
if [ $# -eq 0 ]; then python3 -m pytest -q -p no:cacheprovider "$alone" || failed=1; fi
exit $failed
