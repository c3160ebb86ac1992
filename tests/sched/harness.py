"""A scheduler and a hash runner wired together, with every invariant checked after every step."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace

import numpy as np

from forkpoint.cache.layer_spec import KVSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.cache.tier_entries import HOST_READY, DiskFacts, TierReport, no_entries
from forkpoint.cache.tiers import TierSizes
from forkpoint.cache.tree import Checkpoint, Node
from forkpoint.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from forkpoint.images import DIGEST_BYTES, ImageSpan
from forkpoint.params import SamplingParams
from forkpoint.sched.plan import StepPlan, SubmittedStep
from forkpoint.sched.request import Request, RequestUpdate
from forkpoint.sched.scheduler import Scheduler
from tests.cache.shapes import layout_of, state
from tests.hash_drafter import HashDrafter
from tests.hash_grammar import HashGrammar
from tests.hash_runner import HashRunner
from tests.sched.encoder_watch import EncoderWatch

VOCAB = 5000

KV = KVSpec.of(2, 16, 16, "float32")
STATE = state((3, 64), (4, 16, 16), "float32")
BIG_STATE = state((3, 256), (8, 64, 64), "float32")

LAYOUTS = {
    "several blocks a page": layout_of([KV, BIG_STATE]),
    "several slots a page": layout_of([KV] * 4 + [STATE]),
    "one each": layout_of([KV] + [STATE] * 3),
    "no states": layout_of([KV]),
    "no keys and values": layout_of([STATE]),
}
WINDOWED = {
    "states and a window": layout_of([KV, replace(KV, window=130), STATE]),
    "two windows": layout_of([KV, replace(KV, window=64), replace(KV, window=300)]),
    "a window alone": layout_of([replace(KV, window=100)] * 2),
}
WITH_WINDOWS = {**LAYOUTS, **WINDOWED}
HYBRIDS = [name for name, layout in LAYOUTS.items() if layout.has_states and layout.has_kv]


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count, dtype=np.int32)


def image_span(start: int, num_rows: int, num_columns: int, number: int) -> ImageSpan:
    """An image that differs from those of other numbers or shapes. Nothing reads its pixels."""
    digest = bytes((number, num_rows, num_columns)).ljust(DIGEST_BYTES, b"-")
    return ImageSpan(start, num_rows, num_columns, digest, np.zeros((1, 1, 3), np.uint8))


@dataclass
class Harness:
    layout: CacheLayout = field(default_factory=lambda: LAYOUTS["several blocks a page"])
    num_pages: int = 4000
    budget: int = 2048
    max_num_seqs: int = 64
    async_scheduling: bool = False
    state_write_interval: int = 1
    check: bool = True
    deterministic: bool = False
    encoder_budget: int | None = None
    encoder_cache_size: int = 1 << 15
    most_drafts: int = 0  # of a row in a step
    draft_chance: float = 0.0  # that one is right
    cache: CacheConfig = field(default_factory=CacheConfig)
    num_host_pages: int = 0
    host_streams: bool = False
    num_disk_pages: int = 0
    disk_delay: int = 0  # results before the disk, or a host tier that streams, reports what it did, at most
    disk_fail_chance: float = 0.0
    peers: PeerFacts | None = None
    loaded_at_once: int = 0  # bytes from the host tier in a plan; 0: as in the engine
    updates: dict[str, list[RequestUpdate]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)  # tokens that entered the model, by request
    in_flight: list[tuple[StepPlan, SubmittedStep]] = field(default_factory=list)
    sampling: dict[int, list[str]] = field(default_factory=dict)  # the requests that a step in flight samples
    fail_next: bool = False
    grammar_lengths: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            max_num_encoder_input_tokens=self.encoder_budget,
            encoder_cache_size=self.encoder_cache_size,
        )
        self.encoder = EncoderWatch(config.encoder_budget, config.encoder_cache_size)
        self.runner = HashRunner(self.layout, self.num_pages, VOCAB, self.num_host_pages, self.num_disk_pages)
        self.runner.disk.most_delay, self.runner.disk.fail_chance = self.disk_delay, self.disk_fail_chance
        self.runner.lags.interval = self.state_write_interval
        disk: DiskFacts | None = None
        if self.num_disk_pages:
            disk = DiskFacts(self.num_disk_pages, no_entries())
        self.runner.draft_chance = self.draft_chance or self.runner.draft_chance
        drafter = HashDrafter(self.runner, self.most_drafts, self.draft_chance) if self.most_drafts else None
        clock = time.perf_counter
        if self.host_streams:  # loads and steps take no time, so that nothing depends on it
            clock = lambda: 0.0  # noqa: E731
        self.sched = Scheduler(
            self.layout,
            self.num_pages,
            self.cache,
            config,
            deterministic=self.deterministic,
            drafter=drafter,
            clock=clock,
            tiers=TierSizes(self.num_host_pages, disk, peers=self.peers, streams=self.host_streams),
            state_write_interval=self.state_write_interval,
        )
        if self.host_streams:
            self.sched.cache.tiers.apply_reports(TierReport((HOST_READY,)), None)
        if self.loaded_at_once:
            self.sched.cache.tiers.restoring.loaded_at_once = self.loaded_at_once
        self.rows: dict[int, str] = {}

    def add(
        self, name: str, prompt: np.ndarray, max_tokens: int = 1, grammar_length: int = 0, **options: object
    ) -> Request:
        """`grammar_length`: outputs after which the request's grammar is whole; 0: no grammar."""
        of_request = ("priority", "breakpoints", "stop_token_ids", "tool_call_token_ids", "images")
        known = {key: options.pop(key) for key in of_request if key in options}
        if grammar_length:
            known["grammar"] = HashGrammar(VOCAB, grammar_length)
            self.grammar_lengths[name] = grammar_length
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        request = Request(name, prompt, params, max_tokens, seed=0, **known)  # type: ignore[arg-type]
        self.sched.add(request)
        self.requests[name], self.updates[name], self.computed[name] = request, [], 0
        return request

    def step(self) -> bool:
        """One plan, and the result of the oldest one that may now be known. False when nothing is left."""
        filed = list(self.sched.cache.store.tree.nodes())
        kept = [node.checkpoint for node in filed if node.checkpoint is not None]
        plan = self.sched.schedule()
        if plan is not None:
            self._note(plan)
            self._protect(plan, filed, kept)
            if self.fail_next:
                self.runner.fail_steps.add(plan.step)
                self.fail_next = False
            self.in_flight.append((plan, self.runner.submit(plan)))
        depth = 1 if self.async_scheduling and plan is not None else 0
        while len(self.in_flight) > depth:
            self._take_result()
        if self.check:
            self.sched.check_integrity()
        return plan is not None or bool(self.in_flight) or self.sched.has_unfinished()

    def _take_result(self) -> None:
        plan, pending = self.in_flight.pop(0)
        try:
            result = pending.result()
            updates = self.sched.apply(result)
            counts = np.ones(len(plan.sampled_rows), np.int32) if result.counts is None else result.counts
            for name, count in zip(self.sampling.pop(plan.step), counts.tolist(), strict=True):
                self.computed[name] += count - 1  # drafts that were confirmed
        except RuntimeError as error:
            updates = self.sched.fail(plan.step, error)
            for _, later in self.in_flight:
                with contextlib.suppress(RuntimeError):
                    later.result()
            self.in_flight.clear()
        for update in updates:
            self.updates[update.request.id].append(update)

    def _note(self, plan: StepPlan) -> None:
        self.encoder.note(plan)
        for added in plan.added:
            self.rows[added.row] = added.request_id
        self.sampling[plan.step] = [self.rows[row] for row in plan.sampled_rows.tolist()]
        known = plan.rows.num_tokens - plan.rows.num_drafts
        for row, count in zip(plan.rows.row.tolist(), known.tolist(), strict=True):
            self.computed[self.rows[row]] += count

    def _protect(self, plan: StepPlan, filed: list[Node], kept: list[Checkpoint]) -> None:
        """Whatever was cached before this plan must not be written by it; `filed` are the blocks."""
        windows: list[set[int]] = [set() for _ in self.layout.windows]
        for checkpoint in kept:
            for window, run in enumerate(checkpoint.windows if not checkpoint.removed else ()):
                windows[window].update(block.block for block in run)
        self.runner.protected_window_blocks = windows
        saved = set(plan.rows.save_slots.tolist())
        store = self.sched.cache.store
        checkpoints = [node.checkpoint for node in store.tree.nodes() if node.checkpoint is not None]
        self.runner.protected_slots = {c.slot for c in checkpoints} - saved
        self.runner.protected_blocks = {node.block for node in filed if not node.removed}

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("still busy")
        assert not self.sched.has_unfinished()

    def checkpoints(self, prompt: np.ndarray) -> dict[int, Checkpoint]:
        """Those on the path of a prompt, by position."""
        chain = self.sched.cache.new_lease("look", "", prompt).chain
        path = self.sched.cache.store.tree.match(chain, len(prompt) // BLOCK_SIZE)
        return {node.checkpoint.num_tokens: node.checkpoint for node in path if node.checkpoint is not None}

    def output(self, name: str) -> list[int]:
        return [u.token_id for u in self.updates[name] if u.token_id is not None]

    def expected(self, name: str) -> list[int]:
        """The outputs of an uncached run."""
        request, length = self.requests[name], self.grammar_lengths.get(name)
        grammar = HashGrammar(VOCAB, length) if length is not None else None
        prompt = request.prompt_token_ids.tolist()
        return self.runner.expected(prompt, request.max_tokens, grammar=grammar, images=request.images)

    def check_output(self, name: str) -> None:
        assert self.output(name) == self.expected(name), f"{name}: cached and uncached outputs differ"

    def check_hits(self) -> None:
        """The counter of reused tokens is what the requests report, unless one ran again."""
        requests = self.requests.values()
        if not any(request.num_preemptions for request in requests):
            assert self.sched.stats().cache.hit_tokens == sum(request.cache.num_cached_tokens for request in requests)

    def ask(self, name: str, prompt: np.ndarray, max_tokens: int = 1, **options: object) -> Request:
        """Add one request, run to the end, check its outputs and its accounting."""
        request = self.add(name, prompt, max_tokens, **options)
        self.run()
        self.check_output(name)
        computed = self.computed[name] - (max_tokens - 1)
        assert computed == len(prompt) - request.cache.num_cached_tokens, "a cached token was computed"
        return request
