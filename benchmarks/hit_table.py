"""Cached tokens of typical prompts on a small real model, checked against what entered the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.random_model import RandomModelSpec
from benchmarks.rig import LoadedModel, Rig, RigOptions, random_ids
from forkpoint.config import CacheConfig
from forkpoint.sched.plan import IntArray
from forkpoint.sched.request import Request

# One recurrent and one attention layer, so small that prompts of 20,000 tokens take a second.
TABLE_SPEC = RandomModelSpec(
    hidden_size=32,
    num_layers=2,
    attention_every=2,
    intermediate_size=48,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    num_k_heads=1,
    num_v_heads=2,
    state_dim=16,
    max_position_embeddings=32768,
)
VOCAB = 256
OUTPUTS = 6  # of a measured request; enough to see a wrong state
SPARE_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `play` runs it on a rig and returns the request that is measured.

    With `tight_tokens` (those of the longest prompt with its outputs), the line must also hold in a small arena. That
    arena has room for twice the keys and values of these tokens plus 8 slots, and unrelated prompts have filled it
    before.
    """

    name: str
    asked: int
    play: Callable[[Rig], Request]
    tight_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row. `held_bytes` is the size of its `num_checkpoints` checkpoints, which are all that existed at
    its end."""

    row: Row
    cached: int
    computed_as_reported: bool  # tokens that entered the model = prompt - cached, over all requests of the row
    slot_bytes_copied: int
    num_checkpoints: int
    held_bytes: int
    identical: bool  # outputs equal those without a cache

    @property
    def holds(self) -> bool:
        enough = self.cached >= self.row.asked
        return enough and self.computed_as_reported and self.identical and not self.slot_bytes_copied


def ids(seed: int, count: int) -> IntArray:
    return random_ids(seed, count, VOCAB)


def join(*parts: IntArray | list[int]) -> IntArray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _again(length: int, outputs: int) -> Callable[[Rig], Request]:
    def play(rig: Rig) -> Request:
        rig.ask("first", ids(1, length), outputs)
        return rig.ask("again", ids(1, length), OUTPUTS)

    return play


def _turn_2(rig: Rig) -> Request:
    first = rig.ask("turn 1", ids(1, 5000), 600)
    return rig.ask("turn 2", join(first.prompt_token_ids, first.output_token_ids, ids(2, 500)), OUTPUTS)


def _shared(seed: int) -> IntArray:
    return join(ids(1, 3000), ids(seed, 2000))


def _nth_sighting(count: int, breakpoints: tuple[int, ...] = ()) -> Callable[[Rig], Request]:
    def play(rig: Rig) -> Request:
        for number in range(1, count):
            rig.ask(f"sighting {number}", _shared(10 + number), 1, breakpoints)
        return rig.ask("measured", _shared(10 + count), OUTPUTS)

    return play


def _in_the_queue(rig: Rig) -> Request:
    rig.add("first", _shared(10), 1)
    return rig.ask("second", _shared(11), OUTPUTS)


def _fork(rig: Rig) -> Request:
    trunk = ids(1, 20_000)
    rig.ask("trunk", trunk, 1)
    return rig.ask("fork", join(trunk[:9000], ids(2, 500)), OUTPUTS)


def _extension(rig: Rig) -> Request:
    rig.ask("first", ids(1, 20_000), 1)
    return rig.ask("more", join(ids(1, 20_000), ids(2, 10)), OUTPUTS)


ROWS = (
    Row("5,000 tokens again after 600 of output", 4992, _again(5000, 600), 5600),
    Row("4,992 tokens again after 600 of output", 4928, _again(4992, 600), 5592),
    Row("turn 2: 5,000 + 600 + 500 new", 5568, _turn_2, 6106),
    Row("900 tokens again", 896, _again(900, 1), 906),
    Row("3,000 shared + 2,000 own: second", 2560, _nth_sighting(2)),
    Row("the same, breakpoint at 3,000", 2944, _nth_sighting(2, (3000,))),
    Row("the same, both waiting in the queue", 2944, _in_the_queue),
    Row("the same: third", 2944, _nth_sighting(3)),
    Row("20,000 tokens, forked at 9,000", 8704, _fork),
    Row("20,000 tokens, then the same + 10", 19_968, _extension, 20_016),
)


def tight_pages(loaded: LoadedModel, num_tokens: int) -> int:
    """Return the pages for twice the keys and values of `num_tokens` tokens and 8 slots, plus the reserved page."""
    layout = loaded.layout
    return layout.num_pages_for(2 * num_tokens, 0) + -(-SPARE_SLOTS // layout.slots_per_page) + 1


def fill(rig: Rig, num_tokens: int) -> None:
    """Run unrelated prompts until the arena is full."""
    for number in range(5):
        rig.ask(f"unrelated {number}", ids(1000 + number, num_tokens // 2 + 77), 1)


def ids_alone(loaded: LoadedModel, prompt: IntArray, max_tokens: int) -> Sequence[int]:
    """Return the outputs of an engine without a cache."""
    rig = Rig(loaded, RigOptions(cache=CacheConfig(enable_prefix_caching=False)))
    return rig.ask("alone", prompt, max_tokens).output_token_ids


def measure_row(
    loaded: LoadedModel, row: Row, tight: bool = False, alone: Callable[..., Sequence[int]] = ids_alone
) -> RowResult:
    """Play a row on a fresh engine, then run its measured request with `alone`, an engine without a cache."""
    rig = Rig(loaded, RigOptions(num_pages=tight_pages(loaded, row.tight_tokens) if tight else 0))
    if tight:
        fill(rig, row.tight_tokens)
    request = row.play(rig)
    wanted = alone(loaded, request.prompt_token_ids, request.max_tokens)
    reported = sum(r.num_tokens - 1 - r.cache.num_cached_tokens for r in rig.requests.values())
    return RowResult(
        row,
        request.cache.num_cached_tokens,
        reported == rig.core.num_model_tokens,
        rig.core.slot_bytes_copied,
        rig.sched.stats().cache.num_checkpoints,
        rig.checkpoint_bytes,
        request.output_token_ids == wanted,
    )
