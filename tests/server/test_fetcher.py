"""Images by URL: from named hosts alone, over checked addresses, without redirects, bounded in bytes and time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from forkpoint.engine.media_urls import MAX_BYTES
from forkpoint.errors import ConfigError, InvalidPromptError, QueueFullError
from forkpoint.server import fetcher
from forkpoint.server.config import ServerConfig
from forkpoint.server.fetcher import Fetcher, is_public

HOST = "127.0.0.1"


@asynccontextmanager
async def site(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Yield the URL of a web server on this machine."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    try:
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def run(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
    *paths: str,
    allowed: tuple[str, ...] = (f"{HOST}:*",),
) -> dict[str, bytes]:
    """Fetch `paths` of a site, or whole URLs."""

    async def fetch() -> dict[str, bytes]:
        async with site(answer) as url:
            own = Fetcher(allowed)
            urls = [path if "://" in path else url + path for path in paths]
            try:
                async with own.fetched(urls) as found:
                    files = {one: b"".join(parts) for one, parts in found.items()}
                    assert own._num_held_bytes == sum(map(len, files.values()))
                    return {one.removeprefix(url): file for one, file in files.items()}
            finally:
                assert own._num_held_bytes == 0
                await own.close()

    return asyncio.run(fetch())


async def ok(request: web.Request) -> web.StreamResponse:
    return web.Response(body=request.path.encode())


def test_images_are_fetched_together_and_boundedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MAX_AT_ONCE", 3)
    waiting, most = 0, 0
    three = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == 3:
            three.set()
        await three.wait()
        await asyncio.sleep(0.01)
        waiting -= 1
        return await ok(request)

    paths = [f"/{number}" for number in range(7)]
    assert run(answer, *paths) == {path: path.encode() for path in paths}
    assert most == 3


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://other.example/a", "not fetched from 'other.example:80'.*--allowed-media-domains"),
        (f"http://user@{HOST}/a", "not understood"),
        (f"http://x\\@{HOST}/a", "not understood"),
        ("http:///a", "not understood"),
        (f"ftp://{HOST}/a", "not understood"),
        (f"http://{HOST}/" + "a" * 9000, "not understood"),
        ("http://2130706433/a", "not fetched from"),
        ("http://127.1/a", "not fetched from"),
        ("http://[::ffff:127.0.0.1]/a", "not fetched from"),
    ],
)
def test_only_named_hosts_are_asked(url: str, says: str) -> None:
    with pytest.raises(InvalidPromptError, match=says):
        run(ok, url)


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ("a.example", "http://a.example/x", True),
        ("a.example", "https://a.example:443/x", True),
        ("a.example", "http://a.example:443/x", False),
        ("a.example", "http://a.example:8080/x", False),
        ("a.example:8080", "http://a.example:8080/x", True),
        ("a.example:8080", "http://a.example/x", False),
        ("a.example:*", "http://a.example:9/x", True),
        ("::1", "http://[::1]/x", True),
        ("::1", "http://[::1]:1/x", False),
        ("[::1]:1", "http://[::1]:1/x", True),
    ],
)
def test_ports(allowed: str, url: str, is_allowed: bool) -> None:
    own = Fetcher([allowed])
    if is_allowed:
        assert own._checked(url)
    else:
        with pytest.raises(InvalidPromptError, match=r"images are not fetched from .*; this server"):
            own._checked(url)


def test_names_that_lead_inside_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only one of the addresses of a name is private. A public one is connected to without a second lookup.

    Proxies of the environment are not asked, since they would look the name up again. CVE-2025-6242, vllm#55539 and
    vllm#57157: URLs reached hosts inside the network, by redirects, by DNS and by names that were parsed twice.
    """
    monkeypatch.setenv("http_proxy", f"http://{HOST}:9")
    looked_up = []

    async def getaddrinfo(_: Any, host: str, port: int, **options: Any) -> list[Any]:
        looked_up.append(host)
        addresses = {"inside.example": ["93.184.215.14", "10.0.0.1"], "outside.example": [HOST]}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    hosts = ("inside.example", "outside.example")
    both = tuple(f"{host}:*" for host in hosts)
    for host in hosts:
        with pytest.raises(InvalidPromptError, match=f"not fetched from {host}: its name leads to an address"):
            run(ok, f"http://{host}:1/a", allowed=both)

    monkeypatch.setattr(fetcher, "is_public", lambda address: True)

    async def to_name(request: web.Request) -> web.StreamResponse:
        return web.Response(body=request.host.encode())

    async def fetch() -> None:
        async with site(to_name) as url:
            named = url.replace(HOST, "outside.example")
            own = Fetcher(both)
            looked_up.clear()
            async with own.fetched([named + "/a", named + "/b"]) as found:
                assert {b"".join(parts) for parts in found.values()} == {named.removeprefix("http://").encode()}
            await own.close()

    asyncio.run(fetch())
    assert looked_up == ["outside.example"]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00::1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::a00:1",
        "64:ff9b:1::7f00:1",
        "fec0::1",
        "::127.0.0.1",
        "ff02::1",
        "x",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


def test_what_answers_badly_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/redirect":
                raise web.HTTPFound("/redirect")
            case "/missing":
                raise web.HTTPNotFound
            case "/declared":
                return web.Response(body=b"", headers={"Content-Length": str(MAX_BYTES + 1)})
            case "/slow":
                await asyncio.sleep(60)
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(b"x" * 2**20)
        return await ok(request)

    for path, says in [
        ("/redirect", "redirect, which is not followed"),
        ("/missing", "status 404"),
        ("/declared", f"more than {MAX_BYTES} bytes"),
        ("/endless", f"more than {MAX_BYTES} bytes"),
    ]:
        with pytest.raises(InvalidPromptError, match=says):
            run(answer, path)
    with monkeypatch.context() as patch, pytest.raises(InvalidPromptError, match=r"not received within 0\.2 s"):
        patch.setattr(fetcher, "TIMEOUT_S", 0.2)
        run(answer, "/slow", "/good")
    with pytest.raises(InvalidPromptError, match=r"cannot be fetched \(ClientConnector") as refused:
        run(ok, f"http://{HOST}:1/a?secret=1")
    assert "secret" not in str(refused.value)


def test_held_bytes_are_bounded_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MAX_HELD_BYTES", 10)
    assert run(ok, "/1234", "/5678")
    with pytest.raises(QueueFullError):
        run(ok, "/1234", "/5678", "/9")


def test_domains_are_hosts() -> None:
    given = ('["a.example"]', "B.example:8443", "::1", "[::1]:80", "c:*")
    found = ServerConfig(allowed_media_domains=given).allowed_media_domains
    assert found == ("a.example", "b.example:8443", "::1", "[::1]:80", "c:*")
    for wrong in ("https://a.example", "a.example:0", "a.example:x", "a:99999", "*.example", "a/b", "[x]:1", ""):
        with pytest.raises(ConfigError, match="allowed_media_domains"):
            ServerConfig(allowed_media_domains=(wrong,))
