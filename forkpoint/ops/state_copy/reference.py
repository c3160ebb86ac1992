"""Slots in torch: reads, writes, copies, and rows whose tokens are computed turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from forkpoint.ops.metadata import VerifyIndex


def read_slots(pool: Tensor, src: Tensor) -> Tensor:
    """Return a copy of `pool[src]`, with zeros where `src` is -1. `pool[P, ...]` may have any strides."""
    index = src.long()
    states = pool[index.clamp(min=0)]
    absent = index < 0
    if bool(absent.any()):
        states[absent] = 0
    return states


def write_slots(pool: Tensor, dst: Tensor, states: Tensor) -> None:
    """Store `pool[dst[i]] = states[i]`, rounded to the pool's dtype. A `dst` of -1 stores nothing."""
    index = dst.long()
    present = index >= 0
    if not bool(present.all()):
        index, states = index[present], states[present]
    pool[index] = states.to(pool.dtype)


def state_copy(pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy slots `src` to slots `dst` in all pools. A src of -1 gives zeros, a dst of -1 stores nothing."""
    for pool in pools:
        write_slots(pool, dst, read_slots(pool, src))


def turns(counts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield i and the rows with a count above i, for i = 0, 1, .. until no row is left."""
    for i in range(int(counts.max())):
        yield i, torch.nonzero(counts > i)[:, 0]


def folded(pool: Tensor, index: VerifyIndex, fold: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    """Return the states `[B, ...]` fp32 after the pending tokens, and store the states at the marks.

    `fold(states, rows, i)` returns the states after record `i` of `rows`."""
    states = read_slots(pool, index.src).float()
    for i, live in turns(index.pending):
        own = fold(states[live], live, i)
        states[live] = own.to(pool.dtype).float()
        write_slots(pool, torch.where(index.mark[live] == i + 1, index.mark_dst[live], -1), own)
    return states


def verified(
    states: Tensor, pool: Tensor, index: VerifyIndex, advance: Callable[[Tensor, Tensor, Tensor, int], Tensor]
) -> None:
    """Advance folded states `[B, ...]` through all rows' first tokens, then through second tokens, and so on.

    `advance(states, tokens, rows, i)` returns the states after `tokens` and writes record `i` of `rows`."""
    first, lens = index.cu_tokens[:-1].long(), index.cu_tokens.diff()
    drafting = lens > 1
    write_slots(pool, torch.where(drafting, index.dst, -1), states)
    for i, live in turns(lens):
        own = advance(states[live], first[live] + i, live, i)
        states[live] = own.to(pool.dtype).float()
    write_slots(pool, torch.where(drafting, -1, index.dst), states)
