"""The cache as the scheduler sees it: look up, lease, save, commit, release."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from forkpoint.cache.arena import Arena, Move, MoveRoute
from forkpoint.cache.boundaries import DecodeBoundaries
from forkpoint.cache.counters import CacheStats
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.filing import Filing
from forkpoint.cache.hashing import HashChain, TokenIds, chained_hashes
from forkpoint.cache.layout import NO_SLOT, CacheLayout
from forkpoint.cache.lease import Lease
from forkpoint.cache.lookup import NOTHING, PrefixHit, find_prefix
from forkpoint.cache.peer_offers import Fetch
from forkpoint.cache.policies import new_eviction_policy
from forkpoint.cache.policy_answers import checked_missed
from forkpoint.cache.restorable import ARENA, RestorableRooms
from forkpoint.cache.room import ArenaRoom
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tiers import NO_TIERS, Tiers, TierSizes
from forkpoint.cache.tree import INSIDE_PROMPTS, OF_LAST_TURN, Checkpoint, Entry, Node, Origin
from forkpoint.cache.windows import WindowRow
from forkpoint.config import BLOCK_SIZE, CacheConfig
from forkpoint.images import ImageSpan


class CacheManager:
    """Keeps the tree, the arena's accounting and the leases consistent after every method.

    The scheduler calls this class, its `room`, `boundaries`, `filing` and `tiers`, and the methods of Lease. It only
    reads what is behind them.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        config: CacheConfig,
        *,
        deterministic: bool = False,
        cost: RecomputeCost | None = None,
        new_policy: Callable[[], EvictionPolicy] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tiers: TierSizes = NO_TIERS,
    ) -> None:
        """`cost` weighs entries for eviction; `new_policy` replaces the policy of `config`. `clock` counts seconds."""
        self.layout = layout
        self.deterministic = deterministic
        self.enabled = config.enable_prefix_caching and (config.checkpoints or not layout.has_states)
        self.arena = Arena(layout, num_pages)
        create = new_policy or partial(new_eviction_policy, config.eviction_policy)

        def new_timed_policy() -> EvictionPolicy:
            policy = create()
            policy.clock = clock
            return policy

        cost = cost or RecomputeCost()
        self.store = PrefixStore(layout, self.arena, new_timed_policy(), cost, config.num_ghosts)
        self.filing = Filing(self.store)
        self.boundaries = DecodeBoundaries(self.store, self.filing)
        self.room = ArenaRoom(self.store)
        self.tiers = Tiers(
            tiers if self.enabled else NO_TIERS,
            self.store,
            new_timed_policy,
            cost,
            has_private=deterministic,
            clock=clock,
        )

    # --- before a request runs

    def new_lease(self, owner: str, salt: str, token_ids: TokenIds, images: Sequence[ImageSpan] = ()) -> Lease:
        """Return a lease that holds nothing, for a prompt whose blocks are hashed after `salt`.

        In deterministic mode only `owner` finds the blocks with later tokens, which decode kernels compute.
        """
        chain = HashChain(salt, owner, len(token_ids) if self.deterministic else None, images)
        if self.enabled:
            chain.extend(token_ids, chained_hashes if self.deterministic else self.store.tree.hash_history)
        return Lease(owner, chain, detached=not self.enabled)

    def lookup(self, lease: Lease, length: int, read: bool = True) -> PrefixHit:
        """Return the longest reusable prefix of the first `length` tokens. Changes nothing.

        With caching off or `read` False nothing is found; `miss` is then BYPASSED.
        """
        if not self.enabled or not read:
            return NOTHING
        return find_prefix(lease.chain, length, self.store)

    @property
    def fallback_step(self) -> int:
        """Tokens between two fallbacks inside a prompt; 0 means there are none."""
        return self.layout.fallback_step(self.arena.num_pages)

    def reset(self) -> None:
        """Let nothing cached so far be found again, in the arena or a tier. The current restore is dropped."""
        self.tiers.reset()
        self.store.reset()

    def stats(self) -> CacheStats:
        """Return gauges and counters as they are now."""
        stats = self.store.stats()
        for tier in self.tiers.all:
            tier.fill(stats)
        return stats

    def watch_restorable(self) -> RestorableRooms:
        """Start to track what requests can resume from, in the arena and in the tiers, and return the trackers."""
        arena = self.store.watch(ARENA, has_private=self.deterministic)
        # Tiers keep nothing private. On a disk it could not be told apart, since its nodes have no tokens.
        return RestorableRooms([arena, *(tier.watch() for tier in self.tiers.all)])

    def may_hit(self, lease: Lease, num_tokens: int) -> bool:
        """Return whether a lookup could find the first `num_tokens` tokens, a multiple of 64, reusable."""
        index, hashes = num_tokens // BLOCK_SIZE - 1, lease.chain.hashes
        node = self.store.tree.find(hashes[index]) if 0 <= index < len(hashes) else None
        return num_tokens == 0 or (node is not None and (node.checkpoint is not None or not self.layout.has_states))

    def expect(self, checkpoint: Checkpoint | None, change: int) -> None:
        """Add `change` to the number of waiting requests that would resume from `checkpoint`."""
        if checkpoint is not None and not checkpoint.removed:
            checkpoint.num_expected += change
            self.store.requeue(checkpoint)

    # --- while it runs

    def attach(self, lease: Lease, hit: PrefixHit) -> None:
        """Pin the hit's path for a new lease, and count the hit's checkpoint as read. Ends a restore for the lease."""
        assert lease.node is None and lease.num_blocks == 0
        lease.node = hit.path[-1] if hit.path else self.store.tree.root(lease.chain.root)
        lease.windows = [WindowRow() for _ in self.layout.windows]
        self.store.tree.pin(lease.node)
        self._start_from(lease, hit)
        self.tiers.stop_waiting(lease)

    def has_next_block(self, lease: Lease) -> bool:
        """Return whether the tree has the block after the lease's deepest node, because another request filed it."""
        assert lease.node is not None
        depth, hashes = lease.node.depth, lease.chain.hashes
        return depth < len(hashes) and self.store.tree.find(hashes[depth]) is not None

    def jump(self, lease: Lease, hit: PrefixHit) -> None:
        """Move a lease in prefill onto a longer prefix that has been cached meanwhile.

        It gives back the blocks that it computed itself, and keeps its running slot.
        """
        old = lease.node
        assert old is not None and not lease.detached
        self.store.counters.hit_tokens += hit.num_tokens - lease.num_planned
        self.store.tree.pin(hit.path[-1])
        self._free_own_blocks(lease)
        lease.node = hit.path[-1]
        self.store.unpin(old)
        self._start_from(lease, hit)

    def _start_from(self, lease: Lease, hit: PrefixHit) -> None:
        if lease.read_from is not None:
            self.done_reading(lease.read_from)
        lease.num_blocks = lease.num_sent_blocks = self.layout.num_blocks_for(hit.num_tokens)
        if hit.checkpoint is not None and lease.windows:
            self.store.windows.clear(lease.windows)
            self.store.windows.start_from(lease.windows, hit.checkpoint.windows, lease.num_blocks)
        lease.num_planned = lease.num_confirmed = hit.num_tokens
        lease.read_from = lease.hit = hit.checkpoint
        if hit.checkpoint is None:
            if hit.path:
                self.store.count_hit(hit.path[-1])
            return
        lease.decoded = hit.checkpoint.decoded
        self._note_history(lease, hit.path[: hit.checkpoint.node.depth - 1])
        lease.touched.append(hit.checkpoint)
        self.store.start_reading(hit.checkpoint)
        lease.note = self.store.resume(hit.checkpoint, lease.note)

    def _note_history(self, lease: Lease, path: Sequence[Node]) -> None:
        """Note that a conversation goes on past these nodes.

        States inside its prompts may still be useful. States at and near the ends of earlier turns hardly are.
        """
        for node in path:
            checkpoint = node.checkpoint
            if checkpoint is None:
                continue
            if checkpoint.origin in INSIDE_PROMPTS:
                lease.touched.append(checkpoint)
            elif checkpoint.origin in OF_LAST_TURN and not checkpoint.superseded:
                self.store.supersede(checkpoint)

    def ensure_blocks(self, lease: Lease, num_tokens: int) -> bool:
        """Get blocks for `num_tokens` tokens, evicting as needed, and give back those behind windows.

        False: the arena has too few; the lease keeps what it got.
        """
        wanted, windows = self.layout.num_blocks_for(num_tokens), self.store.windows
        if not lease.windows:
            return self._extend(lease, wanted)
        windows.trim(lease.windows, lease.first_position)
        if not self._extend(lease, wanted):
            # The blocks of a window that were taken for later tokens may have left too few of other groups.
            windows.cut(lease.windows, lease.num_blocks)
            while lease.num_blocks < wanted and self._extend(lease, lease.num_blocks + 1):
                pass
            windows.cut(lease.windows, lease.num_blocks)
        return lease.num_blocks >= wanted

    def _extend(self, lease: Lease, wanted: int) -> bool:
        """Take blocks of each group up to index `wanted`. False: not all could be had."""
        start, end = lease.num_blocks, wanted
        for number, row in enumerate(lease.windows):
            end = min(end, self.store.windows.extend(row, number, wanted, self.store.take_window_block))
        if start < end:
            if self.layout.has_kv:
                blocks = self.store.take_blocks(lease, end - start)
                lease.own_blocks.update(zip(range(start, end), blocks, strict=False))
                end = start + len(blocks)
            lease.num_blocks = end
        return lease.num_blocks >= wanted

    def block_ids(self, lease: Lease, start: int, end: int) -> list[list[int]]:
        """Return the ids of blocks `[start, end)` of the lease's table of each of `layout.groups`."""
        windows = [row.block_ids(start, end) for row in lease.windows]
        return [lease.block_ids(start, end), *windows] if self.layout.has_kv else windows

    def drop_duplicates(self, lease: Lease) -> None:
        """Give back the lease's blocks that the tree has too, because another request filed them first."""
        assert lease.node is not None
        self.arena.give_blocks(lease.pop_blocks([i for i in lease.own_blocks if i < lease.node.depth]))
        lease.has_duplicates = False

    def ensure_slot(self, lease: Lease) -> bool:
        """Get a running slot. True if the lease has one, or needs none (no states); False: all are in use."""
        if lease.slot != NO_SLOT or not self.layout.has_states:
            return True
        slot = self.store.take_slot(lease)
        if slot is None:
            return False
        lease.slot = slot
        self.room.took_slot()
        return True

    def extend(self, lease: Lease, token_ids: TokenIds) -> None:
        """Append tokens to the lease's history, unless caching is off."""
        if self.enabled:
            lease.chain.extend(token_ids)

    # --- plans

    def commit(
        self, computed: Iterable[tuple[Lease, int]], steady: Iterable[Lease] = ()
    ) -> tuple[tuple[Move, ...], tuple[Fetch, ...], list[Entry]]:
        """Finish the plan under construction: file the blocks and saves of `computed` leases up to these tokens.

        One more token of each `steady` lease counts as planned. Returns the moves and the fetches that the plan has to
        carry, and all that was filed since the last plan.
        """
        for lease in steady:
            lease.num_planned += 1
        for lease, num_tokens in computed:
            self.filing.publish(lease, num_tokens)
        moves: tuple[Move, ...] = ()
        if self.arena.moves:
            moves = self.arena.drain_moves()
            self.store.counters.moves += sum(move.route is MoveRoute.ARENA for move in moves)
        fetches: tuple[Fetch, ...] = ()
        if self.tiers.fetched is not None:
            fetches = self.tiers.fetched.drain_orders()
        filed: list[Entry] = []
        if self.filing.filed or self.filing.reusable_next:
            filed = self.filing.drain()
        return moves, fetches, filed

    def done_reading(self, checkpoint: Checkpoint) -> None:
        """Count one reader of the checkpoint less. Without readers it can be evicted again."""
        self.store.done_reading(checkpoint)

    # --- afterwards

    def release(self, lease: Lease, donate: bool = False, awaits_tool: bool = False) -> Lease:
        """Give everything back, and return a lease of the same history for the request's next run.

        The tree keeps what was filed. With `donate` it also keeps the running state, if that stands at a block boundary
        without a checkpoint. `awaits_tool`: the request ended in a tool call.
        """
        self.boundaries.resolve(lease)
        self.filing.drop_saves(lease)
        if lease.read_from is not None:
            self.done_reading(lease.read_from)
        if lease.slot != NO_SLOT:
            self.room.gave_slot()
            if not (donate and self._donate_state(lease)):
                self.arena.give_slot(lease.slot)
        self._free_own_blocks(lease)
        self.store.windows.clear(lease.windows)
        if lease.node is not None:
            self.store.unpin(lease.node)
        for checkpoint in lease.touched:
            self.store.note_request_end(checkpoint, lease.note, awaits_tool)
        return Lease(lease.owner, lease.chain, filed=lease.filed, detached=not self.enabled)

    def _donate_state(self, lease: Lease) -> bool:
        tokens = lease.num_confirmed
        if lease.detached or lease.node is None or not tokens or tokens % BLOCK_SIZE or tokens != lease.num_planned:
            return False
        self.filing.publish(lease, tokens)
        node = lease.node
        if lease.detached or node.condemned or node.depth * BLOCK_SIZE != tokens or node.checkpoint:
            return False
        origin = Origin.DECODE if lease.decoded else Origin.PROMPT_END
        windows = self.store.windows.run(lease.windows, node.depth, tokens)
        checkpoint = self.store.add_checkpoint(node, lease.slot, origin, lease.decoded, lease.note, windows=windows)
        assert checkpoint is not None
        lease.touched.append(checkpoint)
        return True

    def forget_private(self, lease: Lease, num_public_tokens: int) -> None:
        """Condemn the released lease's blocks after `num_public_tokens`, which only its owner can find.

        Does nothing unless in deterministic mode.
        """
        if not self.deterministic:
            return
        private = (i for i in lease.filed if isinstance(i, Node) and i.depth * BLOCK_SIZE > num_public_tokens)
        self.store.condemn_all(private)

    def _free_own_blocks(self, lease: Lease) -> None:
        if lease.own_blocks:
            self.arena.give_blocks(lease.pop_blocks(list(lease.own_blocks)))

    def count_query(
        self, lease: Lease, num_tokens: int, hit: PrefixHit, num_restored: int = 0, source: str = ""
    ) -> frozenset[int]:
        """Count a prompt of `num_tokens` tokens and its hit, of which `num_restored` were restored from that source.

        The eviction policy learns which blocks the request computes. Returns the junctions that the lookup saw. If the
        request continues a conversation whose end was evicted, no other history parts from it at that end or later:
        then only junctions before the end are returned.
        """
        self.store.counters.count_query(num_tokens, hit.num_tokens, min(num_restored, hit.num_tokens), source)
        if hit.miss is not None:
            self.store.counters.lost_tokens[hit.miss] += hit.num_ever_cached - hit.num_tokens
        missed = lease.chain.hashes[hit.num_tokens // BLOCK_SIZE : self.layout.usable_prefix(num_tokens) // BLOCK_SIZE]
        lease.note, lost_end = checked_missed(self.store.policy, missed, lease.note, self.arena.turnover)
        if lost_end is None:
            return hit.junctions
        lease.num_survived_tokens = hit.kv_num_tokens
        end = hit.num_tokens + (missed.index(lost_end) + 1) * BLOCK_SIZE
        return frozenset(junction for junction in hit.junctions if junction < end)
