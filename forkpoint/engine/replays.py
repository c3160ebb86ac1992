"""Sends old batches of KV cache events again to subscribers that ask for them, at a bounded rate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from forkpoint.obs.logs import LOGGER
from forkpoint.routing import wire

MAX_AT_ONCE: Final = 16  # replays at once; further requests wait in the socket
MAX_REQUESTS_A_ROUND: Final = 16
BATCHES_A_ROUND: Final = 64  # batches of all replays together
# seconds between rounds; even a flood of requests then takes only a few per cent of the engine's time
ROUND_S: Final = 0.01
MAX_WAITING: Final = 64  # batches in the socket for one subscriber, and requests from it
STALL_S: Final = 10.0  # seconds after which a replay is dropped if its subscriber reads nothing
SHORT_STALL_S: Final = 0.2  # the same if other subscribers wait
LOG_INTERVAL_S: Final = 60.0  # seconds between warnings about malformed requests


@dataclass(slots=True)
class _Replay:
    next_number: int
    progress_s: float  # when a batch was last sent


class Replays:
    """The replays in progress, of the batches that `sent` keeps. Only the publishing thread may use it.

    `on_gap` is called if a subscriber asks for batches that are no longer kept.
    """

    def __init__(self, socket: zmq.Socket[bytes], sent: deque[tuple[int, bytes]], on_gap: Callable[[], None]) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise if a subscriber has gone or reads nothing
        socket.set_hwm(MAX_WAITING)
        self._socket, self._sent, self._on_gap = socket, sent, on_gap
        self._replays: dict[bytes, _Replay] = {}  # by the client's identity, the next one to serve first
        self._round_s = self._warned_s = float("-inf")

    def serve(self, end: int) -> bool:
        """Read requests and send some batches, at most once in ROUND_S. `end` is the next new batch's number.

        Returns whether there is more to send.
        """
        now_s = time.monotonic()
        if now_s - self._round_s >= ROUND_S:
            self._round_s = now_s
            for _ in range(MAX_REQUESTS_A_ROUND):
                if not self._socket.poll(0) or not self._make_room(now_s):
                    break
                self._take(self._socket.recv_multipart(), end, now_s)
            num_left = BATCHES_A_ROUND
            for client in list(self._replays):
                num_left -= self._send(client, max(1, num_left // len(self._replays)), now_s)
        return bool(self._replays)

    def _make_room(self, now_s: float) -> bool:
        if len(self._replays) < MAX_AT_ONCE:
            return True
        client = min(self._replays, key=lambda name: self._replays[name].progress_s)
        if now_s - self._replays[client].progress_s < SHORT_STALL_S:
            return False
        del self._replays[client]
        return True

    def _take(self, frames: list[bytes], end: int, now_s: float) -> None:
        if len(frames) != 3 or len(frames[2]) != wire.SEQUENCE_BYTES:
            if now_s - self._warned_s >= LOG_INTERVAL_S:
                self._warned_s = now_s
                LOGGER.warning(
                    "a request for a replay of KV cache events is ignored: its %d frames have a wrong form", len(frames)
                )
            return
        before = self._replays.get(frames[0])
        progress_s = now_s if before is None else before.progress_s  # a repeated request is not progress
        self._replays[frames[0]] = _Replay(min(int.from_bytes(frames[2], "big"), end), progress_s)

    def _send(self, client: bytes, most: int, now_s: float) -> int:
        """Send up to `most` batches to one client, and the end mark after the last one. Returns how many were sent.

        The client's replay ends with the mark, if the client has gone, or if it read nothing for STALL_S.
        """
        replay = self._replays.pop(client)
        first = self._sent[0][0] if self._sent else replay.next_number
        if replay.next_number < first:
            self._on_gap()
            replay.next_number = first
        num_sent = 0
        try:
            while num_sent < most and replay.next_number - first < len(self._sent):
                number, data = self._sent[replay.next_number - first]
                self._put(client, wire.sequence_bytes(number), data)
                replay.next_number, replay.progress_s = number + 1, now_s
                num_sent += 1
            if replay.next_number - first >= len(self._sent):
                self._put(client, wire.END_OF_REPLAY, b"")
                return num_sent
        except zmq.Again:
            if now_s - replay.progress_s > STALL_S:
                return num_sent
        except zmq.ZMQError:  # the client has gone
            return num_sent
        self._replays[client] = replay
        return num_sent

    def _put(self, client: bytes, number: bytes, data: bytes) -> None:
        self._socket.send_multipart((client, b"", number, data), zmq.NOBLOCK)
