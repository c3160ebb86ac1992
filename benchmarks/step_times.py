"""Times single steps of the 9B shape on a GPU, for the simulator: `python -m benchmarks.step_times OUT.json`.

Weights are dummy, and options are the defaults. A step's time is the time between two results while the device is kept
busy. Its load is read from its plan. Nearly equal loads form one line, with the median.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.shape import SHAPE_9B, write_config
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from forkpoint.sched.plan import StepPlan, StepResult
from forkpoint.sched.request import RequestUpdate
from forkpoint.sched.scheduler import Scheduler
from forkpoint.sim.cost import H200, CostModel, StepLoad
from forkpoint.sim.engine_replica import load_of
from forkpoint.sim.shape import QWEN3_5_9B
from studies.calibration import MeasuredStep, calibrate

# (requests, prompt tokens, output tokens)
WORK = (
    (1, 512, 1),
    (1, 1024, 1),
    (1, 2048, 1),
    (1, 4096, 1),
    (1, 32_000, 1),
    (1, 256, 64),
    (8, 16_000, 32),
    (32, 256, 64),
    (32, 4000, 64),
    (128, 256, 64),
    (128, 2000, 32),
    (250, 256, 48),
)


class StepRecorder:
    """Sits between the step loop and the scheduler, and records loads and times."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._loads: dict[int, StepLoad] = {}
        self._last_s = 0.0
        self._was_busy = False
        self.times: dict[StepLoad, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self) -> StepPlan | None:
        plan = self._scheduler.schedule()
        if plan is not None:
            self._loads[plan.step] = load_of(plan, self._scheduler.layout)
        return plan

    def apply(self, result: StepResult) -> list[RequestUpdate]:
        now = time.perf_counter()
        load = self._loads.pop(result.step)
        if self._was_busy:
            self.times[load].append(now - self._last_s)
        self._last_s, self._was_busy = now, bool(self._loads)
        return self._scheduler.apply(result)


def measure(llm: LLM, repeats: int) -> list[MeasuredStep]:
    """Run all work. Return a line for each kind of load, with the median of its times."""
    core = llm._engine.core
    scheduler = core.scheduler
    assert isinstance(scheduler, Scheduler)
    recorder = StepRecorder(scheduler)
    core.scheduler = cast(Scheduler, recorder)
    rng = np.random.default_rng(0)
    for round_number in range(repeats + 1):
        if round_number == 1:
            recorder.times.clear()  # the first round warmed up
        for count, prompt, output in WORK:
            prompts = rng.integers(1, 30_000, (count, prompt)).tolist()
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    core.scheduler = scheduler
    kinds: dict[tuple[int, ...], list[tuple[StepLoad, float]]] = defaultdict(list)
    for load, times in recorder.times.items():
        kind = (load.prefill_tokens, round(load.prefill_pairs / 2e6), load.num_decodes, load.decode_kv_tokens // 8192)
        kinds[kind] += [(load, seconds) for seconds in times]
    found = []
    for samples in kinds.values():
        samples.sort(key=lambda sample: sample[1])
        load, _ = samples[len(samples) // 2]
        found.append(MeasuredStep(load, median(seconds for _, seconds in samples)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument("out", type=Path, help="JSON file")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        model = write_config(Path(temporary) / "model", SHAPE_9B)
        with LLM(str(model), **engine_options("auto", enforce_eager=False)) as llm:
            steps = measure(llm, args.repeats)
    lines = [{"load": asdict(step.load), "seconds": step.seconds} for step in steps]
    content = {"device": torch.cuda.get_device_name(), "model": "qwen3.5-9b", "steps": lines}
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    model_before = CostModel(QWEN3_5_9B, H200)
    fitted = calibrate(model_before, steps)
    print(fitted.device)
    for step in steps:
        before, after = model_before.step_s(step.load) / step.seconds, fitted.step_s(step.load) / step.seconds
        load = step.load
        print(
            f"{load.prefill_tokens:6d} {load.prefill_pairs:12.0f} {load.num_decodes:4d} {load.decode_kv_tokens:8d} "
            f"{1e3 * step.seconds:8.2f} ms, predicted / measured {before:.2f}, fitted {after:.2f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
