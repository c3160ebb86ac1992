"""Emulates vLLM's prefix cache for hybrid models ("align" mode), by the rules of version 0.33.

There is one pool of ids of equal size. An id is a page in every layer of one group. A block of `block_tokens` tokens
takes one id of the attention group. A state takes one id of each state group. All ids share one LRU list.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from forkpoint.cache.hashing import BlockHash
from forkpoint.errors import ConfigError
from forkpoint.sim.shape import ModelShape
from studies.emulations.sequence import GRID, EmulatedChunk, EmulatedCounts, EmulatedHit, Sequence

KERNEL_BLOCKS = {"Kimi-Linear-48B-A3B": 128}  # tokens of the smallest block of its attention kernels, else GRID


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The flags that change what is kept.

    `dense`: retention interval None, every chunk end and every boundary crossed in decode stays. `unit`: the prefix
    match unit, a multiple of GRID, 0 for none.
    """

    dense: bool = False
    unit: int = 0


@dataclass(frozen=True, slots=True)
class VllmGeometry:
    """Tokens of a block, groups of state layers, and bytes of an id."""

    block_tokens: int
    num_state_groups: int
    id_bytes: int

    @classmethod
    def of(cls, shape: ModelShape) -> VllmGeometry:
        """Compute the geometry: blocks grow until their page is as large as a state's, and groups are as large as the
        smaller kind."""
        kv, states = shape.layout.kv, shape.layout.states
        if not kv or not states:
            raise ConfigError(f"{shape.name} is not a hybrid model; its vLLM emulation has nothing to align")
        token_bytes = kv[0].block_bytes(GRID) // GRID
        state_bytes = max(state.slot_bytes for state in states)
        step = KERNEL_BLOCKS.get(shape.name, GRID)
        block = step * math.ceil(state_bytes / (step * token_bytes))
        group = min(len(kv), len(states))
        num_attention, num_states = math.ceil(len(kv) / group), math.ceil(len(states) / group)
        return cls(block, num_states, group * num_attention * block * token_bytes)


Key = tuple[int, bytes]  # group (0: attention, PARTIAL: a partly filled attention block), hash
PARTIAL = -1


@dataclass(slots=True, eq=False)
class Id:
    """One row of the pool."""

    key: Key | None = None
    num_users: int = 0


@dataclass(slots=True)
class _Held:
    """The ids of a running sequence."""

    blocks: list[Id] = field(default_factory=list)
    states: list[Id] = field(default_factory=list)  # the running state, one id a group
    released: list[list[Id]] = field(default_factory=list)  # states to let go of at the next step


