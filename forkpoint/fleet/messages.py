"""Messages between gateway, router and replicas."""

from __future__ import annotations

from dataclasses import dataclass

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """The data that decide where a call goes.

    `block_hashes` are the hashes of its prompt's blocks (None: any replica will do). `tried` are the names of replicas
    that have been tried already.
    """

    block_hashes: tuple[int, ...] | None = None
    tried: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's HTTP request on its way to a replica."""

    method: str
    path: str
    query: str = ""
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of the answer of replica `replica`. The body follows in pieces."""

    replica: str
    status: int
    headers: Headers = ()

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return any(name == "content-type" and value.startswith("text/event-stream") for name, value in self.headers)
