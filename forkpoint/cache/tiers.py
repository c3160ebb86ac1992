"""The rooms below the arena: which there are, and what falls into which."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from forkpoint.cache.arena import MoveRoute
from forkpoint.cache.disk_entries import HOST_READY, DiskFacts
from forkpoint.cache.disk_tier import DiskTier
from forkpoint.cache.eviction import EvictionPolicy, RecomputeCost
from forkpoint.cache.peer_offers import PeerFacts
from forkpoint.cache.store import PrefixStore
from forkpoint.cache.streamed_tier import StreamedHostTier
from forkpoint.cache.tier import HostTier

NO_LIMIT: Final = 1 << 62
FIRST_TICKET: Final = HOST_READY + 1


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The tiers of an engine.

    `num_host_pages` is the size of the host tier in pages of `CacheLayout.in_tiers`, its reserved page included;
    without pages there is no such tier. It `streams` if its copies run beside the steps.
    `disk` is the disk tier that the worker has opened. At most `write_limit` bytes are written to it in a day of
    `wall_clock`. `peers` is the worker's link to other engines. With `weighs_disk`, a prefix is read from the disk only
    if that is faster than computing it.
    """

    num_host_pages: int = 0
    disk: DiskFacts | None = None
    write_limit: int = NO_LIMIT
    peers: PeerFacts | None = None
    wall_clock: Callable[[], float] = time.time
    streams: bool = False
    weighs_disk: bool = False


NO_TIERS: Final = TierSizes()


def build_tiers(
    sizes: TierSizes,
    store: PrefixStore,
    new_policy: Callable[[], EvictionPolicy],
    cost: RecomputeCost,
    *,
    has_private: bool,
    tickets: Iterator[int],
    clock: Callable[[], float],
) -> tuple[HostTier | None, DiskTier | None]:
    """Build the host and disk tiers that `sizes` names below `store`, the arena's; None for each that it does not.

    `tickets` are those of all copies that end later than their plan. What leaves a room falls into the next one that
    exists.
    """
    layout, moves, counters = store.layout.in_tiers(), store.arena.moves, store.counters
    host: HostTier | None = None
    if sizes.num_host_pages:
        new_host: Callable[..., HostTier] = HostTier
        if sizes.streams:
            new_host = partial(StreamedHostTier, tickets=tickets, clock=clock)
        host = new_host(layout, sizes.num_host_pages, moves, new_policy(), cost, counters, has_private=has_private)
        store.keep = host.keep
    if sizes.disk is None:
        return host, None
    disk = DiskTier(
        layout,
        sizes.disk,
        moves,
        new_policy(),
        cost,
        counters,
        has_private=has_private,
        source=MoveRoute.ARENA_TO_DISK if host is None else MoveRoute.HOST_TO_DISK,
        tickets=tickets,
        write_limit=sizes.write_limit,
        weighs_loads=sizes.weighs_disk,
        wall_clock=sizes.wall_clock,
        clock=clock,
    )
    if host is None:
        store.keep = disk.keep
    else:
        host.store.keep = disk.keep
        host.skipped = partial(disk.keep_from, MoveRoute.ARENA_TO_DISK)
    return host, disk
