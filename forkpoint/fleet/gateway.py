"""Receives clients' requests and passes each to a replica, or to another one if that is lost before it answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from forkpoint.config import BLOCK_SIZE
from forkpoint.fleet.handover import SPLIT, decode_half, early_offer, new_lease, offer_of, prefill_half
from forkpoint.fleet.messages import ForwardedRequest, Head, RoutingHint
from forkpoint.fleet.metrics import joined_metrics
from forkpoint.obs.logs import LOGGER
from forkpoint.server.errors import CLIENT_LEFT, PROMPT_PATHS

MAX_TRIES: Final = 8
MAX_STOPPED: Final = 2  # engines that stop while they have a request; it may be the cause, so no further engine gets it
# seconds after the second failure, increasing by as much after each one; Ray takes seconds to notice a loss
PAUSE_S: Final = 0.5
# Seconds for which a request waits for a prefill replica to take its prompt, and for each answer if it is sent to all.
# Ray itself waits without a limit, even if all replicas are busy or gone.
TAKEN_S: Final = 2.0
ALL_ANSWER_S: Final = 10.0
LOST_ERRORS: Final = (RayError, RayServeException)  # of a replica that was lost, or of a deployment that has none
SENT_TO_ALL: Final = frozenset({"/metrics", "/reset_prefix_cache", "/check_integrity"})
STORED: Final = "/v1/responses"  # only one replica has the response that is stored under an id
ELSEWHERE: Final = ("engine_stopped", "loading", "queue_full")  # error codes that depend on the replica
OF_RAY: Final = frozenset({"date", "x-request-id"})  # headers that Ray's proxy adds to each answer itself
NOT_STORED: Final = ("response_not_found", "previous_response_not_found")
LOST: Final = "the replica that answered was lost; send the request again"


@dataclass(slots=True)
class ReplicaAnswer:
    """A replica's answer: its head and first piece if it is a stream, otherwise all of it."""

    head: Head
    body: bytes
    rest: Any

    def code(self) -> str | None:
        """Return the error code; None if the answer is not an error."""
        if self.head.status < 400 or self.head.is_stream:
            return None
        try:
            return str(json.loads(self.body)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return "engine_stopped" if self.head.status == 503 else None

    def response(self) -> Response:
        headers = {name: value for name, value in self.head.headers if name not in OF_RAY}
        if self.head.is_stream:
            return StreamingResponse(self._pieces(), self.head.status, headers)
        return Response(self.body, self.head.status, headers)

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield self.body
        try:
            async for piece in self.rest:
                yield piece
        except LOST_ERRORS as error:
            LOGGER.warning("a replica was lost in the middle of an answer: %s", _last_line(error))
            lost = {"type": "error", "error": {"type": "api_error", "message": LOST, "code": "replica_lost"}}
            yield b"event: error\ndata: " + json.dumps(lost).encode() + b"\n\n"


class Gateway:
    """The ingress of the application. It keeps no state between requests.

    With `prefill` replicas, prompts of at least `min_tokens` tokens are computed there and continued by `replicas`.
    """

    def __init__(
        self,
        replicas: DeploymentHandle,
        asks_prefix: bool,
        prefill: DeploymentHandle | None = None,
        min_tokens: int = 0,
    ) -> None:
        self._replicas = replicas.options(stream=True)
        self._prefixes = replicas
        self._prefill: DeploymentHandle | None = None
        if prefill is not None:
            self._prefill = prefill.options(stream=True)
        self._min_tokens = min_tokens
        self._asks_prefix = asks_prefix or prefill is not None

    async def __call__(self, request: Request) -> Response:
        headers = tuple(request.headers.items())
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        forwarded = ForwardedRequest(request.method, path, request.url.query, headers, body)
        if forwarded.path in SENT_TO_ALL:
            return await self._answer_of_all(forwarded)
        return (await self._answer(forwarded)).response()

    async def _answer(self, forwarded: ForwardedRequest) -> ReplicaAnswer:
        route = RoutingHint(await self._prefix(forwarded))
        forwarded, computing = await self._with_computed_prompt(route, forwarded)
        try:
            return await self._answer_of_one(route, forwarded)
        finally:
            if computing is not None:
                computing.cancel()  # the answer is on its way, or nobody wants it

    async def _answer_of_one(self, route: RoutingHint, forwarded: ForwardedRequest) -> ReplicaAnswer:
        """Return the first answer that does not depend on the replica, or the last refusal if all refuse.

        Replicas that are lost before they answer are skipped, for MAX_TRIES tries in all. After MAX_STOPPED engines
        have stopped, the request may be the cause, and the last answer is returned.
        """
        last: ReplicaAnswer | None = None
        stopped = set[str]()
        for number in range(MAX_TRIES):
            try:
                answer = await self._open(self._replicas, route, forwarded)
            except LOST_ERRORS as error:
                LOGGER.warning("a replica was lost before it answered: %s", _last_line(error))
                await asyncio.sleep(number * PAUSE_S)
                continue
            code = answer.code()
            is_elsewhere = code in NOT_STORED and forwarded.path.startswith(STORED)
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
        return last or _lost()

    async def _with_computed_prompt(
        self, route: RoutingHint, forwarded: ForwardedRequest
    ) -> tuple[ForwardedRequest, asyncio.Task[None] | None]:
        """Let a prefill replica compute a long prompt, and return the request that continues it.

        The request can be sent at once if the replica has said where its prompts are fetched. The task then waits for
        the replica's answer. If the prompt is not computed, whichever replica gets the request computes it.
        """
        num_tokens = len(route.block_hashes or ()) * BLOCK_SIZE
        if self._prefill is None or num_tokens < self._min_tokens or forwarded.path not in SPLIT:
            return forwarded, None
        lease = new_lease()
        half = prefill_half(forwarded.body, lease)
        if half is None:
            return forwarded, None
        pieces = self._prefill.compute_prompt.remote(route, replace(forwarded, body=half))
        try:
            with _cancelling(pieces):
                async with asyncio.timeout(TAKEN_S):  # Python 3.11's `wait_for` may lose a cancellation
                    earlier: dict[str, Any] | None = await anext(pieces)
            if earlier is None:
                offer = offer_of(await _computed(pieces))
                return replace(forwarded, body=decode_half(forwarded.body, offer)), None
        except LOST_ERRORS as error:
            _log_lost_prompt(error)
            return forwarded, None
        except TimeoutError:
            LOGGER.warning("no prefill replica takes a prompt within %g s, and another replica computes it", TAKEN_S)
            return forwarded, None
        body = decode_half(forwarded.body, early_offer(earlier, lease))
        return replace(forwarded, body=body), asyncio.create_task(_follow(pieces))

    async def _open(self, replicas: DeploymentHandle, route: RoutingHint, forwarded: ForwardedRequest) -> ReplicaAnswer:
        """Send the request and wait for the head of the answer. Raises LOST_ERRORS if the replica is lost before."""
        pieces = replicas.answer.remote(route, forwarded)
        with _cancelling(pieces):
            head: Head = await anext(pieces)
            body: bytes = await anext(pieces, b"")
            if not head.is_stream:
                body = b"".join([body, *[piece async for piece in pieces]])
        return ReplicaAnswer(head, body, pieces)

    async def _prefix(self, forwarded: ForwardedRequest) -> tuple[int, ...]:
        if not self._asks_prefix or forwarded.path not in PROMPT_PATHS:
            return ()
        try:
            found: tuple[int, ...] = await self._prefixes.prefix.remote(RoutingHint(), forwarded)
            return found
        except LOST_ERRORS:
            return ()

    async def _answer_of_all(self, forwarded: ForwardedRequest) -> Response:
        """Send the request to each replica. Return their metrics as one text, or the worst answer.

        The worst answer has the highest status: 503 if a replica is lost, or if none answers in ALL_ANSWER_S.
        """
        answers: dict[str, ReplicaAnswer] = {}
        for replicas in filter(None, (self._replicas, self._prefill)):
            while True:
                route = RoutingHint(tried=frozenset(answers))
                try:
                    async with asyncio.timeout(ALL_ANSWER_S):
                        answer = await self._open(replicas, route, forwarded)
                except (*LOST_ERRORS, TimeoutError):
                    return _lost().response()
                if answer.head.replica in answers:
                    break
                answers[answer.head.replica] = answer
        worst = max(answers.values(), key=lambda found: found.head.status)
        if forwarded.path == "/metrics" and worst.head.status == 200:
            worst.body = joined_metrics({name: found.body.decode() for name, found in answers.items()}).encode()
        return worst.response()


@contextlib.contextmanager
def _cancelling(pieces: Any) -> Iterator[None]:
    """Cancel a call if waiting for it is given up. Ray leaves a call running that a replica has taken."""
    try:
        yield
    except (asyncio.CancelledError, TimeoutError):
        pieces.cancel()
        raise


async def _computed(pieces: Any) -> bytes:
    """Return the answer of a prefill replica; nothing if that is an error. Raises LOST_ERRORS."""
    with _cancelling(pieces):
        head: Head = await anext(pieces)
        body: bytes = await anext(pieces, b"")
    return body if head.status == 200 else b""


async def _follow(pieces: Any) -> None:
    """Wait for the answer of a prefill replica. A decode replica that fetches its prompt learns of a failure itself."""
    try:
        await _computed(pieces)
    except LOST_ERRORS as error:
        _log_lost_prompt(error)


def _log_lost_prompt(error: RayError | RayServeException) -> None:
    LOGGER.warning("a prefill replica was lost, and another replica computes its prompt: %s", _last_line(error))


def _lost() -> ReplicaAnswer:
    content = {"error": {"message": LOST, "type": "server_error", "param": None, "code": "replica_lost"}}
    return ReplicaAnswer(Head("", 503, (("content-type", "application/json"),)), json.dumps(content).encode(), None)


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
