"""Sums over GPUs, by our kernel, by torch's symmetric memory and by NCCL: `python -m benchmarks.exchanges`.

bfloat16, microseconds of one sum in a graph of many, medians of the first rank; each is compared with NCCL's first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_9b.floor import median_s
from forkpoint.ops.exchange.peers import Peers

SIZES = tuple(4096 << i for i in range(10))  # bytes
IN_A_GRAPH = 32
WIDTH = 4096  # elements of a row


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchanges", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=2)
    return parser


def ways(rank: int, size: int, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """By the names of the columns."""
    from torch.distributed import _symmetric_memory as symmetric

    peers = Peers.meet(rank, size, device)
    assert dist.group.WORLD is not None
    name, shared = dist.group.WORLD.group_name, symmetric.empty(SIZES[-1] // 2, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, dist.group.WORLD)
    operators: Any = torch.ops.symm_mem

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def one_shot(x: Tensor) -> Tensor:
        found: Tensor = operators.one_shot_all_reduce(shared[: x.numel()].copy_(x.flatten()), "sum", name)
        return found.view_as(x)

    return {"NCCL": nccl, "one-shot of torch, with the copy into its memory": one_shot, "ours": peers.sum}


def run(rank: int, size: int, place: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=place.as_uri(), rank=rank, world_size=size)
    columns = ways(rank, size, device)
    if not rank:
        print("| bytes | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for num_bytes in SIZES:
        x = torch.randn(max(1, num_bytes // 2 // WIDTH), min(WIDTH, num_bytes // 2), device=device).bfloat16()
        want, cells = columns["NCCL"](x.clone()), []
        for add in columns.values():
            assert torch.equal(add(x.clone()), want)
            y = torch.zeros_like(x)  # stays as it is, however often it is added up

            def many(add: Callable[[Tensor], Tensor] = add, y: Tensor = y) -> None:
                for _ in range(IN_A_GRAPH):
                    add(y)

            cells.append(f"{1e6 * median_s(many, device, repeats=20) / IN_A_GRAPH:.1f}")
        if not rank:
            print(f"| {num_bytes:,} | {' | '.join(cells)} |", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # nothing is left to do, and a process group waits when it is taken apart


def main(argv: Sequence[str] | None = None) -> None:
    size = build_parser().parse_args(argv).ranks
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run, args=(rank, size, Path(folder, "ranks"))) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
