"""What a model sees of a step: tensors, never requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, RecordIndex, SegmentIndex, VerifyIndex

# One layer's share of the arena: strided views by the names that its specs give the tensors.
LayerCache: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Index tensors and caches of one forward pass over `T` tokens, decode rows first.

    `decode` and `prefill` have the slots for each state operator, by name: they differ only where an operator cannot
    redirect and its states were copied beforehand. `caches[i]` belongs to layer i. With `verify` decode rows may have
    several tokens, and it says what the state operators read and write of them. With `record` states are written every
    few tokens.
    """

    positions: Tensor  # [T] int64
    num_decodes: int  # tokens of decode rows
    attention: AttentionIndex
    decode: Mapping[str, DecodeIndex]
    prefill: Mapping[str, SegmentIndex]
    caches: tuple[LayerCache, ...]  # with `verify`, `record` also what tokens leave behind, by its specs' names
    verify: VerifyIndex | None = None
    record: RecordIndex | None = None
    embedded: Tensor | None = None  # `[T, H]`, where a family's layers look at it again
