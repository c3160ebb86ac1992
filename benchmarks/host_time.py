"""The host's share of a step: requests, cache, plans and outputs with a runner that answers at once.

python -m benchmarks.host_time
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu_9b.shape import write_config
from benchmarks.model131m import HybridShape
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from forkpoint.platforms.cuda import CudaPlatform
from forkpoint.sched.plan import StepPlan, StepResult

# As many blocks and slots to keep account of as a large model has, of which no byte is ever read.
SHAPE = HybridShape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_key_heads=2,
    num_value_heads=4,
    state_dim=32,
)
ARENA_BYTES = 600 << 20
DECODE_PROMPT, DECODE_STEPS = 256, 128


@dataclass(frozen=True, slots=True)
class Answered:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


class InstantRunner:
    """Samples token 7 for every row, without any work."""

    def submit(self, plan: StepPlan) -> Answered:
        token_ids = np.full(len(plan.sampled_rows), 7, np.int32)
        return Answered(StepResult(plan.step, token_ids, num_tokens=plan.num_tokens))

    def close(self) -> None:
        """Do nothing, because nothing is held."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """The median CPU seconds of one request, or of one step."""

    name: str
    seconds: float


class HostBench:
    """`LLM.generate` over an InstantRunner, with the defaults of a GPU."""

    def __init__(self, folder: Path, repeats: int, *, events: bool) -> None:
        self._llm = LLM(
            str(write_config(folder, SHAPE)),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            cpu_ops="torch",
            log_level="error",
            kv_cache_memory_bytes=ARENA_BYTES,
            max_num_batched_tokens=CudaPlatform.defaults.max_num_batched_tokens,
            max_num_seqs=CudaPlatform.defaults.max_num_seqs,
            async_scheduling=CudaPlatform.defaults.async_scheduling,
            kv_events_config={"enable_kv_cache_events": events, "endpoint": f"ipc://{folder.parent}/events"},
        )
        self._llm._engine.core._runner = InstantRunner()
        self._random = np.random.default_rng(0)
        self._repeats = repeats

    def run(self, prompt_len: int, extension: int, batches: tuple[int, ...]) -> Iterator[HostTime]:
        """Measure a prompt, the same prompt with `extension` more tokens, and decode steps of each batch size."""
        prompt = self._ids(prompt_len)
        yield self._measure(f"{prompt_len:,}-token prompt, cold", lambda: self._ask([self._ids(prompt_len)], 1))
        self._ask([prompt], 1)
        warm = f"the same + {extension} tokens, warm"
        yield self._measure(warm, lambda: self._ask([prompt + self._ids(extension)], 1))
        for batch in batches:
            seconds = statistics.median(self._decode_s(batch) for _ in range(self._repeats))
            yield HostTime(f"decode step, {batch} rows", seconds)

    def _decode_s(self, batch: int) -> float:
        short, long = (
            self._ask([self._ids(DECODE_PROMPT) for _ in range(batch)], count) for count in (1, DECODE_STEPS + 1)
        )
        return (long - short) / DECODE_STEPS

    def _measure(self, name: str, call: Callable[[], float]) -> HostTime:
        return HostTime(name, statistics.median(call() for _ in range(self._repeats)))

    def _ask(self, prompts: list[list[int]], max_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.process_time()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - start

    def _ids(self, count: int) -> list[int]:
        found: list[int] = self._random.integers(1, SHAPE.vocab_size, count).tolist()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--events", action="store_true", help="publish what can be restored; its thread counts too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for found in HostBench(Path(folder) / "model", args.repeats, events=args.events).run(16_384, 128, (1, 32, 128)):
            print(f"{found.name:<36} {found.seconds * 1e6:8.0f} us", flush=True)


if __name__ == "__main__":
    main()
