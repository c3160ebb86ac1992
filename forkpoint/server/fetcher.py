"""Fetches the images that requests name by URL, from hosts that the operator has named.

The event loop fetches, between two readings of a request, so a slow host keeps no reader. A URL is parsed once. The
host's name is resolved once, and connections go to addresses that were checked.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from forkpoint.checks import shown
from forkpoint.engine.media_urls import MAX_BYTES
from forkpoint.errors import InvalidPromptError, QueueFullError
from forkpoint.obs.logs import LOGGER
from forkpoint.version import installed_version

TIMEOUT_S: Final = 5.0  # limit for one image, its host's name and the wait for a connection included
MAX_REQUEST_S: Final = 20.0  # limit for all images of a request
MAX_AT_ONCE: Final = 8  # images of one request that are fetched at the same time
MAX_PER_HOST: Final = 16  # connections to one host, for all requests together
MAX_HELD_BYTES: Final = 512 << 20  # images of all requests that are fetched or wait for a reader
MAX_URL_CHARS: Final = 8192
ANY_PORT, DEFAULT_PORT = "*", ""  # ports of allowed hosts; the second is that of the URL's scheme
KEPT_NAMES_S: Final = 10  # seconds for which the checked addresses of a name are used again
GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
NAT64: Final = IPv6Network("64:ff9b::/96")  # addresses that a gateway translates to the IPv4 address in their end


def _host_and_port(domain: str) -> tuple[str, str]:
    """Split HOST, HOST:PORT or HOST:* into the host as URLs have it, and the port (DEFAULT_PORT without one)."""
    host, _, port = domain.rpartition(":")
    is_address = domain.count(":") > 1 and not host.startswith("[")  # an IPv6 address without a port
    if not host or is_address or domain.endswith("]"):
        host, port = domain, DEFAULT_PORT
    host = host.removeprefix("[").removesuffix("]")
    return str(URL.build(scheme="http", host=host).raw_host), port


class Fetcher:
    """Fetches images over HTTP from `allowed_domains` alone: names of hosts or addresses.

    Without a port the default ports of http and https are allowed, and with `:*` any port. All methods belong to one
    event loop.
    """

    def __init__(self, allowed_domains: Sequence[str]) -> None:
        self._allowed = frozenset(map(_host_and_port, allowed_domains))
        self._session: aiohttp.ClientSession | None = None
        self._num_held_bytes = 0
        self._num_images = self._num_bytes = 0
        self._seconds = 0.0

    @asynccontextmanager
    async def fetched(self, urls: Sequence[str]) -> AsyncIterator[Mapping[str, Sequence[bytes]]]:
        """Fetch the images at `urls` and hold their parts, as they came, until the context is left.

        Raises InvalidPromptError for a URL that is not allowed and for an image that does not come in time or is too
        large, and QueueFullError if too many bytes are held.
        """
        targets = {url: self._checked(url) for url in urls}
        parts: dict[str, list[bytes]] = {url: [] for url in urls}
        try:
            await self._fetch_all(targets, parts)
            yield parts
        finally:
            self._num_held_bytes -= sum(len(part) for found in parts.values() for part in found)

    def counters(self) -> dict[str, float]:
        """Return the number of images fetched since the start, their bytes, and the seconds that they took."""
        return {
            "num_images_fetched": self._num_images,
            "image_fetch_bytes": self._num_bytes,
            "image_fetch_seconds": self._seconds,
        }

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _checked(self, url: str) -> URL:
        """Parse a URL. Raises InvalidPromptError if it is not allowed."""
        try:
            found = URL(url[: MAX_URL_CHARS + 1])
            fits = len(url) <= MAX_URL_CHARS and found.scheme in ("http", "https") and found.user is None
            host = found.raw_host if fits else None
        except ValueError:
            host = None
        if not host:
            raise InvalidPromptError(
                f"the image URL {shown(url)} is not understood; give http(s)://HOST/PATH without a user name, at most "
                f"{MAX_URL_CHARS} characters"
            )
        ports = [str(found.port), ANY_PORT]
        if found.is_default_port():
            ports.append(DEFAULT_PORT)
        if not any((host, port) in self._allowed for port in ports):
            allowed = ", ".join(sorted(f"{name}:{port}".removesuffix(":") for name, port in self._allowed))
            raise InvalidPromptError(
                f"images are not fetched from {shown(f'{host}:{found.port}')}; this server fetches them from {allowed} "
                "(--allowed-media-domains), or send a data URL"
            )
        return found

    async def _fetch_all(self, targets: Mapping[str, URL], parts: Mapping[str, list[bytes]]) -> None:
        turns = asyncio.Semaphore(MAX_AT_ONCE)
        try:
            async with asyncio.timeout(MAX_REQUEST_S), asyncio.TaskGroup() as group:
                for url, target in targets.items():
                    group.create_task(self._fetch(target, parts[url], turns))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        except TimeoutError:
            raise InvalidPromptError(
                f"the {len(targets)} images of the request were not received within {MAX_REQUEST_S:g} s; send them as "
                "data URLs"
            ) from None

    async def _fetch(self, url: URL, parts: list[bytes], turns: asyncio.Semaphore) -> None:
        async with turns:
            started_s = time.perf_counter()
            where = f"the image at {shown(str(url.with_query(None)))}"
            try:
                async with self._opened().get(url, allow_redirects=False) as response:
                    await self._read(response, where, parts)
            except TimeoutError:
                raise InvalidPromptError(
                    f"{where} was not received within {TIMEOUT_S:g} s; send it as a data URL"
                ) from None
            except (aiohttp.ClientError, OSError) as error:
                raise InvalidPromptError(
                    f"{where} cannot be fetched ({type(error).__name__}); check the URL, or send a data URL"
                ) from None
            self._num_images += 1
            self._num_bytes += sum(map(len, parts))
            self._seconds += time.perf_counter() - started_s

    async def _read(self, response: aiohttp.ClientResponse, where: str, parts: list[bytes]) -> None:
        """Append the body's parts as they come, so that they are counted even if the rest never comes.

        Raises InvalidPromptError for a wrong answer or size, and QueueFullError if too many bytes are held.
        """
        if 300 <= response.status < 400:
            raise InvalidPromptError(f"{where} is answered by a redirect, which is not followed; give the last URL")
        if response.status != 200:
            raise InvalidPromptError(f"{where} is answered with status {response.status}; check the URL")
        num_bytes = response.content_length or 0
        if num_bytes <= MAX_BYTES:
            num_bytes = 0
            async for part in response.content.iter_any():
                parts.append(part)
                num_bytes += len(part)
                self._num_held_bytes += len(part)
                if num_bytes > MAX_BYTES:
                    break
                if self._num_held_bytes > MAX_HELD_BYTES:
                    raise QueueFullError("too many images are being fetched at once; try again later")
        if num_bytes > MAX_BYTES:
            raise InvalidPromptError(f"{where} has more than {MAX_BYTES} bytes, which is the limit; send a smaller one")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_PublicResolver(), ttl_dns_cache=KEPT_NAMES_S, limit=0, limit_per_host=MAX_PER_HOST
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={
                    "User-Agent": f"forkpoint/{installed_version()}",
                    "Accept": "image/*, video/*",
                    "Accept-Encoding": "identity",
                },
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a compressed body could grow beyond all limits
                trust_env=False,  # a proxy would resolve the name again
            )
        return self._session


class _PublicResolver(AbstractResolver):
    """Resolves names of hosts. aiohttp connects to the addresses that it returns, and asks for no literal address."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the host's addresses.

        Raises InvalidPromptError if any of them is not public, and OSError if the host is unknown.
        """
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG)
        found: list[ResolveResult] = []
        for kind, _, proto, _, address in infos:
            if not is_public(str(address[0])):
                LOGGER.warning("no image is fetched from %s: its name leads to the address %s", host, address[0])
                raise InvalidPromptError(
                    f"images are not fetched from {host}: its name leads to an address that is not public; name the "
                    "address itself in --allowed-media-domains and in the URL, or send a data URL"
                )
            found.append(
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=port,
                    family=kind,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return found

    async def close(self) -> None:
        pass


def is_public(address: str) -> bool:
    """Return whether an address is one of the public internet, and not one of this machine or its network."""
    try:
        found: IPv4Address | IPv6Address | None = ip_address(address)
    except ValueError:  # such as a link-local address with its interface
        return False
    if isinstance(found, IPv6Address):
        if found in NAT64:
            found = IPv4Address(found.packed[-4:])
        else:
            inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
            if inner is None and found not in GLOBAL_UNICAST:
                return False
            found = inner if inner is not None else found
    return found is not None and found.is_global and not found.is_multicast
