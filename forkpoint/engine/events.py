"""Publishes what the cache can restore, as vLLM publishes its blocks; no step ever waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque

import zmq

from forkpoint.cache.restorable import Change, Restorable
from forkpoint.config import KVEventsConfig
from forkpoint.errors import ConfigError
from forkpoint.obs.logs import LOGGER
from forkpoint.routing import wire

POLL_S = 0.1  # how long a subscriber that asks for a replay may wait for it
CLOSE_S = 1.0


class EventPublisher:
    """Takes the changes of a cache between steps, in the engine's thread; a thread of its own encodes and sends them.

    Where that falls behind by `max_queue_size` batches, or a subscriber asks for batches that are kept no more,
    the next batch says what is there from the beginning. Raises ConfigError for an endpoint that cannot be had.
    """

    def __init__(self, config: KVEventsConfig, restorable: Restorable) -> None:
        self._restorable = restorable
        self._topic = config.topic.encode()
        self._queue: queue.Queue[list[Change] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._from_beginning = threading.Event()
        self._context = zmq.Context()
        try:
            self._out = self._open(zmq.PUB, config.endpoint, config.hwm)
            self._replay = (
                self._open(zmq.ROUTER, config.replay_endpoint, 2 * (config.buffer_steps + 1))
                if config.replay_endpoint
                else None
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        """As in vLLM a publisher binds an address with a wildcard, of `::` or `ipc:`, and connects to any other."""
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        binds = kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        try:
            socket.bind(endpoint) if binds else socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {endpoint!r} cannot be opened: {error}; give an address that is free, as tcp://*:5557"
            ) from error
        return socket

    def publish(self) -> None:
        """Hand over what changed since the last call."""
        if self._from_beginning.is_set() and not self._queue.full():
            self._from_beginning.clear()
            self._restorable.tell_all()
        if changes := self._restorable.drain():
            try:
                self._queue.put_nowait(changes)
            except queue.Full:
                self._from_beginning.set()

    def close(self) -> None:
        """Send what was handed over, within a second."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            LOGGER.warning("KV cache events that nobody has been sent are dropped")
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        number = 0
        while True:
            if self._replay is not None:
                self._answer_replays(self._replay, number)
            try:
                changes = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if changes is None:
                break
            data = wire.encode(wire.batch_of(changes, time.time()))
            self._sent.append((number, data))
            self._out.send_multipart((self._topic, wire.sequence_bytes(number), data))
            number += 1
        self._context.destroy(linger=int(CLOSE_S * 1000))

    def _answer_replays(self, replay: zmq.Socket[bytes], end: int) -> None:
        """Send the batches that subscribers ask for by the number of the first one."""
        while replay.poll(0):
            frames = replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != wire.SEQUENCE_BYTES:
                LOGGER.warning("a replay of KV cache events was asked for in %d frames of another form", len(frames))
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            if start < (self._sent[0][0] if self._sent else end):
                self._from_beginning.set()
            for number, data in self._sent:
                if number >= start:
                    replay.send_multipart((client, b"", wire.sequence_bytes(number), data))
            replay.send_multipart((client, b"", wire.END_OF_REPLAY, b""))