class VllmCache:
    """Implements EmulatedCache."""

    def __init__(self, geometry: VllmGeometry, num_ids: int, options: VllmOptions) -> None:
        self.geometry = geometry
        self.options = options
        self.counts = EmulatedCounts()
        self.max_num_seqs = max(1, num_ids // (1 + geometry.num_state_groups))
        self.num_ids = num_ids
        self._free: OrderedDict[Id, None] = OrderedDict((Id(), None) for _ in range(num_ids))
        self._cached: dict[Key, dict[Id, None]] = {}  # of equal ones all stay; the first is found
        self._partials: dict[bytes, list[int]] = {}  # hash of the full blocks before -> ends of partial tails
        self._held: dict[Sequence, _Held] = {}

    # --- lookup

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """Return whether a sequence can run alone: its blocks, a running state and a stored one, and one more with
        partial tails."""
        blocks = math.ceil(sequence.num_tokens / self.geometry.block_tokens)
        num_states = 3 if self.options.unit else 2
        return blocks + num_states * self.geometry.num_state_groups + 1 <= self.num_ids

    def lookup(self, sequence: Sequence, num_known_tokens: int) -> EmulatedHit:
        """Find the longest prefix with keys and values, then the last state in it."""
        size, hashes = self.geometry.block_tokens, sequence.chain.hashes
        num_full = 0
        while (num_full + 1) * size < num_known_tokens and self._has(0, hashes, (num_full + 1) * size):
            num_full += 1
        kv_end = num_full * size
        if self.options.unit:
            kv_end = self._partial_end(sequence, kv_end, num_known_tokens)
        for end in self._state_ends(num_full, kv_end):
            if self._has_states(hashes, end):
                return EmulatedHit(end, num_full * size)
        return EmulatedHit(0, num_full * size)

    def _partial_end(self, sequence: Sequence, kv_end: int, num_known_tokens: int) -> int:
        hashes = sequence.chain.hashes
        before = hashes[kv_end // GRID - 1] if kv_end else sequence.chain.root
        ends = [end for end in self._partials.get(before, ()) if kv_end < end < num_known_tokens]
        return max((end for end in ends if self._has(PARTIAL, hashes, end)), default=kv_end)

    def _state_ends(self, num_full: int, kv_end: int) -> range:
        """Return the positions where a state may be, the last first."""
        step = self.options.unit or self.geometry.block_tokens
        return range(kv_end if self.options.unit else num_full * step, 0, -step)

    def _has(self, group: int, hashes: list[BlockHash], end: int) -> bool:
        return (group, hashes[end // GRID - 1]) in self._cached

    def _has_states(self, hashes: list[BlockHash], end: int) -> bool:
        return all(self._has(group, hashes, end) for group in self._state_groups)

    @property
    def _state_groups(self) -> range:
        return range(1, self.geometry.num_state_groups + 1)

    # --- where chunks end

    def _last_boundary(self, sequence: Sequence) -> int:
        """Return the last boundary of the prompt whose state is kept."""
        size = self.geometry.block_tokens
        return (sequence.prefill_end - 1) // size * size

    def _partial_tail(self, sequence: Sequence) -> int:
        unit = self.options.unit
        return (sequence.prefill_end - 1) // unit * unit if unit else 0

    def _junction(self, sequence: Sequence) -> int:
        size = self.geometry.block_tokens
        return sequence.junction // size * size

    def chunk_end(self, sequence: Sequence, start: int, end: int, budget: int) -> int:
        """Round intermediate ends down to a block. Mandatory stops come first."""
        size = self.geometry.block_tokens
        if end < sequence.prefill_end and end // size * size > start:
            end = end // size * size
        elif end < sequence.prefill_end and budget >= size:
            return start
        stops = [self._junction(sequence)]
        if not self._stored_midway(sequence, start, end):
            next_boundary = -(-start // size) * size  # `start` itself, which is no stop, if it is a boundary
            stops += [next_boundary, self._last_boundary(sequence), self._partial_tail(sequence)]
        return min((stop for stop in stops if start < stop < end), default=end)

    def _stored_midway(self, sequence: Sequence, start: int, end: int) -> int:
        """Return the position whose state the kernel stores while the last chunk passes it; 0 if there is none.

        The state needs a column of the block table between that of the chunk's first state and that of its last one.
        """
        size = self.geometry.block_tokens
        step = self.options.unit or size
        position = (sequence.prefill_end - 1) // step * step
        has_column = -(-end // size) - 2 > (start - 1) // size
        passes = end >= sequence.prefill_end and start % step == 0 and start < position < end
        return position if passes and has_column else 0

    # --- room

    def _take(self, count: int) -> list[Id] | None:
        if len(self._free) < count:
            return None
        return [self._pop() for _ in range(count)]

    def _pop(self) -> Id:
        block, _ = self._free.popitem(last=False)
        if block.key is not None:
            if block.key[0] > 0:
                self.counts.states_evicted += block.key[0] == 1
            else:
                self.counts.blocks_evicted += 1
            self._forget(block)
        block.num_users = 1
        return block

    def _forget(self, block: Id) -> None:
        assert block.key is not None
        equal = self._cached[block.key]
        del equal[block]
        if not equal:
            del self._cached[block.key]
        block.key = None

    def _find(self, group: int, block_hash: bytes) -> Id:
        return next(iter(self._cached[(group, block_hash)]))

    def _use(self, block: Id) -> None:
        if not block.num_users:
            del self._free[block]
        block.num_users += 1

    def _release(self, blocks: list[Id]) -> None:
        """Queue unused ids for eviction: nameless ones in front, the last of the list first."""
        for block in blocks:
            block.num_users -= 1
            if not block.num_users:
                self._free[block] = None
                if block.key is None:
                    self._free.move_to_end(block, last=False)

    def _name(self, block: Id, group: int, block_hash: bytes) -> None:
        """Register contents. An id that already has the same contents stays registered too."""
        if block.key is None:
            block.key = group, block_hash
            self._cached.setdefault(block.key, {})[block] = None

    # --- running

    def _source(self, sequence: Sequence, hit: EmulatedHit) -> list[Id]:
        """Return what a hit copies from: the states, and the block that it ends in (a whole one, or a partial tail)."""
        size, hashes, at = self.geometry.block_tokens, sequence.chain.hashes, hit.num_tokens
        if not at:
            return []
        source = [self._find(group, hashes[at // GRID - 1]) for group in self._state_groups]
        if at % size:
            whole = at < hit.kv_num_tokens
            end = -(-at // size) * size if whole else at
            source.append(self._find(0 if whole else PARTIAL, hashes[end // GRID - 1]))
        return source

    def start(self, sequence: Sequence, hit: EmulatedHit, end: int) -> bool:
        """Attach the hit. Its last states are held until the next step."""
        size, hashes = self.geometry.block_tokens, sequence.chain.hashes
        shared = [self._find(0, hashes[(i + 1) * size // GRID - 1]) for i in range(hit.num_tokens // size)]
        source = self._source(sequence, hit)
        needed = -(-end // size) - len(shared) + self.geometry.num_state_groups
        needed += sum(not block.num_users for block in (*shared, *source))
        if len(self._free) < needed + self._for_checkpoint(sequence, hit.num_tokens, end):
            return False
        for block in (*shared, *source):
            self._use(block)
        held = _Held(shared, released=[source] if source else [])
        self._held[sequence] = held
        held.states = self._take(self.geometry.num_state_groups) or []
        held.blocks += self._take(-(-end // size) - len(shared)) or []
        return True

    def _for_checkpoint(self, sequence: Sequence, start: int, end: int) -> int:
        """Return the ids that a chunk's checkpoint takes: a state, and an attention block with a partial tail."""
        position = self._stored_midway(sequence, start, end)
        if not position and end == self._partial_tail(sequence):
            position = end
        return (self.geometry.num_state_groups + (position % self.geometry.block_tokens > 0)) * (position > 0)

    def grow(self, sequence: Sequence, end: int) -> bool:
        held, size = self._held[sequence], self.geometry.block_tokens
        self._let_go(held)
        missing = -(-end // size) - len(held.blocks)
        spare = 0
        if sequence.decode_base is None:
            spare = self._for_checkpoint(sequence, sequence.num_computed, end)
        if len(self._free) < max(missing, 0) + spare:
            return False
        taken = self._take(max(missing, 0))
        assert taken is not None
        held.blocks += taken
        return True

    def chunk_done(self, sequence: Sequence, start: int, end: int) -> EmulatedChunk:
        """Register full blocks, and keep the states that the retention rule names."""
        held, size = self._held[sequence], self.geometry.block_tokens
        self._let_go(held)
        self._name_blocks(sequence, start, end)
        num_saves, copied = 0, 0
        midway, last = self._stored_midway(sequence, start, end), self._last_boundary(sequence)
        if midway and midway % size == 0:
            stored = self._take(self.geometry.num_state_groups)
            if stored is not None:
                self._name_states(sequence, stored, midway)
                held.released.append(stored)
                num_saves += 1
        if end % size == 0:
            num_saves += self._turn_over(sequence, end, self.options.dense or end in (last, self._junction(sequence)))
            copied = self.geometry.num_state_groups * self.geometry.id_bytes
        tail = midway or end
        if tail % size and tail == self._partial_tail(sequence):
            num_saves += self._save_partial(sequence, tail)
        return EmulatedChunk(num_saves, copied)

    def _name_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        size, blocks = self.geometry.block_tokens, self._held[sequence].blocks
        for index in range(start // size, end // size):
            self._name(blocks[index], 0, sequence.chain.hashes[(index + 1) * size // GRID - 1])

    def _name_states(self, sequence: Sequence, states: list[Id], end: int) -> None:
        block_hash = sequence.chain.hashes[end // GRID - 1]
        for group, block in zip(self._state_groups, states, strict=True):
            self._name(block, group, block_hash)

    def _turn_over(self, sequence: Sequence, end: int, keep: bool) -> int:
        """Give the next step a fresh running state at a boundary. The old state is named if it is to be kept."""
        held = self._held[sequence]
        fresh = self._take(self.geometry.num_state_groups)
        if fresh is None:
            return 0
        if keep:
            self._name_states(sequence, held.states, end)
        held.released.append(held.states)
        held.states = fresh
        return int(keep)

    def _save_partial(self, sequence: Sequence, end: int) -> int:
        """Keep the final partial block and its state as copies, because their owner goes on."""
        hashes, size = sequence.chain.hashes, self.geometry.block_tokens
        copies = self._take(1 + self.geometry.num_state_groups)
        if copies is None:
            return 0
        full = end // size * size
        before = hashes[full // GRID - 1] if full else sequence.chain.root
        ends = self._partials.setdefault(before, [])
        if end not in ends:
            ends.append(end)
        self._name(copies[0], PARTIAL, hashes[end // GRID - 1])
        self._name_states(sequence, copies[1:], end)
        self._held[sequence].released.append(copies)
        return 1

    def _let_go(self, held: _Held) -> None:
        for states in held.released:
            self._release(states)
        held.released.clear()

    # --- decode

    def next_event(self, position: int) -> int:
        size = self.geometry.block_tokens
        return -(-position // size) * size

    def decode_event(self, sequence: Sequence, position: int) -> EmulatedChunk | None:
        """Take a new block and a new running state at a block boundary."""
        size = self.geometry.block_tokens
        if not self.grow(sequence, position + 1):
            return None
        if position % size or position <= sequence.prefill_end:
            return EmulatedChunk()
        self._name_blocks(sequence, position - size, position)
        saved = self._turn_over(sequence, position, self.options.dense)
        return EmulatedChunk(saved, self.geometry.num_state_groups * self.geometry.id_bytes)

    def end_step(self, num_decodes: int) -> bool:
        return True

    def free(self, sequence: Sequence, num_computed: int, finished: bool) -> None:
        """Give everything back. Blocks are queued for eviction, the last one first."""
        held, size = self._held.pop(sequence), self.geometry.block_tokens
        self._let_go(held)
        self._release(held.states)
        full = num_computed // size
        for index in range(max(0, full - 1), min(full, len(held.blocks))):
            self._name(held.blocks[index], 0, sequence.chain.hashes[(index + 1) * size // GRID - 1])
        self._release(held.blocks[::-1])
