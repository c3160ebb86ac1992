"""The tensors that a model is given for one step. They name slots and positions, never requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, RecordIndex, SegmentIndex, VerifyIndex

# One layer's part of the cache arena: strided views, keyed by the tensor names of the layer's specs.
LayerCache: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Index tensors and caches of one forward pass over `T` tokens, decode rows first.

    `decode` and `prefill` map the name of each state operator to its slots. They differ between operators only where an
    operator cannot write to another slot than it reads, and its states were copied beforehand. `caches[i]` belongs to
    layer i. If `verify` is set, decode rows may have several tokens, and `verify` says which states and records the
    operators read and write for them. If `record` is set, states are written only every few tokens. LayerState chooses
    between these indexes. `windows` is by width, and has the blocks of layers with such a window.
    """

    positions: Tensor  # [T] int64: the line of cos and sin that rotates each token
    num_decodes: int  # number of tokens in decode rows
    attention: AttentionIndex
    decode: Mapping[str, DecodeIndex]
    prefill: Mapping[str, SegmentIndex]
    caches: tuple[LayerCache, ...]  # with `verify` or `record` also the records of each token, by its specs' names
    verify: VerifyIndex | None = None
    record: RecordIndex | None = None
    embedded: Tensor | None = None  # token embeddings `[T, H]`, for families whose layers read them again
    token_ids: Tensor | None = None  # `[T]` int64, for families whose layers read them
    windows: Mapping[int, AttentionIndex] = field(default_factory=dict)
    draft_positions: Tensor | None = None  # `positions` of the MTP head, if it may have others

    def attention_of(self, window: int | None) -> AttentionIndex:
        """Return where layers with that window keep their keys; those of full attention if it has none of its own."""
        if window is None:
            return self.attention
        return self.windows.get(window, self.attention)
