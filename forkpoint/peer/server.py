"""The prefill engine's side: a thread that accepts connections, and one for each of them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Final

from forkpoint.peer.offered import Offered, OfferedEntry
from forkpoint.peer.protocol import (
    COPIES_WAIT_S,
    DONE,
    GONE,
    IN_RING,
    PART_NUMBER,
    SENT,
    SHARED,
    SILENCE_S,
    HeldEntries,
    Line,
    PartHead,
    PeerError,
    WantedEntries,
    complete_head,
    in_ring,
    part_of,
    part_start,
    part_sum,
)

MAX_CONNECTIONS: Final = 128  # at once; more are closed, and their engines compute
CONNECTION_S: Final = 60.0  # the longest time of a connection
COPIED_S: Final = SILENCE_S - 1.0  # longest wait for an entry and its bytes together, so that nobody gives up before
EXPIRE_EVERY_S: Final = 1.0
RETRY_S: Final = 0.1  # pause after an error of the system, so that the engine's steps have the interpreter
LOGGER: Final = logging.getLogger("forkpoint")


class OfferServer:
    """Sends offered entries to engines of the same namespace. Raises OSError if it cannot listen."""

    def __init__(self, offered: Offered, namespace: bytes, engine_id: str, host: str, port: int) -> None:
        self._offered, self._namespace, self._engine_id = offered, namespace, engine_id
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._listener.settimeout(EXPIRE_EVERY_S)
        self.port: int = self._listener.getsockname()[1]
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection
        self._thread.join(2 * EXPIRE_EVERY_S)
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._offered.expire()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # the process has too many open files, or it closes
                self._closing.wait(RETRY_S)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="offer", daemon=True).start()
            except RuntimeError:  # the system starts no more threads
                connection.close()
                self._free.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.closing(connection):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # heads of entries are small
                self._answer(Line(connection, time.monotonic() + CONNECTION_S))
        except (OSError, PeerError) as error:
            LOGGER.debug("an engine that fetches a prompt left: %s", error)
        finally:
            self._free.release()

    def _answer(self, line: Line) -> None:
        wanted: WantedEntries = line.receive(WantedEntries)
        if wanted.namespace != self._namespace:
            line.send(HeldEntries(refusal="it runs another model, or options that give other numbers"))
            return
        if wanted.engine_id != self._engine_id:
            line.send(HeldEntries(refusal="it has been restarted"))
            return
        if not wanted.keys:
            self._offered.end(wanted.lease)
            return
        ring = self._offered.ring
        line.send(HeldEntries(ring=None if ring is None or not wanted.shares_memory else ring.facts))
        shares_ring = ring is not None and wanted.ring == ring.facts.ring_id
        keys, entries = [key[: -PART_NUMBER.size] for key in wanted.keys], list[OfferedEntry]()
        try:
            while len(entries) < len(keys):
                start, since_s = len(entries), time.monotonic()
                found = self._offered.wait_for(wanted.lease, keys[start:], COPIES_WAIT_S)
                if not found:
                    line.send_bytes(PartHead(GONE).pack())
                    return
                entries += found
                unsent = list[bytes]()  # heads
                for entry, key in zip(found, wanted.keys[start:], strict=False):
                    (part,) = PART_NUMBER.unpack(key[-PART_NUMBER.size :])  # it was found, so the key is long enough
                    position = entry.position  # a later offer of the entry may change it
                    if ring is not None and shares_ring and position is not None and ring.holds(position):
                        known = part_sum(self._namespace, entry.name, part, memoryview(b""))
                        unsent.append(PartHead(IN_RING, known, in_ring(position)).pack())
                        continue
                    line.send_bytes(b"".join(unsent))
                    unsent.clear()
                    self._send(line, entry, part, wanted.shares_memory, since_s + COPIED_S)
                    since_s = time.monotonic()
                line.send_bytes(b"".join(unsent))
            is_complete = self._offered.wait_until_complete(wanted.lease, COPIES_WAIT_S)
            last = complete_head(self._namespace, entries[-1].name) if is_complete else PartHead(GONE)
            line.send_bytes(last.pack())
            line.receive_into(memoryview(bytearray(len(DONE))))
        finally:
            self._offered.sent(entries)

    def _send(self, line: Line, entry: OfferedEntry, part: int, shares_memory: bool, until_s: float) -> None:
        """Send a part of an entry, or only its place in shared memory. It stays there as long as the connection.

        Raises PeerError if the entry's bytes are not there at `until_s`.
        """
        data = part_of(memoryview(entry.data), part)
        if not data:
            raise PeerError(f"it asks for part {part} of an entry of {len(entry.data)} bytes")
        if not self._offered.wait_for_copy(entry, max(0.0, until_s - time.monotonic())):
            raise PeerError("its entry did not come from the device in time")
        found = self._offered.part_sum(entry, part)
        if shares_memory and entry.place is not None:
            place = entry.place._replace(offset=entry.place.offset + part_start(part))
            line.send_bytes(PartHead(SHARED, found, place).pack())
            return
        line.send_bytes(PartHead(SENT, found).pack())
        line.send_bytes(data)
