"""Traces: requests with arrival or think times, whose tokens are known up to equality."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from forkpoint.errors import TraceError
from forkpoint.sim.tokens import TokenSpans


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. It arrives at `arrival_s`, or `think_s` after request `after` has ended.

    `output` are the tokens it generates, which a later turn repeats. The caller declares `breakpoints`. `awaits_tool`:
    the answer contains a tool call.
    """

    id: str
    session: str
    prompt: TokenSpans
    output: TokenSpans
    arrival_s: float = 0.0
    after: str | None = None
    think_s: float = 0.0
    breakpoints: tuple[int, ...] = ()
    awaits_tool: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of the file, with distinct ids. A request that follows another comes after it.

    Raises TraceError otherwise, and for an empty prompt or output.
    """

    name: str
    requests: tuple[TraceRequest, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for request in self.requests:
            if request.id in seen:
                raise TraceError(f"trace {self.name} has two requests {request.id!r}; every request needs its own id")
            if request.after is not None and request.after not in seen:
                raise TraceError(f"trace {self.name}: {request.id!r} follows {request.after!r}, which is not before it")
            if not request.prompt.num_tokens or not request.output.num_tokens:
                raise TraceError(f"trace {self.name}: {request.id!r} needs one prompt and one output token at least")
            seen.add(request.id)

    def scaled(self, arrivals: float = 1.0, think: float = 1.0) -> Trace:
        """Return the trace with arrival times multiplied by `arrivals` and think times by `think`."""
        requests = [replace(r, arrival_s=r.arrival_s * arrivals, think_s=r.think_s * think) for r in self.requests]
        return Trace(self.name, tuple(requests))

    def sample(self, share: float, seed: int = 0) -> Trace:
        """Return a random `share`, in (0, 1], of the sessions, each with all its requests at their own times.

        Raises TraceError for another share.
        """
        if not 0 < share <= 1:
            raise TraceError(f"a share of {share} of the sessions of {self.name} is not possible; give 0 < share <= 1")
        rng = random.Random(seed)
        drawn = {session: rng.random() < share for session in dict.fromkeys(r.session for r in self.requests)}
        return Trace(self.name, tuple(r for r in self.requests if drawn[r.session]))

    def within(self, max_tokens: int) -> Trace:
        """Return the trace without requests over `max_tokens` tokens, output included, and all that follow them."""
        dropped: set[str] = set()
        kept = []
        for request in self.requests:
            length = request.prompt.num_tokens + request.output.num_tokens
            if length > max_tokens or request.after in dropped:
                dropped.add(request.id)
            else:
                kept.append(request)
        return Trace(self.name, tuple(kept))
