"""Checks and times the host tier on one GPU: `python -m benchmarks.gpu_tiers`.

First, answers of an engine with a small arena and a host tier must equal those of an engine without a cache, bit for
bit. Then the 9B shape with dummy weights is timed: a prefix that comes from the host, the pauses of other streams
meanwhile, and a tier that is slower than computing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.gpu_9b.options import engine_options
from benchmarks.gpu_9b.shape import SHAPE_9B, write_config
from benchmarks.model131m import HybridShape
from benchmarks.random_model import make_random_model
from forkpoint.config import BLOCK_SIZE
from forkpoint.engine.core import EngineCore
from forkpoint.engine.llm import LLM
from forkpoint.errors import ForkpointError
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams
from forkpoint.platforms.copy_stream import PIECE_BYTES
from forkpoint.platforms.platform import DeviceEvent
from forkpoint.runtime.host_copies import StreamCopies
from forkpoint.runtime.runner import ModelRunner
from forkpoint.sched.plan import MoveKind, MoveRoute

GIB = 1 << 30
PARTS = ("bits", "times")
THROTTLED_RATE = 0.3e9  # bytes per second
EVICTED_AT_ONCE = 384 << 20  # bytes that are stored before a step reports what has been stored
Ids = list[int]


class CheckFailedError(ForkpointError):
    """Raised if an answer has other bits, or if a measurement did not do what it is to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes9B:
    """Lengths in tokens, and counts. The arena holds the streams and few of the prefixes."""

    prefix: int = 16_384
    suffix: int = 64
    num_prefixes: int = 10
    stream_prompt: int = 256  # the first stream's; others have a token less each, so that blocks do not end together
    num_streams: int = 64
    num_steps: int = 320  # of each phase with streams
    between: int = 24  # steps between two requests for a prefix
    repeats: int = 5
    arena_gib: float = 9.0
    host_gib: float = 28.0
    max_num_seqs: int = 72


class TierBench:
    """An engine in this process whose arena can be emptied to its host tier."""

    def __init__(self, llm: LLM, vocab_size: int, seed: int = 0) -> None:
        self.llm = llm
        self.engine = llm._engine
        self.core: EngineCore = llm._engine.core
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def ids(self, count: int) -> Ids:
        """Return new token ids."""
        found: Ids = self._random.integers(1, self._vocab_size, count).tolist()
        return found

    def ask(self, prompt: Ids, max_tokens: int = 1) -> tuple[RequestOutput, float]:
        """Return a greedy answer, and the seconds to its first token."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        error = output.outputs[0].error
        if error is not None:
            raise CheckFailedError(f"a request failed: {error}")
        return output, (output.metrics.first_token_s or 0.0) - start

    @property
    def copies(self) -> StreamCopies:
        runner = self.core._runner
        assert isinstance(runner, ModelRunner) and isinstance(runner.arena.copies, StreamCopies)
        return runner.arena.copies

    def wait_until_ready(self) -> float:
        """Run short requests until the tier's memory is pinned, and return the seconds."""
        start = time.perf_counter()
        while not getattr(self.core.scheduler.cache.tiers.host, "is_ready", False):
            self.ask(self.ids(65))
            time.sleep(0.05)
            if time.perf_counter() - start > 120:
                raise CheckFailedError("the host tier's memory is not pinned after 120 s")
        return time.perf_counter() - start

    def empty_arena(self) -> None:
        """Evict all that eviction can take, a part at a time, so that all of it can be stored."""
        cache, layout = self.core.scheduler.cache, self.core.scheduler.layout.in_tiers()
        sizes = {MoveKind.BLOCK: layout.block_bytes, MoveKind.SLOT: layout.slot_bytes}
        is_left = True
        while is_left:
            stored = 0
            while is_left and stored < EVICTED_AT_ONCE:
                is_left = cache.store.evict_least()
                stored = sum(sizes[move.kind] for move in cache.arena.moves if move.route is MoveRoute.STORE)
            self._run_empty_step()
        dead = cache.store._evict_dead(1 << 30)
        cache.store._give_blocks(dead)

    def _run_empty_step(self) -> None:
        """Run steps until what was evicted has been stored."""
        self.ask(self.ids(8))
        while self.copies._out.is_busy:
            time.sleep(0.001)
            self.ask(self.ids(8))

    def stored_bytes(self) -> int:
        return int(self.llm.get_metrics()["host_stored_bytes"])


