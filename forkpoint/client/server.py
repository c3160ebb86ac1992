"""A connection to one server."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp

from forkpoint.checks import Checker, json_value
from forkpoint.client.protocol import API_KEY_VARIABLE, Delta, EventDecoder, read_chunk, refusal
from forkpoint.errors import BrokenAnswerError, ConfigError, ServerUnreachableError

HEALTH_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
DONE: Final = "[DONE]"
Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Final[Endpoint] = "/v1/chat/completions"
COMPLETIONS: Final[Endpoint] = "/v1/completions"

_CHECK: Final = Checker(ConfigError)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of /v1/models. `root` (the weights' origin) and `max_model_len` are None if the server does not say."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer with any status. `body` is the JSON value, or the text if it is not JSON."""

    status: int
    body: Any
    request_id: str | None

    def raise_for_status(self) -> None:
        """Raise ServerRefusedError for a status of 400 or more."""
        if self.status >= 400:
            raise refusal(self.status, self.body)


class Server:
    """A client of the server at `url`, given with or without its trailing /v1. Use it in an `async with` statement.

    The methods raise ServerUnreachableError if no connection can be opened, ServerRefusedError for an error status, and
    BrokenAnswerError for an answer that is cut off, late or malformed, unless they say otherwise.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`api_key` defaults to FORKPOINT_API_KEY of the environment; `timeout_s` limits a whole answer (None: not).

        Raises ConfigError for a `url` that is not an HTTP server's.
        """
        self.url = base_url(url)
        key = api_key or os.environ.get(API_KEY_VARIABLE)
        self._headers = dict(headers or {})
        if key:
            self._headers.setdefault("Authorization", f"Bearer {key}")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def models(self) -> list[ServedModel]:
        reply = await self.exchange("GET", "/v1/models")
        reply.raise_for_status()
        try:
            entries = reply.body["data"]
            return [ServedModel(entry["id"], entry.get("root"), entry.get("max_model_len")) for entry in entries]
        except (TypeError, KeyError) as error:
            raise BrokenAnswerError(f"{self.url}/v1/models does not list models; is this an OpenAI server?") from error

    async def model(self, name: str | None = None) -> ServedModel:
        """Return the served model called `name` (None: the first one). Raises ConfigError if it is not served."""
        models = await self.models()
        for model in models:
            if name in (None, model.id):
                return model
        served = ", ".join(model.id for model in models) or "nothing"
        raise ConfigError(f"{self.url} does not serve model {name!r}; it serves {served}")

    async def is_healthy(self) -> bool:
        """Return whether /health answers 200 within 5 s. False also if nothing listens; raises nothing."""
        try:
            async with self._opened.get(self.url + "/health", timeout=HEALTH_TIMEOUT) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def exchange(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """Send `body` as JSON and return the whole answer. An error status is returned, not raised."""
        async with self._request(method, path, body) as response:
            return await _read(response)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, running_usage: bool = False
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a streamed answer as they come. Leaving the iteration closes the connection.

        With `running_usage` forkpoint and vLLM report the usage with every chunk, so that it is known if the caller
        leaves.
        """
        options = {"include_usage": True}
        if running_usage:
            options["continuous_usage_stats"] = True
        body = {**body, "stream": True, "stream_options": options}
        decoder, done = EventDecoder(), False
        async with self._request("POST", path, body) as response:
            if response.status >= 400:
                (await _read(response)).raise_for_status()
            async for received in response.content.iter_any():
                for data in decoder.feed(received):
                    done = done or data == DONE
                    for delta in _deltas(data):
                        yield delta
        if not done:
            raise BrokenAnswerError(f"the answer of {self.url} ended without {DONE}; the server may have died")

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Server in an `async with` statement")
        return self._session

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send `body` as JSON. Convert aiohttp's errors, also in the block, to those of the class."""
        try:
            async with self._opened.request(method, self.url + path, json=body) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise self._unreachable(error) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise BrokenAnswerError(f"the answer of {self.url} broke off: {reason}") from error

    def _unreachable(self, error: aiohttp.ClientConnectorError) -> ServerUnreachableError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return ServerUnreachableError(
                f"the certificate of {self.url} is not trusted ({error.certificate_error}); name its authority, or the "
                "certificate itself, in SSL_CERT_FILE"
            )
        if isinstance(error, aiohttp.ClientSSLError):
            return ServerUnreachableError(
                f"{self.url} does not speak HTTPS ({error.os_error}); try http:// if it is a plain server"
            )
        number = error.errno or 0
        # errors of name resolution have negative numbers
        reason = os.strerror(number) if number > 0 else error.os_error.strerror
        return ServerUnreachableError(
            f"nothing answers at {self.url} ({reason}); start a server with `forkpoint serve`, or give another URL"
        )


def base_url(url: str) -> str:
    """Return `url` without a trailing slash, /v1 or endpoint. Raises ConfigError if it is not an HTTP URL."""
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a malformed port or address
        ok = False
    _CHECK.require(ok, "url", url, "http://HOST or https://HOST, with :PORT from 1 to 65535 unless it is the usual one")
    url = url.rstrip("/")
    for path in (CHAT, COMPLETIONS, "/v1"):
        url = url.removesuffix(path)
    return url.rstrip("/")


def _deltas(data: str) -> Iterable[Delta]:
    """Return the news in the data of an event. The last event has none."""
    return () if data == DONE else read_chunk(data)


async def _read(response: aiohttp.ClientResponse) -> Reply:
    text = await response.text(errors="replace")
    return Reply(response.status, json_value(text, text), response.headers.get("X-Request-Id"))
