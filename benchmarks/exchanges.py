"""Times all-reduces, norms of sums and gathers over GPUs, by our kernels, torch and NCCL: `python -m
benchmarks.exchanges`.

Times are microseconds of one call in a graph of many, medians of the first rank, in bfloat16. Each result is first
compared with NCCL's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_9b.floor import median_s
from forkpoint.ops.exchange.rank_exchange import RankExchange
from forkpoint.ops.norm.kernel import add_rmsnorm

SIZES = tuple(4096 << i for i in range(10))  # bytes
NORMED = ((128, 4096), (384, 2048), (1024, 4096), (8192, 4096))  # rows and elements of each
GATHERED = ((128, 2048), (128, 6144), (8192, 6144))
IN_A_GRAPH = 16
WIDTH = 4096  # elements of a row

Way: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # of what a rank has, and a residual


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchanges", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=2)
    return parser


def sums(exchange: RankExchange, device: torch.device) -> dict[str, Way]:
    """Return the sums to time, by the names of the columns."""
    from torch.distributed import _symmetric_memory as symmetric

    assert dist.group.WORLD is not None
    name, shared = dist.group.WORLD.group_name, symmetric.empty(SIZES[-1] // 2, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, dist.group.WORLD)
    operators: Any = torch.ops.symm_mem

    def nccl(x: Tensor, residual: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def one_shot(x: Tensor, residual: Tensor) -> Tensor:
        found: Tensor = operators.one_shot_all_reduce(shared[: x.numel()].copy_(x.flatten()), "sum", name)
        return found.view_as(x)

    return {
        "NCCL": nccl,
        "one-shot of torch, with the copy into its memory": one_shot,
        "ours": lambda x, _: exchange.sum(x),
    }


def norms(exchange: RankExchange, device: torch.device) -> dict[str, Way]:
    """Return the norms of the residual plus a sum, by the names of the columns."""
    weight = torch.ones(max(width for _, width in NORMED), device=device)

    def nccl(x: Tensor, residual: Tensor) -> Tensor:
        dist.all_reduce(x)
        return add_rmsnorm(x, residual, weight[: x.shape[1]], 1e-6)[0]

    def ours(x: Tensor, residual: Tensor) -> Tensor:
        return exchange.sum_add_rmsnorm(x, residual, weight[: x.shape[1]], 1e-6)

    return {"NCCL, then the norm": nccl, "ours": ours}


def gathers(exchange: RankExchange, device: torch.device) -> dict[str, Way]:
    def nccl(x: Tensor, residual: Tensor) -> Tensor:
        out = x.new_empty(exchange.size, *x.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), x)
        return out.movedim(0, -2).flatten(-2)

    return {"NCCL, then side by side": nccl, "ours": lambda x, _: exchange.gather(x)}


def tell(what: str, shapes: Sequence[tuple[int, int]], columns: dict[str, Way], device: torch.device) -> None:
    shows = not dist.get_rank()
    if shows:
        print(f"\n| {what} | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for shape in shapes:
        x, cells = torch.randn(shape, device=device).bfloat16(), []
        want = next(iter(columns.values()))(x.clone(), torch.zeros_like(x))
        for way in columns.values():
            torch.testing.assert_close(way(x.clone(), torch.zeros_like(x)), want, atol=3e-2, rtol=2e-2)
            y, residual = torch.zeros_like(x), torch.zeros_like(x)  # stay as they are, however often added up

            def many(way: Way = way, y: Tensor = y, residual: Tensor = residual) -> None:
                for _ in range(IN_A_GRAPH):
                    way(y, residual)

            cells.append(f"{1e6 * median_s(many, device, repeats=20) / IN_A_GRAPH:.1f}")
        if shows:
            label = f"{2 * x.numel():,}" if what == "bytes" else f"{shape[0]:,} x {shape[1]:,}"
            print(f"| {label} | {' | '.join(cells)} |", flush=True)


def run(rank: int, size: int, place: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=place.as_uri(), rank=rank, world_size=size)
    exchange = RankExchange.meet(rank, size, device)
    shapes = [(max(1, num_bytes // 2 // WIDTH), min(WIDTH, num_bytes // 2)) for num_bytes in SIZES]
    tell("bytes", shapes, sums(exchange, device), device)
    tell("sum and norm of", NORMED, norms(exchange, device), device)
    tell("gather of", GATHERED, gathers(exchange, device), device)
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
