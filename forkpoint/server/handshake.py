"""The TLS handshake with which a connection of HTTPS begins.

A server of asyncio can do handshakes by itself, but a connection would count for no limit before its handshake is over.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any

from forkpoint.server.connections import HEAD_TIMEOUT_S, Connection, Connections


class Handshake(asyncio.Protocol):
    """A connection until its handshake is over. It gives way to new ones, and is closed if the handshake fails."""

    def __init__(self, *, context: ssl.SSLContext, shared: Connections, **options: Any) -> None:
        """`options` are those of Connection."""
        self._context, self._shared = context, shared
        self._connection = _Secured(ends_handshake=self._stop_waiting, shared=shared, **options)
        self._waits = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._shared.num_open += 1
        self._waits = True
        try:
            self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # too many open files
            self._stop_waiting()
            return
        finally:
            transport.abort()  # it must not read what the handshake reads; the copy of its socket stays open
        has_room = self._shared.make_room(asyncio.get_running_loop().time())
        self._shared.waiting[self] = None
        self._task = asyncio.create_task(self._begin())
        self._task.add_done_callback(self._end)
        if not has_room:
            self.give_way()

    def give_way(self) -> None:
        """Close at once, to make room for a new connection."""
        self._stop_waiting()
        self._task.cancel()

    async def _begin(self) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: self._connection, self._socket, ssl=self._context, ssl_handshake_timeout=HEAD_TIMEOUT_S
        )

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:  # the client has left, was late or does not speak TLS
            self._stop_waiting()
            self._socket.close()

    def _stop_waiting(self) -> None:
        self._shared.waiting.pop(self, None)
        self._shared.num_open -= self._waits
        self._waits = False


class _Secured(Connection):
    """A connection that counts for itself once its handshake is over."""

    def __init__(self, *, ends_handshake: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._ends_handshake = ends_handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._ends_handshake()
        super().connection_made(transport)
