"""Runs the victim alone, next to good requests, and next to wild ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from scripts.fuzz.bodies import GOOD, Bodies, Wild
from scripts.fuzz.victim import Victim, quantile_s
from scripts.load_server import leftovers

FORESEEN = "request_failed"  # the code of a 500 that one request brought on itself
LONGEST_S = (
    600.0  # that any request may take: without a limit it goes on to the length of the model, which may take minutes
)
MAX_PROBLEMS = 50
NUM_GOOD = 200  # requests beside which the victim is measured first


@dataclass(frozen=True, slots=True)
class Fuzz:
    url: str
    num_requests: int
    num_workers: int = 4
    seed: int = 0
    limit_s: float = float("inf")  # after which no more requests are begun


@dataclass
class Report:
    """The results of a run. Times between the victim's tokens are in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    elapsed_s: float = 0.0
    num_fields: int = 0
    least_drawn: int = 0

    def problem(self, text: str) -> None:
        self.counts["problems"] += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)

    def p99_s(self, phase: str) -> float:
        return quantile_s(self.gaps_s.get(phase, []), 0.99)

    def text(self) -> str:
        lines = [", ".join(f"{name}: {count:,}" for name, count in sorted(self.counts.items()))]
        lines.append(f"{self.num_fields} fields, each wild {self.least_drawn} times or more; {self.elapsed_s:.0f} s")
        for phase, gaps in self.gaps_s.items():
            p50, p99 = quantile_s(gaps, 0.5), quantile_s(gaps, 0.99)
            longest = max(gaps, default=0.0)
            lines.append(
                f"victim {phase}: {len(gaps):,} tokens, between them p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, "
                f"longest {longest * 1e3:.0f} ms"
            )
        return "\n".join(lines)


def run_fuzz(fuzz: Fuzz) -> Report:
    return asyncio.run(_run(fuzz))


async def _run(fuzz: Fuzz) -> Report:
    report = Report()
    timeout = aiohttp.ClientTimeout(total=LONGEST_S)
    async with aiohttp.ClientSession(fuzz.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        async with session.get("/openapi.json") as reply:
            openapi = await reply.json()
        async with session.get("/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        bodies = Bodies(openapi, model, fuzz.seed)
        victim = Victim(session)
        await victim.ask()  # the first one is cold
        started = time.perf_counter()
        for phase, num_requests, request in (
            ("alone", 0, None),
            ("beside good requests", min(NUM_GOOD, fuzz.num_requests), lambda: _good(session, model, report)),
            ("beside wild requests", fuzz.num_requests, lambda: _wild(session, bodies.draw(), report)),
        ):
            victim.gaps_s = report.gaps_s[phase] = []
            await _beside(victim, request, num_requests, fuzz)
        report.elapsed_s = time.perf_counter() - started
        report.num_fields = len(bodies.num_drawn)
        report.least_drawn = min(bodies.num_drawn.values())
        report.counts["victim's answers"] = victim.num_answers
        for text in victim.problems:
            report.problem(text)
    try:
        for text in await leftovers(fuzz.url):
            report.problem(text)
    except aiohttp.ClientError as error:
        report.problem(f"the server is gone: {error}")
    return report


async def _beside(victim: Victim, request: Callable[[], Awaitable[None]] | None, num_requests: int, fuzz: Fuzz) -> None:
    """Let the victim ask while `num_requests` requests are sent, `num_workers` at once. Without requests it asks
    twice."""
    if request is None:
        await victim.ask()
        await victim.ask()
        return
    over = asyncio.Event()
    asking = asyncio.create_task(victim.run(over))
    left = iter(range(num_requests))

    deadline = time.monotonic() + fuzz.limit_s

    async def work() -> None:
        for _ in left:
            if time.monotonic() > deadline:
                return
            await request()

    try:
        await asyncio.gather(*(work() for _ in range(fuzz.num_workers)))
    finally:
        over.set()
        await asking


async def _good(session: aiohttp.ClientSession, model: str, report: Report) -> None:
    body = {**GOOD["/v1/chat/completions"], "model": model, "stream": True}
    async with session.post("/v1/chat/completions", json=body) as reply:
        await reply.read()
        report.counts["good requests"] += 1
        if reply.status != 200:
            report.problem(f"a good request was answered {reply.status}")


async def _wild(session: aiohttp.ClientSession, wild: Wild, report: Report) -> None:
    report.counts["wild requests"] += 1
    if wild.leaves_s is not None:
        with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
            timeout = aiohttp.ClientTimeout(total=max(wild.leaves_s, 0.001))
            async with session.post(wild.path, data=wild.body, headers=wild.headers, timeout=timeout) as reply:
                await reply.read()
        report.counts["left"] += 1
        return
    try:
        async with session.post(wild.path, data=wild.body, headers=wild.headers) as reply:
            data = await reply.read()
            report.counts[f"answered {reply.status}"] += 1
            wrong = _wrong(reply.status, reply.content_type, data)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong is not None:
        report.problem(f"{wild.path} {', '.join(wild.fields)}: {wrong}; the body was {wild.body[:400]!r}")


def _wrong(status: int, content_type: str, data: bytes) -> str | None:
    """Return what is wrong with an answer; None if it is a whole answer or a clear error."""
    if content_type == "text/event-stream":
        events = [line for line in data.split(b"\n") if line.startswith(b"data: ")]
        if not events:
            return f"a stream without events: {data[:200]!r}"
        ends = (b"[DONE]", b"message_stop", b"response.", b'"error"')
        if not any(end in events[-1] for end in ends):
            return f"a stream without an end: {events[-1][:200]!r}"
        broken = [event for event in events if b'"error":{' in event and b'"error":null' not in event]
        return next((f"in a stream: {event[:300]!r}" for event in broken if FORESEEN.encode() not in event), None)
    try:
        answer = json.loads(data)
    except ValueError:
        return f"answered {status} with something that is not JSON: {data[:200]!r}"
    if status == 200:
        return None
    error = answer.get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return f"answered {status} without a message: {data[:200]!r}"
    if status >= 500 and error.get("code") != FORESEEN:
        return f"answered {status}: {error['message'][:300]}"
    return None
