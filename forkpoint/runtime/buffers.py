"""The arena's bytes: one buffer, of which each layer has strided views."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forkpoint.cache.disk_entries import BLOCK, SLOT
from forkpoint.cache.layout import FP8, BlockGroup, CacheLayout, KVSpec, TensorSpec
from forkpoint.disk.store import DiskStore
from forkpoint.models.context import LayerCache
from forkpoint.peer.link import PeerLink
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.host_copies import DirectCopies, HostCopies, StreamCopies, TierMemory
from forkpoint.runtime.news import NewsOfCopies
from forkpoint.runtime.units import unit_bytes, unit_extent
from forkpoint.sched.plan import Move, MoveKind, MoveRoute, TierNews

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FP8: torch.float8_e4m3fn}

HOST_ALIGNMENT = 1 << 21  # bytes; pieces of the host tier are pinned from multiples of it on
PEER_ROUTES = frozenset({MoveRoute.OFFER, MoveRoute.WITHDRAW, MoveRoute.FETCHED, MoveRoute.FORGET})


class ArenaBuffer:
    """Owns `num_pages * layout.page_bytes` bytes, which start uninitialised.

    `layers[i]` are the tensors of layer i by name. Tensors of tokens are `[blocks, heads, block_size, dim]` in kernel
    blocks: block b has those from `b * kernel_blocks` on. Tensors of sequences are `[slots, *shape]`. All are strided
    views: in a block or slot the layers' parts follow each other. A layer's blocks are those of its window's group.
    `host` is the memory of the host tier, with `num_host_pages` pages of the same layout. The system provides its pages
    when they are first written, and `copies` runs the host tier's copies. `disk` has the disk tier, and `peers` the
    link to other engines, if there is one.
    """

    def __init__(
        self, layout: CacheLayout, num_pages: int, platform: Platform | None = None, num_host_pages: int = 0
    ) -> None:
        """Without a `platform` the arena lies in the host's memory."""
        self.layout = layout
        self.num_pages = num_pages
        device = None if platform is None else platform.device
        self.data = torch.empty(num_pages * layout.page_bytes, dtype=torch.uint8, device=device)
        self.host = _aligned(num_host_pages * layout.page_bytes)
        memory = TierMemory.of(layout, self.data, self.host)
        self.copies: HostCopies = DirectCopies(memory)
        if num_host_pages and platform is not None and platform.has_copy_streams:
            self.copies = StreamCopies(memory, platform)
        self.disk: DiskStore | None = None
        self.peers: PeerLink | None = None
        self.block_views: list[Tensor] = []  # all tensors of tokens, layer by layer
        self.states: list[tuple[int, TensorSpec, Tensor]] = []  # all tensors of sequences, with their layer's number
        self.layers = tuple(self._views())

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.layout.slots_per_page

    def move(self, moves: Sequence[Move], sound: bool = True) -> None:
        """Copy whole blocks and slots, in order, and hand the disk's moves to its thread.

        Unless the memory is `sound`, nothing goes to the disk or to other engines: such writes fail.
        """
        for move in moves:
            if move.route is MoveRoute.ARENA:
                src, dst = (self._extent(move.kind, unit, move.group) for unit in (move.src, move.dst))
                self.data[dst].copy_(self.data[src])
            elif move.route in PEER_ROUTES:
                self._use_peers(move, sound)
            elif not self.copies.run(move):
                self._use_disk(move, sound)
        self.copies.issue()

    def news_of_copies(self, wait_s: float = 0.0) -> NewsOfCopies:
        """Return what reads the news of copies at the end of a step."""
        is_late = self.disk is not None or isinstance(self.copies, StreamCopies)
        return NewsOfCopies(self.news if is_late else None, self.peers, wait_s)

    def news(self, wait_s: float = 0.0) -> TierNews | None:
        """Return what the tiers have done since the last call; None if that is nothing.

        With `wait_s`, wait so long for the first news.
        """
        done = self.copies.news(wait_s)
        if self.disk is None:
            return done
        found = self.disk.news(0.0 if done is not None else wait_s)
        if found is None or done is None:
            return found or done
        return replace(found, done=done.done + found.done, failed=done.failed + found.failed)

    def _use_peers(self, move: Move, sound: bool) -> None:
        peers, name = self.peers, move.name
        assert peers is not None, "the worker has no link to other engines"
        if move.route is MoveRoute.FETCHED:
            peers.fetching.take(move.ticket, move.src, self._bytes(self.data, move.kind, move.dst))
        elif move.route is MoveRoute.FORGET:
            peers.fetching.forget(move.ticket)
        elif move.route is MoveRoute.WITHDRAW:
            peers.withdraw(None if name is None else name.hash)
        elif sound:
            assert name is not None
            peers.offer(name, self._bytes(self.data, move.kind, move.src), move.ticket)

    def _use_disk(self, move: Move, sound: bool) -> None:
        disk, route, name = self.disk, move.route, move.name
        assert disk is not None, "the worker has opened no disk tier"
        if route is MoveRoute.LAND:
            disk.take(move.ticket, self._bytes(self.data, move.kind, move.dst))
        elif route is MoveRoute.READ:
            assert name is not None
            disk.submit_read(name, move.src, move.ticket)
        elif route is MoveRoute.DISCARD:
            disk.discard(move.ticket)
        elif route is MoveRoute.REMOVE:
            disk.submit_removal(name)
        elif route is MoveRoute.DISK:
            disk.submit_copy(BLOCK if move.kind is MoveKind.BLOCK else SLOT, move.src, move.dst)
        elif not sound:
            disk.fail_write(move.ticket)
        else:
            assert name is not None
            room = self.host if route is MoveRoute.HOST_TO_DISK else self.data
            disk.submit_write(name, move.dst, self._bytes(room, move.kind, move.src), move.ticket)

    def unit_bytes(self, kind: MoveKind, group: int = 0) -> int:
        """Return the bytes of a group's block or of a slot, without padding at its end; 0 without groups."""
        return unit_bytes(self.layout, kind, group)

    def _extent(self, kind: MoveKind, unit: int, group: int = 0) -> slice:
        return unit_extent(self.layout, kind, unit, group)

    def _bytes(self, room: Tensor, kind: MoveKind, unit: int) -> memoryview:
        """Return a unit's bytes in `room`, memory of the host. They can be written."""
        return room[self._extent(kind, unit)].numpy().data

    def close(self) -> None:
        """End all copies, and close the disk tier and the link to other engines."""
        self.copies.close()
        if self.peers is not None:
            self.peers.close()
        if self.disk is not None:
            self.disk.close()

    def _views(self) -> Iterator[LayerCache]:
        layout, slot_offset = self.layout, 0
        groups, offsets = {group.window: group for group in layout.groups}, Counter[int | None]()
        for number, layer in enumerate(layout.layers):
            views = {}
            for spec in layer:
                for tensor in spec.tensors:
                    if isinstance(spec, KVSpec):
                        view = self._block_view(tensor, groups[spec.window], offsets[spec.window])
                        offsets[spec.window] += tensor.num_bytes(layout.kernel_block_size)
                        self.block_views.append(view)
                    else:
                        place = (self.num_slots, layout.slot_stride_bytes, slot_offset)
                        view = self._view(tensor.shape, tensor.dtype, *place)
                        slot_offset += tensor.num_bytes()
                        self.states.append((number, tensor, view))
                    views[tensor.name] = view
            yield views

    def _block_view(self, tensor: TensorSpec, group: BlockGroup, offset_bytes: int) -> Tensor:
        (heads, dim), layout = tensor.shape, self.layout
        count = self.num_pages * group.blocks_per_page * layout.kernel_blocks
        place = (count, group.stride_bytes // layout.kernel_blocks, offset_bytes)
        return self._view((heads, layout.kernel_block_size, dim), tensor.dtype, *place)

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
