"""Sources from which prefixes are restored: the tiers, and other engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from forkpoint.cache.arena import Move
from forkpoint.cache.hashing import HashChain
from forkpoint.cache.tree import Checkpoint, Entry, Node
from forkpoint.cache.windows import WindowRuns


class RestoreSource(ABC):
    """Has whole paths of nodes of its own, which `Restoring` copies to the arena. Metrics and logs use its `name`."""

    name: ClassVar[str]

    @abstractmethod
    def find(self, chain: HashChain, max_blocks: int) -> Node | None:
        """Return the deepest node of a history, at most `max_blocks` deep, that can be restored; None if none can."""

    @abstractmethod
    def load(self, entry: Entry, unit: int, windows: WindowRuns = ()) -> Move:
        """Return the copy of an entry to a unit of the arena. The blocks of a checkpoint's windows go to `windows`."""

    @abstractmethod
    def num_ready(self, entries: Sequence[Entry], *, is_busy: bool) -> int:
        """Return how many of these entries, from the first on, can be loaded at once.

        A source that cannot load all of them at once starts to prepare the others, and few of them if the plan has rows
        of other requests (`is_busy`).
        """

    @property
    def is_reading(self) -> bool:
        """Whether something that `num_ready` prepares is still to come."""
        return False

    @property
    def gives_way(self) -> bool:
        """Whether the prefix being loaded is still to come, so that any other restore comes before it."""
        return False

    def has_lost(self, end: Node) -> bool:
        """Return whether a prefix that is being loaded was dropped, so that a shorter one may still be found."""
        return end.condemned

    def note_loaded(self, end: Node, nodes: Sequence[Node]) -> None:
        """Note that blocks of the path to `end` were loaded to these nodes of the arena."""
        return

    def is_stalled(self) -> bool:
        """Return whether nothing more can be loaded."""
        return False

    def pays(self, num_bytes: int, start: int, end: int, *, is_busy: bool) -> bool:
        """Return whether to load `num_bytes` rather than to compute tokens `[start, end)`.

        `is_busy`: other requests run, too.
        """
        return True

    def goes_on(self, left_bytes: int, start: int, end: int, *, is_busy: bool) -> bool:
        """Return whether to go on with a load of which `left_bytes` are left. The other arguments are as in `pays`."""
        return True

    @abstractmethod
    def hold(self, node: Node) -> None:
        """Keep a node that is about to be loaded, with its path and its checkpoint."""

    @abstractmethod
    def release(self, node: Node, checkpoint: Checkpoint | None) -> None:
        """Undo `hold`. `checkpoint` is the one that the node had then."""

    @abstractmethod
    def count_use(self, entry: Entry) -> None:
        """Count that a request resumes from a checkpoint, or in a layout without states from a node."""
