"""The tiers below the arena and the exchange with other engines, as the scheduler sees them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from forkpoint.cache.arena import MoveRoute
from forkpoint.cache.disk_tier import DiskTier
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.lease import Lease
from forkpoint.cache.peer_offers import FetchReport, PeerFacts
from forkpoint.cache.peers import PeerExchange
from forkpoint.cache.restore_source import RestoreSource
from forkpoint.cache.restoring import Restoring
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.streamed_tier import StreamedHostTier
from forkpoint.cache.tier import HostTier, Tier
from forkpoint.cache.tier_entries import HOST_READY, DiskFacts, TierReport
from forkpoint.cache.tree import Entry, node_of

NO_LIMIT: Final = 1 << 62
FIRST_TICKET: Final = HOST_READY + 1


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The tiers of an engine.

    `num_host_pages` is the size of the host tier in pages of `CacheLayout.in_tiers`, its reserved page included; 0: no
    host tier. The host tier `streams` if its copies run next to the steps. `disk` is the disk tier that the worker has
    opened. At most `write_limit` bytes are written to it in a day of `wall_clock`. With `weighs_disk`, a prefix is read
    from the disk only if that is faster than computing it. `peers` is the worker's link to other engines.
    """

    num_host_pages: int = 0
    disk: DiskFacts | None = None
    write_limit: int = NO_LIMIT
    peers: PeerFacts | None = None
    wall_clock: Callable[[], float] = time.time
    streams: bool = False
    weighs_disk: bool = False


NO_TIERS: Final = TierSizes()


class Tiers:
    """The tiers below the arena, the exchange with other engines, and the restore that copies from both.

    `host`, `disk`, `peers` and their `fetched` are None if the engine has no such part. `all` are the tiers that it
    has. An entry that leaves a room falls into the next one. `load_choices` learn from steps that compute prompts.
    """

    def __init__(
        self,
        sizes: TierSizes,
        store: PrefixStore,
        new_policy: Callable[[], EvictionPolicy],
        cost: RecomputeCost,
        *,
        has_private: bool,
        clock: Callable[[], float],
    ) -> None:
        """`store` is the arena's. `has_private`: it has entries that only one request finds."""
        self._store = store
        layout, moves, counters = store.layout.in_tiers(), store.arena.moves, store.counters
        tickets = itertools.count(FIRST_TICKET)  # for all copies that end later than their plan
        self.host: HostTier | None = None
        if num_pages := sizes.num_host_pages:
            new_host: Callable[..., HostTier] = HostTier
            if sizes.streams:
                new_host = partial(StreamedHostTier, tickets=tickets, clock=clock)
            self.host = new_host(layout, num_pages, moves, new_policy(), cost, counters, has_private=has_private)
            store.keep = partial(self.host.keep, route=MoveRoute.STORE)
        self.disk: DiskTier | None = None
        if sizes.disk is not None:
            self.disk = DiskTier(
                layout,
                sizes.disk,
                moves,
                new_policy(),
                cost,
                counters,
                has_private=has_private,
                tickets=tickets,
                write_limit=sizes.write_limit,
                weighs_loads=sizes.weighs_disk,
                wall_clock=sizes.wall_clock,
                clock=clock,
            )
            from_arena = partial(self.disk.keep, route=MoveRoute.ARENA_TO_DISK)
            if self.host is None:
                store.keep = from_arena
            else:
                self.host.store.keep = partial(self.disk.keep, route=MoveRoute.HOST_TO_DISK)
                self.host.skipped = from_arena
        self.peers: PeerExchange | None = None
        if sizes.peers is not None:
            self.peers = PeerExchange(layout, sizes.peers, moves, counters, clock, tickets if sizes.streams else None)
        self.fetched = self.peers.fetched if self.peers is not None else None
        self.all: list[Tier] = [tier for tier in (self.host, self.disk) if tier is not None]
        self.load_choices = [tier.choice for tier in self.all if tier.choice is not None]
        sources: list[RestoreSource] = [*self.all]
        if self.fetched is not None:
            sources.append(self.fetched)
        self.restoring = Restoring(store, sources, streams=sizes.streams)

    # --- restoring

    def stop_waiting(self, lease: Lease) -> None:
        """Stop restoring and fetching a prefix for this lease."""
        self.restoring.drop(lease)
        if self.fetched is not None:
            self.fetched.leave(lease)

    @property
    def is_reading(self) -> bool:
        """Whether something for a waiting request is on its way from a tier or from another engine."""
        return self.restoring.is_reading or (self.fetched is not None and self.fetched.is_fetching)

    # --- plans

    @property
    def has_unsent(self) -> bool:
        """Whether there is an order to the disk or to other engines that no plan has carried yet."""
        return (self.disk is not None and self.disk.has_unsent) or (self.peers is not None and self.peers.has_unsent)

    @property
    def has_copies(self) -> bool:
        """Whether the plan under construction is needed although it computes nothing."""
        return self.has_unsent or self.restoring.has_loaded

    def begin_plan(self, *, is_busy: bool) -> None:
        """Start to count what the next plan loads, and store what may be evicted soon.

        `is_busy`: the plan has rows of requests that run. Fetches that are late are given up.
        """
        if self.fetched is not None and (doubtful := self.fetched.give_up_late()):
            self.condemn_everywhere(doubtful)
        self.restoring.begin_plan(is_busy=is_busy)
        for tier in self.all:
            tier.store_ahead(self._store)

    def save_to_disk(self) -> bool:
        """Store what the arena and the host tier hold in the disk tier, as far as it can be written soon.

        The current restore is dropped. Returns whether the disk still has something to write or remove.
        """
        if self.disk is None:
            return False
        self.restoring.drop()
        if not self.disk.is_writing:  # each call walks all entries, and there is one for every plan until the end
            self.disk.save(self._store, MoveRoute.ARENA_TO_DISK)
            if self.host is not None:
                self.disk.save(self.host.store, MoveRoute.HOST_TO_DISK)
        return self.disk.is_writing or self.has_unsent

    def apply_reports(self, tiers: TierReport | None, fetches: FetchReport | None) -> None:
        """Take in what the worker reports of the tiers' copies and of fetches."""
        if tiers is not None:
            for tier in self.all:
                tier.apply(tiers)
            if self.fetched is not None:
                self.fetched.apply_staged(tiers)
        if fetches is not None and self.fetched is not None:
            self.fetched.apply(fetches)

    # --- removing

    def condemn_everywhere(self, items: Iterable[Entry]) -> None:
        """Remove checkpoints, and nodes with all below them, that were never computed or hold garbage.

        Their copies go, too. An item that was evicted from the arena may be in a tier, or back in the arena. Its hash
        finds these copies.
        """
        items = list(items)
        if self.all or self.peers is not None:
            self.restoring.drop()
            hashes = [node_of(item).hash for item in items]
            for tier in self.all:
                tier.condemn(hashes)
            if self.peers is not None:
                self.peers.withdraw(hashes)
            copies = [self._store.tree.find(each) for each, item in zip(hashes, items, strict=True) if item.removed]
            items += [node for node in copies if node is not None]
        self._store.condemn_all(items)

    def reset(self) -> None:
        """Let nothing stored, offered or fetched so far be found again. The current restore is dropped."""
        self.restoring.drop()
        for tier in self.all:
            tier.reset()
        if self.peers is not None:
            self.peers.reset()
