"""Publishes which prefixes the cache can restore, in the format of vLLM's KV events. No step ever waits for it."""

from __future__ import annotations

import queue
import socket as socketlib
import threading
import time
from collections import deque

import zmq

from forkpoint.cache.restorable import Change, RestorableRooms
from forkpoint.checks import host_in_url, is_loopback
from forkpoint.engine.replays import ROUND_S, Replays
from forkpoint.errors import ConfigError
from forkpoint.json_options import KVEventsConfig
from forkpoint.obs.logs import LOGGER
from forkpoint.routing import wire

POLL_S = 0.1  # longest time in seconds before a request for a replay is read
CLOSE_S = 1.0  # longest time in seconds for sending the rest at the end
LOOPBACK = "127.0.0.1"
ANYWHERE = "tcp://*"  # vLLM's default; here it means the address that the server listens on
MAX_FRAME_BYTES = 1024  # subscribers send only topics, and requests of 8 bytes


class EventPublisher:
    """Takes the changes of a cache between steps, in the engine's thread. Its own thread encodes and sends them.

    If that thread falls behind by `max_queue_size` batches, or a subscriber asks for batches that are no longer kept,
    the next batch lists everything from the beginning. Raises ConfigError for an endpoint that cannot be opened.
    """

    def __init__(self, config: KVEventsConfig, restorable: RestorableRooms) -> None:
        self._restorable = restorable
        self._topic = config.topic.encode()
        self._queue: queue.Queue[list[Change] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._from_beginning = threading.Event()
        self._context = zmq.Context()
        try:
            self._out = self._context.socket(zmq.PUB)
            self._out.set_hwm(config.hwm)
            self.addresses = [self._open(self._out, config.endpoint, config.host)]
            self._replays: Replays | None = None
            if config.replay_endpoint:
                replay = self._context.socket(zmq.ROUTER)
                self._replays = Replays(replay, self._sent, self._from_beginning.set)
                self.addresses.append(self._open(replay, config.replay_endpoint, config.host))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, socket: zmq.Socket[bytes], endpoint: str, host: str | None) -> str:
        """Open the socket at an endpoint and return its address. Raises ConfigError.

        As in vLLM, a publisher binds to an address with a wildcard, with `::`, or of `ipc:`, and connects to others. A
        warning is logged if other machines can reach it.
        """
        binds = socket.type == zmq.ROUTER or any(part in endpoint for part in ("*", "::", "0.0.0.0"))
        binds = binds or endpoint.startswith(("ipc:", "inproc:"))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            address = address_of(endpoint, host)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            if binds:
                socket.bind(address)
            else:
                socket.connect(address)
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(
                f"kv_events_config: {endpoint!r} cannot be opened: {error}; give a free address such as tcp://*:5557"
            ) from error
        if binds and address.startswith("tcp:") and not _is_local(address):
            LOGGER.warning(
                "KV cache events on %s contain all prompts as token ids: let only your routers reach this address",
                address,
            )
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self) -> None:
        """Hand the changes since the last call to the sending thread. Never waits."""
        if self._from_beginning.is_set() and not self._queue.full():
            self._from_beginning.clear()
            self._restorable.report_all()
        if changes := self._restorable.drain():
            try:
                self._queue.put_nowait(changes)
            except queue.Full:
                self._from_beginning.set()

    def close(self) -> None:
        """Send the batches that were handed over, for at most CLOSE_S each to queue and to send."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            LOGGER.warning("KV cache events that were not sent yet are dropped")
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        number = 0
        while True:
            is_replaying = self._replays is not None and self._replays.serve(number)
            try:
                changes = self._queue.get(timeout=ROUND_S if is_replaying else POLL_S)
            except queue.Empty:
                continue
            if changes is None:
                break
            data = wire.encode(wire.batch_of(changes, time.time()))
            self._sent.append((number, data))
            self._out.send_multipart((self._topic, wire.sequence_bytes(number), data))
            number += 1
        self._context.destroy(linger=int(CLOSE_S * 1000))


def address_of(endpoint: str, host: str | None) -> str:
    """Return `endpoint` with `tcp://*` replaced by the address of `host`, by default loopback.

    Raises OSError for a host that is unknown.
    """
    if not endpoint.startswith(ANYWHERE):
        return endpoint
    address = socketlib.getaddrinfo(host or LOOPBACK, None, type=socketlib.SOCK_STREAM)[0][4][0]
    return f"tcp://{host_in_url(str(address))}{endpoint.removeprefix(ANYWHERE)}"


def _is_local(address: str) -> bool:
    """Return whether only this machine can reach a ZeroMQ address of TCP."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return host == "lo" or is_loopback(host)  # a network interface may stand in place of a host
