"""Log lines about requests that are written once, whatever process reads the requests."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, TypeAlias

from forkpoint.obs.logs import LOGGER

Note: TypeAlias = Callable[[str], None]  # called with the text of a notice

MAX_NOTICES: Final = 256  # different texts in the log; bounded, because clients choose some of the words
HASH_BYTES: Final = 8  # a collision, which would hide a notice, is then practically impossible


class Notices:
    """Logs each text once, whichever process it comes from.

    Readers are short-lived forks, so the hashes of logged texts are kept in memory that all forks share. Two readers
    that log at the same moment can overwrite each other's hash. The text whose hash is lost may be logged once more.
    """

    def __init__(self, level: int = logging.WARNING) -> None:
        """Create the table of hashes. The processes that share it have to be forked later."""
        self._level = level
        self._hashes = mmap.mmap(-1, MAX_NOTICES * HASH_BYTES)

    def add(self, text: str) -> None:
        """Log `text`, unless it or `MAX_NOTICES` others have been logged."""
        own = blake2b(text.encode(errors="replace"), digest_size=HASH_BYTES).digest()
        logged = self._hashes[:]
        starts = range(0, len(logged), HASH_BYTES)
        free = None
        for start in starts:
            known = logged[start : start + HASH_BYTES]
            if known == own:
                return
            if not any(known):
                free = start
                break
        if free is None:
            return
        self._hashes[free : free + HASH_BYTES] = own
        LOGGER.log(self._level, "%s", text)
        if free == starts[-1]:
            last = "requests had %d different notices like these; further ones are not logged"
            LOGGER.log(self._level, last, MAX_NOTICES)
