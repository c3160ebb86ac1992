"""Measures the resident memory of an engine over many small requests in batches of changing size."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from forkpoint.demo.model import default_model
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams

MOST_OPEN = 64
MIB = 2**20


def main() -> None:
    """Print a line for each twentieth of the requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="a model folder; default: the demo model")
    parser.add_argument("--num-requests", type=int, default=20_000)
    options = parser.parse_args()
    with LLM(options.model or default_model(), max_model_len=512, num_threads=1, log_level="error") as llm:
        engine, rng = llm._engine, np.random.default_rng(0)
        num_done = num_open = shown = 0
        target = 1
        while num_done < options.num_requests:
            if rng.random() < 0.05:
                target = int(rng.integers(1, MOST_OPEN))
            for _ in range(target - num_open):
                ids = rng.integers(4, engine.inputs.vocab_size, int(rng.integers(1, 60))).tolist()
                params = SamplingParams(max_tokens=int(rng.integers(1, 8)), temperature=rng.random(), ignore_eos=True)
                engine.add_request(engine.inputs.prompt(ids), params)
            num_open = max(num_open, target)
            num_ended = sum(state.finished for state in engine.advance())
            num_done, num_open = num_done + num_ended, num_open - num_ended
            if num_done >= shown:
                print(f"{num_done:6} requests  {time.process_time():7.1f} s of CPU  {_resident_bytes() / MIB:6.0f} MiB")
                shown += max(1, options.num_requests // 20)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
