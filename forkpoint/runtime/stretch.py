"""Stretches of memory, and copies between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Stretch(NamedTuple):
    """The bytes `[start, end)` of a tensor of bytes. Unlike a slice, it costs next to nothing to make."""

    memory: Tensor
    start: int
    end: int

    @classmethod
    def of(cls, memory: Tensor) -> Stretch:
        return cls(memory, 0, len(memory))

    @property
    def bytes(self) -> Tensor:
        return self.memory[self.start : self.end]

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def joined(copies: Iterable[tuple[Stretch, Stretch]], padding: int = 0) -> Iterator[tuple[Stretch, Stretch]]:
    """Yield copies (target, source), with neighbours that follow each other in both memories as one copy.

    Between neighbours both memories may have the same gap, of at most `padding` bytes, which is copied too.
    """
    target: Stretch | None = None
    source: Stretch | None = None
    for next_target, next_source in copies:
        if target is not None and source is not None:
            gap = _gap(target, next_target)
            if 0 <= gap <= padding and gap == _gap(source, next_source):
                target = Stretch(target.memory, target.start, next_target.end)
                source = Stretch(source.memory, source.start, next_source.end)
                continue
            yield target, source
        target, source = next_target, next_source
    if target is not None and source is not None:
        yield target, source


def are_apart(stretches: Iterable[Stretch]) -> bool:
    """Return whether no two stretches share bytes."""
    ordered = sorted(stretches, key=lambda each: (id(each.memory), each.start))
    return all(first.memory is not second.memory or first.end <= second.start for first, second in pairwise(ordered))


def _gap(stretch: Stretch, following: Stretch) -> int:
    """Return the bytes between two stretches of a memory; -1 if they are of different memories."""
    return following.start - stretch.end if following.memory is stretch.memory else -1


def joint_padding(arena: tuple[int, int] | None, tier: tuple[int, int] | None, smallest_unit: int) -> int:
    """Return the bytes after each block that copies may write; 0 if there are none.

    `arena` and `tier` are the places of blocks. A unit that fits into the padding could lie there, and be overwritten.
    """
    if arena is None or arena != tier:
        return 0
    stride, num_bytes = arena
    padding = stride - num_bytes
    return padding if padding < smallest_unit else 0
