"""Slot to slot copies in torch."""

from __future__ import annotations

from torch import Tensor


def read_slots(pool: Tensor, src: Tensor) -> Tensor:
    """A copy of `pool[src]`, zeros where `src` is -1. `pool[P, ...]` may have any strides."""
    index = src.long()
    states = pool[index.clamp(min=0)]
    absent = index < 0
    if bool(absent.any()):
        states[absent] = 0
    return states


def write_slots(pool: Tensor, dst: Tensor, states: Tensor) -> None:
    """`pool[dst[i]] = states[i]`, rounded to the pool's dtype; nothing where `dst` is -1."""
    index = dst.long()
    present = index >= 0
    if not bool(present.all()):
        index, states = index[present], states[present]
    pool[index] = states.to(pool.dtype)


def state_copy(pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """The operator, on any device that torch knows."""
    for pool in pools:
        write_slots(pool, dst, read_slots(pool, src))
