"""The arena's bytes: one buffer, of which each layer has strided views."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from forkpoint.cache.layer_spec import FP8, KVSpec, TensorSpec
from forkpoint.cache.layout import BlockGroup, CacheLayout
from forkpoint.disk.store import DiskStore
from forkpoint.models.context import LayerCache
from forkpoint.peer.link import PeerLink
from forkpoint.platforms.copy_stream import PIECE_BYTES
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.disk_copies import DirectDisk, StreamedDisk
from forkpoint.runtime.host_copies import DirectCopies, StreamCopies, TierMemory
from forkpoint.runtime.peer_copies import DirectPeers, StreamedPeers
from forkpoint.runtime.pinned import PinnedBuffers
from forkpoint.runtime.units import unit_extent
from forkpoint.sched.plan import PEER_ROUTES, FetchReport, Move, MoveRoute, TierReport

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FP8: torch.float8_e4m3fn}

HOST_ALIGNMENT = PIECE_BYTES  # of the host tier's memory, so that no piece of a copy is pinned in two parts
TURN_S: Final = 0.001  # wait of a step without work for fetches, before it looks at the tiers again


class ArenaBuffer:
    """Owns `num_pages * layout.page_bytes` bytes, which start uninitialised.

    `layers[i]` are the tensors of layer i by name. Tensors of tokens are `[blocks, heads, block_size, dim]` in kernel
    blocks: block b has those from `b * kernel_blocks` on. Tensors of sequences are `[slots, *shape]`. All are strided
    views: in a block or slot the layers' parts follow each other. A layer's blocks are those of its window's group.
    `host` is the memory of the host tier, with `num_host_pages` pages of the layout `stored`. The system provides its
    pages when they are first written, and `copies` runs the host tier's copies. `peers` is the link to other engines,
    if there is one. `has_late_copies`: some copies end later than the plan that started them, and `next_reports` says
    which have ended.
    """

    def __init__(self, layout: CacheLayout, num_pages: int, platform: Platform, num_host_pages: int = 0) -> None:
        self.layout, self.stored = layout, layout.in_tiers()
        self.num_pages = num_pages
        self.data = torch.empty(num_pages * layout.page_bytes, dtype=torch.uint8, device=platform.device)
        self.host = _aligned(num_host_pages * self.stored.page_bytes)
        self._memory = TierMemory.of(layout, self.data, self.host)
        self._platform = platform
        self.copies = DirectCopies(self._memory)
        self.has_late_copies = bool(num_host_pages) and platform.has_copy_streams
        if self.has_late_copies:
            self.copies = StreamCopies(self._memory, platform)
        self._pinned: PinnedBuffers | None = None
        self._disk_copies: DirectDisk | None = None
        self._peer_copies: DirectPeers | None = None
        self.peers: PeerLink | None = None
        self.block_views: list[Tensor] = []  # all tensors of tokens, layer by layer
        self.states: list[tuple[int, TensorSpec, Tensor]] = []  # all tensors of sequences, with their layer's number
        self.layers = tuple(self._views())

    def use_disk(self, disk: DiskStore) -> None:
        """Let moves concern a disk tier, which `close` closes."""
        streams, self.has_late_copies = self._streams(), True
        if streams is None:
            self._disk_copies = DirectDisk(self._memory, disk)
        else:
            self._disk_copies = StreamedDisk(self._memory, disk, *streams)

    def use_peers(self, link: PeerLink, ring_bytes: int = 0) -> None:
        """Let moves concern a link to other engines, which `close` closes.

        With copy streams, offered units also go to a ring of `ring_bytes`.
        """
        streams, self.peers, self.has_late_copies = self._streams(), link, True
        if streams is None:
            self._pinned = PinnedBuffers(self._platform)
            self._peer_copies = DirectPeers(self._memory, link, self._pinned)
        else:
            self._peer_copies = StreamedPeers(self._memory, link, *streams, self._platform, ring_bytes)

    def _streams(self) -> tuple[StreamCopies, PinnedBuffers] | None:
        """Return the streams for copies, and buffers of the host for them, which are made when they are first needed.

        None for a device that works on the host's memory.
        """
        if not self._platform.has_copy_streams:
            return None
        if not isinstance(self.copies, StreamCopies):
            self.copies = StreamCopies(self._memory, self._platform)
        if self._pinned is None:
            self._pinned = PinnedBuffers(self._platform)
        return self.copies, self._pinned

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.layout.slots_per_page

    def move(self, moves: Sequence[Move], sound: bool = True) -> None:
        """Copy whole blocks and slots, in order, and hand the disk's moves to its thread.

        After a failed step the memory is not `sound`. Then nothing goes to the disk or to other engines, and moves to
        the disk fail.
        """
        self._note(moves, sound)
        self._issue()

    def _note(self, moves: Sequence[Move], sound: bool = True) -> None:
        """Run moves as `move` does, without beginning the copies that end later than the plan."""
        for route, group in groupby(moves, key=attrgetter("route")):
            same: Sequence[Move] = list(group)
            if route is MoveRoute.LOAD_TO_BUFFER:
                self.copies.load_to_buffer(same)
            elif route is MoveRoute.STORE:
                self.copies.store(same)
            else:
                for move in self.copies.land(same) if route is MoveRoute.LAND else same:
                    self._run(move, sound)
            self.copies.fill()

    def _run(self, move: Move, sound: bool) -> None:
        if move.route is MoveRoute.ARENA:
            src, dst = (unit_extent(self.layout, move.kind, unit, move.group) for unit in (move.src, move.dst))
            self.data[dst].copy_(self.data[src])
        elif move.route in PEER_ROUTES:
            assert self._peer_copies is not None, "the worker has no link to other engines"
            self._peer_copies.run(move, sound)
        elif move.route is MoveRoute.LAND or not self.copies.run(move):
            assert self._disk_copies is not None, "the worker has opened no disk tier"
            self._disk_copies.run(move, sound)

    def _issue(self) -> None:
        """Begin the copies that moves have only noted."""
        self.copies.issue()
        for late in (self._disk_copies, self._peer_copies):
            if late is not None:
                late.issue()

    def next_reports(self, wait_s: float = 0.0) -> tuple[TierReport | None, FetchReport | None]:
        """Return the next reports of the tiers and of the fetches, None for each that has nothing to report.

        Waits at most `wait_s` for the first.
        """
        if self.peers is None:
            return self.next_report(wait_s), None
        until_s = time.monotonic() + wait_s
        while True:
            copied, fetched = self.next_report(), self.peers.fetching.next_report()
            left_s = until_s - time.monotonic()
            if copied is not None or fetched is not None or left_s <= 0:
                return copied, fetched
            # The tiers do not wait while they have no copies. The thread sleeps, because others need the interpreter.
            fetched = self.peers.fetching.next_report(min(left_s, TURN_S))
            if fetched is not None:
                return None, fetched

    def next_report(self, wait_s: float = 0.0) -> TierReport | None:
        """Return the tiers' next report; None if nothing ended since the last one. Wait at most `wait_s` for it."""
        done = self.copies.next_report(wait_s)
        if self._disk_copies is None:
            return done
        found = self._disk_copies.next_report(0.0 if done is not None else wait_s)
        if found is None or done is None:
            return found or done
        return replace(found, done=done.done + found.done, failed=done.failed + found.failed)

    def close(self) -> None:
        """End all copies, and close the disk tier and the link to other engines."""
        self.copies.close()
        for late in (self._disk_copies, self._peer_copies):
            if late is not None:
                late.close()
        if self._pinned is not None:
            self._pinned.close()

    def _views(self) -> Iterator[LayerCache]:
        layout, slot_offset = self.layout, 0
        groups, offsets = {group.window: group for group in layout.groups}, Counter[int | None]()
        for number, layer in enumerate(layout.layers):
            views = {}
            for spec in layer:
                for tensor in spec.tensors:
                    if isinstance(spec, KVSpec):
                        group = groups[spec.window]
                        view = self._block_view(tensor, group, offsets[spec.window])
                        offsets[spec.window] += tensor.num_bytes(group.kernel_block_size)
                        self.block_views.append(view)
                    else:
                        place = (self.num_slots, layout.slot_stride_bytes, slot_offset)
                        view = self._view(tensor.shape, tensor.dtype, *place)
                        slot_offset += tensor.num_bytes()
                        self.states.append((number, tensor, view))
                    views[tensor.name] = view
            yield views

    def _block_view(self, tensor: TensorSpec, group: BlockGroup, offset_bytes: int) -> Tensor:
        heads, dim = tensor.shape
        count = self.num_pages * group.blocks_per_page * group.kernel_blocks
        place = (count, group.stride_bytes // group.kernel_blocks, offset_bytes)
        return self._view((heads, group.kernel_block_size, dim), tensor.dtype, *place)

    def _view(self, shape: tuple[int, ...], dtype: str, count: int, stride_bytes: int, offset_bytes: int) -> Tensor:
        """Return a view `[count, *shape]`: contiguous entries, the i-th at byte `i * stride_bytes + offset_bytes`."""
        kind = DTYPES[dtype]
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        outer = stride_bytes // kind.itemsize
        return self.data.view(kind).as_strided((count, *shape), (outer, *strides), offset_bytes // kind.itemsize)


def _aligned(num_bytes: int) -> Tensor:
    """Return uninitialised memory of the host that starts at a multiple of HOST_ALIGNMENT, unless it is empty."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = torch.empty(num_bytes + HOST_ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % HOST_ALIGNMENT
    return memory[start : start + num_bytes]
