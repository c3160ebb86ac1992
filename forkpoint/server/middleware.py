"""Checks that every request passes first: its host, its origin, its API key, its size. It also gets its id here."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkpoint.checks import is_loopback
from forkpoint.obs.logs import LOGGER
from forkpoint.server.body import is_json
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError, is_anthropic, too_large
from forkpoint.server.metrics import Metrics
from forkpoint.server.page import FOLDER as PAGE_FOLDER

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs", "/favicon.ico"})
# An IPv6 address in brackets or alone, or a name or IPv4 address; then perhaps a port.
HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.%]+)\]|(?P<name>[^:\[\]@/?#\s]+))(?::\d*)?")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # requests with these change nothing
REQUEST_ID = b"x-request-id"
ANTHROPICS_REQUEST_ID = b"request-id"  # the header in which Anthropic's clients look for it
MAX_REQUEST_ID_LENGTH = 128  # characters; longer ids are cut
KEY: Final[ContextVar[bytes]] = ContextVar("key")  # the API key of the current request; empty if it needs none


class Gate:
    """Answers 403 to foreign hosts and pages, 401 without a known key, and 413 if Content-Length is too large.

    Adds X-Request-Id to every answer (and Request-Id to those of Anthropic's API), and counts the answers.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._hosts = Hosts(config)
        self._origins = Origins(config)
        self._keys = tuple(key.encode() for key in config.api_key)
        self._config = config
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["root_path"] = self._config.root_path
        headers = dict(scope["headers"])
        request_id = headers.get(REQUEST_ID, b"")[:MAX_REQUEST_ID_LENGTH] or uuid.uuid4().hex.encode()
        id_headers = (REQUEST_ID, ANTHROPICS_REQUEST_ID) if is_anthropic(scope) else (REQUEST_ID,)
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *((name, request_id) for name in id_headers)]
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, send_with_id)
        except HTTPError as error:
            if not status:
                refusal = JSONResponse(error.body_for(scope), error.status, error.headers)
                await refusal(scope, receive, send_with_id)
        finally:
            # The declared path of the route, not the requested one: clients could create labels without end.
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.http_answer(route, scope["method"], status)
            if self._config.access_log:
                elapsed = time.perf_counter() - started
                name = request_id.decode("latin-1")
                LOGGER.info("%s %s %s in %.3f s [%s]", scope["method"], scope["path"], status, elapsed, name)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:  # a proxy may read another one than this server
            raise HTTPError(400, "the request has several Host headers; send one")
        self._hosts.check(headers.get(b"host"))
        path = scope["path"].removeprefix(self._config.root_path) or "/"  # some proxies remove the root path themselves
        is_open = path in OPEN_PATHS or path.startswith(PAGE_FOLDER) or scope["method"] == "OPTIONS"
        KEY.set(self._known_key(headers) if self._keys and not is_open else b"")
        if not self._keys and scope["method"] not in SAFE_METHODS and not is_json(headers.get(b"content-type", b"")):
            self._origins.check(headers)
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)

    def _known_key(self, headers: dict[bytes, bytes]) -> bytes:
        given = given_key(headers)
        if not any(hmac.compare_digest(given, key) for key in self._keys):
            wrong = "does not know the API key that was sent" if given else "needs an API key"
            raise HTTPError(
                401,
                f"this server {wrong}; send the header 'Authorization: Bearer KEY' with a valid key, "
                "or 'x-api-key: KEY'",
                "authentication_error",
                code="invalid_api_key",
            )
        return given


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key of a request, in the header of OpenAI's clients or of Anthropic's; empty without a key."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"")


class Hosts:
    """The hosts that requests may name.

    A web page can make its own name resolve to this machine's address (DNS rebinding) and so reach a server that needs
    no key. Only the Host header then shows that the request came for another host.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._names = {config.host.lower(), *map(str.lower, config.allowed_hosts)}
        pages_reach_it = config.uds is None and is_loopback(config.host)  # no page can name a Unix socket
        is_guarded = bool(config.allowed_hosts) or (not config.api_key and pages_reach_it)
        self._any = not is_guarded or "*" in self._names

    def check(self, given: bytes | None) -> None:
        """Raise HTTPError 403 for a header that names another host. None passes, because browsers always send one."""
        if self._any or given is None:
            return
        name = _without_port(given.decode("latin-1").lower())
        if name not in self._names and not is_loopback(name):
            raise HTTPError(
                403,
                f"this server does not answer for the host {name[:MAX_REQUEST_ID_LENGTH]!r}; if it should, name it "
                "with --allowed-hosts",
                "permission_error",
                code="host_not_allowed",
            )


class Origins:
    """The origins whose pages may send requests that change something without a preflight.

    Browsers let any page send a POST with a body that is not JSON to any server. Only its Origin header then says
    where it comes from. For all other requests that could change something they ask the server first (CORS).
    """

    def __init__(self, config: ServerConfig) -> None:
        self._allowed = frozenset(origin.encode() for origin in config.allowed_origins)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise HTTPError 403 for a page of another site. Clients other than browsers send no Origin and pass."""
        given = headers.get(b"origin")
        if given is None or given in self._allowed or b"*" in self._allowed:
            return
        if given.partition(b"://")[2] == headers.get(b"host"):
            return  # a page of this server
        raise HTTPError(
            403,
            f"pages of {given.decode('latin-1')[:MAX_REQUEST_ID_LENGTH]!r} may not do this; if they should, name the "
            "origin with --allowed-origins",
            "permission_error",
            code="origin_not_allowed",
        )


def _without_port(host: str) -> str:
    """Return the name or address in a Host header. A header of another form is returned unchanged."""
    found = HOST.fullmatch(host)
    if found is None:
        return host
    return found["address"] or found["name"]


def own_salt(given: str) -> str:
    """Return the cache salt `given`, bound to the current request's API key. Two keys never share a salt."""
    return hmac.new(KEY.get(), b"cache salt\0" + given.encode(), hashlib.sha256).hexdigest()
