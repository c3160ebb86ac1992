#!/usr/bin/env bash
# Checks what can be checked of Ascend NPUs without one (docs/ascend.md), in the environment of scripts/ascend_env.sh:
# kernels are lowered (B), their IR runs on this machine between guard pages (C), and names are compared with
# torch_npu's wheel (D). `quick` is for .ci/run: the names, and the kernels of three of six models.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.ascend/venv/bin/python
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD TRITON_INTERPRET=0
tests() { "$python" -m pytest -q -p no:cacheprovider "$@"; }

.venv/bin/python -m pytest -q -p no:cacheprovider tests/ascend/test_names.py -rs
if [ ! -e .ascend/venv/complete ]; then
    echo "ascend: tiers B and C are skipped: there is no triton-ascend"
    exit 0
fi
if [ "${1:-}" = quick ]; then
    tests -n 2 tests/ascend/test_lowering.py -k "not deterministic and not 9B and not 35B and not ssd"
    echo "ascend: skipped here, and run by make ascend: the kernels of 9B, 35B-A3B and an SSD model, those of"
    echo "ascend: deterministic tables, the estimate of on-chip memory, and tier C: the operators' tests and the engine"
    exit 0
fi
tests tests/ascend/test_lowering.py
if [ ! -e .ascend/mlir/usr ]; then
    echo "ascend: tier C is skipped: there is no MLIR 19"
    exit 0
fi
lowered=(-p tests.ascend.lowered_plugin)
operators=(attention attention_inputs conv1d elementwise linear moe recurrence sampling)
files=("${operators[@]/#/tests/ops/test_triton_}")
files=("${files[@]/%/.py}" tests/ops/test_{fp8_bytes,latent_attention,record,scan,verify}.py)
for way in "GUARD=right" "GUARD=left" "ORDER=reverse"; do
    env "$way" "$python" -m pytest -q -p no:cacheprovider "${lowered[@]}" "${files[@]}" \
        -k "not cpp and not [torch"
    env "$way" MOST_GUARDED=2 "$python" -m pytest -q -p no:cacheprovider "${lowered[@]}" \
        tests/ascend/test_engine_lowered.py
done
