"""Puts load on a server: many streams, some aborted, and bad bodies between them. Then nothing may be left over.

    python -m scripts.load_server                      # a server of its own with the demo model, 256 streams, 60 s
    python -m scripts.load_server --url http://HOST    # one that runs with --enable-dev-endpoints

The exit code is 1, with a list of problems, if a good request fails, a bad one is not refused, or blocks, slots, open
requests or memory are left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

PREFIXES = 12  # shared by the prompts, so that they hit, part and evict each other
BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b"{"),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": [{"role": 5}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "model": "unknown"}'),
    ("/v1/completions", b'{"prompt": [999999999]}'),
    ("/v1/completions", b'{"prompt": "x", "n": 0}'),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 4, "top_p": 7}'),
    ("/v1/completions", b"\xff\xfe"),
    ("/v1/completions", json.dumps({"prompt": "x" * 100_000}).encode()),
)


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.counts["problems"] += 1
        if len(self.problems) < 20:
            self.problems.append(text)


@dataclass(frozen=True)
class Load:
    url: str
    num_streams: int
    seconds: float
    leave_share: float = 0.1
    bad_share: float = 0.05
    seed: int = 0


async def run_load(load: Load) -> Tally:
    """Keep `num_streams` requests open for `seconds`."""
    tally = Tally()
    deadline = time.monotonic() + load.seconds
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(load.url, connector=connector, timeout=timeout) as session:
        workers = [_work(session, load, tally, deadline, random.Random(load.seed + i)) for i in range(load.num_streams)]
        await asyncio.gather(*workers)
    return tally


async def _work(
    session: aiohttp.ClientSession, load: Load, tally: Tally, deadline: float, random_: random.Random
) -> None:
    while time.monotonic() < deadline:
        try:
            if random_.random() < load.bad_share:
                await _bad_request(session, tally, random_)
            else:
                await _good_request(session, tally, random_, leave=random_.random() < load.leave_share)
        except Exception as error:
            tally.problem(f"{type(error).__name__}: {error}")


async def _bad_request(session: aiohttp.ClientSession, tally: Tally, random_: random.Random) -> None:
    path, body = random_.choice(BAD_BODIES)
    async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as reply:
        answer = await reply.json()
        if not 400 <= reply.status < 500 or "message" not in answer["error"]:
            tally.problem(f"{path} {body[:60]!r} was answered {reply.status}: {answer}")
    tally.counts["bad bodies"] += 1


async def _good_request(session: aiohttp.ClientSession, tally: Tally, random_: random.Random, *, leave: bool) -> None:
    prefix = f"Prefix {random_.randrange(PREFIXES)}. " * random_.randrange(4, 20)
    text = prefix + str(random_.random())
    num_tokens = random_.randrange(1, 48)
    body: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if random_.random() < 0.5:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "system", "content": prefix}, {"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    leave_after = random_.randrange(num_tokens) if leave else None
    async with session.post(path, json=body) as reply:
        if reply.status != 200:
            tally.problem(f"{path} was answered {reply.status}: {await reply.text()}")
            return
        last, num_events = b"", 0
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                break
            last = line
            num_events += 1
            if leave_after is not None and num_events > leave_after:
                tally.counts["left"] += 1
                return  # closes the connection
        else:
            tally.problem(f"{path} ended without [DONE]: {last[:200]!r}")
            return
    usage = json.loads(last.removeprefix(b"data: ")).get("usage")
    if usage is None or usage["completion_tokens"] != num_tokens:
        tally.problem(f"{path}: {num_tokens} tokens were asked for, usage is {usage}")
    tally.counts["good"] += 1
    tally.counts["tokens"] += num_tokens


async def leftovers(url: str) -> list[str]:
    """Return the problems of an idle server: values that should be zero, or checks that should pass."""
    found: list[str] = []
    async with aiohttp.ClientSession(url) as session:
        await _wait_idle(session)
        for name in ("num_requests_open", "num_requests_running", "num_requests_waiting"):
            found += await _not_zero(session, name)
        found += await _not_zero(session, "kv_cache_usage_perc")
        found += await _not_zero(session, "state_slots_running")
        async with session.post("/check_integrity") as reply:
            if reply.status != 200:
                found.append(f"integrity: {await reply.text()}")
        async with session.post("/reset_prefix_cache") as reply:
            if (await reply.json()) != {"done": True}:
                found.append("the prefix cache could not be reset")
        for name in ("state_slots_used", "cached_blocks", "arena_usage_perc"):
            found += await _not_zero(session, name)
        async with session.get("/health") as reply:
            if reply.status != 200:
                found.append(f"/health answers {reply.status}")
    return found


async def _wait_idle(session: aiohttp.ClientSession) -> None:
    for _ in range(300):
        if not await _not_zero(session, "num_requests_open"):
            return
        await asyncio.sleep(0.1)


async def _not_zero(session: aiohttp.ClientSession, name: str) -> list[str]:
    async with session.get("/metrics") as reply:
        found = re.search(rf"^forkpoint_{name}{{.*}} (\S+)$", await reply.text(), re.MULTILINE)
    if found is None:
        return [f"no metric {name}"]
    return [] if float(found[1]) == 0 else [f"{name} is {found[1]}"]


def memory_bytes(pid: int | None) -> dict[int, int]:
    """Return the resident memory of a process and its children, by pid; of no process for None."""
    if pid is None:
        return {}
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {one: _resident_bytes(one) for one in (pid, *map(int, children))}


def _resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


@contextmanager
def served(url: str | None, log_path: Path) -> Iterator[tuple[str, int | None]]:
    """Yield the address and process id of a new server of the demo model, which ends with the context.

    If `url` names a running server, its address and None are yielded.
    """
    if url:
        yield url, None
        return
    process, url = _start_server(log_path)
    try:
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _start_server(log_path: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Return a server of the demo model and its address when it is ready. Exit with its log if it does not start."""
    from benchmarks.random_model import make_random_model

    command = [sys.executable, "-m", "forkpoint.cli.main", "serve", str(make_random_model()), "--port", "0"]
    command += ["--max-model-len", "2048", "--enable-dev-endpoints"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    while process.poll() is None:
        ready = re.search(r"ready: \S+ on (http://\S+)", log_path.read_text())
        if ready is not None:
            return process, ready[1]
        time.sleep(0.1)
    raise SystemExit(log_path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="a running server (default: start one)")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-growth-mib", type=float, default=64.0, help="of memory, after a third of the time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(options.url, Path(folder) / "server.log") as (url, pid):
        return _measure(url, options, pid)


def _measure(url: str, options: argparse.Namespace, pid: int | None) -> int:
    first = asyncio.run(run_load(Load(url, options.streams, options.seconds / 3)))
    problems = first.problems + asyncio.run(leftovers(url))
    before = memory_bytes(pid)
    second = asyncio.run(run_load(Load(url, options.streams, options.seconds * 2 / 3, seed=1)))
    problems += second.problems + asyncio.run(leftovers(url))
    for one, held in memory_bytes(pid).items():
        growth = (held - before.get(one, 0)) / 2**20
        print(f"memory of process {one}: {held / 2**20:.1f} MiB, {growth:+.1f} MiB in the last two thirds")
        if growth > options.max_growth_mib:
            problems.append(f"process {one} has grown by {growth:.1f} MiB")
    counts = first.counts + second.counts
    print(", ".join(f"{name}: {count:,}" for name, count in sorted(counts.items())))
    print(f"{counts['tokens'] / options.seconds:,.0f} tokens/s, {counts['good'] / options.seconds:,.1f} requests/s")
    print("\n".join(problems) or "nothing went wrong, nothing is left over")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
