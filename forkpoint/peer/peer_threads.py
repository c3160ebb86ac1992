"""Threads that wait for other engines, in separate queues for each of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Final, TypeAlias

LOGGER: Final = logging.getLogger("forkpoint")
_Job: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class _Queue:
    num_threads: int = 0
    waiting: deque[_Job] = field(default_factory=deque)


class PeerThreads:
    """Runs jobs, at most `most` at the same time for each peer, so that a peer which does not answer delays no other.

    A thread ends when nothing waits for it. The program does not wait for threads when it ends.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()  # guards all below
        self._queues: dict[tuple[str, int], _Queue] = {}  # queues of the peers that have threads

    def submit(self, peer: tuple[str, int], job: _Job) -> None:
        """Run a job for a peer, given as host and port. Raises RuntimeError if the system starts no more threads."""
        with self._lock:
            queue = self._queues.get(peer, _Queue())
            if queue.num_threads == self._most:
                queue.waiting.append(job)
                return
            Thread(target=self._run, args=(peer, queue, job), name="fetch", daemon=True).start()
            queue.num_threads += 1
            self._queues[peer] = queue

    def _run(self, peer: tuple[str, int], queue: _Queue, job: _Job) -> None:
        while True:
            try:
                job()
            except Exception:
                LOGGER.exception("a thread that waits for %s port %d failed", *peer)
            with self._lock:
                if not queue.waiting:
                    queue.num_threads -= 1
                    if not queue.num_threads:
                        del self._queues[peer]
                    return
                job = queue.waiting.popleft()
