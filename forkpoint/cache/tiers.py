"""The rooms below the arena: which there are, and what falls into which."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
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
from forkpoint.errors import ConfigError

NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The tiers of an engine.

    `num_host_pages` is the size of the host tier, its reserved page included; without pages there is no such tier. It
    `streams` if its copies run beside the steps.
    `disk` is the disk tier that the worker has opened. At most `write_limit` bytes are written to it in a day of
    `wall_clock`. A disk that does not answer is noticed by `clock`. `peers` is the worker's link to other engines.
    """

    num_host_pages: int = 0
    disk: DiskFacts | None = None
    write_limit: int = NO_LIMIT
    peers: PeerFacts | None = None
    wall_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.perf_counter
    streams: bool = False


NO_TIERS: Final = TierSizes()


def build_tiers(
    sizes: TierSizes,
    store: PrefixStore,
    new_policy: Callable[[], EvictionPolicy],
    cost: RecomputeCost,
    *,
    has_private: bool,
) -> tuple[HostTier | None, DiskTier | None]:
    """Build the host and disk tiers that `sizes` names below `store`, the arena's; None for each that it does not.

    What leaves a room falls into the next one that exists. Raises ConfigError if the layout has windows.
    """
    layout, moves, counters = store.layout, store.arena.moves, store.counters
    if layout.windows and (sizes.num_host_pages or sizes.disk is not None or sizes.peers is not None):
        raise ConfigError("tiers and peers cannot hold blocks of windows; create the layout with longest=0")
    host: HostTier | None = None
    tickets = itertools.count(HOST_READY + 1)
    if sizes.num_host_pages:
        new_host: Callable[..., HostTier] = HostTier
        if sizes.streams:
            new_host = partial(StreamedHostTier, tickets=tickets, clock=sizes.clock)
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
        wall_clock=sizes.wall_clock,
        clock=sizes.clock,
    )
    if host is None:
        store.keep = disk.keep
    else:
        host.store.keep = disk.keep
        host.skipped = partial(disk.keep_from, MoveRoute.ARENA_TO_DISK)
    return host, disk
