"""Seconds from the start of a process to its first token, in a process of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.protocol import repository_root
from forkpoint.errors import ForkpointError

READY = "first token:"


class ChildFailedError(ForkpointError):
    """The measured process ended without a token."""


def measure_first_token(model: Path, kernel_cache: Path, options: list[str]) -> tuple[float, str]:
    """Return the seconds from starting a Python process to the first token of a short prompt, and the process's own
    account of them.

    `kernel_cache` is the folder of compiled kernels. `options` are further arguments of this module.
    """
    path = [str(repository_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TRITON_CACHE_DIR": str(kernel_cache), "PYTHONPATH": os.pathsep.join(path)}
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.gpu_9b.first_token", "--model", str(model), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY):
                seconds = time.perf_counter() - start
                process.stdout.read()
                return seconds, line.removeprefix(READY).strip()
    raise ChildFailedError(f"{' '.join(command)} ended with exit code {process.returncode} before its first token")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--quantization")
    parser.add_argument("--log-level", default="warning")
    args = parser.parse_args()
    marks = {"python": time.perf_counter()}
    from benchmarks.gpu_9b.options import engine_options
    from forkpoint import LLM, SamplingParams

    marks["imports"] = time.perf_counter()
    options = engine_options(args.device, args.enforce_eager, quantization=args.quantization)
    llm = LLM(args.model, **{**options, "log_level": args.log_level})
    marks["engine"] = time.perf_counter()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    marks["token"] = time.perf_counter()
    times = list(marks.values())
    parts = [f"{name} {end - start:.1f} s" for name, start, end in zip(list(marks)[1:], times, times[1:], strict=False)]
    print(READY, ", ".join(parts), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
