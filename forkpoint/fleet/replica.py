"""A replica: one server, and the methods that Ray Serve calls on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import ray
from ray import serve

from forkpoint.config import EngineConfig
from forkpoint.errors import EngineStoppedError
from forkpoint.fleet.handover import offer_of, with_addresses
from forkpoint.fleet.messages import ForwardedRequest, Head, Headers, RoutingHint
from forkpoint.fleet.server_process import LOOPBACK, free_ports, run_server, with_ports
from forkpoint.server.config import ServerConfig
from forkpoint.worker.child import how_it_ended, start_child

POLL_S: Final = 0.1
STOP_S: Final = 5.0  # seconds for a server without open requests to end
# Headers of one connection rather than of the request. The body is passed on unchanged.
HOP_HEADERS: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "upgrade"})
GONE: Final = {
    "error": {"message": "the replica's server has stopped", "type": "server_error", "code": "engine_stopped"}
}


class Replica:
    """Passes HTTP requests to its own server process, which ends with it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: EngineConfig, server: ServerConfig, on_one_machine: bool
    ) -> None:
        ports = free_ports()
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._url = f"http://{LOOPBACK}:{ports[0]}"
        self._offer: dict[str, Any] | None = None  # of the last prompt that was computed for another replica
        address = LOOPBACK if on_one_machine else ray.util.get_node_ip_address()
        self._events = {"endpoint": f"tcp://{address}:{ports[1]}", "replay_endpoint": f"tcp://{address}:{ports[2]}"}
        nodes: tuple[str, ...] = ()
        if not on_one_machine:
            nodes = tuple(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        engine = with_addresses(engine, address, nodes)
        self._process = start_child(run_server, *with_ports(engine, server, ports, address), name="server")
        # No limits, because the router counts the requests, and an answer may take long.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
        )
        while not await self._is_healthy():
            await asyncio.sleep(POLL_S)

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the addresses at which the router can subscribe to the cache's events."""
        return self._events

    async def check_health(self) -> None:
        """Raise EngineStoppedError if the server has stopped. Ray then replaces this replica."""
        if not await self._is_healthy():
            raise EngineStoppedError("the replica's server reports that its engine has stopped")

    async def prefix(self, route: RoutingHint, forwarded: ForwardedRequest) -> tuple[int, ...]:
        """Return the published hashes of the prompt's blocks; none for a request that will be refused."""
        try:
            async with self._send(forwarded, f"/prefix{forwarded.path}") as response:
                if response.status != 200:
                    return ()
                return tuple((await response.json())["block_hashes"])
        except aiohttp.ClientError:
            return ()

    async def answer(self, route: RoutingHint, forwarded: ForwardedRequest) -> AsyncIterator[Head | bytes]:
        """Yield the head of the server's answer, then the pieces of its body as they arrive.

        The head has the status 503 if the server cannot be reached.
        """
        try:
            response = await self._send(forwarded, forwarded.path)
        except aiohttp.ClientError:
            yield Head(self._name, 503, (("content-type", "application/json"),))
            yield json.dumps(GONE).encode()
            return
        async with response:
            yield Head(self._name, response.status, _kept(response.headers.items()))
            async for piece in response.content.iter_any():
                yield piece

    async def compute_prompt(
        self, route: RoutingHint, forwarded: ForwardedRequest
    ) -> AsyncIterator[dict[str, Any] | Head | bytes | None]:
        """Yield the offer of an earlier prompt, which says where prompts are fetched; None if there is none yet.

        The head of this prompt's answer and all of its body follow when it is computed.
        """
        yield self._offer
        pieces = self.answer(route, forwarded)
        head = await anext(pieces)
        assert isinstance(head, Head)
        body = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
        self._offer = offer_of(body) or self._offer
        yield head
        yield body

    def _send(self, forwarded: ForwardedRequest, path: str) -> Any:
        url = self._url + path
        if forwarded.query:
            url += f"?{forwarded.query}"
        headers = _kept(forwarded.headers)
        return self._session.request(forwarded.method, url, headers=headers, data=forwarded.body, allow_redirects=False)

    async def _is_healthy(self) -> bool:
        """Return whether the server answers /health with 200. Raises EngineStoppedError if the process has ended."""
        if not self._process.is_alive():
            raise EngineStoppedError(f"the replica's server {how_it_ended(self._process.exitcode)}")
        try:
            async with self._session.get(self._url + "/health") as response:
                return bool(response.status == 200)
        except aiohttp.ClientError:
            return False

    async def __del__(self) -> None:
        """End the server. Ray Serve calls this once the replica has answered all requests that it was sent."""
        self._process.terminate()
        await asyncio.to_thread(self._process.join, STOP_S)
        self._process.kill()
        await self._session.close()


def _kept(headers: Any) -> Headers:
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in HOP_HEADERS)
