#!/usr/bin/env bash
# Makes .ascend/: an environment with triton-ascend (which takes Triton's name, and so wants one of its own) beside the
# packages of the usual one, and MLIR 19, which turns what it makes into code for this machine. Nothing is installed
# outside that folder. What cannot be had is said, and skipped by what needs it; `quick` leaves MLIR out.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
mkdir -p .ascend
if [ ! -e .ascend/venv/complete ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
        { echo "ascend: triton-ascend 3.2.0 has wheels for Python 3.11 and older alone"; exit 0; }
    "$python" -m venv .ascend/venv
    .ascend/venv/bin/python -m pip install --quiet --no-compile pybind11 'numpy<2.3' &&
        .ascend/venv/bin/python -m pip install --quiet --no-compile --no-deps triton-ascend==3.2.0 ||
        { echo "ascend: no triton-ascend 3.2.0 from the package index"; exit 0; }
    # Behind its own packages come those of the usual environment: torch, pytest and the others.
    "$python" -c 'import site; print(site.getsitepackages()[0])' > "$(echo .ascend/venv/lib/python3*/site-packages)/zz.pth"
    touch .ascend/venv/complete
fi
if [ "${1:-}" != quick ] && [ ! -e .ascend/mlir/usr ] && command -v apt-get > /dev/null; then
    mkdir -p .ascend/debs
    (cd .ascend/debs && apt-get download mlir-19-tools llvm-19 libmlir-19 libllvm19 > /dev/null 2>&1) ||
        { echo "ascend: no packages of MLIR 19 from apt-get"; exit 0; }
    # Under another name until all of it is there: an unpacking that broke off is done again.
    rm -rf .ascend/mlir .ascend/mlir.part
    for package in .ascend/debs/*.deb; do dpkg -x "$package" .ascend/mlir.part; done
    mv .ascend/mlir.part .ascend/mlir
    rm -r .ascend/debs
fi
