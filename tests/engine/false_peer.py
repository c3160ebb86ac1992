"""A peer between a decode engine and a prefill engine that damages, delays or cuts off what it passes on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Damage = Callable[[bytes, int], bytes | None]  # of some bytes and their offset in the stream; None ends the connection


@contextlib.contextmanager
def false_peer(host: str, port: int, damage: Damage) -> Iterator[int]:
    """Pass connections on to a prefill engine, and its answers back through `damage`. Yields the port."""
    ends = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener, (host, port), damage, ends), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        ends.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _serve(listener: socket.socket, target: tuple[str, int], damage: Damage, ends: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while True:
            near, _ = listener.accept()
            with near, socket.create_connection(target) as far:
                threading.Thread(target=_pass_on, args=(near, far), daemon=True).start()
                offset = 0
                while data := far.recv(1000):
                    passed = damage(data, offset)
                    if passed is None:
                        break
                    near.sendall(passed)
                    offset += len(data)
                else:
                    continue
                near.shutdown(socket.SHUT_RDWR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        try:
            while data := source.recv(1000):
                target.sendall(data)
        finally:
            target.shutdown(socket.SHUT_WR)
