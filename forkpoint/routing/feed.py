"""Listens to the events of replicas, which say where prompts can resume."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq

from forkpoint.obs.logs import LOGGER
from forkpoint.routing import wire
from forkpoint.routing.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


class RestorableIndex:
    """The blocks that one replica has published. Hashes are those of `wire.sent_hash`."""

    def __init__(self) -> None:
        self._resumable: dict[int | bytes, bool] = {}  # of each published block: whether a request can resume there

    def apply(self, batch: EventBatch) -> None:
        """Take in a batch; batches come in order."""
        for event in batch.events:
            match event:
                case BlockStored(block_hashes=hashes, resumable_hashes=ends):
                    self._resumable.update(dict.fromkeys(hashes, ends is None))
                    self._resumable.update(dict.fromkeys(ends or (), True))
                case BlockRemoved(block_hashes=hashes):
                    for name in hashes:
                        self._resumable.pop(name, None)
                case AllBlocksCleared():
                    self._resumable.clear()

    def restorable(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks a request could take from the cache.

        With a block all that come before it are published, so a few looks find how far they reach.
        """
        num_blocks = bisect_left(hashes, True, key=lambda name: name not in self._resumable)
        while num_blocks and not self._resumable.get(hashes[num_blocks - 1]):
            num_blocks -= 1
        return num_blocks


POLL_MS: Final = 200
REPLAY_MS: Final = 2000  # that a replay may take from one batch to the next


class EventFeed:
    """What one replica can restore, kept up to date by a thread. Whoever asks may see a batch half taken in, which
    costs a miss at worst.

    Batches that were missed, the first ones included, are asked for again; what the replica keeps no more, it tells
    anew by itself. The endpoints are those of the replica, as this process reaches them.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.index = RestorableIndex()
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._next = 0  # the number of the batch to come
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more; the thread ends by itself."""
        self._stop.set()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as live:
            live.set_hwm(0)
            live.subscribe(b"")
            live.connect(self._endpoint)
            self._catch_up(context)
            while not self._stop.is_set():
                if not live.poll(POLL_MS):
                    continue
                frames = live.recv_multipart()
                if len(frames) == 3 and int.from_bytes(frames[1], "big") > self._next:
                    self._catch_up(context)
                self._take(frames)

    def _catch_up(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Take in what is replayed from the first batch that is missing."""
        with context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(self._replay_endpoint)
            replay.send_multipart((b"", wire.sequence_bytes(self._next)))
            while replay.poll(REPLAY_MS) and not self._stop.is_set():
                frames = replay.recv_multipart()
                if frames[1:2] == [wire.END_OF_REPLAY]:
                    return
                self._take(frames)
        LOGGER.warning("a replica at %s did not answer; its cache is known in part", self._replay_endpoint)

    def _take(self, frames: Sequence[bytes]) -> None:
        """Take in a message, if it is one, and none that came before."""
        try:
            _, number_bytes, data = frames
            batch = wire.decode(data)
        except (ValueError, msgspec.MsgspecError) as error:
            LOGGER.warning("a message of %s is no batch of events: %s", self._endpoint, error)
            return
        number = int.from_bytes(number_bytes, "big")
        if number >= self._next:
            self.index.apply(batch)
            self._next = number + 1
