"""The slab: one preallocated file that is cut into pages, as the arena is."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forkpoint.cache.tier_entries import BLOCK
from forkpoint.disk.folder import names_open_file

SECTOR_BYTES: Final = 4096  # alignment of direct reads and writes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SECTOR_BYTES) * SECTOR_BYTES


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The places of units. A page has `blocks_per_page` blocks or `slots_per_page` slots, each in whole sectors."""

    blocks_per_page: int
    slots_per_page: int
    block_bytes: int
    slot_bytes: int

    @property
    def page_bytes(self) -> int:
        return max(self.blocks_per_page * _aligned(self.block_bytes), self.slots_per_page * _aligned(self.slot_bytes))

    def per_page(self, kind: int) -> int:
        return self.blocks_per_page if kind == BLOCK else self.slots_per_page

    def unit_bytes(self, kind: int) -> int:
        """Return the bytes of a unit's contents."""
        return self.block_bytes if kind == BLOCK else self.slot_bytes

    def stored_bytes(self, kind: int) -> int:
        """Return the bytes that a unit takes on the disk."""
        return _aligned(self.unit_bytes(kind))

    def offset(self, kind: int, unit: int) -> int:
        page, index = divmod(unit, self.per_page(kind))
        return page * self.page_bytes + index * self.stored_bytes(kind)


class Slab:
    """Owns the file `path` of `num_pages` pages, which is created or cut to that size. Methods raise OSError.

    The first `num_old_pages` of these were in the file before. The system's page cache is bypassed where the folder's
    file system allows that.
    """

    def __init__(self, path: Path, layout: SlabLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.path, self._num_bytes = path, num_pages * layout.page_bytes
        flags = os.O_RDWR | os.O_CREAT
        fd = os.open(path, flags, 0o600)
        try:
            had = os.fstat(fd).st_size
            self.num_old_pages = min(had // layout.page_bytes, num_pages)
            if had > self._num_bytes:
                os.ftruncate(fd, self._num_bytes)
            try:
                os.posix_fallocate(fd, 0, self._num_bytes)
            except OSError:
                os.ftruncate(fd, min(had, self._num_bytes))  # it may have filled the disk
                raise
        finally:
            os.close(fd)
        direct = _open_direct(path)
        self._fd = os.open(path, flags, 0o600) if direct is None else direct

    def write(self, kind: int, unit: int, data: mmap.mmap) -> None:
        """Write a unit; `data` has its stored bytes, whole sectors."""
        offset, view = self.layout.offset(kind, unit), memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def read(self, kind: int, unit: int, data: mmap.mmap) -> bool:
        """Read a unit's stored bytes into `data`. Returns False if the file ends before it."""
        return os.preadv(self._fd, [data], self.layout.offset(kind, unit)) == len(data)

    def is_in_place(self) -> bool:
        return names_open_file(self.path, self._fd, self._num_bytes)

    def close(self) -> None:
        os.close(self._fd)


def _open_direct(path: Path) -> int | None:
    """Open the file for direct reads and writes; None if its file system does not have them. Page 0 is unused."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, SECTOR_BYTES) as sector:
            os.preadv(fd, [sector], 0)
            os.pwrite(fd, sector, 0)
    except OSError:
        os.close(fd)
        return None
    return fd
