"""The messages between engines: a length, then msgpack of a fixed type.

A decode engine opens one or more connections and sends `WantedEntries` over each. The prefill engine answers with
`HeldEntries`. Unless that refuses, parts of entries follow in the order of the keys, each as soon as its entry has been
computed: a PartHead, then the part's bytes. The bytes are left out if the decode engine can read them from shared
memory, or from the ring of the prefill engine's device (ring.py). Both sides know each entry's size, because the
namespace covers the layout. A last PartHead says that all of the prompt has been computed, and that no entry turned out
to be wrong. The decode engine sends one byte once it has everything. A message without keys ends the lease.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from typing import Any, Final, NamedTuple, Self

import msgspec

from forkpoint.cache.tier_entries import EntryName
from forkpoint.disk.namespace import entry_sum
from forkpoint.peer.ring import RingFacts
from forkpoint.shared_arrays import Place

MAGIC: Final = b"FKP5"
HEAD: Final = struct.Struct("<4sI")  # magic and bytes of the message
PART: Final = struct.Struct("<B16sqqqq")  # status, checksum, place in shared memory
MAX_MESSAGE_BYTES: Final = 2**22  # 16 bytes for each block of a prompt of 16 million tokens
# Bytes that one call of the system sends or receives. The thread waits for the interpreter after each call.
PIECE_BYTES: Final = 2**24
# Bytes of an entry that travel together. Several connections carry a state, which is the last entry to be computed.
PART_BYTES: Final = 2**22
HEADS_BYTES: Final = 2**14  # bytes that are read ahead for heads
PART_NUMBER: Final = struct.Struct("<I")
COPIES_WAIT_S: Final = 10.0  # longest wait for the next entry of a prompt, which may still be computed
SILENCE_S: Final = COPIES_WAIT_S + 5.0  # a peer that sends no byte for so long counts as stopped
LEAST_WAIT_S: Final = 0.001  # timeout of a system call; 0 would mean to wait for ever
DONE: Final = b"D"
# Status of a part: there is none, its bytes follow, or they are in shared memory or in the ring. COMPLETE comes last.
GONE, SENT, SHARED, IN_RING, COMPLETE = range(5)
NO_PLACE: Final = Place(0, 0, 0, 0)


class WantedEntries(msgspec.Struct, array_like=True, frozen=True):
    """Asks for entries of a lease. Without keys the lease ends.

    `keys[i]` is the kind of an entry, one byte, its hash, and the number of a part. With `shares_memory`, entries may
    be read from the prefill engine's memory. `ring` is the id of its ring if that has been opened.
    """

    namespace: bytes
    engine_id: str
    lease: int
    keys: tuple[bytes, ...]
    shares_memory: bool = False
    ring: bytes = b""


class HeldEntries(msgspec.Struct, array_like=True, frozen=True):
    """The answer to WantedEntries. `refusal` says why no entries follow; "": they do. `ring` may be opened."""

    refusal: str = ""
    ring: RingFacts | None = None


class PartHead(NamedTuple):
    """Comes before a part of an entry: its checksum, and its place in shared memory if its bytes do not follow.

    If the entry is in the ring, `place` is `in_ring` of its position. The checksum then covers the entry's name alone.
    """

    status: int
    sum: bytes = b""
    place: Place = NO_PLACE

    def pack(self) -> bytes:
        return PART.pack(self.status, self.sum, *self.place)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Self:
        status, checksum, *place = PART.unpack(data)
        return cls(status, checksum, Place(*place))


class PeerError(Exception):
    """The peer broke the protocol."""


def in_ring(position: int) -> Place:
    """Return the place of an entry at a position of the ring."""
    return Place(1, 0, 0, position)


def num_parts(num_bytes: int) -> int:
    """Return the number of parts in which an entry of `num_bytes` travels."""
    return -(-num_bytes // PART_BYTES)


def part_start(part: int) -> int:
    """Return the byte of an entry with which a part begins."""
    return part * PART_BYTES


def part_of(data: memoryview, part: int) -> memoryview:
    """Return a part of an entry's bytes; empty if there is no such part."""
    return data[part_start(part) : part_start(part + 1)]


def part_sum(namespace: bytes, name: EntryName, part: int, data: memoryview) -> bytes:
    """Return the checksum of a part's bytes, which nothing else passes for."""
    return entry_sum(namespace + PART_NUMBER.pack(part), name, data)


def complete_head(namespace: bytes, name: EntryName) -> PartHead:
    """Return the last head of an answer whose last entry has this name. No damaged one passes for it."""
    return PartHead(COMPLETE, part_sum(namespace, name, 0, memoryview(b"")))


class Line:
    """A connection that ends at `until_s`, by `time.monotonic`, or when nothing has come for `silence_s`.

    Methods raise OSError and PeerError.
    """

    def __init__(self, connection: socket.socket, until_s: float, silence_s: float = math.inf) -> None:
        self._socket = connection
        self._until_s, self._silence_s = until_s, silence_s
        self._ahead = b""  # what has come behind the last message
        connection.settimeout(None)  # the system watches the time: Python would wake up for every packet

    @property
    def is_local(self) -> bool:
        """Whether both ends have the same address, so that the other engine may be on this machine."""
        return bool(self._socket.getpeername()[0] == self._socket.getsockname()[0])

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self.send_bytes(HEAD.pack(MAGIC, len(data)) + data)

    def send_bytes(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            self._limit(socket.SO_SNDTIMEO)
            try:
                view = view[self._socket.send(view[:PIECE_BYTES]) :]
            except BlockingIOError:
                continue  # time is up

    def receive(self, kind: type[Any]) -> Any:
        """Return the next message, which is of this type. Its size is checked before it is read."""
        magic, num_bytes = HEAD.unpack(self._receive(HEAD.size))
        if magic != MAGIC or num_bytes > MAX_MESSAGE_BYTES:
            raise PeerError("it does not speak this protocol")
        try:
            return msgspec.msgpack.decode(self._receive(num_bytes), type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise PeerError(f"it sent a message that cannot be read: {error}") from error

    def receive_head(self) -> PartHead:
        """Return the head of the next part. Read all heads that have come by one call of the system."""
        if len(self._ahead) < PART.size:
            self._limit(socket.SO_RCVTIMEO)
            try:
                self._ahead += self._socket.recv(HEADS_BYTES)
            except BlockingIOError as error:
                raise TimeoutError("it took too long") from error
        head = PartHead.unpack(self._receive(PART.size))
        if head.status > COMPLETE or (head.status in (SHARED, IN_RING)) == (head.place == NO_PLACE):
            raise PeerError("it does not speak this protocol")
        return head

    def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, view: memoryview) -> None:
        if len(view) <= len(self._ahead):
            view[:], self._ahead = self._ahead[: len(view)], self._ahead[len(view) :]
            return
        view[: len(self._ahead)] = self._ahead
        view, self._ahead = view[len(self._ahead) :], b""
        while view:
            self._limit(socket.SO_RCVTIMEO)
            try:
                count = self._socket.recv_into(view[:PIECE_BYTES], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise TimeoutError("it took too long") from error
            if not count:
                raise PeerError("it ended the connection early")
            view = view[count:]

    def end(self) -> None:
        """Let a thread that waits for the other engine fail at once. Any thread may call it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            return

    def _limit(self, option: int) -> None:
        """Let the next call wait no longer than until the connection ends. Raises TimeoutError after that."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        left_s = min(left_s, self._silence_s)
        seconds, rest = divmod(max(left_s, LEAST_WAIT_S), 1.0)
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(rest * 1e6)))
