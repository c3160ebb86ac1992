"""A replica: one server, and what Ray Serve wants to know of it."""

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
from forkpoint.fleet.messages import ForwardedRequest, Head, Headers, RoutingHint
from forkpoint.fleet.server_process import LOOPBACK, free_ports, placed, run_server
from forkpoint.server.config import ServerConfig
from forkpoint.worker.child import how_it_ended, start_child

POLL_S: Final = 0.1
STOP_S: Final = 5.0  # for a server that has nothing open any more
# Of one connection, not of the request; the body comes as it is.
HOP_HEADERS: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "upgrade"})
GONE: Final = {
    "error": {"message": "the replica's server has stopped", "type": "server_error", "code": "engine_stopped"}
}


class Replica:
    """Passes HTTP requests to a server of its own, which ends with it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: EngineConfig, server: ServerConfig, on_one_machine: bool
    ) -> None:
        ports = free_ports()
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._url = f"http://{LOOPBACK}:{ports[0]}"
        address = LOOPBACK if on_one_machine else ray.util.get_node_ip_address()
        self._events = {
            "endpoint": f"tcp://{address}:{ports[1]}",
            "replay_endpoint": f"tcp://{address}:{ports[2]}",
        }
        self._process = start_child(run_server, *placed(engine, server, ports, address), name="server")
        # The router has counted the requests, and an answer may take its time.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
        )
        while not await self._is_healthy():
            await asyncio.sleep(POLL_S)

    def record_replica_metadata(self) -> dict[str, str]:
        """Where the router can listen to the cache."""
        return self._events

    async def check_health(self) -> None:
        """Raises EngineStoppedError where the server is no more; Ray then puts another replica in this one's place."""
        if not await self._is_healthy():
            raise EngineStoppedError("the server answers that its engine has stopped")

    async def prefix(self, route: RoutingHint, asked: ForwardedRequest) -> tuple[int, ...]:
        """The hashes of the blocks that the request's prompt begins with; none for one that will be refused."""
        try:
            async with self._send(asked, f"/prefix{asked.path}") as response:
                return tuple((await response.json())["block_hashes"]) if response.status == 200 else ()
        except aiohttp.ClientError:
            return ()

    async def answer(self, route: RoutingHint, asked: ForwardedRequest) -> AsyncIterator[Head | bytes]:
        """The head of the server's answer, then its body as it comes."""
        try:
            response = await self._send(asked, asked.path)
        except aiohttp.ClientError:
            yield Head(self._name, 503, (("content-type", "application/json"),))
            yield json.dumps(GONE).encode()
            return
        async with response:
            yield Head(self._name, response.status, _kept(response.headers.items()))
            async for piece in response.content.iter_any():
                yield piece

    def _send(self, asked: ForwardedRequest, path: str) -> Any:
        url = self._url + path + (f"?{asked.query}" if asked.query else "")
        headers = _kept(asked.headers)
        return self._session.request(asked.method, url, headers=headers, data=asked.body, allow_redirects=False)

    async def _is_healthy(self) -> bool:
        """Raises EngineStoppedError where the process has ended."""
        if not self._process.is_alive():
            raise EngineStoppedError(f"the replica's server {how_it_ended(self._process.exitcode)}")
        try:
            async with self._session.get(self._url + "/health") as response:
                return bool(response.status == 200)
        except aiohttp.ClientError:
            return False

    async def __del__(self) -> None:
        """Ray Serve calls this once the replica has answered what it had been sent."""
        self._process.terminate()
        await asyncio.to_thread(self._process.join, STOP_S)
        self._process.kill()
        await self._session.close()


def _kept(headers: Any) -> Headers:
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in HOP_HEADERS)
