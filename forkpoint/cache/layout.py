"""How the arena is divided: the sizes of blocks and slots, and what a page holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from forkpoint.cache.layer_spec import KVSpec, LayerSpec, StateSpec
from forkpoint.cache.page_size import ALIGNMENT_BYTES, SLOTS_WITHOUT_BYTES, choose_page, choose_shared_page
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import ConfigError

NO_BLOCK: Final = -1
NO_SLOT: Final = -1  # as a source it stands for the zero state
FALLBACKS_PER_ARENA: Final = 4  # the least number in a conversation that fills the arena
# Tokens. With a tier, layers with a wider window keep all blocks, because the tier stores the window with each state.
WIDEST_STORED: Final = 1024
SMALL_SLOT: Final = 0.25  # share of a block up to which a slot is cheap enough to save every boundary


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The blocks of the layers that look equally far back. Block `b` starts at byte `b * stride_bytes` of the arena.

    With `window`, blocks that lie wholly behind it are given back. Without one all blocks are kept. Attention sees a
    block as `kernel_blocks` blocks of `kernel_block_size` tokens.
    """

    window: int | None
    block_bytes: int  # without padding
    blocks_per_page: int
    stride_bytes: int
    kernel_block_size: int  # tokens
    kernel_blocks: int  # in a block

    def first_block(self, position: int) -> int:
        """Return the index of the first block that the token at `position` attends to; 0 without a window."""
        if self.window is None:
            return 0
        return max(0, position + 1 - self.window) // BLOCK_SIZE

    @property
    def most_of_state(self) -> int:
        """The most blocks that a checkpoint holds: those of the window before its next token."""
        assert self.window is not None
        return -(-(self.window - 1) // BLOCK_SIZE)

    @property
    def most_blocks(self) -> int:
        """The most blocks that a row needs between two steps, the block of its next token and its drafts included."""
        return self.most_of_state + 2

    @property
    def unit_bytes(self) -> int:
        """The bytes of a block without padding at its end. Its kernel blocks are padded in between."""
        return self.stride_bytes - (self.stride_bytes - self.block_bytes) // self.kernel_blocks


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the arena is divided. Build it with `CacheLayout.create`.

    A page holds either `blocks_per_page` blocks or `slots_per_page` slots. Block `b` starts at byte
    `b * block_stride_bytes` of the arena and slot `s` at `s * slot_stride_bytes`. Both strides divide `page_bytes`, so
    every tensor of a layer is one strided view. A layout without attention has `blocks_per_page == 0`, one without
    states `slots_per_page == 0`. Attention sees a block as `kernel_blocks` equal parts of `kernel_block_size` tokens,
    each with what all layers keep of its tokens. The tokens of each block are dealt to `dealt_to` ranks, and the bytes
    are those of one rank. Blocks of windows are not dealt.

    Layers with windows have blocks of their own (`windows`), which are a part of the state: a checkpoint holds those
    that its next token attends to. "Blocks" alone are those of layers that attend to all tokens. A layout with windows
    and without recurrent layers has slots of 0 bytes, so that it has checkpoints too.
    """

    layers: tuple[LayerSpec, ...]
    blocks_per_page: int
    slots_per_page: int
    page_bytes: int
    kv: tuple[KVSpec, ...]  # specs of all layers
    states: tuple[StateSpec, ...]
    block_bytes: int  # without padding
    slot_bytes: int  # without padding
    kernel_block_size: int  # tokens
    kernel_blocks: int  # in a block
    has_kv: bool  # whether blocks are kept
    has_states: bool
    windows: tuple[BlockGroup, ...] = ()
    groups: tuple[BlockGroup, ...] = ()  # all groups of blocks: that of layers without a window, then `windows`
    dealt_to: int = 1
    whole_kernel_block_size: int = BLOCK_SIZE  # tokens that attention reads at a time of blocks that are not dealt

    @classmethod
    def create(
        cls,
        layers: Sequence[LayerSpec],
        kernel_block_sizes: Sequence[int] = (),
        longest: int | None = None,
        dealt_to: int = 1,
    ) -> CacheLayout:
        """Build the layout with the smallest page that wastes at most 5 %, whatever it holds.

        Kernels read blocks of the first of `kernel_block_sizes` that divides what a rank keeps of a block. Raises
        ConfigError if none does, or if the layers keep nothing. Without sizes they read all of it. Layers with a window
        of `longest` tokens or more keep all blocks; None: only those without a window do. Each block is dealt to
        `dealt_to` ranks, a divisor of BLOCK_SIZE.
        """
        if longest is not None:
            layers = [tuple(_without_wide_window(spec, longest) for spec in layer) for layer in layers]
        specs = [spec for layer in layers for spec in layer]
        kv = tuple(spec for spec in specs if isinstance(spec, KVSpec))
        states = tuple(spec for spec in specs if isinstance(spec, StateSpec))
        whole_size = _kernel_block_size(kernel_block_sizes, BLOCK_SIZE)
        kernel_size = _kernel_block_size(kernel_block_sizes, BLOCK_SIZE // dealt_to)
        kernel_blocks = BLOCK_SIZE // dealt_to // kernel_size
        block_bytes = kernel_blocks * sum(spec.block_bytes(kernel_size) for spec in kv if spec.window is None)
        slot_bytes = sum(spec.slot_bytes for spec in states)
        windows: tuple[BlockGroup, ...] = ()
        if widths := sorted({spec.window for spec in kv if spec.window is not None}):
            count = BLOCK_SIZE // whole_size
            sizes = [count * sum(spec.block_bytes(whole_size) for spec in kv if spec.window == w) for w in widths]
            (blocks, slots, *per_page), page_bytes = choose_shared_page(
                [block_bytes, slot_bytes, *sizes], math.lcm(kernel_blocks, count)
            )
            windows = tuple(
                BlockGroup(width, num_bytes, blocks_per_page, page_bytes // blocks_per_page, whole_size, count)
                for width, num_bytes, blocks_per_page in zip(widths, sizes, per_page, strict=True)
            )
            slots = slots or SLOTS_WITHOUT_BYTES
        else:
            blocks, slots, page_bytes = choose_page(block_bytes, slot_bytes, kernel_blocks)
        groups = windows
        if blocks:
            groups = (BlockGroup(None, block_bytes, blocks, page_bytes // blocks, kernel_size, kernel_blocks), *windows)
        return cls(
            layers=tuple(layers),
            blocks_per_page=blocks,
            slots_per_page=slots,
            page_bytes=page_bytes,
            kv=kv,
            states=states,
            block_bytes=block_bytes,
            slot_bytes=slot_bytes,
            kernel_block_size=kernel_size,
            kernel_blocks=kernel_blocks,
            has_kv=blocks > 0,
            has_states=slots > 0,
            windows=windows,
            groups=groups,
            dealt_to=dealt_to,
            whole_kernel_block_size=whole_size,
        )

    @property
    def block_stride_bytes(self) -> int:
        return self.page_bytes // self.blocks_per_page if self.blocks_per_page else 0

    @property
    def slot_stride_bytes(self) -> int:
        return self.page_bytes // self.slots_per_page if self.slots_per_page else 0

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a state, and of the blocks of its windows if no other checkpoint shares them."""
        return self.slot_bytes + sum(group.most_of_state * group.block_bytes for group in self.windows)

    @property
    def stored_slot_bytes(self) -> int:
        """The bytes of a slot of a tier: a state, and the most blocks of windows that it needs."""
        return self.slot_bytes + sum(group.most_of_state * group.unit_bytes for group in self.windows)

    def in_tiers(self) -> CacheLayout:
        """Return the layout of tiers, and of what other engines fetch. It has no windows.

        A slot there has the state and then the blocks of each window, which the arena holds in units of their own.
        Units have no padding at their end.
        """
        if not self.windows:
            return self
        block_bytes = self.groups[0].unit_bytes if self.has_kv else 0
        slot_bytes = max(ALIGNMENT_BYTES, self.stored_slot_bytes)  # windows of one token need no blocks
        blocks, slots, page_bytes = choose_page(block_bytes, slot_bytes, 1)
        size = BLOCK_SIZE // self.dealt_to
        groups: tuple[BlockGroup, ...] = ()
        if blocks:
            groups = (BlockGroup(None, block_bytes, blocks, page_bytes // blocks, size, 1),)
        return replace(
            self,
            blocks_per_page=blocks,
            slots_per_page=slots,
            page_bytes=page_bytes,
            block_bytes=block_bytes,
            slot_bytes=slot_bytes,
            kernel_block_size=size,
            kernel_blocks=1,
            windows=(),
            groups=groups,
        )

    @property
    def state_operators(self) -> tuple[str, ...]:
        """The operators that update states, each once."""
        tensors = (tensor for spec in self.states for tensor in spec.tensors)
        return tuple(dict.fromkeys(name for tensor in tensors for name in tensor.operators or ()))

    @property
    def verifies_drafts(self) -> bool:
        """Whether every state can be brought to the last accepted draft."""
        return all(tensor.drafts for spec in self.states for tensor in spec.tensors)

    @property
    def spaces_writes(self) -> bool:
        """Whether some state can be written every few tokens only."""
        return any(tensor.spaced for spec in self.states for tensor in spec.tensors)

    @property
    def padding(self) -> float:
        """The share of a page that carries no data, for the units that waste most of it."""
        waste = [0.0]
        if self.has_kv:
            waste.append(1 - self.block_bytes * self.blocks_per_page / self.page_bytes)
        if self.slot_bytes:
            waste.append(1 - self.slot_bytes * self.slots_per_page / self.page_bytes)
        waste += (1 - group.block_bytes * group.blocks_per_page / self.page_bytes for group in self.windows)
        return max(waste)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks of each group, rounded up, for `num_tokens` tokens; 0 without attention."""
        return -(-num_tokens // BLOCK_SIZE) if self.kv else 0

    def num_window_blocks_for(self, num_tokens: int) -> list[int]:
        """Return for each of `windows` how many blocks a request of `num_tokens` tokens needs at the least."""
        return [min(self.num_blocks_for(num_tokens), group.most_blocks) for group in self.windows]

    def num_pages_for(self, num_tokens: int, num_slots: int) -> int:
        """Return the pages that a request of `num_tokens` tokens with `num_slots` slots needs at least."""
        return self.num_pages_of(self.num_blocks_for(num_tokens), num_slots, self.num_window_blocks_for(num_tokens))

    def num_pages_of(self, num_blocks: int, num_slots: int, num_window_blocks: Sequence[int]) -> int:
        """Return the pages that so many blocks and slots take, and blocks of each of `windows`, densely packed."""
        pages = 0
        if self.has_kv:
            pages += -(-num_blocks // self.blocks_per_page)
        if self.has_states:
            pages += -(-num_slots // self.slots_per_page)
        for group, count in zip(self.windows, num_window_blocks, strict=True):
            pages += -(-count // group.blocks_per_page)
        return pages

    def fallback_step(self, num_pages: int) -> int:
        """Return the tokens between fallbacks, the states in a prompt that outlive its end; 0: there are none.

        n fallbacks in an arena of s slots cost the share n / s of it. A conversation that is evicted down to the next
        fallback loses 1 / (2 n) of the arena on average beyond what was needed.
        The sum f(n) = n / s + 1 / (2 n) is least at n = sqrt(s / 2), which puts fallbacks sqrt(2 s) slots' worth of KV
        blocks apart. They are at most 1 / FALLBACKS_PER_ARENA of the arena apart, so that a conversation that fills
        much of the arena always has one.
        """
        if not (self.has_kv and self.has_states):
            return 0
        part = num_pages * self.blocks_per_page // FALLBACKS_PER_ARENA
        distance = int(math.sqrt(2 * num_pages * self.slots_per_page) * self.checkpoint_bytes / self.block_bytes)
        return min(part, distance) * BLOCK_SIZE

    def capture_interval(self, asked: int) -> int:
        """Return the distance in tokens between periodic states, where `asked` is the option's; 0: none.

        If slots are small next to blocks, it is 64: every boundary.
        """
        is_small = self.has_kv and self.checkpoint_bytes <= SMALL_SLOT * self.block_bytes
        if asked and is_small:
            return BLOCK_SIZE
        return asked

    def longest_request(self, num_pages: int) -> int:
        """Return how many tokens, prompt and output, a request may have in an empty arena.

        `num_pages` includes page 0.
        """
        windows = [group.most_blocks for group in self.windows]
        pages = num_pages - 1 - self.num_pages_of(0, 1, windows)  # page 0 is reserved; one state
        return max(0, pages) * self.blocks_per_page * BLOCK_SIZE

    @staticmethod
    def usable_prefix(num_prompt_tokens: int) -> int:
        """Return how many tokens a hit may cover: whole blocks, without the prompt's last token."""
        return max(0, num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def _without_wide_window(spec: KVSpec | StateSpec, longest: int) -> KVSpec | StateSpec:
    if isinstance(spec, KVSpec) and spec.window is not None and spec.window >= longest:
        return replace(spec, window=None)
    return spec


def _kernel_block_size(sizes: Sequence[int], num_tokens: int) -> int:
    """Return the first of `sizes` that divides `num_tokens`, the tokens of a block that one rank keeps."""
    fitting = [size for size in sizes if size > 0 and num_tokens % size == 0]
    if sizes and not fitting:
        what = f"a block of {BLOCK_SIZE}"
        if num_tokens < BLOCK_SIZE:
            what = f"the {num_tokens} tokens of a block that one of {BLOCK_SIZE // num_tokens} ranks keeps"
        raise ConfigError(
            f"the device's attention reads blocks of {' or '.join(map(str, sizes))} tokens; none divides {what}"
        )
    return fitting[0] if fitting else num_tokens
