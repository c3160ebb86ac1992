"""Arrays in anonymous memory that processes share, such as the pixels of images.

A process opens the memory of another through the descriptor that the other one keeps open, in /proc. It then has a
descriptor of its own. The memory is freed once no process maps it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

LEAST_SHARED_BYTES: Final = 1 << 18  # smaller arrays are sent as bytes
CAN_SHARE: Final = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
NAME: Final = "forkpoint-arrays"  # of the memory, in /proc


class Place(NamedTuple):
    """The beginning of an array in shared memory. The inode says whether the descriptor still is that memory's."""

    process_id: int
    descriptor: int
    inode: int
    offset: int


class SharedMemory(mmap.mmap):
    """Mapped memory and its descriptor, which is closed when no array is in it any more."""

    descriptor: int
    inode: int
    address: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Map all of the memory, and take over its descriptor. Raises OSError."""
        try:
            status = os.fstat(descriptor)
            found = cls(descriptor, status.st_size)
        except BaseException:
            os.close(descriptor)
            raise
        found.descriptor, found.inode = descriptor, status.st_ino
        found.address = np.frombuffer(found, np.uint8).ctypes.data
        finalize(found, os.close, descriptor).atexit = False
        return found

    @classmethod
    def new(cls, num_bytes: int) -> Self:
        """Return new memory. Raises OSError without room for it."""
        descriptor = os.memfd_create(NAME)
        try:
            os.truncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls.of(descriptor)

    @classmethod
    def open(cls, process_id: int, descriptor: int) -> Self:
        """Map memory that another process keeps open. Raises OSError if it does not."""
        return cls.of(os.open(f"/proc/{process_id}/fd/{descriptor}", os.O_RDWR))


class MemoryReader:
    """Reads shared memory of other processes without mapping it, so that memory which has shrunk is only an error.

    Use it in one thread, as a context manager or until `close`.
    """

    def __init__(self) -> None:
        self._descriptors: dict[tuple[int, int, int], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read_into(self, place: Place, target: memoryview) -> None:
        """Fill `target` with what starts at `place`. Raises OSError if that memory is not there."""
        *key, offset = place
        descriptor = self._descriptor(*key)
        while target:
            count = os.preadv(descriptor, [target], offset)
            if not count:
                raise OSError(errno.ENODATA, "the shared memory is smaller than it was said to be")
            target, offset = target[count:], offset + count

    def _descriptor(self, process_id: int, number: int, inode: int) -> int:
        found = self._descriptors.get((process_id, number, inode))
        if found is not None:
            return found
        # Whatever the other process says, only a file is read, which never waits.
        found = os.open(f"/proc/{process_id}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(found)
        if status.st_ino != inode or not stat.S_ISREG(status.st_mode):
            os.close(found)
            raise OSError(errno.ESTALE, "the descriptor is that of other memory")
        self._descriptors[process_id, number, inode] = found
        return found


class OpenedMemory:
    """Finds arrays in the memory of other processes, which is opened once while arrays of it live."""

    def __init__(self) -> None:
        self._memory: WeakValueDictionary[tuple[int, int, int], SharedMemory] = WeakValueDictionary()

    def array(self, place: Place, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return the array at `place`. Raises OSError if its memory is there no longer."""
        *key, offset = place
        process_id, descriptor, inode = key
        memory = self._memory.get((process_id, descriptor, inode))
        if memory is None:
            memory = SharedMemory.open(process_id, descriptor)
            if memory.inode != inode:
                raise OSError(errno.ESTALE, "the descriptor is that of other memory")
            self._memory[process_id, descriptor, inode] = memory
        return np.ndarray(shape, dtype, memory, offset)


def place_of(array: npt.NDArray[Any]) -> Place | None:
    """Return where an array is in shared memory; None if it is not, or not in one piece."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, SharedMemory) or not array.flags.c_contiguous:
        return None
    return Place(os.getpid(), owner.descriptor, owner.inode, array.ctypes.data - owner.address)


def in_shared_memory(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array that other processes can open: itself or a copy. A small array stays where it is.

    Raises OSError without room for it.
    """
    if not CAN_SHARE or array.nbytes < LEAST_SHARED_BYTES or place_of(array) is not None:
        return array
    found: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, SharedMemory.new(array.nbytes))
    found[...] = array
    return found
