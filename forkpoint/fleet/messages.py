"""What gateway, router and replicas say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """What decides where a call goes: the hashes of its prompt's blocks (None: any replica will do), and replicas, by
    name, that have been tried already."""

    block_hashes: tuple[int, ...] | None = None
    tried: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """An HTTP request."""

    method: str
    path: str
    query: str = ""
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of the answer of the replica of that name; its body follows in pieces."""

    replica: str
    status: int
    headers: Headers = field(default=())

    @property
    def is_stream(self) -> bool:
        """Whether the body is told as it comes."""
        return any(name == "content-type" and value.startswith("text/event-stream") for name, value in self.headers)
