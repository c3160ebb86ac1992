"""Times matrix products and experts on a GPU next to the vendor's library: `python -m benchmarks.gpu_linear`.

Times are medians of calls inside a CUDA graph that alternate between more weights than the cache holds. The floor is
the weights' bytes over the measured copy rate, or operations over the measured bfloat16 matrix rate, whichever is more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu_ops import ceilings, median_seconds, randn, turns
from benchmarks.machine import commit_hash, today
from forkpoint.ops.activation.kernel import silu_mul
from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.linear.tiles import (
    Tile,
    fastest_gated_tile,
    fastest_tile,
    fixed_gated_tile,
    fixed_tile,
)
from forkpoint.ops.moe.reference import PackedExperts
from forkpoint.ops.parameters import RouteRule
from forkpoint.ops.select import select_table
from forkpoint.ops.table import OpTable

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL_ROWS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a 9B model, with N outputs and K inputs. If `gated`, a SiLU-mul of its two halves
    follows."""

    name: str
    num_outputs: int
    width: int
    count: int  # in a step
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_outputs * self.width


PRODUCTS = (
    Product("recurrent layers' input", 12352, 4096, 24),
    Product("attention's input", 10240, 4096, 8),
    Product("out of both", 4096, 4096, 32),
    Product("gate, up and SiLU-mul", 24576, 4096, 32, gated=True),
    Product("down", 4096, 12288, 32),
    Product("head", 151936, 4096, 1),
)
# Of a 35B-A3B model: 256 routed experts and a shared one, 8 + 1 to a token.
EXPERTS, CHOICES, HIDDEN, INNER = 257, 9, 2048, 512
RULE = RouteRule(top_k=CHOICES - 1, num_shared=1, shared="gated")
EXPERT_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)


def times_of(product: Product, rows: int, call: Callable[[Tensor, PackedLinear], object]) -> float:
    """Return the median seconds of a call."""
    count = turns(product.num_bytes)
    weights = [PackedLinear(randn(product.num_outputs, product.width), None) for _ in range(count)]
    x = randn(rows, product.width)
    # Enough calls that the start of the graph does not count.
    repeats = 1 if rows in PREFILL_ROWS else max(1, 16 // count)
    return median_seconds([partial(call, x, w) for w in weights * repeats])


def library(product: Product) -> Callable[[Tensor, PackedLinear], object]:
    def call(x: Tensor, packed: PackedLinear) -> Tensor:
        y = F.linear(x, packed.weight)
        return silu_mul(y) if product.gated else y

    return call


def ours(product: Product, table: OpTable) -> Callable[[Tensor, PackedLinear], object]:
    return table.linear_silu_mul if product.gated else table.linear


def chosen(product: Product, rows: int) -> list[Tile | None]:
    """Return the tiles of the default and of the deterministic mode."""
    if product.gated:
        half = product.num_outputs // 2
        fixed = fixed_gated_tile(rows, half, product.width, torch.bfloat16)
        return [fastest_gated_tile(rows, half, torch.bfloat16), fixed]
    shape = rows, product.num_outputs, product.width, torch.bfloat16
    return [fastest_tile(*shape), fixed_tile(*shape)]


def show(tile: Tile | None) -> str:
    """Show a tile as `rows x outputs x width / splits`, and None as `-`."""
    if tile is None:
        return "-"
    return f"{tile.rows}x{tile.outputs}x{tile.width}" + (f" / {tile.splits}" if tile.splits > 1 else "")


def print_products(rows_of: Iterable[int], copy: float, rate: float) -> None:
    fast, fixed = (select_table("triton", deterministic, False) for deterministic in (False, True))
    print("| product | rows | floor µs | library µs | ours µs | of the floor | tile | deterministic µs | tile |")
    print("|---|---|---|---|---|---|---|---|---|")
    totals: dict[int, list[float]] = {}
    for product in PRODUCTS:
        for rows in rows_of:
            if product.name == "head" and rows > DECODE_ROWS[-1]:
                continue
            floor = max(product.num_bytes / copy, 2 * rows * product.num_outputs * product.width / rate)
            calls = library(product), ours(product, fast), ours(product, fixed)
            took = [times_of(product, rows, call) for call in calls]
            tiles = [show(tile) for tile in chosen(product, rows)]
            cells = [f"{product.name} [{product.num_outputs}, {product.width}]", str(rows), f"{floor * 1e6:.1f}"]
            cells += [f"{took[0] * 1e6:.1f}", f"{took[1] * 1e6:.1f}", f"{floor / took[1]:.0%}", tiles[0]]
            print("| " + " | ".join([*cells, f"{took[2] * 1e6:.1f}", tiles[1]]) + " |", flush=True)
            step = totals.setdefault(rows, [0.0] * 4)
            for i, seconds in enumerate((floor, *took)):
                step[i] += product.count * seconds
    print("\nAll products of a step:\n\n| rows | floor ms | library ms | ours ms | deterministic ms |")
    print("|---|---|---|---|---|")
    for rows, step in totals.items():
        print(f"| {rows} | " + " | ".join(f"{seconds * 1e3:.2f}" for seconds in step) + " |")


def print_experts(copy: float, rate: float) -> None:
    fast, fixed = (select_table("triton", deterministic, False) for deterministic in (False, True))
    packed = PackedExperts(randn(EXPERTS, 2 * INNER, HIDDEN), randn(EXPERTS, HIDDEN, INNER))
    each = 6 * HIDDEN * INNER  # bytes of an expert, and operations of a pair
    print("| tokens | experts in use | floor µs | ours µs | of the floor | deterministic µs | route µs |")
    print("|---|---|---|---|---|---|---|")
    for tokens in EXPERT_TOKENS:
        # Several routings, so that calls read other experts.
        scores = [randn(tokens, EXPERTS) for _ in range(max(1, min(8, 64 // tokens)))]
        routes = [fast.route(s, RULE) for s in scores]
        used = sum(len(set(ids.flatten().tolist())) for _, ids in routes) / len(routes)
        floor = max(used * each / copy, tokens * CHOICES * each / rate)
        x = randn(tokens, HIDDEN)
        calls = [[partial(table.experts, x, packed, *r) for r in routes] for table in (fast, fixed)]
        took = [median_seconds([*made]) for made in calls]
        routing = median_seconds([partial(fast.route, s, RULE) for s in scores])
        cells = [f"{tokens}", f"{used:.0f}", f"{floor * 1e6:.1f}", f"{took[0] * 1e6:.1f}", f"{floor / took[0]:.0%}"]
        print("| " + " | ".join([*cells, f"{took[1] * 1e6:.1f}", f"{routing * 1e6:.1f}"]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("decode", "prefill", "experts"), help="one of the tables")
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, rate = ceilings()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, bfloat16, commit {options.commit or commit_hash()}, {today()}")
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s")
    tables: dict[str, Callable[[], None]] = {
        "decode": lambda: print_products(DECODE_ROWS, copy, rate),
        "prefill": lambda: print_products(PREFILL_ROWS, copy, rate),
        "experts": lambda: print_experts(copy, rate),
    }
    for name, table in tables.items():
        if options.only in (None, name):
            print(f"\n### {name}\n")
            table()


if __name__ == "__main__":
    main()
