"""Sends images that are attacks to a server, next to a stream that must not notice them.

    forkpoint serve MODEL --allowed-media-domains '127.0.0.1:*'
    python -m scripts.media_attacks http://127.0.0.1:8000

MODEL reads images. Four clients send each attack for some seconds, between two phases without attacks. The clients
stand for other machines. They run in a process of their own with a low priority, so that the process that measures the
stream never builds or sends a body of 100 MB.

A line of the table says how the attack was answered, the longest time to an answer, and the 99th percentile of the
times between the tokens of a stream: beside the attack, alone, and their ratio. The first line has short texts instead
of an attack.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import aiohttp
from aiohttp import web
from PIL import Image

from scripts.fuzz.victim import Victim, quantile_s

NUM_CLIENTS: Final = 4
CLIENT_NICENESS: Final = 10  # clients on other machines would not take the server's cores
LARGE_BYTES: Final = 100 * 10**6
ALLOWED_BYTES: Final = 32 * 10**6  # of a body that the server's default limit just allows
NUM_TINY: Final = 1000
TIMEOUT_S: Final = 120.0  # of a request
PIECE_BYTES: Final = 2**18  # of a body without Content-Length

Body: TypeAlias = "bytes | AsyncIterator[bytes]"


@dataclass
class Outcome:
    """The answers to one attack: how often each status came, and the longest time to one in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0


def data_url(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat_body(*urls: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


async def _redirect(request: web.Request) -> web.Response:
    raise web.HTTPFound(f"/redirect/{int(request.match_info['number']) + 1}")


async def _slow(request: web.Request) -> web.StreamResponse:
    """Send a byte a second, without end."""
    response = web.StreamResponse(headers={"Content-Type": "image/png"})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):  # the server has given up
        while True:
            await response.write(b"\x89")
            await asyncio.sleep(1.0)
    return response


@asynccontextmanager
async def hostile_site() -> AsyncIterator[str]:
    """Run a web server on this machine that redirects without end or is slow, and yield its URL."""
    app = web.Application()
    app.router.add_get("/redirect/{number}", _redirect)
    app.router.add_get("/slow", _slow)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _short_text() -> bytes:
    messages = [{"role": "user", "content": "Hello, who are you?"}]
    return json.dumps({"messages": messages, "max_tokens": 4}).encode()


def _image_file(num_bytes: int) -> bytes:
    return chat_body("data:image/png;base64," + "A" * num_bytes)


async def _in_chunks() -> AsyncIterator[bytes]:
    """Yield a large body. Nothing says its size beforehand."""
    yield b'{"messages": "'
    for _ in range(LARGE_BYTES // PIECE_BYTES):
        yield b"A" * PIECE_BYTES
    yield b'"}'


def _always(body: bytes) -> Callable[[], Body]:
    return lambda: body


# Given the URL of the hostile site, these return what makes the bodies of an attack.
ATTACKS: Final[Mapping[str, Callable[[str], Callable[[], Body]]]] = MappingProxyType(
    {
        "none: short texts": lambda site: _always(_short_text()),
        "30,000 x 30,000 pixels in 110 KB": lambda site: _always(chat_body(data_url(Image.new("1", (30_000, 30_000))))),
        "a body of 32 MB, which is read": lambda site: _always(_image_file(ALLOWED_BYTES)),
        "a body of 100 MB": lambda site: _always(_image_file(LARGE_BYTES)),
        "100 MB in chunks": lambda site: _in_chunks,
        "a redirect without end": lambda site: _always(chat_body(f"{site}/redirect/0")),
        "private addresses": lambda site: _always(chat_body("http://10.0.0.1/a.png", "http://169.254.169.254/latest")),
        "a host that sends a byte a second": lambda site: lambda: chat_body(f"{site}/slow?{time.monotonic_ns()}"),
        "1,000 tiny images": lambda site: _always(chat_body(*[data_url(Image.new("1", (1, 1)))] * NUM_TINY)),
    }
)


async def _ask(session: aiohttp.ClientSession, body: Callable[[], Body], until_s: float, outcome: Outcome) -> None:
    while (began_s := time.monotonic()) < until_s:
        try:
            headers = {"Content-Type": "application/json"}
            async with session.post("/v1/chat/completions", data=body(), headers=headers) as reply:
                await reply.read()
                outcome.statuses[str(reply.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome.statuses[type(error).__name__] += 1
        outcome.longest_s = max(outcome.longest_s, time.monotonic() - began_s)


async def _attack(url: str, name: str, seconds: float) -> Outcome:
    outcome = Outcome()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with hostile_site() as site, aiohttp.ClientSession(url, timeout=timeout) as session:
        body = ATTACKS[name](site)
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(_ask(session, body, until_s, outcome) for _ in range(NUM_CLIENTS)))
    return outcome


def attack(url: str, name: str, seconds: float) -> Outcome:
    """Send one attack to the server for some seconds, and return how it was answered."""
    return asyncio.run(_attack(url, name, seconds))


def attackers() -> ProcessPoolExecutor:
    """Return the process that the clients run in."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=os.nice, initargs=(CLIENT_NICENESS,))


async def phase(victim: Victim, seconds: float, attacking: asyncio.Future[Outcome] | None) -> list[float]:
    """Let the victim ask until an attack is over, or for some seconds. Returns the times between its tokens."""
    over = asyncio.Event()
    victim.gaps_s = []
    asking = asyncio.create_task(victim.run(over))
    if attacking is None:
        await asyncio.sleep(seconds)
    else:
        await attacking
    over.set()
    await asking
    return victim.gaps_s


async def run(url: str, seconds: float) -> int:
    """Print the table. Returns 1 if the victim's answers changed or broke off, otherwise 0."""
    loop, clients = asyncio.get_running_loop(), attackers()
    async with aiohttp.ClientSession(url) as session:
        victim = Victim(session)
        await victim.ask()  # the first one is cold
        await loop.run_in_executor(clients, os.getpid)  # starts the process
        print("| attack | answers | longest answer | p99 beside it | p99 alone | ratio |\n|---|---|---|---|---|---|")
        for name in ATTACKS:
            alone = await phase(victim, seconds, None)
            attacking = loop.run_in_executor(clients, attack, url, name, seconds)
            beside = await phase(victim, seconds, attacking)
            outcome = await attacking
            alone += await phase(victim, seconds, None)
            if not alone or not beside:
                break  # the problems say why
            answers = ", ".join(f"{count} x {status}" for status, count in outcome.statuses.items())
            p99, plain = quantile_s(beside, 0.99) * 1e3, quantile_s(alone, 0.99) * 1e3
            times = f"{outcome.longest_s:.1f} s | {p99:.1f} ms | {plain:.1f} ms | {p99 / plain:.2f}"
            print(f"| {name} | {answers} | {times} |", flush=True)
    print("\n".join(victim.problems))
    return int(bool(victim.problems))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.media_attacks", description="Hostile images on a server.")
    parser.add_argument("url", help="a running server")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    args = parser.parse_args()
    return asyncio.run(run(args.url, args.seconds))


if __name__ == "__main__":
    raise SystemExit(main())
