"""Measures how long a router takes to decide, with as many published blocks as a large cache has.

python -m benchmarks.routing
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

from forkpoint.config import BLOCK_SIZE
from forkpoint.routing import wire
from forkpoint.routing.feed import RestorableIndex
from forkpoint.routing.router import Router


@dataclass(slots=True)
class Published:
    """A replica with known conversations. Each can be resumed at its end and once in the middle."""

    index: RestorableIndex = field(default_factory=RestorableIndex)

    def add(self, hashes: list[int]) -> None:
        ends: list[int | bytes] = [hashes[len(hashes) // 2], hashes[-1]]
        event = wire.BlockStored(list(hashes), None, [], BLOCK_SIZE, None, None, None, ends)
        self.index.apply(wire.EventBatch(0.0, [event]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=100_000, help="published by each replica")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--prompt-blocks", type=int, default=1000, help="of each conversation")
    args = parser.parse_args()
    replicas = [Published() for _ in range(args.replicas)]
    prompts = []
    for index, replica in enumerate(replicas):
        for number in range(args.blocks // args.prompt_blocks):
            first = (index * args.blocks + number * args.prompt_blocks) * 7919
            prompts.append([first + block for block in range(args.prompt_blocks)])
            replica.add(prompts[-1])
    router, times, loads = Router("prefix-aware"), [], [1] * len(replicas)
    for prompt in prompts:
        asked = prompt[: args.prompt_blocks * 9 // 10]  # parts from the conversation: the last state is far above
        start = time.perf_counter()
        router.choose(loads, lambda index: replicas[index].index.restorable(asked) * BLOCK_SIZE)  # noqa: B023
        times.append(time.perf_counter() - start)
    times.sort()
    print(f"{args.replicas} replicas with {args.blocks:,} blocks each, prompts of {args.prompt_blocks} blocks")
    print(
        f"median {statistics.median(times) * 1e6:.0f} us, 99th percentile {times[len(times) * 99 // 100] * 1e6:.0f} us"
    )


if __name__ == "__main__":
    main()
