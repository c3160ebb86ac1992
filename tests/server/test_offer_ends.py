"""A refused prompt is not waited for: the engine learns of its lease, however early the server refuses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.types import Message

from forkpoint.cache.peer_offers import chosen_lease
from forkpoint.errors import QueueFullError
from forkpoint.server.body import transfer_params
from forkpoint.server.config import ServerConfig
from forkpoint.server.readers import SMALL_BYTES
from forkpoint.server.service import Service
from forkpoint.server.texts import Prepare

LEASE = 2**40
WANTED = {"do_remote_decode": True, "forkpoint": {"lease": LEASE}}


class Engine:
    """What a service needs of an engine, with so many requests open."""

    def __init__(self, num_open: int) -> None:
        self.num_sequences, self.ended = num_open, list[int | None]()
        self.is_full = False
        self.config = SimpleNamespace(links_peers=True)

    def check_ready(self) -> None: ...

    def end_offer(self, params: object) -> None:
        self.ended.append(chosen_lease(params))


@pytest.mark.parametrize("num_blanks", [0, SMALL_BYTES])
@pytest.mark.parametrize("num_open", [0, 1])
def test_a_full_server_reads_which_offer_it_refuses(num_open: int, num_blanks: int) -> None:
    """A large body is left to a reader, since the event loop has no time for it."""
    engine, asked = Engine(num_open), list[str]()

    async def run(prepare: Prepare[object], *parts: bytes) -> object:
        asked.append(cast(Any, prepare).__name__)
        return prepare(cast(Any, None), b"".join(parts))

    readers = SimpleNamespace(num_open=0, counted=contextlib.nullcontext, run=run)
    service = Service(cast(Any, engine), cast(Any, readers), ServerConfig(max_open_requests=1), cast(Any, None))
    sent = json.dumps({"prompt": "a", "kv_transfer_params": WANTED}).encode() + b" " * num_blanks

    async def receive() -> Message:
        return {"type": "http.request", "body": sent, "more_body": False}

    async def read() -> None:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
        async with service.body(Request(scope, receive)):
            raise QueueFullError("later")

    with pytest.raises(QueueFullError):
        asyncio.run(read())
    assert engine.ended == [LEASE] and asked == ["read_transfer_params"] * bool(num_blanks)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"kv_transfer_params",
        b'["kv_transfer_params"]',
        b'{"kv_transfer_params": 1}',
        b"[" * 10**6 + b'"kv_transfer_params"',
        json.dumps({"kv_transfer_params": {**WANTED, "forkpoint": {"lease": 7}}}).encode(),
        json.dumps({"kv_transfer_params": {**WANTED, "forkpoint": {"lease": 2**80}}}).encode(),
        json.dumps({"kv_transfer_params": {**WANTED, "do_remote_decode": False}}).encode(),
    ],
    ids=lambda body: str(body[:60]),
)
def test_bodies_without_an_offer_end_none(body: bytes) -> None:
    assert chosen_lease(transfer_params(body)) is None
