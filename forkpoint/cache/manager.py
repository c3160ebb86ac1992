"""The cache as the scheduler sees it: look up, lease, save, publish, release."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from forkpoint.cache.arena import Arena, Move
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.filing import Filing
from forkpoint.cache.hashing import HashChain, TokenIds
from forkpoint.cache.layout import NO_SLOT, CacheLayout
from forkpoint.cache.lease import Lease, StateSave
from forkpoint.cache.lookup import NOTHING, PrefixHit, find_prefix
from forkpoint.cache.policies import EVICTION
from forkpoint.cache.restorable import Restorable
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.tree import INSIDE_PROMPTS, OF_LAST_TURN, Checkpoint, Node, Origin
from forkpoint.config import BLOCK_SIZE, CacheConfig


class CacheManager:
    """Owns tree, arena accounting and leases. Every method leaves all of them consistent.

    `cost` weighs entries for eviction; `policy` overrides the one that `config` names.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        config: CacheConfig,
        *,
        deterministic: bool = False,
        cost: RecomputeCost | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.layout = layout
        self.deterministic = deterministic
        self.enabled = config.enable_prefix_caching and (config.checkpoints or not layout.has_states)
        self.arena = Arena(layout, num_pages)
        policy = policy or EVICTION.find(config.eviction_policy)()
        self.store = PrefixStore(layout, self.arena, policy, cost or RecomputeCost(), config.num_ghosts)
        self.filing = Filing(self.store)
        self.num_slots_held = 0  # that requests write, and those of checkpoints with readers

    def watch_restorable(self) -> Restorable:
        """Keep account of what lookups find from now on; to be called while the cache is empty."""
        self.store.restorable = Restorable(has_private=self.deterministic)
        return self.store.restorable

    # --- before a request runs

    def new_lease(self, owner: str, salt: str, token_ids: TokenIds) -> Lease:
        """A lease for a prompt that holds nothing yet. In deterministic mode blocks with later tokens (those made by
        decode kernels) can be found by `owner` alone."""
        chain = HashChain(salt, owner, len(token_ids) if self.deterministic else None)
        if self.enabled:
            chain.extend(token_ids)
        return Lease(owner, chain, detached=not self.enabled)

    def lookup(self, lease: Lease, length: int, read: bool = True) -> PrefixHit:
        """The longest reusable prefix of the first `length` tokens. Changes nothing."""
        if not self.enabled or not read:
            return NOTHING
        return find_prefix(lease.chain, length, self.store)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an otherwise empty arena holds a request of that final length."""
        return self.layout.num_pages_for(num_tokens, 1) <= self.arena.num_pages - 1

    def may_hit(self, lease: Lease, num_tokens: int) -> bool:
        """Whether a lookup could find the first `num_tokens` tokens, a multiple of the grid, reusable."""
        index, hashes = num_tokens // BLOCK_SIZE - 1, lease.chain.hashes
        node = self.store.tree.find(hashes[index]) if 0 <= index < len(hashes) else None
        return num_tokens == 0 or (node is not None and (node.checkpoint is not None or not self.layout.has_states))

    def expect(self, checkpoint: Checkpoint | None, change: int) -> None:
        """`change` waiting requests more are known to resume from `checkpoint`."""
        if checkpoint is not None and not checkpoint.dropped:
            checkpoint.num_expected += change
            self.store.refile(checkpoint)

    # --- what requests hold; what is merely cached is not among it, since it gives way

    @property
    def num_blocks_held(self) -> int:
        """Of the tree's blocks the pinned ones are held. (Of no account in a layout without keys and values.)"""
        return self.arena.blocks.num_used - self.store.tree.num_nodes + self.store.tree.num_pinned

    @property
    def num_pages_held(self) -> int:
        """Pages that what is held takes, densely packed."""
        return self.layout.num_pages_of(self.num_blocks_held, self.num_slots_held)

    def has_room(self, hit: PrefixHit, num_tokens: int, spare_blocks: int) -> bool:
        """Whether a request that hits `hit` could grow to `num_tokens` without preempting another one."""
        num_shared = sum(node.pins > 0 for node in hit.path)
        slots = 1 + (hit.checkpoint is not None and hit.checkpoint.num_readers == 0)
        return self._fits(num_tokens, spare_blocks - num_shared, slots)

    def may_have_room(self, lease: Lease, num_tokens: int, spare_blocks: int) -> bool:
        """False only where `has_room` would be False whatever a lookup finds: cheaper than the lookup.

        A hit spares room only by blocks that other requests hold, and those can be counted by hash."""
        nodes = (self.store.tree.find(block_hash) for block_hash in lease.chain.hashes)
        shared = itertools.takewhile(lambda node: node is not None and node.pins > 0, nodes)
        return self._fits(num_tokens, spare_blocks - sum(1 for _ in shared), 1)

    def _fits(self, num_tokens: int, more_blocks: int, more_slots: int) -> bool:
        blocks = self.num_blocks_held + self.layout.num_blocks_for(num_tokens) + more_blocks
        return self.layout.num_pages_of(blocks, self.num_slots_held + more_slots) < self.arena.num_pages

    # --- while it runs

    def attach(self, lease: Lease, hit: PrefixHit) -> None:
        """Give the lease the hit's blocks and the checkpoint to read first."""
        assert lease.node is None and lease.num_blocks == 0
        lease.node = hit.path[-1] if hit.path else self.store.tree.root(lease.chain.root)
        self.store.tree.pin(lease.node)
        self._start_from(lease, hit)

    def continues(self, lease: Lease) -> bool:
        """Whether the tree has the block after the lease's deepest node: others went further."""
        assert lease.node is not None
        depth, hashes = lease.node.depth, lease.chain.hashes
        return depth < len(hashes) and self.store.tree.find(hashes[depth]) is not None

    def jump(self, lease: Lease, hit: PrefixHit) -> None:
        """Move a lease in prefill onto a longer prefix that has been cached meanwhile.

        The blocks computed so far are given back; the running slot is kept for what follows.
        """
        old = lease.node
        assert old is not None and not lease.detached
        self.store.tree.pin(hit.path[-1])
        self._free_own_blocks(lease)
        lease.node = hit.path[-1]
        self.store.unpin(old)
        self._start_from(lease, hit)

    def _start_from(self, lease: Lease, hit: PrefixHit) -> None:
        if lease.read_from is not None:
            self.done_reading(lease.read_from)
        lease.num_blocks = lease.num_sent_blocks = len(hit.path) if self.layout.has_kv else 0
        lease.num_planned = lease.num_confirmed = hit.num_tokens
        lease.read_from = lease.hit = hit.checkpoint
        if hit.checkpoint is None:
            if hit.path:
                self.store.count_hit(hit.path[-1])
            return
        lease.decoded = hit.checkpoint.decoded
        self._note_history(lease, hit.path[: hit.checkpoint.node.depth - 1])
        lease.touched.append(hit.checkpoint)
        self._start_reading(hit.checkpoint)
        lease.note = self.store.resume(hit.checkpoint, lease.note)

    def _note_history(self, lease: Lease, path: Sequence[Node]) -> None:
        """The history of these nodes goes on: states inside its prompts may be of use still, those at and near the
        ends of earlier turns hardly."""
        for node in path:
            checkpoint = node.checkpoint
            if checkpoint is None:
                continue
            if checkpoint.origin in INSIDE_PROMPTS:
                lease.touched.append(checkpoint)
            elif checkpoint.origin in OF_LAST_TURN and not checkpoint.superseded:
                self.store.supersede(checkpoint)

    def ensure_blocks(self, lease: Lease, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens; False if the arena cannot give them (what it gave is kept)."""
        start, end = lease.num_blocks, self.layout.num_blocks_for(num_tokens)
        if start < end:
            blocks = self.store.take_blocks(lease, end - start)
            lease.own_blocks.update(zip(range(start, end), blocks, strict=False))
            lease.num_blocks += len(blocks)
        return lease.num_blocks >= end

    def drop_duplicates(self, lease: Lease) -> None:
        """Give back blocks of the lease whose contents another request has filed meanwhile; the row's table
        has to name the tree's blocks from the plan under construction on."""
        assert lease.node is not None
        self.arena.give_blocks(lease.pop_blocks([i for i in lease.own_blocks if i < lease.node.depth]))
        lease.has_duplicates = False

    def ensure_slot(self, lease: Lease) -> bool:
        """A running slot; True at once for a layout without states."""
        if lease.slot != NO_SLOT or not self.layout.has_states:
            return True
        slot = self.store.take_slot(lease)
        if slot is None:
            return False
        lease.slot = slot
        self.num_slots_held += 1
        return True

    def extend(self, lease: Lease, token_ids: TokenIds) -> None:
        """The lease's history goes on with `token_ids`."""
        if self.enabled:
            lease.chain.extend(token_ids)

    def cross_boundary(self, lease: Lease, token_ids: TokenIds) -> bool:
        """Keep the state at the block boundary where the row's next decode step starts, or which its last step passed.

        `token_ids` are the known tokens up to there. The block that they complete is filed. If the boundary lies beyond
        them, drafts in flight decide whether the row comes to it: it is in reach. Where the boundary's state is the
        running state, its slot becomes the checkpoint and a fresh one is taken. Otherwise the next plan saves it, if
        the row comes so far. False: there is no slot for a state that drafts in flight decide on, and the row is better
        planned once their result is known.
        """
        if not self.enabled:
            return True
        self.extend(lease, token_ids)
        self.filing.publish(lease, lease.num_planned)
        node = lease.node
        assert node is not None
        boundary = lease.num_planned // BLOCK_SIZE * BLOCK_SIZE
        lease.in_reach = boundary > lease.chain.num_tokens
        if lease.detached or not self.layout.has_states or lease.read_from is not None:
            return True
        if not lease.in_reach and (node.depth * BLOCK_SIZE != boundary or node.checkpoint is not None):
            return True
        save = StateSave(boundary, Origin.DECODE)
        turns = boundary == lease.num_planned and not lease.in_reach
        fresh = self._fresh_slot(lease, save, lease if turns else save)
        if fresh is None:
            self.store.counters.checkpoints_skipped[Origin.DECODE] += not lease.in_reach
            return not lease.in_reach
        if turns:
            save.slot, lease.slot = lease.slot, fresh
            lease.read_from = self.filing.keep(lease, node, save, num_readers=1)
            self.num_slots_held += 1
        else:
            save.slot = fresh
            lease.saves.append(save)
        return True

    def resolve_boundary(self, lease: Lease) -> None:
        """It is known whether the last plan passed the boundary that was in reach: file what it did there, or give it
        back."""
        previous = lease.decode_checkpoint
        self.filing.publish(lease, lease.num_planned - lease.num_last_step)
        lease.in_reach = False
        if previous is not None and lease.decode_checkpoint is not previous and _is_spare(previous):
            self.store.drop_checkpoint(previous)

    def _fresh_slot(self, lease: Lease, save: StateSave, owner: Lease | StateSave) -> int | None:
        """The slot of the request's previous decode checkpoint if nobody used that and another follows for certain,
        else a new one."""
        previous, node = lease.decode_checkpoint, lease.node
        assert node is not None
        if previous is not None and not lease.in_reach and _is_spare(previous):
            slot = previous.slot
            self.store.drop_checkpoint(previous, keep_slot=True)
            self.arena.slots.transfer([slot], [owner])
            return slot
        return self.filing.take_slot(lease, save, node.hash, owner)  # the hash of a block in reach is not known yet

    # --- plans

    def read_slot(self, lease: Lease) -> int:
        """The slot with the state that the lease's next step starts from."""
        if lease.read_from is not None:
            return lease.read_from.slot
        return lease.slot if lease.num_planned else NO_SLOT

    def advance(self, lease: Lease, end: int, decodes: bool) -> Checkpoint | None:
        """A plan takes the lease to `end` tokens. Returns the checkpoint that it reads, if any; call `done_reading`
        with it once the step's result is known."""
        reading, lease.read_from = lease.read_from, None
        lease.num_last_step = end - lease.num_planned if decodes else 1
        lease.num_planned = end
        lease.num_sent_blocks = lease.num_blocks
        lease.decoded = lease.decoded or decodes
        return reading

    def advance_steady(self, leases: Iterable[Lease]) -> None:
        """The same for decode steps of leases in mid-block that read and write their running slot."""
        for lease in leases:
            lease.num_planned += 1

    def confirm(self, lease: Lease, end: int) -> None:
        """The result is known of a step that took the lease to so many tokens; it may have jumped further since."""
        lease.num_confirmed = max(lease.num_confirmed, end)

    def reject(self, lease: Lease, num_rejected: int, of_last: bool) -> None:
        """A result did not confirm `num_rejected` tokens that were planned; `of_last`: by the row's last step."""
        lease.num_planned -= num_rejected
        lease.num_last_step -= num_rejected * of_last

    def finish_plan(self) -> tuple[tuple[Move, ...], list[Node | Checkpoint]]:
        """The plan under construction is complete; returns the moves that it has to carry, and what was filed since
        the last one."""
        moves = self.arena.drain_moves() if self.arena.moves else ()
        self.store.counters.moves += len(moves)
        made = self.filing.drain() if self.filing.filed or self.filing.reusable_next else []
        return moves, made

    def done_reading(self, checkpoint: Checkpoint) -> None:
        """One reader of a checkpoint's slot is done."""
        assert checkpoint.num_readers > 0
        checkpoint.num_readers -= 1
        if not checkpoint.num_readers:
            self.num_slots_held -= 1
            self.store.refile(checkpoint)

    def _start_reading(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_readers += 1
        if checkpoint.num_readers == 1:
            self.num_slots_held += 1

    # --- afterwards

    def release(self, lease: Lease, donate: bool = False, awaits_tool: bool = False) -> Lease:
        """Give everything back. What the tree holds stays; with `donate` the running state, if at a block boundary
        that has no checkpoint yet, stays too. `awaits_tool`: the request ended in a tool call.

        Returns a lease of the same history that holds nothing, for the request's next run."""
        if lease.in_reach:
            self.resolve_boundary(lease)
        for save in lease.saves:
            self.arena.give_slot(save.slot)
        lease.saves.clear()
        if lease.read_from is not None:
            self.done_reading(lease.read_from)
        if lease.slot != NO_SLOT:
            self.num_slots_held -= 1
            if not (donate and self._donate_state(lease)):
                self.arena.give_slot(lease.slot)
        self._free_own_blocks(lease)
        if lease.node is not None:
            self.store.unpin(lease.node)
        for checkpoint in lease.touched:
            self.store.leave(checkpoint, lease.note, awaits_tool)
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
        checkpoint = self.store.add_checkpoint(node, lease.slot, origin, lease.decoded, lease.note)
        assert checkpoint is not None
        lease.touched.append(checkpoint)
        return True

    def forget_private(self, lease: Lease, num_public_tokens: int) -> None:
        """Drop what only this lease's owner can find (deterministic mode: decode-made entries); released."""
        if not self.deterministic:
            return
        self.condemn(i for i in lease.filed if isinstance(i, Node) and i.depth * BLOCK_SIZE > num_public_tokens)

    def condemn(self, items: Iterable[Node | Checkpoint]) -> None:
        """These checkpoints, and these nodes with all below them, were never computed or hold garbage."""
        for item in items:
            if item.dropped:
                continue
            if isinstance(item, Node):
                self.store.condemn(item)
            elif item.num_readers:
                self.store.condemn(item.node)  # a step in flight reads it; it goes with its node
            else:
                self.store.drop_checkpoint(item)

    def _free_own_blocks(self, lease: Lease) -> None:
        if lease.own_blocks:
            self.arena.give_blocks(lease.pop_blocks(list(lease.own_blocks)))

    def count_query(self, lease: Lease, num_tokens: int, hit: PrefixHit) -> frozenset[int]:
        """Record one prompt of `num_tokens` tokens that asked, and what it got or would have got.

        Returns the junctions that it showed; where a conversation had lost its end and goes on there is none.
        """
        counters = self.store.counters
        counters.query_tokens += num_tokens
        counters.hit_tokens += hit.num_tokens
        if hit.miss is not None:
            counters.lost_tokens[hit.miss] += hit.once_num_tokens - hit.num_tokens
        gone = lease.chain.hashes[hit.num_tokens // BLOCK_SIZE : self.layout.usable_prefix(num_tokens) // BLOCK_SIZE]
        lease.note, ended = self.store.policy.missed(gone, lease.note, self.arena.turnover)
        if ended is None:
            return hit.junctions
        lease.num_survived_tokens = hit.kv_num_tokens
        end = hit.num_tokens + (gone.index(ended) + 1) * BLOCK_SIZE
        return frozenset(junction for junction in hit.junctions if junction < end)


def _is_spare(checkpoint: Checkpoint) -> bool:
    """Whether nobody has used it or is about to."""
    return not (checkpoint.dropped or checkpoint.num_readers or checkpoint.num_hits or checkpoint.num_expected)
