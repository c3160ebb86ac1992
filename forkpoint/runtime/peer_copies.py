"""Copies between a worker's memory and its link to other engines: at once, or next to the device's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Final

from forkpoint.cache.tier_entries import EntryName
from forkpoint.peer.link import PeerLink
from forkpoint.peer.offered import OfferedEntry
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.after_copies import AfterCopies, AtOnce
from forkpoint.runtime.copy_lane import CopyBatch
from forkpoint.runtime.host_copies import StreamCopies, TierMemory
from forkpoint.runtime.pinned import PinnedBuffers, as_tensor
from forkpoint.runtime.rings import OwnRing, PeerRings
from forkpoint.runtime.stretch import Stretch
from forkpoint.sched.plan import Move, MoveRoute

LOGGER: Final = logging.getLogger("forkpoint")


class DirectPeers:
    """Runs a plan's moves at once. For a device that works on the host's memory."""

    def __init__(self, memory: TierMemory, link: PeerLink, buffers: PinnedBuffers) -> None:
        self._memory, self._link, self._buffers = memory, link, buffers
        self._staged: dict[int, CopyBatch] = {}  # by fetch: the batch of its last copy
        self._after_copies = AtOnce()
        self._offers = AtOnce()  # keeps changes of leases after the offers before them
        self._new: dict[int, list[OfferedEntry]] = {}  # by lease: what no function offers yet
        self._last: CopyBatch | None = None  # the batch of the last of them
        link.use_buffers(buffers.take, buffers.give)

    def run(self, move: Move, sound: bool) -> None:
        """Run a move that concerns other engines. Unless the memory is `sound`, nothing is offered to them."""
        name = move.name
        if move.route is MoveRoute.FETCHED:
            self._memory.copy_in(move, as_tensor(self._link.fetching.contents(move.ticket, move.src)))
        elif move.route is MoveRoute.FORGET:
            forget = partial(self._link.fetching.forget, move.ticket)
            self._after_copies.add(forget, self._staged.pop(move.ticket, None))
        elif move.route is MoveRoute.WITHDRAW and move.ticket:
            self._change(partial(self._link.offered.end, move.ticket))
        elif move.route is MoveRoute.WITHDRAW:
            self._change(partial(self._link.offered.withdraw, None if name is None else name.hash))
        elif name is None:
            self._change(partial(self._link.offered.complete, move.ticket))
        elif sound:
            self._offer(move, name)

    def _offer(self, move: Move, name: EntryName) -> None:
        data = self._buffers.take(self._memory.unit_bytes(move.kind))
        self._memory.copy_out(move, as_tensor(data))
        self._new.setdefault(move.ticket, []).append(OfferedEntry(name, data))

    def _change(self, run: Callable[[], object]) -> None:
        """Run a function after all offers before it."""
        self._offer_new()
        self._offers.add(run)

    def _offer_new(self) -> None:
        """Offer what was copied since the last call, all of a plan at once: threads take the interpreter for it."""
        for lease, entries in self._new.items():
            self._offers.add(partial(self._link.offered.add, entries, lease), self._last)
            self._after_copies.add(partial(self._link.offered.copied, entries), self._last)
        self._new, self._last = {}, None

    def issue(self) -> None:
        """Begin the work that `run` has only noted. Call it after the last move of a plan."""
        self._offer_new()
        self._offers.flush()
        self._after_copies.flush()

    def close(self) -> None:
        """End the link. All copies of the device must be done."""
        self._offers.close()
        self._after_copies.close()
        self._link.close()


class StreamedPeers(DirectPeers):
    """Copies offered and fetched units on the streams of `copies`.

    They lie in pinned memory. Offers and withdrawals keep their order. A fetched unit goes to a buffer of the device.
    It is reported when it is there, and LAND is then a move of `copies`. Its pinned memory is given back when the
    device has read it.

    Offered units also go to a ring of `ring_bytes`, if the device can share one, and are offered as soon as they are
    there. Fetched units come from the ring of the other engine if they are still there.
    """

    def __init__(
        self,
        memory: TierMemory,
        link: PeerLink,
        copies: StreamCopies,
        pinned: PinnedBuffers,
        platform: Platform,
        ring_bytes: int,
    ) -> None:
        super().__init__(memory, link, pinned)
        pinned.prepare(link.facts.max_bytes)
        self._copies = copies
        self._after_copies = AfterCopies("peer copies")
        self._offers = AfterCopies("peer offers", attrgetter("filled"))
        self._own: OwnRing | None = None
        if ring_bytes:
            try:
                self._own = OwnRing(platform, ring_bytes)
                link.offered.ring = self._own.ring
            except OSError as error:
                LOGGER.info("peers: other engines do not read the device's memory: %s", error)
        self._rings = PeerRings(platform)
        link.use_rings(self._rings.open, self._rings.close)

    def run(self, move: Move, sound: bool) -> None:
        if move.route is MoveRoute.STAGE:
            batch = self._stage(move)
            if batch is not None:
                self._staged[move.dst] = batch
        else:
            super().run(move, sound)

    def _stage(self, move: Move) -> CopyBatch | None:
        """Copy a unit that has arrived to a buffer of the device, and return the batch of the copy, if it is late."""
        place = self._link.in_ring(move.dst, move.src)
        if place is None:
            contents = as_tensor(self._link.fetching.contents(move.dst, move.src))
            return self._copies.copy_in(Stretch.of(contents), move.ticket)
        source = self._rings.find(*place, self._memory.unit_bytes(move.kind))
        if source is None:
            self._link.leave_ring(place[0])
            self._copies.lose(move.ticket)
            return None
        return self._copies.copy_in(source, move.ticket, partial(self._was_held, *place))

    def _was_held(self, ring_id: bytes, position: int) -> bool:
        """Return whether a unit that was copied from a ring was there until now."""
        was_held = self._rings.holds(ring_id, position)
        if not was_held:
            self._link.leave_ring(ring_id)
        return was_held

    def _offer(self, move: Move, name: EntryName) -> None:
        num_bytes = self._memory.unit_bytes(move.kind)
        position: int | None = None
        if self._own is not None and (taken := self._own.take(num_bytes + self._memory.padding)) is not None:
            position, target = taken
            self._copies.copy_on_device(move, Stretch(target.memory, target.start, target.start + num_bytes))
        data = self._buffers.take(num_bytes)
        self._last = self._copies.copy_out(move, Stretch.of(as_tensor(data)))
        self._new.setdefault(move.ticket, []).append(OfferedEntry(name, data, position))

    def close(self) -> None:
        super().close()
        self._rings.close_all()
        if self._own is not None:
            self._own.close()
