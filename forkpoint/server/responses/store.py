"""Stored responses, which clients can retrieve, and from which conversations can go on."""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.server.responses.event_log import EventLog


@dataclass(frozen=True, slots=True)
class Key:
    """The id of a response, together with its owner's API key, so that no client finds another's responses."""

    owner: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response.

    `reply`: the response as JSON. `input_items`: the items of the conversation that it answers, as a JSON list.
    `whole`: the answer is there, so a conversation can go on from it. `log` has the events of a response that streams
    in the background, and `num_logged_bytes` are those that it had when the response was stored.
    """

    reply: bytes
    input_items: bytes
    whole: bool
    log: EventLog | None = None
    num_logged_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.reply) + len(self.input_items) + self.num_logged_bytes

    def items(self) -> list[dict[str, Any]]:
        """Return the items of the conversation and of its answer."""
        return [*json.loads(self.input_items), *json.loads(self.reply)["output"]]


NAME_TAIL: Final = 12  # last characters of a response's id, which the ids of its items contain
ITEM_ID: Final = re.compile(rf"[a-z]+_([0-9a-f]{{{NAME_TAIL}}})_\d+")


class ResponseStore:
    """Keeps the most recently used responses, at most `max_responses` and `max_bytes` of them.

    It also holds the tasks of responses in the background, whose number the limit of open requests bounds.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[Key, Stored] = OrderedDict()
        self._by_tail: dict[Key, Key] = {}  # keys by the key with only the tail of the response's id
        self._running: dict[Key, asyncio.Task[None]] = {}

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0 and self._max_bytes > 0

    def put(self, key: Key, stored: Stored) -> None:
        """Store a response, in place of one with this key, and drop the least recently used ones beyond the limits.

        One that alone exceeds `max_bytes` is not stored.
        """
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
        """Return the owner's response that has the item with the id `item` (and count it as used), or None."""
        named = ITEM_ID.fullmatch(item)
        if named is None or (key := self._by_tail.get(Key(owner, named[1]))) is None:
            return None
        return self.get(key)

    def drop(self, key: Key) -> None:
        stored = self._stored.pop(key, None)
        if stored is not None:
            del self._by_tail[_tail(key)]
            self._num_bytes -= stored.num_bytes

    def run(self, key: Key, task: asyncio.Task[None]) -> None:
        """Hold the task of a response in the background until it ends."""
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    async def stop(self, key: Key) -> None:
        """Cancel a response's task in the background, and wait for its end. Does nothing if there is no task."""
        task = self._running.get(key)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _tail(key: Key) -> Key:
    return Key(key.owner, key.name[-NAME_TAIL:])
