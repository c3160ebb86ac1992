"""Turns measurements and floors into the lines of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu_9b import measures
from benchmarks.gpu_9b.floor import Floor, StepWork, decode_work, prefill_work
from benchmarks.gpu_9b.measures import AgentRun, Client, Series, Sizes
from benchmarks.gpu_9b.table import Goal, Line

PARTS = ("ttft", "chat", "decode", "agent")
COLD = Goal("415.8 ms", 420.0)
WARM = Goal("34.3 ms", 10.0)
CHAT = Goal("30 to 119 ms", 11.0)
DECODE = {
    1: Goal("198.5 tok/s", 215.0, more_is_better=True),
    32: Goal("5,103 tok/s", 5500.0, more_is_better=True),
    128: Goal("12,989 tok/s", 14_400.0, more_is_better=True),
}
AGENT = Goal("14.8 s", 11.8)
AGENT_CACHED = Goal("84.3 %", 88.0, more_is_better=True)
GRID = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts to measure, and the token budget of a step, with which floors count prefills."""

    sizes: Sizes
    budget: int
    parts: Sequence[str] = PARTS

    @property
    def chat_tokens(self) -> int:
        """Tokens of a turn that no cache can hold: new tokens, the last output, and the tokens after the last
        boundary."""
        return self.sizes.chat_new + 1 + GRID // 2

    @property
    def prefill_tokens(self) -> int:
        """Tokens of a full step of the long prompt."""
        return min(self.budget, self.sizes.prompt)

    @property
    def floor_tokens(self) -> set[int]:
        """Step sizes whose products have to be timed."""
        sizes, found = self.sizes, set[int]()
        if "ttft" in self.parts:
            found |= {self.prefill_tokens, sizes.extension}
        if "chat" in self.parts:
            found.add(self.chat_tokens)
        if "decode" in self.parts:
            found |= set(sizes.decode_batches)
        if "agent" in self.parts:
            found |= {self.prefill_tokens, sizes.conversations}
        return found

    @property
    def floor_rows(self) -> set[int]:
        """Numbers of rows whose output head has to be timed."""
        return {1, *self.sizes.decode_batches, self.sizes.conversations}


def measure(client: Client, plan: Plan, floor: Floor) -> Iterator[Line]:
    """Yield the lines of the plan's parts as they are measured."""
    makers: dict[str, Callable[[Client, Plan, Floor], Iterator[Line]]] = {
        "ttft": _first_tokens,
        "chat": _chat,
        "decode": _decode,
        "agent": _agent,
    }
    for part in plan.parts:
        yield from makers[part](client, plan, floor)


def cold_floor_s(floor: Floor, num_tokens: int, step: int) -> float:
    """Return the floor of a prompt that is computed in steps of `step` tokens."""
    products = num_tokens * floor.per_token_s(step)
    return products - floor.products_s[step] + floor.step_s(_renamed(prefill_work(0, num_tokens), step))


def _renamed(work: StepWork, step: int) -> StepWork:
    """Return the same traffic and attention, with the products of one step of `step` tokens."""
    return StepWork(
        num_tokens=step,
        num_rows=work.num_rows,
        num_states=work.num_states,
        num_keys=work.num_keys,
        num_pairs=work.num_pairs,
    )


def agent_floor_s(floor: Floor, sizes: Sizes, step: int) -> tuple[float, float]:
    """Return (seconds, share of cached tokens) of the agent loop with a cache that keeps everything up to the 64-token
    grid."""
    rows, seconds, computed, asked = sizes.conversations, 0.0, 0, 0
    for turn in range(sizes.turns):
        length = sizes.shared + sizes.own + turn * (sizes.turn_answer + sizes.turn_new)
        start = (length - sizes.turn_new - 1) // GRID * GRID if turn else sizes.shared // GRID * GRID
        fresh = rows * (length - start) + (0 if turn else start)
        work = _renamed(prefill_work(start, length), step)
        seconds += fresh * floor.per_token_s(step)
        seconds += rows * (floor.step_s(work) - floor.products_s[step] - floor.head_s[1]) + floor.head_s[rows]
        seconds += (sizes.turn_answer - 1) * floor.step_s(decode_work(rows, length + sizes.turn_answer / 2))
        computed, asked = computed + fresh, asked + rows * length
    return seconds, 1 - computed / asked


def _first_tokens(client: Client, plan: Plan, floor: Floor) -> Iterator[Line]:
    sizes = plan.sizes
    cold, warm = measures.time_to_first_token(client, sizes)
    least = cold_floor_s(floor, sizes.prompt, plan.prefill_tokens)
    yield _milliseconds(f"time to first token, {sizes.prompt:,}-token prompt, cold", cold, least, COLD)
    end = sizes.prompt + sizes.extension
    least = floor.step_s(prefill_work(sizes.prompt, end))
    yield _milliseconds(f"the same prompt + {sizes.extension} tokens, warm", warm, least, WARM)


def _chat(client: Client, plan: Plan, floor: Floor) -> Iterator[Line]:
    sizes = plan.sizes
    turns = measures.chat_turns(client, sizes)
    slowest = max(turns, key=lambda series: series.median)
    least = floor.step_s(prefill_work(sizes.chat_end - plan.chat_tokens, sizes.chat_end))
    name = (
        f"chat turns at {sizes.chat_start:,} to {sizes.chat_end:,} tokens ({sizes.chat_answer} generated + "
        f"{sizes.chat_new} new each), warm, slowest of {len(turns)}"
    )
    yield _milliseconds(name, slowest, least, CHAT)


def _decode(client: Client, plan: Plan, floor: Floor) -> Iterator[Line]:
    sizes = plan.sizes
    for batch in sizes.decode_batches:
        series = measures.decode_rate(client, sizes, batch)
        step = floor.step_s(decode_work(batch, sizes.decode_prompt + sizes.decode_tokens / 2))
        goal = DECODE.get(batch, Goal("", 0.0, more_is_better=True))
        digits = 1 if batch == 1 else 0
        yield Line(f"decode, batch {batch}", "tok/s", series.median, batch / step, goal, series.values, digits)


def _agent(client: Client, plan: Plan, floor: Floor) -> Iterator[Line]:
    sizes = plan.sizes
    runs: list[AgentRun] = measures.agent_loop(client, sizes)
    least, cached = agent_floor_s(floor, sizes, plan.prefill_tokens)
    seconds = tuple(run.seconds for run in runs)
    shares = tuple(100 * run.num_cached / run.num_prompt for run in runs)
    name = (
        f"agent loop: {sizes.conversations} conversations, {sizes.shared:,} shared + {sizes.own:,} own tokens, "
        f"{sizes.turns} turns of {sizes.turn_answer} out and {sizes.turn_new} in"
    )
    yield Line(name, "s", float(np.median(seconds)), least, AGENT, seconds, digits=2)
    yield Line("the same: prompt tokens cached", "%", float(np.median(shares)), 100 * cached, AGENT_CACHED, shares)


def _milliseconds(name: str, series: Series, floor_s: float, goal: Goal) -> Line:
    return Line(name, "ms", series.median * 1e3, floor_s * 1e3, goal, tuple(v * 1e3 for v in series.values))
