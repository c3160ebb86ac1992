"""Times the transfer of a prompt between two processes, without a model: `python -m benchmarks.peer_transfers`.

The entries have the sizes of a 9B model's prompt of 16,384 tokens: 256 blocks of 2 MiB, and a state of 49 MiB. They are
offered from shared memory and fetched from there, or over TCP. Each fetch checks every checksum. `--busy` keeps the
thread that waits for the fetch in Python all the time, as a decode engine's steps do in part.

The second table has a prompt that is asked for early, from shared memory. It shows what is left when the last chunk is
computed: the time until all is in an arena, and what is fetched and copied to the arena in this time. "At the end" is
for comparison: an engine that copies nothing to its arena before everything has arrived.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks import machine
from forkpoint.cache.peer_offers import Fetch, PeerFacts
from forkpoint.cache.tier_entries import BLOCK, SLOT, EntryName
from forkpoint.peer.link import PeerLink, open_link
from forkpoint.peer.offered import OfferedEntry
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.pinned import PinnedBuffers

UNIT_BYTES: Final = {BLOCK: 2 << 20, SLOT: 49 << 20}
NUM_BLOCKS: Final = 256
HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 60.0


def names() -> tuple[EntryName, ...]:
    blocks = [EntryName(BLOCK, depth.to_bytes(16, "little"), b"", depth) for depth in range(1, NUM_BLOCKS + 1)]
    return (*blocks, EntryName(SLOT, blocks[-1].hash, b"", NUM_BLOCKS))


def facts(engine_id: str) -> PeerFacts:
    return PeerFacts(b"n" * 16, engine_id, HOST, 0, ("loopback",), 1 << 40, TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class EarlyWay:
    """A way to fetch a prompt while it is computed, in chunks of so many blocks."""

    name: str
    chunks: tuple[int, ...]
    lands_early: bool


EARLY_WAYS: Final = (
    EarlyWay("at the end", (128, 128), lands_early=False),
    EarlyWay("as it arrives", (128, 128), lands_early=True),
    EarlyWay("as it arrives, in shorter and shorter chunks", (128, 96, 24, 8), lands_early=True),
)


def offer_prompts(connection: Connection) -> None:
    """Run in a process of its own: offer a prompt whenever the connection says so.

    The connection names a lease, and the blocks of each chunk if the prompt is asked for early. The answer is the time
    when the last chunk was computed.
    """
    link, buffers = open_link(facts("p"), UNIT_BYTES, 3600.0, listens=True), PinnedBuffers(CpuPlatform())
    link.use_buffers(buffers.take, buffers.give)
    contents = np.random.default_rng(0).integers(0, 256, UNIT_BYTES[SLOT], np.uint8)
    connection.send(link.facts.port)

    def offer(entries: Iterable[EntryName], lease: int) -> None:
        for name in entries:
            buffer = buffers.take(UNIT_BYTES[name.kind])
            buffer[:] = contents[: len(buffer)].data
            link.offered.add([OfferedEntry(name, buffer, is_copied=True)], lease)

    while (call := connection.recv()) is not None:
        lease, *chunks = call
        left = iter(names())
        for count in chunks[:-1]:
            offer(itertools.islice(left, count), lease)
            connection.recv()  # all of it has been fetched
        computed_s = time.perf_counter()
        offer(left, lease)
        connection.send(computed_s)
    link.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_transfers", description=(__doc__ or "").strip())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="look for the end of the fetch without a pause")
    args = parser.parse_args()
    print(f"# {os.cpu_count()} CPUs, {machine.commit_hash()}, {machine.today()}")
    connection, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=offer_prompts, args=(there,), daemon=True)
    process.start()
    port = connection.recv()
    link = open_link(facts("d"), UNIT_BYTES, 3600.0, listens=False, fetches_apart=True)
    buffers = PinnedBuffers(CpuPlatform())
    link.use_buffers(buffers.take, buffers.give)
    lease = time_fetches(connection, link, port, args)
    time_early_fetches(connection, link, port, lease, args)
    connection.send(None)
    process.join()
    link.close()


def time_fetches(connection: Connection, link: PeerLink, port: int, args: argparse.Namespace) -> int:
    """Time the fetch of a computed prompt, over each path. Returns the last lease."""
    wanted, lease = names(), 0
    num_bytes = sum(UNIT_BYTES[name.kind] for name in wanted)
    print("| path | ms | GB/s |")
    for path, shares in (("shared memory", True), ("TCP", False)):
        link.fetching.shares_memory = shares
        seconds = list[float]()
        for number in range(args.repeats + 1):
            lease += 1
            connection.send((lease,))
            connection.recv()
            start, report = time.perf_counter(), None
            link.fetching.start(Fetch(lease, HOST, (port,), "p", lease, wanted, TIMEOUT_S))
            while report is None or not (report.done or report.failed):
                report = link.fetching.next_report(0.0 if args.busy else TIMEOUT_S)
            elapsed = time.perf_counter() - start
            assert report.done == (lease,), "the fetch failed; the line above says why"
            link.fetching.forget(lease)
            if number:  # the first time touches new memory
                seconds.append(elapsed)
        median = float(np.median(seconds))
        print(f"| {path} | {median * 1e3:.0f} | {num_bytes / median / 1e9:.2f} |", flush=True)
    return lease


def time_early_fetches(connection: Connection, link: PeerLink, port: int, lease: int, args: argparse.Namespace) -> None:
    """Time what is left after the last chunk. All ways take turns."""
    link.fetching.shares_memory = True
    arena = np.zeros(sum(UNIT_BYTES[name.kind] for name in names()), np.uint8)
    found: dict[str, list[tuple[float, int, int]]] = {way.name: [] for way in EARLY_WAYS}
    for number in range(args.repeats + 1):
        for way in EARLY_WAYS:
            lease += 1
            rest = fetch_early(connection, link, port, lease, way, arena, args.busy)
            if number:
                found[way.name].append(rest)
    print("\n| copied to the arena | ms after the last chunk | MiB fetched | MiB copied |")
    for name, rests in found.items():
        milliseconds, fetched, copied = (float(np.median(column)) for column in zip(*rests, strict=True))
        print(f"| {name} | {milliseconds:.0f} | {fetched:.0f} | {copied:.0f} |", flush=True)


def fetch_early(
    connection: Connection,
    link: PeerLink,
    port: int,
    lease: int,
    way: EarlyWay,
    arena: npt.NDArray[np.uint8],
    is_busy: bool,
) -> tuple[float, int, int]:
    """Fetch a prompt while it is computed.

    Returns the milliseconds from the end of its last chunk until all is in the arena, and the MiB that were fetched and
    copied to the arena meanwhile.
    """
    wanted = names()
    starts = np.cumsum([0, *(UNIT_BYTES[name.kind] for name in wanted)]).tolist()
    ends = np.cumsum(way.chunks[:-1]).tolist()
    connection.send((lease, *way.chunks))
    link.fetching.start(Fetch(lease, HOST, (port,), "p", lease, wanted, TIMEOUT_S))
    num_arrived = num_landed = num_early = 0
    while num_landed < len(wanted):
        report = link.fetching.next_report(0.0 if is_busy else TIMEOUT_S / 1000)
        if report is not None:
            assert not report.failed, "the fetch failed; the line above says why"
            num_arrived = max([num_arrived, *(count for ticket, count in report.arrived if ticket == lease)])
            if lease in report.done:
                num_arrived = len(wanted)
        if way.lands_early or num_arrived == len(wanted):
            for place in range(num_landed, num_arrived):
                arena[starts[place] : starts[place + 1]] = link.fetching.contents(lease, place)
            num_landed = num_arrived
        if ends and num_arrived >= ends[0]:
            num_early = num_landed
            connection.send(ends.pop(0))
    end_s, computed_s = time.perf_counter(), connection.recv()
    link.fetching.forget(lease)
    fetched = starts[-1] - starts[sum(way.chunks[:-1])]
    return (end_s - computed_s) * 1e3, fetched >> 20, (starts[-1] - starts[num_early]) >> 20


if __name__ == "__main__":
    main()
