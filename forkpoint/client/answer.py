"""A streamed answer, and the times at which its parts arrived."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from forkpoint.client.protocol import Delta, Usage


class Answer:
    """One answer, extended as deltas arrive. Times are readings of time.perf_counter in seconds.

    A delta without text, reasoning or tool call (the opening role, the closing finish reason) is not a token, so it
    does not count for `first_token_s` and `gaps_s`. Deltas of usage or a cache miss change no time.
    """

    def __init__(self, start_s: float | None = None) -> None:
        self.start_s = time.perf_counter() if start_s is None else start_s
        self.first_token_s: float | None = None
        self.last_s = self.start_s
        self.gaps_s: list[float] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.miss: str | None = None
        self._last_token_s = self.start_s
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, delta: Delta, now_s: float | None = None) -> None:
        """Add a delta that arrived at `now_s` (default: now)."""
        if now_s is None:
            now_s = time.perf_counter()
        self.usage = delta.usage or self.usage
        self.miss = delta.miss or self.miss
        if delta.usage is not None or delta.miss is not None:
            return
        self.last_s = now_s
        self.finish_reason = delta.finish_reason or self.finish_reason
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        if delta.carries_tokens:
            if self.first_token_s is None:
                self.first_token_s = now_s
            else:
                self.gaps_s.append(now_s - self._last_token_s)
            self._last_token_s = now_s

    async def read(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield `deltas` after adding each to this answer, and close them at the end."""
        async with aclosing(deltas) as source:
            async for delta in source:
                self.add(delta)
                yield delta

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def time_to_first_token_s(self) -> float | None:
        if self.first_token_s is None:
            return None
        return self.first_token_s - self.start_s

    @property
    def latency_s(self) -> float:
        return self.last_s - self.start_s

    @property
    def num_completion_tokens(self) -> int:
        """The number that the server reports; without a report, the number of deltas with tokens."""
        if self.usage is not None:
            return self.usage.num_completion_tokens
        return len(self.gaps_s) + (self.first_token_s is not None)
