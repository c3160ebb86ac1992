"""Responses that can be asked for again, or gone on from."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Key:
    """A response of an owner, who is told by the API key: nobody finds another's."""

    owner: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Stored:
    """`reply` as JSON; `messages`, the conversation with its answer, as lines of JSON, each a list. `whole`: it can be
    gone on from."""

    reply: bytes
    messages: bytes
    whole: bool

    @property
    def num_bytes(self) -> int:
        return len(self.reply) + len(self.messages)


NAME_TAIL: Final = 12  # characters at the end of a response's name, by which its items are named
ITEM_ID: Final = re.compile(rf"[a-z]+_([0-9a-f]{{{NAME_TAIL}}})_\d+")


class ResponseStore:
    """Keeps so many responses and bytes of them, and lets go of those unused longest.

    What runs in the background is held beside, and bounded by the number of open requests.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[Key, Stored] = OrderedDict()
        self._by_tail: dict[Key, Key] = {}  # the last part of a response's name, instead of the whole
        self._running: dict[Key, asyncio.Task[None]] = {}

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0 and self._max_bytes > 0

    def put(self, key: Key, stored: Stored) -> None:
        """Keep a response; one larger than all that may be kept is not."""
        self.drop(key)
        if stored.num_bytes > self._max_bytes:
            return
        self._stored[key] = stored
        self._by_tail[_tail(key)] = key
        self._num_bytes += stored.num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._stored)))

    def get(self, key: Key) -> Stored | None:
        stored = self._stored.get(key)
        if stored is not None:
            self._stored.move_to_end(key)
        return stored

    def with_item(self, owner: bytes, item: str) -> Stored | None:
        """Return the owner's response that has the item of that id."""
        named = ITEM_ID.fullmatch(item)
        key = self._by_tail.get(Key(owner, named[1])) if named is not None else None
        return self.get(key) if key is not None else None

    def drop(self, key: Key) -> None:
        stored = self._stored.pop(key, None)
        if stored is not None:
            del self._by_tail[_tail(key)]
            self._num_bytes -= stored.num_bytes

    def run(self, key: Key, task: asyncio.Task[None]) -> None:
        """Hold `task`, which answers in the background, until it ends."""
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    async def stop(self, key: Key) -> None:
        """Cancel what answers in the background, and wait for its end; harmless where nothing does."""
        task = self._running.get(key)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _tail(key: Key) -> Key:
    return Key(key.owner, key.name[-NAME_TAIL:])
