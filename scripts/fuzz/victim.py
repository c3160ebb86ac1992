"""A stream that must not notice the other requests: its text, and the time between its tokens."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import aiohttp

PROMPT = "The victim counts: one, two, three, four,"
NUM_TOKENS = 64


@dataclass
class Victim:
    """Asks the same question again and again, greedily, so that the text is known."""

    session: aiohttp.ClientSession
    expected: str = ""
    num_answers: int = 0
    problems: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    async def run(self, until: asyncio.Event) -> None:
        while not until.is_set():
            try:
                await self.ask()
            except Exception as error:
                self.problems.append(f"the victim's stream: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def ask(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        text, last = "", 0.0
        async with self.session.post("/v1/completions", json=body) as reply:
            if reply.status != 200:
                self.problems.append(f"the victim was answered {reply.status}: {(await reply.text())[:200]}")
                return
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.problems.append(f"the victim's stream broke: {event}")
                    return
                now = time.perf_counter()
                if last:
                    self.gaps_s.append(now - last)
                last = now
                text += "".join(choice["text"] for choice in event["choices"])
        self.num_answers += 1
        self.expected = self.expected or text
        if text != self.expected:
            self.problems.append(f"the victim's text changed: {text!r} instead of {self.expected!r}")


def quantile_s(gaps_s: list[float], share: float) -> float:
    """Return a quantile of the times between tokens; 0 if there are none."""
    ordered = sorted(gaps_s)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
