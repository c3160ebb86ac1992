#!/usr/bin/env bash
# All tests that look at a GPU, at full sizes, on the machine's CUDA devices: scripts/gpu_tests.sh [pytest options]
# SHARDS processes share the devices (8); tests that measure memory run alone, last. Logs stay in the folder LOGS.
set -uo pipefail
cd "$(dirname "$0")/.."
unset TRITON_INTERPRET
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
alone=(tests/gpu/test_memory.py tests/gpu/test_engine.py::test_the_share_of_memory_decides_the_arena)
folder=${LOGS:-$(mktemp -d)}
pytest="python3 -m pytest -o addopts= -p no:cacheprovider"
devices=$(python3 -c 'import torch; print(torch.cuda.device_count())')
[ "$devices" -gt 0 ] || { echo "gpu_tests: torch sees no CUDA device here" >&2; exit 1; }
python3 -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'
files=$(grep -l triton_cases tests/ops/test_*.py)
# The C++ operators read the host's memory; `make test` has their cases.
$pytest -q --collect-only $files tests/gpu "$@" | grep :: | grep -v "${alone[@]/#/-e^}" -e '\[cpp' > "$folder/all" || exit 1
split -d -a 2 -n "r/${SHARDS:-8}" "$folder/all" "$folder/shard."
failed=0
for shard in "$folder"/shard.??; do
  first=$((10#${shard##*.} % devices))  # every device is seen, a shard's own one first
  seen=$first$(for d in $(seq 0 $((devices - 1))); do [ "$d" = $first ] || printf ',%s' "$d"; done)
  CUDA_VISIBLE_DEVICES=$seen $pytest -v --durations=3 "@$shard" > "$shard.log" 2>&1 &
done
for job in $(jobs -p); do wait "$job" || failed=1; done
grep -h "^FAILED\|^ERROR\|^E  " "$folder"/*.log
tail -q -n 1 "$folder"/*.log
if [ $# -eq 0 ]; then $pytest -v "${alone[@]}" || failed=1; fi
exit $failed
