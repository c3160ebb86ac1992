"""Work of the host that follows copies of the device, in their order, so that no step waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from forkpoint.platforms.platform import MARK_POLL_S, Mark
from forkpoint.runtime.host_copies import CopyBatch


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
    """Runs functions one after the other in a thread, each once the copies that it was added with are done.

    The worker's thread calls all methods. Functions must not raise.
    """

    def __init__(self, name: str) -> None:
        self._added: list[tuple[Callable[[], object], CopyBatch | None]] = []
        self._changed = threading.Condition()  # guards all below
        self._work: deque[tuple[Callable[[], object], Mark | None]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, run: Callable[[], object], after: CopyBatch | None = None) -> None:
        """Run a function after `flush`, these copies, and all functions that were added before."""
        self._added.append((run, after))

    def flush(self) -> None:
        if not self._added:
            return
        added, self._added = self._added, []
        with self._changed:
            self._work += [(run, None if after is None else after.mark) for run, after in added]
            self._changed.notify()

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._is_closing)
                if not self._work:
                    return
                run, mark = self._work.popleft()
            while mark is not None and not mark.query():
                time.sleep(MARK_POLL_S)
            run()