# --- bits


def bits_of(output: RequestOutput) -> tuple[object, ...]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return tuple(completion.token_ids), [
        sorted((k, v.logprob) for k, v in each.items()) for each in completion.logprobs
    ]


def check_bits(folder: Path, device: str) -> Iterator[str]:
    """Compare answers with a small arena and a host tier to those without a cache, with and without drafts."""
    rng = np.random.default_rng(1)
    talks = [rng.integers(5, 250, int(rng.integers(300, 900))).tolist() for _ in range(8)]
    prompts = [talk + rng.integers(5, 250, int(rng.integers(1, 90))).tolist() for _ in range(3) for talk in talks]
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True)
    shared: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 4, "deterministic": True, "log_level": "error"}
    shared |= {"device": device, "skip_tokenizer_init": True}
    tier = {"kv_cache_memory_bytes": 24 << 20, "kv_offloading_size": 1.0}
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        answers: list[list[RequestOutput]] = []
        for options in ({"enable_prefix_caching": False, "kv_cache_memory_bytes": 512 << 20}, tier):
            with LLM(str(folder), speculative_config=drafts, **shared, **options) as llm:
                bench = TierBench(llm, 250)
                if options is tier:
                    bench.wait_until_ready()
                answers.append([])
                for first in range(0, len(prompts), 3):  # three at a time
                    answers[-1] += llm.generate(prompts[first : first + 3], params, use_tqdm=False)
                metrics = llm.get_metrics()
        cold, tiered = answers
        wrong = sum(bits_of(a) != bits_of(b) for a, b in zip(cold, tiered, strict=True))
        restored = int(metrics["host_hit_tokens"])
        if wrong or not restored:
            raise CheckFailedError(f"drafts {drafts}: {wrong} of {len(prompts)} answers differ, {restored} restored")
        name = "off" if drafts is None else "on"
        yield (
            f"bits, drafts {name}: {len(prompts)} of {len(prompts)} answers equal; {restored} tokens restored, "
            f"{metrics['num_replayed_steps']} steps from graphs, {metrics['host_skipped']} entries not stored"
        )


# --- times


class ThrottledEvent:
    """An event that is reached at a given time at the earliest."""

    def __init__(self, event: Any, at_s: float) -> None:
        self._event, self._at_s = event, at_s

    def wait(self, stream: Any) -> None:
        """Let a stream wait for the event, as for one of its own events. The stream does not wait for the time."""
        self._event.wait(stream)

    def query(self) -> bool:
        return time.perf_counter() >= self._at_s and self._event.query()

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._at_s - time.perf_counter()))
        self._event.synchronize()


class ThrottledStream:
    """A stream for copies that seems to copy THROTTLED_RATE bytes a second."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._until_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def copy(self, copies: Sequence[tuple[Any, Any]]) -> None:
        self._stream.copy(copies)
        num_bytes = sum(target.numel() for target, _ in copies)
        self._until_s = max(self._until_s, time.perf_counter()) + num_bytes / THROTTLED_RATE

    def record_event(self) -> DeviceEvent:
        return ThrottledEvent(self._stream.record_event(), self._until_s)


def shown(seconds: Sequence[float]) -> str:
    return f"{np.median(seconds) * 1e3:.1f} ms (of {', '.join(f'{each * 1e3:.1f}' for each in seconds)})"


def time_copies(bench: TierBench, sizes: TierSizes9B) -> str:
    """Time the copies of a prefix from the host's memory alone, which is the floor of restoring it."""
    layout, memory, platform = bench.core.scheduler.layout, bench.copies._memory, bench.copies._platform
    num_bytes = sizes.prefix // BLOCK_SIZE * layout.block_bytes + layout.slot_bytes
    seconds = []
    for _ in range(sizes.repeats):
        target = torch.empty(num_bytes, dtype=torch.uint8, device=memory.arena.device)
        platform.synchronize()
        start = time.perf_counter()
        for begin in range(0, num_bytes, PIECE_BYTES):
            end = min(num_bytes, begin + PIECE_BYTES)
            target[begin:end].copy_(memory.host[begin:end], non_blocking=True)
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
    rate = num_bytes / float(np.median(seconds)) / 1e9
    return f"copies of {num_bytes / 2**20:.0f} MiB alone: {shown(seconds)}, {rate:.1f} GB/s"


