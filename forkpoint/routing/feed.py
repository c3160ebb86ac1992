"""Subscribes to the KV cache events of replicas, which show where prompts can resume."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq

from forkpoint.obs.logs import LOGGER
from forkpoint.routing import wire
from forkpoint.routing.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


class RestorableIndex:
    """The blocks that one replica has published of each medium. Hashes are those of `wire.sent_hash`."""

    def __init__(self) -> None:
        # medium -> hash of each published block -> whether a request can resume at its end
        self._resumable: defaultdict[str | None, dict[int | bytes, bool]] = defaultdict(dict)

    def apply(self, batch: EventBatch) -> None:
        """Apply a batch of events. Batches must come in order."""
        for event in batch.events:
            match event:
                case BlockStored(block_hashes=hashes, medium=medium, resumable_hashes=ends):
                    self._resumable[medium].update(dict.fromkeys(hashes, ends is None))
                    self._resumable[medium].update(dict.fromkeys(ends or (), True))
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    for name in hashes:
                        self._resumable[medium].pop(name, None)
                case AllBlocksCleared():
                    self._resumable.clear()

    def restorable(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks a request could restore from the medium that has most of them."""
        return max((_restorable(resumable, hashes) for resumable in list(self._resumable.values())), default=0)


def _restorable(resumable: dict[int | bytes, bool], hashes: Sequence[int]) -> int:
    """Return how many of a prompt's first blocks a request could restore from one medium.

    If a block is published, all blocks before it are. A binary search therefore finds the last published block.
    """
    num_blocks = bisect_left(hashes, True, key=lambda name: name not in resumable)
    while num_blocks and not resumable.get(hashes[num_blocks - 1]):
        num_blocks -= 1
    return num_blocks


POLL_MS: Final = 200
REPLAY_MS: Final = 2000  # longest time between two batches of a replay


class EventFeed:
    """Keeps a RestorableIndex of one replica up to date in a thread.

    A reader may see a batch applied in part, which costs at most a miss. Missed batches, the first ones included, are
    requested again. If the replica no longer keeps them, it publishes its whole cache again. The endpoints are
    addresses at which this process reaches the replica.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.index = RestorableIndex()
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._next = 0  # the number of the batch to come
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. The thread ends by itself."""
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
        """Apply the batches that the replica replays, from the first missing one on; log if they do not end."""
        with context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(self._replay_endpoint)
            replay.send_multipart((b"", wire.sequence_bytes(self._next)))
            while replay.poll(REPLAY_MS) and not self._stop.is_set():
                frames = replay.recv_multipart()
                if frames[1:2] == [wire.END_OF_REPLAY]:
                    return
                self._take(frames)
        LOGGER.warning(
            "the replica at %s did not replay its events; only a part of its cache is known", self._replay_endpoint
        )

    def _take(self, frames: Sequence[bytes]) -> None:
        """Apply a message. Ignore malformed messages, with a warning, and batches that were applied before."""
        try:
            _, number_bytes, data = frames
            batch = wire.decode(data)
        except (ValueError, msgspec.MsgspecError) as error:
            LOGGER.warning("a message of %s is not a batch of events: %s", self._endpoint, error)
            return
        number = int.from_bytes(number_bytes, "big")
        if number >= self._next:
            self.index.apply(batch)
            self._next = number + 1
