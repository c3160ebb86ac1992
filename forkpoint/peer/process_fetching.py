"""The decode engine's side of the process that fetches prompts for it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from forkpoint.cache.peer_offers import Fetch, FetchNews
from forkpoint.peer.fetch_child import Forget, Freed, Identity, LogLine, Start
from forkpoint.peer.fetching import LOGGER
from forkpoint.shared_arrays import place_of

CLOSE_S: Final = 2.0  # time for the process to end


class _Child:
    """The process and the connection to it."""

    def __init__(self, identity: Identity) -> None:
        self.connection, there = multiprocessing.Pipe()
        run = f"from forkpoint.peer.fetch_child import main; main({there.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", run],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine, which closes the connection
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        there.close()
        self.connection.send(identity)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process. It writes nothing afterwards."""
        self.connection.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ProcessFetching:
    """Fetches as `Fetching` does, in a process of its own, to buffers in shared memory.

    If the process ends, its fetches fail, and the next fetch starts another one. Only the worker's thread may call it.
    """

    def __init__(self, namespace: bytes, unit_bytes: Mapping[int, int], rank: int = 0) -> None:
        self._identity = Identity(namespace, dict(unit_bytes), rank)
        self.take: Callable[[int], memoryview]  # `PeerLink.use_buffers` sets both
        self.give: Callable[[memoryview], None]
        self.shares_memory = True  # with other engines of this machine
        self._entries: dict[int, list[memoryview]] = {}  # by ticket: the buffers of a fetch, until `forget`
        self._num_arrived: dict[int, int] = {}  # by ticket: of the first entries
        self._written: set[int] = set()  # tickets whose buffers the process may write to
        self._leaving: dict[int, list[memoryview]] = {}  # such buffers of fetches that were forgotten
        self._news: dict[str, dict[int, Any]] = {}  # not returned yet: for each kind of news, its tickets
        self._forget_news()
        self._child: _Child | None = _Child(self._identity)

    def start(self, fetch: Fetch) -> None:
        buffers = [self.take(self._identity.unit_bytes[name.kind]) for name in fetch.names]
        places = [place_of(np.frombuffer(buffer, np.uint8)) for buffer in buffers]
        if buffers:
            self._entries[fetch.ticket], self._num_arrived[fetch.ticket] = buffers, 0
        if None in places:
            LOGGER.warning("the system has no shared memory left for a prompt, which is computed instead of fetched")
            self._news["failed"][fetch.ticket] = True
            return
        if buffers:
            self._written.add(fetch.ticket)
        self._send(Start(fetch, tuple(filter(None, places)), self.shares_memory))

    def contents(self, ticket: int, place: int) -> memoryview:
        """Return an entry that has arrived. It is valid until `forget`."""
        assert place < self._num_arrived[ticket], "it has not arrived"
        return self._entries[ticket][place]

    def forget(self, ticket: int) -> None:
        entries = self._entries.pop(ticket, [])
        self._num_arrived.pop(ticket, None)
        if ticket not in self._written:
            self._give_all(entries)
            return
        self._leaving[ticket] = entries
        self._send(Forget(ticket))

    def news(self, wait_s: float = 0.0) -> FetchNews | None:
        """Return what has ended or arrived since the last call; None if that is nothing.

        With `wait_s`, wait so long until a fetch has ended or much of one has arrived.
        """
        until_s = time.monotonic() + wait_s
        while self._written and self._child is not None:
            left_s = 0.0 if any(self._news.values()) else max(0.0, until_s - time.monotonic())
            try:
                if not self._child.connection.poll(left_s):
                    break
                self._take(self._child.connection.recv())
            except (EOFError, OSError):
                self._lose_child()
        news = self._news
        if not any(news.values()):
            return None
        self._forget_news()
        return FetchNews(
            tuple(news["done"]), tuple(news["failed"]), tuple(news["unreachable"]), tuple(news["arrived"].items())
        )

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _forget_news(self) -> None:
        self._news = {name: {} for name in ("done", "failed", "unreachable", "arrived")}

    def _take(self, message: Any) -> None:
        """Take in a message of the process."""
        if isinstance(message, LogLine):
            LOGGER.log(message.level, "%s", message.text)
        elif isinstance(message, Freed):
            self._written.discard(message.ticket)
            self._give_all(self._leaving.pop(message.ticket, []))
        else:
            for ticket, count in message.arrived:
                if ticket in self._entries:
                    self._num_arrived[ticket] = self._news["arrived"][ticket] = count
            for ticket in message.done:
                if ticket in self._entries:
                    self._num_arrived[ticket] = len(self._entries[ticket])
                    self._news["done"][ticket] = True
            self._news["failed"].update(dict.fromkeys(self._entries.keys() & set(message.failed)))
            self._news["unreachable"].update(dict.fromkeys(self._entries.keys() & set(message.unreachable)))

    def _send(self, message: Start | Forget) -> None:
        if self._child is None:
            self._child = _Child(self._identity)
        try:
            self._child.connection.send(message)
        except OSError:
            self._lose_child()

    def _lose_child(self) -> None:
        """Let the fetches of a process that has ended fail."""
        LOGGER.warning(
            "the process that fetches prompts has ended; the prompts are computed, and the next starts another"
        )
        self.close()
        for ticket in self._written & self._entries.keys():
            if self._num_arrived[ticket] < len(self._entries[ticket]):
                self._news["failed"][ticket] = True
        self._written.clear()
        for entries in self._leaving.values():
            self._give_all(entries)
        self._leaving.clear()

    def _give_all(self, entries: list[memoryview]) -> None:
        for entry in entries:
            self.give(entry)
