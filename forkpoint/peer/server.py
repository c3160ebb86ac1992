"""The prefill engine's side: a thread that accepts connections, and one for each of them."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Final

from forkpoint.peer.offered import GONE, Offered
from forkpoint.peer.protocol import DONE, HeldEntries, Line, PeerError, WantedEntries

MAX_CONNECTIONS: Final = 32  # at once; more are closed, and their engines compute
CONNECTION_S: Final = 60.0  # the most that one may take
COPIES_WAIT_S: Final = 10.0  # for the copies of an offer that has been sent: a step may be running
EXPIRE_EVERY_S: Final = 1.0
LOGGER: Final = logging.getLogger("forkpoint")


class OfferServer:
    """Sends what `offered` has to engines of the same namespace. Raises OSError if it cannot listen."""

    def __init__(self, offered: Offered, namespace: bytes, engine_id: str, host: str, port: int) -> None:
        self._offered, self._namespace, self._engine_id = offered, namespace, engine_id
        self._listener = socket.create_server((host, port))
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
            except OSError:  # nobody came for a while, or the process has too many open files
                continue
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="offer", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.closing(connection):
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
        entries = self._offered.wait_for(wanted.lease, wanted.keys, COPIES_WAIT_S)
        if entries is None:
            line.send(HeldEntries(refusal=GONE))
            return
        try:
            line.send(HeldEntries(tuple(checksum for _, checksum in entries)))
            for data, _ in entries:
                line.send_bytes(data)
            line.receive_into(memoryview(bytearray(len(DONE))))
        finally:
            self._offered.end(wanted.lease)
