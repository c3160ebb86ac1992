"""Emulates SGLang's prefix cache for hybrid models, by the rules of version 0.5.23: one radix tree, two pools."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from forkpoint.sim.shape import ModelShape
from studies.emulations.radix import RadixNode, RadixTree
from studies.emulations.sequence import EmulatedChunk, EmulatedCounts, EmulatedHit, Sequence

CACHE_CHUNK = 64


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """The flags `--mamba-radix-cache-strategy`, `--mamba-full-memory-ratio` (bytes of states : bytes of keys and
    values) and `--mamba-track-interval`."""

    extra_buffer: bool = True
    memory_ratio: float = 0.9
    track_interval: int = 256

    @property
    def page(self) -> int:
        return CACHE_CHUNK if self.extra_buffer else 1

    @property
    def slots_reserved(self) -> int:
        """Slots per running request that the sizing rule counts."""
        return 5 if self.extra_buffer else 3

    @property
    def slots_held(self) -> int:
        """Slots that a running request takes: its state, and two for tracked states."""
        return 3 if self.extra_buffer else 1


@dataclass(slots=True)
class _Held:
    """What a running sequence holds: the locked path, and its own tokens beyond the tree."""

    node: RadixNode
    state: RadixNode | None  # the state that it started from, locked while it runs
    own_tokens: int
    tracked: int = 0  # position of the last state in a track slot


class SglangCache:
    """Implements EmulatedCache."""

    def __init__(self, shape: ModelShape, memory_bytes: int, options: SglangOptions) -> None:
        self.options = options
        ratio = options.memory_ratio
        self.num_slots = int(memory_bytes * ratio / (1 + ratio)) // shape.layout.slot_bytes
        self.num_kv_tokens = int(memory_bytes / (1 + ratio)) // shape.kv_token_bytes // options.page * options.page
        self.counts = EmulatedCounts()
        self.max_num_seqs = max(1, self.num_slots // options.slots_reserved)
        self._slot_bytes = shape.layout.slot_bytes
        self._tree = RadixTree(options.page)
        self._free_slots = self.num_slots
        self._free_tokens = self.num_kv_tokens
        self._held: dict[Sequence, _Held] = {}
        self._tickets = itertools.count()
        self._states: list[tuple[int, int, RadixNode]] = []  # heap by last use
        self._leaves: list[tuple[int, int, RadixNode]] = []

    def _pages(self, num_tokens: int) -> int:
        page = self.options.page
        return -(-num_tokens // page) * page

    # --- lookup

    def can_ever_fit(self, sequence: Sequence) -> bool:
        return self._pages(sequence.num_tokens) <= self.num_kv_tokens and self.options.slots_held <= self.num_slots

    def lookup(self, sequence: Sequence, num_known_tokens: int) -> EmulatedHit:
        """Return the longest match in keys and values, and of it the part up to the deepest node with a state."""
        node, end = self._tree.match(sequence.tokens, num_known_tokens - 1)
        state = next((item for item in self._tree.path(node) if item.has_state), None)
        return EmulatedHit(state.end if state else 0, end)

    def _branch(self, sequence: Sequence) -> int:
        return sequence.junction // CACHE_CHUNK * CACHE_CHUNK if self.options.extra_buffer else 0

    # --- running

    def chunk_end(self, sequence: Sequence, start: int, end: int, budget: int) -> int:
        return end if end == sequence.prefill_end else max(start, end // self.options.page * self.options.page)

    def start(self, sequence: Sequence, hit: EmulatedHit, end: int) -> bool:
        """Split the tree where the match ends, lock the hit, and copy its state to the request's own slot."""
        tree, tokens = self._tree, sequence.tokens
        deepest, matched = tree.match(tokens, hit.kv_num_tokens)
        tree.touch(tree.split(tokens, deepest, matched))
        node, _ = tree.match(tokens, hit.num_tokens)
        state = node if hit.num_tokens else None
        tree.lock(node, 1)
        if state is not None:
            state.state_locks += 1
            self._use_state(state)
        own = self._pages(sequence.prefill_end) - hit.num_tokens
        if self._take_slots(self.options.slots_held):
            if self._take_tokens(own):
                self._held[sequence] = _Held(node, state, own, hit.num_tokens)
                return True
            self._free_slots += self.options.slots_held
        tree.lock(node, -1)
        if state is not None:
            state.state_locks -= 1
            self._file_state(state)
        self._file_leaf(node)
        return False

    def grow(self, sequence: Sequence, end: int) -> bool:
        return True  # admission took the whole prompt

    def chunk_done(self, sequence: Sequence, start: int, end: int) -> EmulatedChunk:
        """Store one state per chunk: at the branch, at the last grid position, or (no_buffer) at the chunk's end."""
        if not self.options.extra_buffer:
            saved = self._store(sequence, end)
            return EmulatedChunk(saved, saved * self._slot_bytes)
        branch = self._branch(sequence)
        at = start + (end - start) // CACHE_CHUNK * CACHE_CHUNK
        if start < branch <= end and (branch - start) % CACHE_CHUNK == 0:
            at = branch
        if at <= start:
            return EmulatedChunk()
        return EmulatedChunk(self._store(sequence, at))

    def _store(self, sequence: Sequence, end: int) -> int:
        """Store tokens up to `end` and a state there in the tree. Return 1 if a slot was found for the state."""
        held, tree = self._held[sequence], self._tree
        node, new = tree.insert(sequence.tokens, end)
        duplicates = max(0, node.end - held.node.end - new)
        held.own_tokens -= new + duplicates
        self._free_tokens += duplicates  # somebody else filed the same tokens: this copy is given back
        tree.lock(node, 1)
        tree.lock(held.node, -1)
        self._file_leaf(held.node)
        held.node = node
        held.tracked = max(held.tracked, node.end)
        if node.end != end or node.has_state:
            if node.has_state:
                self._use_state(node)
            return 0
        if not self._take_slots(1):
            return 0
        node.has_state = True
        self._use_state(node)
        return 1

    # --- decode

    def next_event(self, position: int) -> int:
        step = math.gcd(self.options.page, self.options.track_interval) if self.options.extra_buffer else 1 << 62
        return -(-position // step) * step

    def decode_event(self, sequence: Sequence, position: int) -> EmulatedChunk | None:
        """Take one more page. At the track interval the state moves to the other track slot."""
        held = self._held[sequence]
        if not self.options.extra_buffer:
            return EmulatedChunk()
        if position >= held.node.end + held.own_tokens:
            if not self._take_tokens(self.options.page):
                return None
            held.own_tokens += self.options.page
        if position % self.options.track_interval == 0 and position > sequence.prefill_end:
            held.tracked = position
            return EmulatedChunk(1)
        return EmulatedChunk()

    def end_step(self, num_decodes: int) -> bool:
        """Take pages of one token for all rows that decode at once."""
        return self.options.extra_buffer or self._take_tokens(num_decodes)

    def free(self, sequence: Sequence, num_computed: int, finished: bool) -> None:
        """Store the last tracked state (no_buffer: the last state itself) in the tree with its tokens."""
        held = self._held[sequence]
        decoded = max(0, num_computed - sequence.prefill_end) if not self.options.extra_buffer else 0
        held.own_tokens += decoded
        if finished:
            end = held.tracked if self.options.extra_buffer else num_computed
            if end > held.node.end:
                self._free_slots += 1  # one of the slots held changes hands
                self._store(sequence, end)
                self._free_slots -= 1
        del self._held[sequence]
        self._free_tokens += held.own_tokens
        self._free_slots += self.options.slots_held
        self._tree.lock(held.node, -1)
        self._file_leaf(held.node)
        if held.state is not None:
            held.state.state_locks -= 1
            self._file_state(held.state)

    # --- what gives way

    def _take_slots(self, count: int) -> bool:
        while self._free_slots < count:
            if not self._evict_state():
                return False
        self._free_slots -= count
        return True

    def _take_tokens(self, count: int) -> bool:
        while self._free_tokens < count:
            if not self._evict_leaf():
                return False
        self._free_tokens -= count
        return True

    def _use_state(self, node: RadixNode) -> None:
        node.state_used = self._tree.tick()
        self._file_state(node)

    def _file_state(self, node: RadixNode) -> None:
        if node.has_state and not node.state_locks:
            heapq.heappush(self._states, (node.state_used, next(self._tickets), node))

    def _file_leaf(self, node: RadixNode) -> None:
        if node.parent is not None and not node.children and not node.locks and not node.dropped:
            heapq.heappush(self._leaves, (node.used, next(self._tickets), node))

    def _evict_state(self) -> bool:
        """Evict the least recently used state. At a leaf its keys and values are evicted too."""
        while self._states:
            used, _, node = heapq.heappop(self._states)
            if node.dropped or not node.has_state or node.state_locks or node.state_used != used:
                continue
            if not node.children and not node.locks:
                self._drop_leaf(node)
            else:
                self._drop_state(node)
            return True
        return False

    def _drop_state(self, node: RadixNode) -> None:
        node.has_state = False
        self._free_slots += 1
        self.counts.states_evicted += 1

    def _evict_leaf(self) -> bool:
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.dropped or node.children or node.locks:
                continue
            if node.used != used:
                self._file_leaf(node)
                continue
            self._drop_leaf(node)
            return True
        return False

    def _drop_leaf(self, node: RadixNode) -> None:
        if node.has_state:
            self._drop_state(node)
        self._tree.remove(node)
        self._free_tokens += len(node.tokens)
        self.counts.blocks_evicted += -(-len(node.tokens) // CACHE_CHUNK)
        assert node.parent is not None
        self._file_leaf(node.parent)
