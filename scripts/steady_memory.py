"""Measures the memory of a server over many small requests, which must not grow.

    python -m scripts.steady_memory                    # 20,000 requests, the demo model
    python -m scripts.steady_memory --requests 2000

Prompts differ, a few at a time share a prefix, and the number of rows changes all the time. Prints the memory of each
process after every twentieth of the requests. The exit code is 1 if the last parts need over `--max-growth` more than
the first ones after the warm-up, or if anything is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from statistics import median

import aiohttp

from scripts.load_server import leftovers, memory_bytes, served

NUM_PARTS = 20
WARM_PARTS = 4  # tables that have a bound fill, the allocator's arenas and oneDNN's kernels come about
MAX_AT_ONCE = 48


async def run_part(url: str, num_requests: int, seed: int) -> None:
    """Send `num_requests` requests, a changing number of them at once. Raises if one is not answered with 200."""
    draw = random.Random(seed)
    left = iter(range(num_requests))
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def work() -> None:
            for number in left:
                prompt = f"{seed} {number % 50} " * draw.randrange(1, 40) + str(number)
                body = {"prompt": prompt, "max_tokens": draw.randrange(1, 9), "stream": draw.random() < 0.5}
                async with session.post("/v1/completions", json=body) as reply:
                    await reply.read()
                    reply.raise_for_status()
                await asyncio.sleep(draw.random() * 0.02)

        await asyncio.gather(*(work() for _ in range(draw.randrange(2, MAX_AT_ONCE))))


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory of a server over many small requests.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--max-growth", type=float, default=0.02, help="share of what is held after the warm-up")
    options = parser.parse_args()
    held: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, served(None, Path(folder) / "server.log") as (url, server_pid):
        for part in range(NUM_PARTS):
            asyncio.run(run_part(url, options.requests // NUM_PARTS, part))
            for pid, size in memory_bytes(server_pid).items():
                held.setdefault(pid, []).append(size / 2**20)
        problems = asyncio.run(leftovers(url))
    for pid, sizes in held.items():
        print(f"process {pid}, MiB: " + " ".join(f"{size:.0f}" for size in sizes))
        first, last = median(sizes[WARM_PARTS : WARM_PARTS + 4]), median(sizes[-4:])
        print(f"  after the warm-up {first:.1f}, at the end {last:.1f}: {last / first - 1:+.1%}")
        if len(sizes) == NUM_PARTS and last > first * (1 + options.max_growth):
            problems.append(f"process {pid} has grown by {last - first:.1f} MiB")
    print("\n".join(problems) or "nothing has grown, nothing is left over")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
