"""Runs the server of one replica in a process of its own."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

from forkpoint.checks import is_loopback
from forkpoint.config import EngineConfig
from forkpoint.json_options import KVEventsConfig
from forkpoint.server.config import ServerConfig
from forkpoint.worker.child import begin_child

LOOPBACK = "127.0.0.1"


def run_server(engine: EngineConfig, server: ServerConfig) -> None:
    """Serve until SIGTERM, then exit (SystemExit); with code 1 if the engine died. Ends when the parent does."""
    begin_child()
    from forkpoint.server.run import serve

    raise SystemExit(serve(engine, server))


def with_ports(
    engine: EngineConfig, server: ServerConfig, ports: tuple[int, int, int], address: str
) -> tuple[EngineConfig, ServerConfig]:
    """Return the configs with their ports: the server's, which only this machine can reach, and those of the events.

    The router reaches the events at `address`. They are not published on other addresses of this machine.
    """
    http, live, replay = ports
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"tcp://*:{live}", replay_endpoint=f"tcp://*:{replay}", host=address
    )
    # Requests keep the client's Host header. The hosts that are allowed follow from the gateway's address.
    hosts: tuple[str, ...] = ()
    if server.allowed_hosts:
        hosts = (*server.allowed_hosts, server.host)
    elif not is_loopback(server.host):
        hosts = ("*",)
    return replace(engine, kv_events_config=events), replace(server, host=LOOPBACK, port=http, allowed_hosts=hosts)


def free_ports() -> tuple[int, int, int]:
    """Return three ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("", 0))
        first, second, third = (each.getsockname()[1] for each in sockets)
    return first, second, third
