"""Answers of readers on their way to the API process. Large arrays, such as images, go through shared memory.

A socket would have the event loop copy them several times. The memory has no name. The reader keeps it open until the
API process says that it has opened it, too, through the reader's entry in /proc.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from forkpoint.shared_arrays import CAN_SHARE, LEAST_SHARED_BYTES, NAME, SharedMemory

HEAD: Final = struct.Struct("!QQQQ")  # bytes of the pickle, number of shared arrays, process id, file descriptor
SIZE: Final = struct.Struct("!Q")  # bytes of one shared array


@dataclass(frozen=True, slots=True)
class PackedAnswer:
    """An answer as bytes for the socket, and the shared memory of its large arrays. Close it when it has been read."""

    message: bytes
    memory: int | None = None  # a file descriptor

    @classmethod
    def of(cls, answer: object) -> PackedAnswer:
        """Pickle an answer. Raises what pickle raises, and OSError or MemoryError without room for shared memory."""
        shared: list[memoryview] = []

        def stays_inside(buffer: pickle.PickleBuffer) -> bool:
            data = buffer.raw()
            if not CAN_SHARE or data.nbytes < LEAST_SHARED_BYTES:
                return True
            shared.append(data)
            return False

        pickled = pickle.dumps(answer, protocol=5, buffer_callback=stays_inside)
        memory = _filled(shared) if shared else None
        head = HEAD.pack(len(pickled), len(shared), os.getpid(), memory or 0)
        return cls(head + b"".join(SIZE.pack(data.nbytes) for data in shared) + pickled, memory)

    def close(self) -> None:
        if self.memory is not None:
            os.close(self.memory)


def _filled(parts: list[memoryview]) -> int:
    """Return the file descriptor of anonymous memory that holds `parts`."""
    memory = os.memfd_create(NAME)
    try:
        with open(memory, "wb", closefd=False) as file:
            for part in parts:
                file.write(part)
    except BaseException:
        os.close(memory)
        raise
    return memory


async def receive_answer(inbox: asyncio.StreamReader) -> Any:
    """Receive an answer. Its shared arrays are mapped, so their memory is freed with them.

    Raises IncompleteReadError or OSError if the reader has died.
    """
    num_bytes, num_shared, pid, descriptor = HEAD.unpack(await inbox.readexactly(HEAD.size))
    sizes = [size for (size,) in SIZE.iter_unpack(await inbox.readexactly(SIZE.size * num_shared))]
    pickled = await inbox.readexactly(num_bytes)
    return pickle.loads(pickled, buffers=_mapped(pid, descriptor, sizes))


def _mapped(process_id: int, descriptor: int, sizes: list[int]) -> list[memoryview]:
    """Return the arrays of the given sizes in bytes that follow each other in a reader's shared memory."""
    if not sizes:
        return []
    whole = memoryview(SharedMemory.open(process_id, descriptor))
    return [whole[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