def time_hits(bench: TierBench, sizes: TierSizes9B) -> Iterator[str]:
    """Time the first token of a long prompt: computed, from the arena, and from the host."""
    colds, warms, hosts, restored = list[float](), list[float](), list[float](), list[int]()
    bench.ask(bench.ids(sizes.prefix))  # compiles
    for _ in range(sizes.repeats):
        prompt = bench.ids(sizes.prefix)
        colds.append(bench.ask(prompt)[1])
        warms.append(bench.ask(prompt + bench.ids(sizes.suffix))[1])
        bench.empty_arena()
        output, seconds = bench.ask(prompt + bench.ids(sizes.suffix))
        hosts.append(seconds)
        restored.append(output.cache.num_restored_tokens)
    yield f"first token, {sizes.prefix} tokens computed: {shown(colds)}"
    yield f"first token, prefix in the arena: {shown(warms)}"
    yield f"first token, prefix in the host tier: {shown(hosts)}; asked <= 25 ms; restored {restored}"


def time_slow_tier(bench: TierBench, sizes: TierSizes9B) -> Iterator[str]:
    """Time the first token if the host tier is slower than computing.

    Measure this last: afterwards the engine loads nothing for a minute.
    """
    colds = [bench.ask(bench.ids(sizes.prefix + sizes.suffix))[1] for _ in range(sizes.repeats)]
    lane = bench.copies._in
    fast, lane.stream = lane.stream, ThrottledStream(lane.stream)
    slow, given_up = list[float](), list[int]()
    for _ in range(sizes.repeats + 1):
        prompt = bench.ids(sizes.prefix)
        bench.ask(prompt)
        bench.empty_arena()
        output, seconds = bench.ask(prompt + bench.ids(sizes.suffix))
        slow.append(seconds)
        given_up.append(output.cache.num_restored_tokens)
    lane.stream = fast
    first, later = (float(np.median(each) / np.median(colds) - 1) for each in (slow[:1], slow[1:]))
    yield (
        f"first token, host tier of {THROTTLED_RATE / 1e9} GB/s: first {slow[0] * 1e3:.1f} ms, {first:+.1%} of "
        f"computing, then {shown(slow[1:])}, {later:+.1%}; asked <= +5 %; restored {given_up}"
    )


class Streams:
    """Other streams that decode all the time, and the seconds between their tokens."""

    def __init__(self, bench: TierBench, sizes: TierSizes9B, max_tokens: int) -> None:
        self._bench = bench
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        add = bench.engine.add_request
        prompt = bench.engine.inputs.prompt
        lengths = range(sizes.stream_prompt, sizes.stream_prompt - sizes.num_streams, -1)
        self._names = {add(prompt(bench.ids(length)), params) for length in lengths}
        self._seen: dict[str, int] = dict.fromkeys(self._names, 0)
        self._last_s: dict[str, float] = {}
        self.pauses: list[float] = []
        self.num_restored = 0
        self._asked: set[str] = set()

    def ask(self, prompt: Ids) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._asked.add(self._bench.engine.add_request(self._bench.engine.inputs.prompt(prompt), params))

    def advance(self) -> None:
        """Run a step and note when streams got tokens."""
        changed = self._bench.engine.advance()
        now = time.perf_counter()
        for state in changed:
            name = state.request_id
            if name in self._asked and state.finished:
                self.num_restored += state.output().cache.num_restored_tokens
                self._asked.discard(name)
            elif name in self._names:
                if name in self._last_s:
                    self.pauses.append(now - self._last_s[name])
                self._last_s[name] = now

    def stop(self) -> None:
        for name in self._names:
            self._bench.engine.abort(name)
        while self._bench.engine.has_unfinished():
            self._bench.engine.advance()


