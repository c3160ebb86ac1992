"""Many streams at once, some left in the middle, bad bodies between them; then nothing may be left over."""

from __future__ import annotations

import asyncio

from scripts.load_server import Load, leftovers, memory_bytes, run_load
from tests.server.running import RunningServer

MAX_GROWTH_BYTES = 48 * 2**20


def test_nothing_is_left_over_after_load(server: RunningServer) -> None:
    warm = asyncio.run(run_load(Load(server.url, num_streams=64, seconds=1.5)))
    before = memory_bytes(server.process.pid)
    tally = asyncio.run(run_load(Load(server.url, num_streams=64, seconds=3, seed=1)))
    assert warm.problems + tally.problems == []
    assert asyncio.run(leftovers(server.url)) == []
    for pid, held in memory_bytes(server.process.pid).items():
        assert held - before[pid] < MAX_GROWTH_BYTES
    assert tally.counts["good"] > 50 and tally.counts["left"] > 3 and tally.counts["bad bodies"] > 3
