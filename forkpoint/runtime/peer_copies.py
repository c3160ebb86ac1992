"""Copies between a worker's memory and its link to other engines: at once, or next to the device's steps."""

from __future__ import annotations

from functools import partial

from forkpoint.cache.disk_entries import EntryName
from forkpoint.peer.link import PeerLink
from forkpoint.runtime.after_copies import AfterCopies, AtOnce
from forkpoint.runtime.host_copies import CopyBatch, StreamCopies, TierMemory
from forkpoint.runtime.pinned import PinnedBuffers, as_tensor
from forkpoint.runtime.stretch import Stretch
from forkpoint.sched.plan import Move, MoveRoute

PEER_ROUTES = frozenset({MoveRoute.OFFER, MoveRoute.WITHDRAW, MoveRoute.FETCHED, MoveRoute.STAGE, MoveRoute.FORGET})


class DirectPeers:
    """Runs a plan's moves at once. For a device that works on the host's memory."""

    def __init__(self, memory: TierMemory, link: PeerLink, buffers: PinnedBuffers) -> None:
        self._memory, self._link, self._buffers = memory, link, buffers
        self._staged: dict[int, CopyBatch] = {}  # by fetch: the batch of its last copy
        self._after_copies = AtOnce()  # keeps changes of leases after the offers before them
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
            self._after_copies.add(partial(self._link.offered.end, move.ticket))
        elif move.route is MoveRoute.WITHDRAW:
            self._after_copies.add(partial(self._link.offered.withdraw, None if name is None else name.hash))
        elif name is None:
            self._after_copies.add(partial(self._link.offered.complete, move.ticket))
        elif sound:
            self._offer(move, name)

    def _offer(self, move: Move, name: EntryName) -> None:
        data = self._buffers.take(self._memory.unit_bytes(move.kind))
        self._memory.copy_out(move, as_tensor(data))
        self._link.offered.add(name, data, move.ticket)

    def issue(self) -> None:
        """Begin the work that `run` has only noted. Call it after the last move of a plan."""
        self._after_copies.flush()

    def close(self) -> None:
        """End the link. All copies of the device must be done."""
        self._after_copies.close()
        self._link.close()


class StreamedPeers(DirectPeers):
    """Copies offered and fetched units on the streams of `copies`.

    They lie in pinned memory. Offers and withdrawals keep their order. A fetched unit goes to a buffer of the device.
    It is reported when it is there, and LAND is then a move of `copies`. Its pinned memory is given back when the
    device has read it.
    """

    def __init__(self, memory: TierMemory, link: PeerLink, copies: StreamCopies, pinned: PinnedBuffers) -> None:
        super().__init__(memory, link, pinned)
        pinned.prepare(link.facts.max_bytes)
        self._copies = copies
        self._after_copies = AfterCopies("peer copies")

    def run(self, move: Move, sound: bool) -> None:
        if move.route is not MoveRoute.STAGE:
            super().run(move, sound)
            return
        batch = self._copies.copy_in(as_tensor(self._link.fetching.contents(move.dst, move.src)), move.ticket)
        if batch is not None:
            self._staged[move.dst] = batch

    def _offer(self, move: Move, name: EntryName) -> None:
        data = self._buffers.take(self._memory.unit_bytes(move.kind))
        batch = self._copies.copy_out(move, Stretch.of(as_tensor(data)))
        self._after_copies.add(partial(self._link.offered.add, name, data, move.ticket), batch)
