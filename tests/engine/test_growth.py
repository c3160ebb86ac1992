"""Two thousand small requests leave every table as large as the first thousand did."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from forkpoint.cache import hazards
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import CacheConfig, EngineConfig, SchedulerConfig
from forkpoint.engine.async_engine import AsyncEngine, OpenRequest
from forkpoint.engine.core import EngineCore
from forkpoint.engine.engine import Engine
from forkpoint.engine.inputs import InputProcessor
from forkpoint.engine.messages import AddSequence, Command, EndSequences, Report
from forkpoint.engine.process import EngineLoop
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.params import SamplingParams
from forkpoint.sched.scheduler import Scheduler
from forkpoint.server.metrics import Metrics
from forkpoint.worker.codec import decoder, encoder
from tests.engine.growth import container_sizes
from tests.hash_runner import HashRunner
from tests.sched.harness import LAYOUTS

VOCAB, MAX_MODEL_LEN = 500, 1024
NUM_REQUESTS = 1_000  # in each half
BURST = 50


@pytest.fixture(autouse=True)
def few_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of the model of reuse are to be reached in the first half."""
    monkeypatch.setattr(hazards, "NUM_TRACKED", 64)


def make_core(layout: CacheLayout, async_scheduling: bool) -> tuple[EngineCore, Scheduler]:
    num_pages = layout.num_pages_for(3000, 8) + 2
    config = SchedulerConfig(max_num_seqs=32)
    cache = CacheConfig(num_ghosts=100)
    scheduler = Scheduler(layout, num_pages, cache, config)
    return EngineCore(scheduler, HashRunner(layout, num_pages, VOCAB), async_scheduling=async_scheduling), scheduler


def make_inputs() -> InputProcessor:
    return InputProcessor(None, VOCAB, MAX_MODEL_LEN, frozenset({1}), 0)


class Traffic:
    """Small requests: new ones and old ones, some aborted, some with what takes another path."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._known = [self.ids(int(self._rng.integers(1, 135))) for _ in range(20)]

    def ids(self, count: int) -> list[int]:
        return [int(token) for token in self._rng.integers(2, VOCAB, count)]

    def prompt(self) -> list[int]:
        if self._rng.random() < 0.5:
            return self._known[int(self._rng.integers(len(self._known)))]
        return self.ids(int(self._rng.integers(1, 80)))

    def params(self) -> SamplingParams:
        pick = self._rng.random()
        salt = f"salt {self._rng.integers(10**9)}" if pick < 0.1 else ""
        n = 2 if 0.1 < pick < 0.15 else 1
        allowed = range(2, 50) if 0.15 < pick < 0.2 else None
        return SamplingParams(
            max_tokens=int(self._rng.integers(1, 3)), n=n, cache_salt=salt, allowed_token_ids=allowed, temperature=pick
        )

    def leaves(self) -> bool:
        return bool(self._rng.random() < 0.05)


def sweep(scheduler: Scheduler) -> None:
    """The queue keeps old places until there are as many as new ones; where in that cycle it stands is chance."""
    scheduler.cache.store._queue._compact()


def check_flat(before: Counter[str], after: Counter[str], num_requests: int) -> None:
    """One entry kept for every tenth request would show."""
    room = num_requests / 20
    grown = {name: (before[name], size) for name, size in after.items() if size > before[name] * 1.02 + room}
    assert not grown, f"tables that grew over {num_requests} requests: {grown}"


@pytest.mark.parametrize("name", ["several slots a page", "no states"])
def test_no_table_of_the_engine_grows(name: str) -> None:
    core, scheduler = make_core(LAYOUTS[name], async_scheduling=name == "no states")
    engine, traffic = Engine(core, make_inputs()), Traffic(1)
    sizes = []
    for _ in range(2):
        for _ in range(NUM_REQUESTS // BURST):
            ids = [engine.add_request(engine.inputs.prompt(traffic.prompt()), traffic.params()) for _ in range(BURST)]
            engine.advance()
            for request_id in ids:
                if traffic.leaves():
                    engine.abort(request_id)
            while engine.has_unfinished():
                engine.advance()
        sweep(scheduler)
        sizes.append(container_sizes({"engine": engine}))
    check_flat(*sizes, NUM_REQUESTS)
    core.scheduler.reset_prefix_cache()
    left = container_sizes({"engine": engine})
    assert left["PrefixStore._dead"] == left["PrefixTree._by_hash"] == left["ReuseModel._kinds"] == 0


class Wire:
    """A socket that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def take(self) -> list[bytes]:
        taken, self.sent = self.sent, []
        return taken


class Commands:
    """What AsyncEngine takes for the engine process."""

    def __init__(self) -> None:
        self.wire = Wire()
        self._encode = encoder()

    def send(self, command: Command) -> None:
        self.wire.send(self._encode(command))


def test_no_table_of_the_server_grows() -> None:
    """Both processes' ends, in one."""
    core, scheduler = make_core(LAYOUTS["several slots a page"], async_scheduling=False)
    outbox, commands, traffic = Wire(), Commands(), Traffic(2)
    grammars = GrammarCompiler(None, VOCAB, {1})
    loop = EngineLoop(core, grammars, None, outbox)  # type: ignore[arg-type]
    api = AsyncEngine(EngineConfig(), Metrics("m_", "m"))
    api._process, api._inputs = commands, make_inputs()  # type: ignore[assignment]
    decode_command = decoder(Command)
    decode_report = decoder(Report)

    def exchange() -> None:
        for data in commands.wire.take():
            command = decode_command(data)
            assert isinstance(command, AddSequence | EndSequences)
            loop._carry_out(command)
        loop._take_started()
        if core.has_unfinished():
            loop._step()
        elif loop._refused:
            loop._report([], 0)
        for data in outbox.take():
            api._on_report(decode_report(data))

    sizes, number = [], 0
    for _ in range(2):
        for _ in range(NUM_REQUESTS // BURST):
            opened = OpenRequest()
            for _ in range(BURST):
                number += 1
                api.add(opened, f"r{number}", api.inputs.prompt(traffic.prompt()), traffic.params())
            exchange()
            for state in opened.states:
                if traffic.leaves():
                    api.abort(state.request_id)
            while api.num_open or core.has_unfinished() or loop._starting:
                exchange()
            assert all(state.finished for state in opened.states)
        del opened
        sweep(scheduler)
        sizes.append(container_sizes({"api": api, "loop": loop}))
    check_flat(*sizes, NUM_REQUESTS)
    assert sizes[1]["AsyncEngine._open"] == sizes[1]["EngineLoop._open"] == 0
