"""Faults of a cache, put into an engine's arena from outside: the state that a hit reads is no longer the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from evaluation.question import Question
from evaluation.subject import Subject
from forkpoint.errors import ForkpointError
from forkpoint.runtime.buffers import ArenaBuffer

ZERO = -1  # as an earlier slot: the zero state


@dataclass(frozen=True, slots=True)
class Served:
    """The slot from which a question's next run resumes, and the slot of the state one block earlier."""

    slot: int
    earlier_slot: int


def find_served(subject: Subject, question: Question, salt: str) -> Served:
    """Find the slot of the question's state. Raises ForkpointError if this state, or the one before it, is not
    cached."""
    cache, tokens = subject.cache, question.prompt.token_ids
    hit = cache.lookup(cache.new_lease("mutation", salt, tokens), len(tokens))
    states = [node.checkpoint for node in hit.path[-2:]]
    if hit.num_tokens != subject.layout.usable_prefix(len(tokens)) or None in states:
        raise ForkpointError(
            f"of a prompt of {len(tokens)} tokens {hit.num_tokens} are cached, so the fault cannot be put in; "
            "this is a fault of the evaluation or of the cache"
        )
    slots = [state.slot for state in states if state is not None]
    return Served(slots[-1], slots[-2] if len(slots) > 1 else ZERO)


class Measure(Enum):
    """The measure that a fault lowers: right answers, or texts that continue like those of the sound cache."""

    ANSWERS = "answers"
    CONTINUATIONS = "continuations"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault. `spoil(arena, served)` changes the bytes of the served slots. `lowers` is the measure that has to fall,
    if any."""

    name: str
    about: str
    spoil: Callable[[ArenaBuffer, Sequence[Served]], None]
    lowers: Measure | None = None


@contextmanager
def mutated(arena: ArenaBuffer, served: Sequence[Served], mutation: Mutation) -> Iterator[None]:
    """Spoil the states that hits read while the context is open, and restore them afterwards."""
    kept = {state.slot: slot_bytes(arena, state.slot).clone() for state in served}
    mutation.spoil(arena, served)
    try:
        yield
    finally:
        for slot, content in kept.items():
            slot_bytes(arena, slot).copy_(content)


def slot_bytes(arena: ArenaBuffer, slot: int) -> Tensor:
    """Return the bytes of one slot, as a view."""
    start = slot * arena.layout.slot_stride_bytes
    return arena.data[start : start + arena.layout.slot_bytes]


def _one_block_early(arena: ArenaBuffer, served: Sequence[Served]) -> None:
    """Replace the state after n tokens by the one after n - 64."""
    earlier = {
        state.slot: torch.zeros_like(slot_bytes(arena, state.slot))
        if state.earlier_slot == ZERO
        else slot_bytes(arena, state.earlier_slot).clone()
        for state in served
    }
    for slot, content in earlier.items():
        slot_bytes(arena, slot).copy_(content)


def _swapped(arena: ArenaBuffer, served: Sequence[Served]) -> None:
    """Give each request the state of another request."""
    slots = list(dict.fromkeys(state.slot for state in served))
    contents = [slot_bytes(arena, slot).clone() for slot in slots]
    half = len(slots) // 2  # far apart in the list, which has the questions of one dialogue side by side
    for slot, content in zip(slots, contents[half:] + contents[:half], strict=True):
        slot_bytes(arena, slot).copy_(content)


def _lost(arena: ArenaBuffer, served: Sequence[Served]) -> None:
    for state in served:
        slot_bytes(arena, state.slot).zero_()


Rounding = Callable[[list[Tensor]], None]  # what a slot holds, in place


def _each(rounding: Rounding) -> Callable[[ArenaBuffer, Sequence[Served]], None]:
    def spoil(arena: ArenaBuffer, served: Sequence[Served]) -> None:
        for slot in {state.slot for state in served}:
            rounding(slot_tensors(arena, slot))

    return spoil


def slot_tensors(arena: ArenaBuffer, slot: int) -> list[Tensor]:
    """Return the contents of the slot: each layer's states, as views."""
    return [pool[slot] for *_, pool in arena.states]


def _into_bytes(tensors: list[Tensor]) -> None:
    """Copy values, not bytes, into memory of unsigned bytes: whole numbers modulo 256."""
    for values in tensors:
        values.copy_(values.float().trunc().remainder(256))


def _cast(dtype: torch.dtype) -> Rounding:
    """Cast to the nearest value of the dtype."""

    def rounding(tensors: list[Tensor]) -> None:
        largest = torch.finfo(dtype).max
        for values in tensors:
            values.copy_(values.float().clamp(-largest, largest).to(dtype).float())

    return rounding


def round_to_steps(values: Tensor, largest: Tensor, num_bits: int) -> None:
    """Round in place to the nearest of `2^num_bits - 1` evenly spaced values from `-largest` to `largest`."""
    steps = 2 ** (num_bits - 1) - 1
    scale = (largest.float() / steps).clamp_min(torch.finfo(torch.float32).tiny)
    values.copy_((values.float() / scale).round().clamp(-steps, steps) * scale)


def _one_scale(num_bits: int) -> Rounding:
    """Round everything in a checkpoint with one scale."""

    def rounding(tensors: list[Tensor]) -> None:
        largest = torch.stack([values.float().abs().max() for values in tensors]).max()
        for values in tensors:
            round_to_steps(values, largest, num_bits)

    return rounding


def _scale_per_tensor(num_bits: int) -> Rounding:
    """Round with one scale for each layer's window and one for its matrix."""

    def rounding(tensors: list[Tensor]) -> None:
        for values in tensors:
            round_to_steps(values, values.float().abs().max(), num_bits)

    return rounding


CONTROL: Final = Mutation(
    "none, asked again", "the right state, questions in reverse order", lambda arena, served: None
)
MUTATIONS: Final = (
    Mutation("one block early", "the state 64 tokens before the right one", _one_block_early, Measure.ANSWERS),
    Mutation("swapped", "the state of another request", _swapped, Measure.ANSWERS),
    Mutation("lost", "the zero state", _lost, Measure.ANSWERS),
    Mutation("8 bits, by value", "copied by value into unsigned bytes", _each(_into_bytes), Measure.ANSWERS),
    Mutation("8 bits, one scale", "int8, one scale for a checkpoint", _each(_one_scale(8)), Measure.CONTINUATIONS),
    Mutation(
        "8 bits, scale per tensor", "int8, a scale for each tensor", _each(_scale_per_tensor(8)), Measure.CONTINUATIONS
    ),
    Mutation("8 bits, float8 e4m3", "cast without a scale", _each(_cast(torch.float8_e4m3fn)), Measure.CONTINUATIONS),
    Mutation(
        "4 bits, scale per tensor", "int4, a scale for each tensor", _each(_scale_per_tensor(4)), Measure.CONTINUATIONS
    ),
    Mutation("16 bits, bfloat16", "cast, as bf16 states are", _each(_cast(torch.bfloat16))),
)
