"""Work of the host that follows copies of the device, in their order, so that no step waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from operator import attrgetter
from queue import SimpleQueue

from forkpoint.platforms.platform import EVENT_POLL_S, DeviceEvent
from forkpoint.runtime.copy_lane import CopyBatch


class AtOnce:
    """Runs functions as they are added. For copies that are done at once."""

    def add(self, run: Callable[[], object], after: CopyBatch | None = None) -> None:
        """Run a function. The copies that it has to follow are done."""
        run()

    def flush(self) -> None:
        """Let the added functions begin. All their copies must have been issued."""

    def close(self) -> None:
        """Run the remaining functions. All copies must be done."""


class AfterCopies(AtOnce):
    """Runs functions one after the other in a thread, each once a batch of copies has come to an event.

    The worker's thread calls all methods. Functions must not raise.
    """

    def __init__(self, name: str, event_of: Callable[[CopyBatch], DeviceEvent | None] = attrgetter("event")) -> None:
        """`event_of` returns the event of a batch that was issued. Without it all of its copies have to be done."""
        self._event_of = event_of
        self._added: list[tuple[Callable[[], object], CopyBatch | None]] = []
        self._work = SimpleQueue[tuple[Callable[[], object], DeviceEvent | None] | None]()  # None: the thread ends
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, run: Callable[[], object], after: CopyBatch | None = None) -> None:
        """Run a function after `flush`, these copies' event, and all functions that were added before."""
        self._added.append((run, after))

    def flush(self) -> None:
        for run, after in self._added:
            self._work.put((run, None if after is None else self._event_of(after)))
        self._added.clear()

    def close(self) -> None:
        self.flush()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        for run, event in iter(self._work.get, None):
            while event is not None and not event.query():
                time.sleep(EVENT_POLL_S)
            run()
