"""A model on a device, and the facts about arena and steps that follow from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import SchedulerConfig
from forkpoint.models.attention import AttentionConfig
from forkpoint.models.decoder import Model
from forkpoint.ops.metadata import KeySplits
from forkpoint.ops.ranks import ALONE, Ranks
from forkpoint.ops.table import OpTable
from forkpoint.platforms.platform import Platform
from forkpoint.platforms.table import traits_of
from forkpoint.runtime.dealt_keys import DealtKeys
from forkpoint.runtime.step_inputs import StepShape

MOST_QUERIES: Final = 32  # queries that read a key together: the query heads of a key head, for several tokens of a row


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on a device, before its arena is allocated. Graphs are recorded for `shapes`."""

    model: Model
    ops: OpTable
    layout: CacheLayout
    sched: SchedulerConfig
    platform: Platform
    shapes: Sequence[StepShape] = ()
    max_num_drafts: int = 0
    state_write_interval: int = 1
    ranks: Ranks = ALONE  # those that keep the tokens of a block in turn, `interleave` tokens each
    interleave: int = 1
    runs_before_recording: bool = True  # work runs once before it is recorded; see `Graphs`

    def dealt_keys(self) -> DealtKeys | None:
        """Return what completes the indexes of keys that are dealt to ranks; None if they are not dealt."""
        if self.ranks.size == 1 or not self.layout.has_kv:
            return None
        splits: KeySplits | None = None
        block_size = self.layout.whole_kernel_block_size
        if not self.platform.shares_memory:
            splits = KeySplits(block_size)
        return DealtKeys(self.ranks, self.interleave, block_size, self.platform, splits)

    def key_splits(self) -> KeySplits:
        """Return how keys are split into parts.

        Rows of a small batch get more parts, and keys are read once for several tokens of a row, unless the bits of a
        row must not depend on the batch.
        """
        layout, config, traits = self.layout, self.model.config, traits_of(self.platform.device)
        if self.ops.deterministic or not layout.kv:
            return KeySplits(layout.kernel_block_size)
        wanted, folded = max(1, traits.num_decode_programs // layout.kv[0].num_heads), 1
        if self.ranks.size > 1:  # a rank's keys do not grow with each token
            return KeySplits(layout.kernel_block_size, wanted)
        layers = (*config.layers, config.draft_layer)
        groups = [p.num_heads // p.num_kv_heads for parts in layers for p in parts if isinstance(p, AttentionConfig)]
        if len(groups) == len(layout.kv) and traits.masks_gathers:  # latents are read for each token
            most = max(1, MOST_QUERIES // max(groups))
            folded = min(1 << most.bit_length() - 1, 1 << self.max_num_drafts.bit_length())
        return KeySplits(layout.kernel_block_size, wanted, folded)
