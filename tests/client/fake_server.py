"""A server that speaks OpenAI's protocol and forkpoint's extensions with latencies and answers that are told to it."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

MODEL = "fake-model"
NO_KEY = "send the header 'Authorization: Bearer KEY'"


@dataclass
class Script:
    """How the next answers come. `words` are sent one a chunk; `usage` may depend on the request's body."""

    words: list[str] = field(default_factory=lambda: ["Hello", ",", " world", "!"])
    reasoning: list[str] = field(default_factory=list)
    first_token_s: float = 0.0
    gap_s: float = 0.0
    finish_reason: str = "stop"
    num_prompt_tokens: int = 100
    num_cached_tokens: int | None = 64
    kv_num_tokens: int = 64
    num_restored_tokens: int = 0  # from tiers and other servers
    num_peer_tokens: int = 0
    miss: str | None = "cold"
    image_tokens: tuple[int, int] = (0, 0)  # of the prompt, and those of them that were cached
    drafts: tuple[int, int] | None = None  # tokens drafted and accepted, where the server drafts
    refuse: tuple[int, dict[str, Any] | str] | None = None
    error_after: int | None = None  # an error event after so many words
    break_after: int | None = None  # the connection closes after so many words
    bytes_per_write: int | None = None  # cut the stream at odd places


Choose = Callable[[dict[str, Any]], Script]


class FakeServer:
    """Serves on a free port in a thread of its own, and keeps what it was sent; `aborted` counts disconnects."""

    def __init__(self) -> None:
        self.script = Script()
        self.choose: Choose | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = 0
        self.open = 0
        self.max_open = 0
        card = {"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 4096}
        self.models: list[dict[str, Any]] = [{**card, "input_modalities": ["text", "image"]}]
        self.key: str | None = None  # asked for by all paths of the API
        self.page: Path | None = None  # the folder of the chat page
        self.url = ""

    def wait_for_abort(self) -> None:
        """Waits until a client has gone: a disconnect is noticed a moment after the client shows that it stopped."""
        end_s = time.monotonic() + 10
        while not self.aborted:
            assert time.monotonic() < end_s, "no client went away"
            time.sleep(0.01)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/responses", self._answer)
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name:.+}", self._page)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if self._refuses_key(request):
            return _error(401, NO_KEY)
        return web.json_response({"object": "list", "data": self.models})

    def _refuses_key(self, request: web.Request) -> bool:
        return self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _page(self, request: web.Request) -> web.Response:
        assert self.page is not None
        path = self.page / request.match_info.get("name", "index.html")
        return web.Response(body=path.read_bytes(), content_type=mimetypes.guess_type(path.name)[0])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._refuses_key(request):
            return _error(401, NO_KEY)
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the body is not JSON")
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        script = self.choose(body) if self.choose else self.script
        if script.refuse is not None:
            status, document = script.refuse
            if isinstance(document, str):
                return web.Response(status=status, text=document)
            return web.json_response(document, status=status)
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        try:
            return await self._complete(request, body, script)
        except (ConnectionResetError, asyncio.CancelledError):
            self.aborted += 1
            raise
        finally:
            self.open -= 1

    async def _complete(self, request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
        chat = request.path.endswith("/chat/completions")
        if not body.get("stream"):
            await asyncio.sleep(script.first_token_s + script.gap_s * (len(script.words) - 1))
            whole = _response(script) if request.path.endswith("/responses") else _whole(script, chat)
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event, wait_s in _events(script, chat, body):
            if wait_s:
                await asyncio.sleep(wait_s)
            if event is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            step = script.bytes_per_write or len(data)
            for start in range(0, len(data), step):
                await response.write(data[start : start + step])
        await response.write_eof()
        return response

    def run(self) -> Iterator[FakeServer]:
        # All of it in the thread: the caller's may have a running loop (playwright's).
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(self._start(), loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    async def _start(self) -> web.AppRunner:
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    yield from FakeServer().run()


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def _events(script: Script, chat: bool, body: dict[str, Any]) -> Iterator[tuple[dict[str, Any] | str | None, float]]:
    """(event, seconds to wait before it); None cuts the connection."""
    options = body.get("stream_options") or {}
    running = _usage(script) if options.get("continuous_usage_stats") else {}
    running = {"usage": running["usage"]} if running else {}
    if chat:
        cache = _usage(script).get("cache")
        yield {**_chunk(chat, {"role": "assistant", "content": ""}), **({"cache": cache} if cache else {})}, 0.0
    wait_s = script.first_token_s
    for word in script.reasoning:
        yield _chunk(chat, {"reasoning_content": word}), wait_s
        wait_s = script.gap_s
    for number, word in enumerate(script.words):
        if script.error_after == number:
            yield {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": 500}}, 0.0
            return
        if script.break_after == number:
            yield None, 0.0
            return
        yield {**_chunk(chat, {"content": word}), **running}, wait_s
        wait_s = script.gap_s
    yield _chunk(chat, {}, script.finish_reason), 0.0
    if options.get("include_usage"):
        yield {**_chunk(chat, None), **_usage(script)}, 0.0
    yield "[DONE]", 0.0


def _chunk(chat: bool, delta: dict[str, Any] | None, finish_reason: str | None = None) -> dict[str, Any]:
    chunk: dict[str, Any] = {"id": "x", "object": "chat.completion.chunk" if chat else "text_completion"}
    chunk |= {"created": 0, "model": MODEL, "choices": []}
    if delta is not None:
        part = {"delta": delta} if chat else {"text": delta.get("content", "")}
        chunk["choices"] = [{"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}]
    return chunk


def _usage(script: Script) -> dict[str, Any]:
    completion = len(script.words) + len(script.reasoning)
    usage: dict[str, Any] = {
        "prompt_tokens": script.num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": script.num_prompt_tokens + completion,
    }
    if script.num_cached_tokens is None:
        return {"usage": usage}
    num_image_tokens, num_cached_image_tokens = script.image_tokens
    details = {"cached_tokens": script.num_cached_tokens, "image_tokens": num_image_tokens}
    usage["prompt_tokens_details"] = details
    cache = {
        "num_tokens": script.num_cached_tokens,
        "kv_num_tokens": script.kv_num_tokens,
        "num_image_tokens": num_cached_image_tokens,
        "num_restored_tokens": script.num_restored_tokens,
        "num_peer_tokens": script.num_peer_tokens,
        "miss": script.miss,
    }
    if script.drafts is None:
        return {"usage": usage, "cache": cache}
    speculation = dict(zip(("num_draft_tokens", "num_accepted_tokens"), script.drafts, strict=True))
    return {"usage": usage, "cache": cache, "speculation": speculation}


def _response(script: Script) -> dict[str, Any]:
    usage = {"input_tokens": 100, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 64}}
    part = {"type": "output_text", "text": "".join(script.words)}
    return {"output": [{"type": "message", "content": [part]}], "usage": usage}


def _whole(script: Script, chat: bool) -> dict[str, Any]:
    text = "".join(script.words)
    message = {"role": "assistant", "content": text, "reasoning_content": "".join(script.reasoning) or None}
    part: dict[str, Any] = {"message": message} if chat else {"text": text}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": script.finish_reason}
    kind = "chat.completion" if chat else "text_completion"
    return {"id": "x", "object": kind, "created": 0, "model": MODEL, "choices": [choice], **_usage(script)}
