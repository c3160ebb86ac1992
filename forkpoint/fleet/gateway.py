"""What clients talk to: it passes a request to a replica, and to another one where that is lost before it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from forkpoint.fleet.messages import ForwardedRequest, Head, RoutingHint
from forkpoint.fleet.metrics import joined_metrics
from forkpoint.obs.logs import LOGGER

MAX_TRIES: Final = 8
MAX_STOPPED: Final = 2  # engines that stopped with a request, which may be why: it is not tried on more
PAUSE_S: Final = 0.5  # after the second failure, and so much more after each one; Ray takes seconds to notice
ASKED_OF_ALL: Final = frozenset({"/metrics", "/reset_prefix_cache", "/check_integrity"})
WITH_PROMPT: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
STORED: Final = "/v1/responses"  # one replica has what is stored under an id
ELSEWHERE: Final = ("engine_stopped", "loading", "queue_full")  # codes of refusals that say nothing of other replicas
NOT_STORED: Final = ("response_not_found", "previous_response_not_found")
LOST: Final = "the replica that answered was lost; send the request again"


@dataclass(slots=True)
class ReplicaAnswer:
    """An answer whose first piece has come, or all of it where it is no stream."""

    head: Head
    body: bytes
    rest: Any

    def code(self) -> str | None:
        """Of an answer that is an error."""
        if self.head.status < 400 or self.head.is_stream:
            return None
        try:
            return str(json.loads(self.body)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return "engine_stopped" if self.head.status == 503 else None

    def response(self) -> Response:
        headers = dict(self.head.headers)
        if self.head.is_stream:
            return StreamingResponse(self._pieces(), self.head.status, headers)
        return Response(self.body, self.head.status, headers)

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield self.body
        try:
            async for piece in self.rest:
                yield piece
        except RayError as error:
            LOGGER.warning("a replica was lost in the middle of an answer: %s", _last_line(error))
            told = {"type": "error", "error": {"type": "api_error", "message": LOST, "code": "replica_lost"}}
            yield b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"


class Gateway:
    """The ingress of the application; it keeps nothing between requests."""

    def __init__(self, replicas: DeploymentHandle, asks_prefix: bool) -> None:
        self._replicas = replicas.options(stream=True)
        self._prefixes = replicas
        self._asks_prefix = asks_prefix

    async def __call__(self, request: Request) -> Response:
        headers = tuple(request.headers.items())
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        asked = ForwardedRequest(request.method, path, request.url.query, headers, await request.body())
        if asked.path in ASKED_OF_ALL:
            return await self._answer_of_all(asked)
        return (await self._answer(asked)).response()

    async def _answer(self, asked: ForwardedRequest) -> ReplicaAnswer:
        """The first answer that is not the loss of a replica; of several refusals the last."""
        route = RoutingHint(await self._prefix(asked))
        last: ReplicaAnswer | None = None
        stopped = set[str]()
        for number in range(MAX_TRIES):
            try:
                answer = await self._open(route, asked)
            except RayError as error:
                LOGGER.warning("a replica was lost before it answered: %s", _last_line(error))
                await asyncio.sleep(number * PAUSE_S)
                continue
            code = answer.code()
            is_elsewhere = code in NOT_STORED and asked.path.startswith(STORED)
            if not is_elsewhere and code not in ELSEWHERE:
                return answer
            if code == "engine_stopped":
                stopped.add(answer.head.replica)
                if len(stopped) == MAX_STOPPED:
                    return answer
            if answer.head.replica in route.tried:
                if is_elsewhere or code == "queue_full":
                    return answer
                await asyncio.sleep(number * PAUSE_S)
            last, route = answer, RoutingHint(route.block_hashes, route.tried | {answer.head.replica})
        return last if last is not None else _lost()

    async def _open(self, route: RoutingHint, asked: ForwardedRequest) -> ReplicaAnswer:
        """Raises RayError where the replica is lost before there is something to tell."""
        pieces = self._replicas.answer.remote(route, asked)
        head: Head = await anext(pieces)
        body: bytes = await anext(pieces, b"")
        if not head.is_stream:
            body = b"".join([body, *[piece async for piece in pieces]])
        return ReplicaAnswer(head, body, pieces)

    async def _prefix(self, asked: ForwardedRequest) -> tuple[int, ...]:
        if not self._asks_prefix or asked.path not in WITH_PROMPT:
            return ()
        try:
            found: tuple[int, ...] = await self._prefixes.prefix.remote(RoutingHint(), asked)
            return found
        except RayError:
            return ()

    async def _answer_of_all(self, asked: ForwardedRequest) -> Response:
        """Each replica is asked; metrics are told together, of other answers the worst one."""
        answers: dict[str, ReplicaAnswer] = {}
        while True:
            try:
                answer = await self._open(RoutingHint(tried=frozenset(answers)), asked)
            except RayError:
                return _lost().response()
            if answer.head.replica in answers:
                break
            answers[answer.head.replica] = answer
        worst = max(answers.values(), key=lambda found: found.head.status)
        if asked.path == "/metrics" and worst.head.status == 200:
            worst.body = joined_metrics({name: found.body.decode() for name, found in answers.items()}).encode()
        return worst.response()


def _lost() -> ReplicaAnswer:
    told = {"error": {"message": LOST, "type": "server_error", "param": None, "code": "replica_lost"}}
    return ReplicaAnswer(Head("", 503, (("content-type", "application/json"),)), json.dumps(told).encode(), None)


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
