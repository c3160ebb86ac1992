#!/usr/bin/env bash
# Creates .ascend/: an environment with triton-ascend, which has the name of Triton and cannot share an environment with
# it, and MLIR 19, which compiles triton-ascend's IR for this machine. Nothing is installed outside that folder. If a
# part cannot be downloaded, a line says so, and the tests that need it are skipped. `quick` leaves MLIR out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
mkdir -p .ascend
if [ ! -e .ascend/venv/complete ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
        { echo "ascend: triton-ascend 3.2.0 has wheels only for Python 3.11 and older"; exit 0; }
    "$python" -m venv .ascend/venv
    .ascend/venv/bin/python -m pip install --quiet --no-compile pybind11 'numpy<2.3' &&
        .ascend/venv/bin/python -m pip install --quiet --no-compile --no-deps triton-ascend==3.2.0 ||
        { echo "ascend: no triton-ascend 3.2.0 from the package index"; exit 0; }
    # torch, pytest and other packages come from the usual environment; the environment's own packages come first.
    "$python" -c 'import site; print(site.getsitepackages()[0])' > "$(echo .ascend/venv/lib/python3*/site-packages)/zz.pth"
    touch .ascend/venv/complete
fi
if [ "${1:-}" != quick ] && [ ! -e .ascend/mlir/usr ] && command -v apt-get > /dev/null; then
    mkdir -p .ascend/debs
    (cd .ascend/debs && apt-get download mlir-19-tools llvm-19 libmlir-19 libllvm19 > /dev/null 2>&1) ||
        { echo "ascend: no packages of MLIR 19 from apt-get"; exit 0; }
    # Unpacked under another name first, so that an unpacking that broke off is done again.
    rm -rf .ascend/mlir .ascend/mlir.part
    for package in .ascend/debs/*.deb; do dpkg -x "$package" .ascend/mlir.part; done
    mv .ascend/mlir.part .ascend/mlir
    rm -r .ascend/debs
fi