def time_pauses(bench: TierBench, sizes: TierSizes9B) -> Iterator[str]:
    """Time the pauses of streams: alone, beside hits in the arena, and beside prefixes that load and store."""
    prefixes = [bench.ids(sizes.prefix) for _ in range(sizes.num_prefixes)]
    bench.llm.reset_prefix_cache()
    for prefix in prefixes:
        bench.ask(prefix)
        bench.empty_arena()
    percentiles: dict[str, float] = {}
    for name, chosen in (("alone", []), ("beside hits in the arena", prefixes[:1]), ("beside loads", prefixes)):
        streams = Streams(bench, sizes, 8 + 2 * sizes.num_steps)  # new ones, so that each phase has the same lengths
        for _ in range(sizes.num_steps // 4):
            streams.advance()
        streams.ask(prefixes[0] + bench.ids(sizes.suffix))
        for _ in range(sizes.between):
            streams.advance()
        streams.pauses.clear()
        before, stored, streams.num_restored = bench.core.num_replayed_steps, bench.stored_bytes(), 0
        for step in range(sizes.num_steps):
            if chosen and step % sizes.between == 0:
                streams.ask(chosen[step // sizes.between % len(chosen)] + bench.ids(sizes.suffix))
            streams.advance()
        streams.stop()
        percentiles[name] = float(np.percentile(streams.pauses, 99))
        yield (
            f"{sizes.num_streams} streams {name}: p50 {np.median(streams.pauses) * 1e3:.2f} ms, "
            f"p99 {percentiles[name] * 1e3:.2f} ms; {streams.num_restored} tokens restored, "
            f"{(bench.stored_bytes() - stored) / GIB:.2f} GiB stored, "
            f"{bench.core.num_replayed_steps - before} of {sizes.num_steps} steps from graphs"
        )
        if name == "beside loads" and not streams.num_restored:
            raise CheckFailedError("no prefix was loaded beside the streams")
    alone, arena, loads = percentiles.values()
    ratios = f"{loads / alone:.3f} x alone (asked <= 1.05), {loads / arena:.3f} x beside hits in the arena"
    yield f"p99 beside loads: {ratios}"


def run_times(folder: Path, shape: HybridShape, sizes: TierSizes9B, device: str) -> Iterator[str]:
    options = engine_options(device, enforce_eager=False) | {
        "kv_cache_memory_bytes": int(sizes.arena_gib * GIB),
        "kv_offloading_size": sizes.host_gib,
        "max_num_seqs": sizes.max_num_seqs,
    }
    start = time.perf_counter()
    with LLM(str(write_config(folder, shape)), **options) as llm:
        started_s = time.perf_counter() - start
        bench = TierBench(llm, shape.vocab_size)
        pinned_s = bench.wait_until_ready()
        while bench.core.prepare():  # records a graph, as a server does while it is idle
            pass
        yield f"9B engine started in {started_s:.1f} s; {sizes.host_gib} GiB pinned {pinned_s:.1f} s later"
        yield time_copies(bench, sizes)
        yield from time_hits(bench, sizes)
        yield from time_pauses(bench, sizes)
        yield from time_slow_tier(bench, sizes)
        skipped = llm.get_metrics()["host_skipped"]
        yield f"entries not stored in all: {skipped}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tiers", description=(__doc__ or "").strip())
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=TierSizes9B().repeats, help="of each time to first token")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    parts = args.only.split(",")
    card = "no GPU"
    if torch.cuda.is_available():
        card = torch.cuda.get_device_name()
    print(f"# {card}, {machine.commit_hash()}, {machine.today()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if "times" in parts:
            for line in run_times(Path(folder) / "9b", SHAPE_9B, TierSizes9B(repeats=args.repeats), args.device):
                print(line, flush=True)
        if "bits" in parts:
            for line in check_bits(make_random_model(), args.device):
                print(line, flush=True)


if __name__ == "__main__":
    main()
