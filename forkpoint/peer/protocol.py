"""The messages between engines: a length, then msgpack of a fixed type; then the entries' bytes, and nothing else.

A decode engine connects and sends `WantedEntries`. The prefill engine answers with `HeldEntries` and, if it has all of
them, their bytes in the order of the keys. Both sides know each entry's size, because the namespace covers the layout.
The decode engine sends one byte once it has everything, and the connection ends.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Final

import msgspec

MAGIC: Final = b"FKP1"
HEAD: Final = struct.Struct("<4sI")  # magic and bytes of the message
MAX_MESSAGE_BYTES: Final = 2**22  # 16 bytes for each block of a prompt of 16 million tokens
PIECE_BYTES: Final = 2**20  # that are received at once
DONE: Final = b"D"


class WantedEntries(msgspec.Struct, array_like=True, frozen=True):
    """Asks for entries of a lease. Without keys the lease ends.

    `keys[i]` is the kind of an entry, one byte, and its hash.
    """

    namespace: bytes
    engine_id: str
    lease: int
    keys: tuple[bytes, ...]


class HeldEntries(msgspec.Struct, array_like=True, frozen=True):
    """The answer to WantedEntries. `sums` are the checksums of all wanted entries, whose bytes follow.

    Without `sums`, `refusal` says why there are none.
    """

    sums: tuple[bytes, ...] = ()
    refusal: str = ""


class PeerError(Exception):
    """The peer did not do what the protocol asks for."""


class Line:
    """A connection that ends at `until_s`, by `time.monotonic`. Methods raise OSError and PeerError."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self._socket = connection
        self._until_s = until_s

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self.send_bytes(HEAD.pack(MAGIC, len(data)) + data)

    def send_bytes(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            self._limit()
            view = view[self._socket.send(view[:PIECE_BYTES]) :]

    def receive(self, kind: type[Any]) -> Any:
        """Return the next message, which is of this type. Its size is checked before it is read."""
        head = bytearray(HEAD.size)
        self.receive_into(memoryview(head))
        magic, num_bytes = HEAD.unpack(head)
        if magic != MAGIC or num_bytes > MAX_MESSAGE_BYTES:
            raise PeerError("it does not speak this protocol")
        body = bytearray(num_bytes)
        self.receive_into(memoryview(body))
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise PeerError(f"it sent a message that cannot be read: {error}") from error

    def receive_into(self, view: memoryview) -> None:
        while view:
            self._limit()
            count = self._socket.recv_into(view[:PIECE_BYTES])
            if not count:
                raise PeerError("it ended the connection early")
            view = view[count:]

    def _limit(self) -> None:
        """Let the next call wait no longer than until the connection ends. Raises TimeoutError after that."""
        left = self._until_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        self._socket.settimeout(left)
