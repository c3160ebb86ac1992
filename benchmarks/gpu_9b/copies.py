"""The gain of reading states in place over copying them first, for loads that resume from states all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.gpu_9b.measures import Client

HEAD = "| load | copy-free | states copied first | gain | bytes copied |\n|---|---|---|---|---|"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySizes:
    """Lengths in tokens, and counts."""

    trunk: int = 4000
    branches: int = 64
    branch_new: int = 64
    branch_answer: int = 8
    conversations: int = 32
    first: int = 500
    turns: int = 8
    turn_new: int = 24
    turn_answer: int = 8
    rows: int = 128
    decode_prompt: int = 256
    decode_tokens: int = 256
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Load:
    """One load, measured both ways: its name, the median seconds of each way, and the state bytes that the second way
    copied."""

    name: str
    free_s: float
    copied_s: float
    num_bytes: int

    @property
    def cells(self) -> str:
        gain = self.copied_s / self.free_s - 1
        times = f"{self.free_s * 1e3:,.1f} ms | {self.copied_s * 1e3:,.1f} ms"
        return f"| {self.name} | {times} | {gain:+.1%} | {self.num_bytes / 1e9:,.2f} GB |"


def forks(client: Client, sizes: CopySizes) -> float:
    """Run all branches of a prompt at once, each with a few tokens of its own."""
    trunk = client.ids(sizes.trunk)
    client.ask([trunk], 1)
    return client.ask(
        [trunk + client.ids(sizes.branch_new) for _ in range(sizes.branches)], sizes.branch_answer
    ).seconds


def short_turns(client: Client, sizes: CopySizes) -> float:
    """Run conversations of many short turns, measured after the first turn."""
    histories = [client.ids(sizes.first) for _ in range(sizes.conversations)]
    seconds = 0.0
    for turn in range(sizes.turns + 1):
        answer = client.ask(histories, sizes.turn_answer)
        seconds += answer.seconds if turn else 0.0
        for history, output in zip(histories, answer.outputs, strict=True):
            history += output.outputs[0].token_ids
            history += client.ids(sizes.turn_new)
    return seconds


def long_decode(client: Client, sizes: CopySizes) -> float:
    """Run answers that cross a block boundary, and so store a state, every 64 steps."""
    prompts = [[client.ids(sizes.decode_prompt) for _ in range(sizes.rows)] for _ in range(2)]
    short, long = (client.ask(own, n).seconds for own, n in zip(prompts, (1, sizes.decode_tokens + 1), strict=True))
    return long - short


def loads(sizes: CopySizes) -> dict[str, Callable[[Client], float]]:
    """Return the loads by name."""
    fork = f"{sizes.branches} branches of {sizes.branch_new} tokens off a {sizes.trunk:,}-token prompt"
    turns = f"{sizes.conversations} conversations, {sizes.turns} turns of {sizes.turn_new} in, {sizes.turn_answer} out"
    return {
        fork: partial(forks, sizes=sizes),
        turns: partial(short_turns, sizes=sizes),
        f"decode, {sizes.rows} rows, {sizes.decode_tokens} tokens": partial(long_decode, sizes=sizes),
    }


def compare(start: Callable[[bool], tuple[Client, Callable[[], None]]], sizes: CopySizes) -> Iterator[Load]:
    """Measure every load both ways. `start(copies)` returns a client of a fresh engine and a function that ends it."""
    medians: dict[bool, list[float]] = {}
    copied: list[int] = []
    for copies in (False, True):
        client, close = start(copies)
        try:
            medians[copies] = []
            for run in loads(sizes).values():
                run(client)  # compiles what it needs
                before = client.slot_bytes_copied
                medians[copies].append(float(np.median([run(client) for _ in range(sizes.repeats)])))
                if copies:
                    copied.append((client.slot_bytes_copied - before) // sizes.repeats)
        finally:
            close()
    for name, free_s, copied_s, num_bytes in zip(loads(sizes), medians[False], medians[True], copied, strict=True):
        yield Load(name, free_s, copied_s, num_bytes)
