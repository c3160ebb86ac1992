"""A hit equals a cold run at every class of boundary: to rounding by default, bit for bit in deterministic mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from forkpoint.config import CacheConfig
from forkpoint.ops.cpu.build import load_operators
from tests.engine.compare import Oracle, answer, check_tokens_entered, compare, params_of
from tests.engine.real import MODELS, ModelBank, Options, RealEngine, start

GREEDY = params_of(max_tokens=3, logprobs=2)
NO_CPP = pytest.mark.skipif(load_operators().module is None, reason="no C++ operators here")
# (model, operators, deterministic): test_deterministic.py has more in deterministic mode.
CASES = [
    pytest.param("qwen3_next_moe", "torch", False, id="qwen3_next_moe-torch"),
    pytest.param("olmo_hybrid", "cpp", True, id="olmo_hybrid-cpp-deterministic", marks=NO_CPP),
    pytest.param("qwen3", "cpp", False, id="qwen3-cpp", marks=NO_CPP),
]
IN_ALL_CASES = pytest.mark.parametrize(("model", "cpu_ops", "exact"), CASES)
EVERYWHERE = CacheConfig(checkpoint_interval=64)


@dataclass
class Bench:
    """One engine, and the means to make prompts and to judge what it answered."""

    bank: ModelBank
    oracle: Oracle
    options: Options

    def __post_init__(self) -> None:
        self.run: RealEngine = start(self.bank, self.options)

    def judge(self) -> None:
        for name in self.run.requests:
            mine = answer(self.run, name)
            flips = compare(mine, self.oracle.solve(self.options, mine), self.options.deterministic)
            assert not flips, f"{name}: a token differs"
            check_tokens_entered(self.run, name)
        assert self.run.core.slot_bytes_copied == 0
        self.run.check_nothing_leaked()

    def cached(self, name: str) -> int:
        return self.run.outputs[name].num_cached_tokens


Make = Callable[..., Bench]


@pytest.fixture
def make(bank: ModelBank, oracle: Oracle, model: str, cpu_ops: Literal["torch", "cpp"], exact: bool) -> Make:
    base = Options(model, cpu_ops, exact)
    return lambda **changes: Bench(bank, oracle, replace(base, **changes))


@IN_ALL_CASES
def test_lengths_around_a_boundary(make: Make) -> None:
    bench = make()
    for size in (1, 63, 64, 65, 127, 128, 129, 191, 192, 193):
        prompt = bench.bank.ids(size, size)
        cold, warm = bench.run.ask(prompt, GREEDY), bench.run.ask(prompt, GREEDY)
        assert (bench.cached(cold), bench.cached(warm)) == (0, (size - 1) // 64 * 64)
    bench.judge()


@IN_ALL_CASES
def test_prompts_that_are_prefixes_of_a_cached_one(make: Make) -> None:
    bench = make(cache=EVERYWHERE)
    whole = bench.bank.ids(1, 300)
    bench.run.ask(whole, GREEDY)
    for size in (1, 63, 64, 65, 127, 128, 129, 256, 257, 299):
        assert bench.cached(bench.run.ask(whole[:size], GREEDY)) == (size - 1) // 64 * 64
    bench.judge()


@IN_ALL_CASES
def test_a_fork_at_a_boundary_and_one_off(make: Make) -> None:
    bench = make(cache=EVERYWHERE)
    trunk = bench.bank.ids(2, 260)
    bench.run.ask(trunk, GREEDY)
    for at in (63, 64, 65, 127, 128, 129, 190):
        for more in (1, 65):
            fork = trunk[:at] + bench.bank.ids(at + more, more)
            assert bench.cached(bench.run.ask(fork, GREEDY)) == at // 64 * 64
    bench.judge()


@IN_ALL_CASES
def test_chunk_ends(make: Make, exact: bool) -> None:
    """The hit, the chunk ends and the prompt's end fall together or one off each other."""
    budget = 192 if exact else 128
    bench = make(budget=budget, cache=EVERYWHERE)
    for size in (budget - 1, budget, budget + 1, 2 * budget, 2 * budget + 63):
        prompt = bench.bank.ids(size, size)
        bench.run.ask(prompt, GREEDY)
        longer = prompt + bench.bank.ids(size + 1, budget)
        assert bench.cached(bench.run.ask(longer, GREEDY)) == size // 64 * 64
        assert bench.cached(bench.run.ask(prompt, GREEDY)) == (size - 1) // 64 * 64
    bench.judge()


@IN_ALL_CASES
def test_preempt_then_hit(make: Make) -> None:
    """A request is put back after some outputs, resumes from what it gave to the cache, and is asked again."""
    bench = make()
    for size, outputs in ((63, 20), (129, 65)):
        params = params_of(max_tokens=outputs + 5)
        name = bench.run.add(bench.bank.ids(size, size), params)
        while len(bench.run.requests[name][0].output_token_ids) < outputs:
            bench.run.step()
        (entry,) = bench.run.sched._running.requests
        bench.run.sched._departures.preempt(entry)
        bench.run.run()
        (request,) = bench.run.requests[name]
        assert request.num_preemptions == 1 and request.resume_cache is not None
        assert request.resume_cache.num_cached_tokens >= (size - 1) // 64 * 64
        again = bench.run.ask(bench.bank.ids(size, size), params)
        assert bench.cached(again) == (size - 1) // 64 * 64
        turn = request.all_token_ids().tolist()
        bench.run.ask(turn + bench.bank.ids(size + 1, 30), GREEDY)
    bench.judge()


@pytest.mark.parametrize("budget", [320, 2048])
@IN_ALL_CASES
def test_duplicates_in_one_batch(make: Make, budget: int) -> None:
    bench = make(budget=budget)
    for size in (64, 129, 200, 400):
        prompt = bench.bank.ids(size, size)
        names = [bench.run.add(prompt, GREEDY) for _ in range(3)]
        names.append(bench.run.add(prompt + bench.bank.ids(1, 5), GREEDY))
        bench.run.run()
        if size == 400:  # worth a step's wait
            assert all(bench.cached(name) >= 320 for name in names[1:])
    bench.judge()


@IN_ALL_CASES
def test_completions_of_one_prompt(make: Make) -> None:
    bench = make()
    for size, outputs in ((63, 5), (64, 5), (65, 5), (190, 6)):
        params = params_of(n=3, temperature=1.0, seed=3, max_tokens=outputs)
        bench.run.ask(bench.bank.ids(size, size), params)
        bench.run.ask(bench.bank.ids(size, size), params)
    bench.judge()


def test_cpp_and_torch_agree(bank: ModelBank, oracle: Oracle) -> None:
    if load_operators().module is None:
        pytest.skip("no C++ operators here")
    for model in MODELS:
        bench = Bench(bank, oracle, Options(model, "cpp"))
        prompt = bench.bank.ids(4, 200)
        for _ in range(2):
            mine = answer(bench.run, bench.run.ask(prompt, params_of(max_tokens=40)))
            assert not compare(mine, oracle.solve(Options(model, "torch"), mine), exact=False)
