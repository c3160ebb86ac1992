"""The service that all endpoints share: the engine, the readers, the options and the limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from forkpoint.config import SchedulerConfig
from forkpoint.engine.async_engine import AsyncEngine, OpenRequest
from forkpoint.errors import EngineStoppedError, ForkpointError, QueueFullError
from forkpoint.media_limits import MediaKind
from forkpoint.obs.logs import num_lost_lines
from forkpoint.server.body import Bodies, Parts, transfer_params
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError
from forkpoint.server.generation import Generation
from forkpoint.server.metrics import Metrics
from forkpoint.server.middleware import own_salt
from forkpoint.server.readers import SMALL_BYTES, Readers
from forkpoint.server.sampling import PreparedRequest
from forkpoint.server.sse import unless_left
from forkpoint.server.texts import MissingImages, Prepare, RequestReading, Room, Texts
from forkpoint.server.trials import Trials

if TYPE_CHECKING:
    from forkpoint.server.fetcher import Fetcher

T = TypeVar("T")
STATS_WAIT_S = 3.0  # for the engine's figures; Prometheus waits 10 s for all of them
MAX_BODIES = 16  # bodies of the largest size that fit into memory together; smaller ones may be more


@dataclass(slots=True)
class Service:
    """Prepares requests and hands them to the engine.

    `thread` reads long parts of answers; a single thread leaves the event loop its share of the interpreter.
    `closing`: no more requests are accepted. `media`: kinds of media that prompts may have, known once the model is
    loaded. Only `ApiServer` sets these two.
    """

    engine: AsyncEngine
    readers: Readers
    config: ServerConfig
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    closing: bool = False
    media: tuple[MediaKind, ...] = ()
    thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "answers"))
    bodies: Bodies = field(init=False)
    fetcher: Fetcher | None = field(init=False, default=None)  # None: images are not fetched
    trials: Trials = field(init=False)
    _stats: Mapping[str, Any] = field(init=False, default_factory=dict)  # the last figures of the engine

    def __post_init__(self) -> None:
        self.bodies = Bodies(MAX_BODIES, self.config.max_body_bytes)
        self.trials = Trials(self.engine, self.readers)
        if self.config.allowed_media_domains:
            from forkpoint.server.fetcher import Fetcher  # aiohttp takes a while to import

            self.fetcher = Fetcher(self.config.allowed_media_domains)

    async def close(self) -> None:
        """Give up bodies that have not come as a whole, and close the connections to hosts of images."""
        self.bodies.close()
        if self.fetcher is not None:
            await self.fetcher.close()

    def check_healthy(self) -> None:
        """Raise EngineStoppedError or EngineNotReadyError if requests are refused at the moment."""
        if self.closing:
            raise EngineStoppedError("the server is shutting down")
        self.engine.check_ready()

    async def metrics_text(self) -> bytes:
        """Return the metrics in Prometheus' text format, without the engine's figures while it is not ready.

        If the engine does not answer in time, for example during a long step, the figures are those of its last answer.
        """
        if self.engine.is_ready:
            with contextlib.suppress(EngineStoppedError, TimeoutError):
                async with asyncio.timeout(STATS_WAIT_S):
                    self._stats = await self.engine.call("stats")
        stats = self._stats if self.engine.is_ready else {}
        own: dict[str, float] = {"num_requests_open": self.num_open, "log_lines_lost": num_lost_lines()}
        if self.fetcher is not None:
            own |= self.fetcher.counters()
        return self.metrics.text(own, stats, self.engine.facts)

    @property
    def num_open(self) -> int:
        """Number of prompts that the engine answers and of requests that are being read."""
        return self.engine.num_open + self.readers.num_open

    async def prepare(self, prepare: Prepare[T], request: Request) -> T:
        """Run `prepare` on the request's body in a reader and return the result. Stops if the client leaves.

        Raises the error to answer with, among them QueueFullError if too many requests are open.
        """
        async with self.body(request) as body:
            return await self.prepare_from(body, prepare, request)

    async def prepare_from(self, body: Parts, prepare: Prepare[T], request: Request) -> T:
        """Do as `prepare` for a body that has been received. May be called several times for one body."""
        return await unless_left(request.receive, self._read(prepare, body))

    async def _read(self, prepare: Prepare[T], body: Parts) -> T:
        """Run `prepare` in a reader. If the request names images by URL, fetch them and run it again."""
        room = self._room()
        reading = RequestReading(prepare, replace(room, num_open=room.num_open - 1))  # without this request itself
        answer = await self.readers.run(reading, *body)
        if not isinstance(answer, MissingImages):
            return answer
        assert self.fetcher is not None, "readers ask for images only if hosts are allowed"
        async with self.fetcher.fetched(answer.urls) as fetched:
            sizes = tuple((url, sum(map(len, parts))) for url, parts in fetched.items())
            # not joined here, because that would hold a large image twice and the event loop up
            answer = await self.readers.run(replace(reading, fetched=sizes), *body, *chain(*fetched.values()))
        assert not isinstance(answer, MissingImages)
        return answer

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[Parts]:
        """Receive the request's body, and count the request as open until the context is left. Raises as `prepare`.

        If the request is refused, its offer to a decode engine ends, so that the other engine does not wait for it.
        """
        self.check_healthy()
        try:
            self._check_room(1)
        except QueueFullError:
            if self.engine.config.links_peers:  # otherwise the body need not be read
                async with self.bodies.read(request) as body:
                    await self._end_offer(body)
            raise
        with self.readers.counted():
            async with self.bodies.read(request) as body:
                try:
                    yield body
                except Exception:
                    await self._end_offer(body)
                    raise

    async def _end_offer(self, body: Parts) -> None:
        """Let the engine end the offer of a refused request. A large body is parsed by a reader."""
        if not self.engine.config.links_peers:
            return
        if sum(map(len, body)) <= SMALL_BYTES:
            self.engine.end_offer(transfer_params(b"".join(body)))
            return
        with contextlib.suppress(ForkpointError, HTTPError):  # then the other engine waits for its own time limit
            self.engine.end_offer(await self.readers.run(read_transfer_params, *body))

    async def open(self, name: str, prepared: PreparedRequest, receive: Receive) -> Generation:
        """Send all prompts to the engine, or none if one is refused, and return their generation.

        `name` begins the ids of the engine's requests. Raises the errors of `AsyncEngine.add` and `Trials.check`,
        and QueueFullError if too many completions are open.
        """
        try:
            return await self._open(name, prepared, receive)
        except Exception:
            self.engine.end_offer(prepared.params.kv_transfer_params)
            raise

    async def _open(self, name: str, prepared: PreparedRequest, receive: Receive) -> Generation:
        config, params = self.config, prepared.params
        with self.readers.counted():
            await self.trials.check(params.structured_outputs, receive)
            if params.calls is not None:
                await self.trials.check(params.calls.structure, receive)
        self.check_healthy()
        self._check_room(len(prepared.prompts) * params.n)
        if config.salts_by_key:
            params = replace(params, cache_salt=own_salt(params.cache_salt))
        opened = OpenRequest()
        generation = Generation(self.engine, opened, reports_cache=config.enable_prompt_tokens_details)
        with generation.closed_on_error():
            for index, prompt in enumerate(prepared.prompts):
                if index:
                    await asyncio.sleep(0)  # lets other streams go on between two prompts
                self.engine.add(opened, f"{name}-{index}", prompt, params, priority=prepared.priority)
                if prompt.images:
                    self.metrics.images_read(prompt)
        return generation

    def _check_room(self, num_more: int) -> None:
        self._room().check(num_more)
        if self.engine.is_full:
            limit = self.engine.config.scheduler.get("max_queue_len", SchedulerConfig().max_queue_len)
            raise QueueFullError(f"the waiting queue is full, the limit is max_queue_len={limit}; try again later")

    def _room(self) -> Room:
        return Room(self.engine.num_sequences + self.readers.num_open, self.config.max_open_requests)

    def new_id(self) -> str:
        """Return a new id for an answer. X-Request-Id does not serve, as clients may send the same one twice."""
        return uuid.uuid4().hex


def read_transfer_params(texts: Texts, data: bytes) -> object:
    """Do as `transfer_params`. Runs in a reader's process."""
    return transfer_params(data)
