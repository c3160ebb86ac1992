"""Times attention on the shapes of the 9B model: `python -m benchmarks.gpu_attention [--only NAME]`.

As in `benchmarks.gpu_ops`, times are medians inside CUDA graphs, on memory that the cache does not
hold, beside the floor by bytes or by operations. A line is one layer's call, with the gate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_ops import Call, Case, ceilings, print_cases, randn, turns
from benchmarks.indices import attention_index
from benchmarks.machine import commit_hash, today
from forkpoint.ops.metadata import AttentionIndex, KeySplits
from forkpoint.ops.parameters import QKNorm
from forkpoint.ops.select import select_table
from forkpoint.ops.table import OpTable, PagedAttention
from forkpoint.platforms.platform import DeviceTraits

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, DIM, ROTARY, LAYERS = 16, 4, 256, 64, 8
SPLITS = KeySplits(wanted=DeviceTraits().num_decode_programs // KV_HEADS)
DECODES = ((1, 300), (1, 4096), (1, 16384), (32, 2048), (32, 4096), (128, 350), (256, 1024))
PREFILLS = ((128, 16384), (256, 4096), (512, 4096), (200, 2200), (64, 64), (2048, 2048), (8192, 8192), (8192, 16384))
LONG_PREFILLS = ((4096, 4096), (16384, 16384), (32768, 32768), (8192, 100000))  # timed with narrow heads, too
NARROW = 128  # dims of a head; so many more heads make the same work


def arena(num_blocks: int, dim: int = DIM) -> Tensor:
    """Create keys and values of one layer, `[num_blocks, 2, Hkv, 64, dim]`, with the strides of an arena of LAYERS
    layers."""
    layers = torch.empty(num_blocks, LAYERS, 2, KV_HEADS * DIM // dim, 64, dim, device=DEVICE, dtype=torch.bfloat16)
    return layers[:, LAYERS // 2].normal_()


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of `rows` rows. Each has `queries` queries, which are the last of its `length` tokens."""

    rows: int
    queries: int
    length: int
    dim: int = DIM

    @property
    def name(self) -> str:
        kind = "decode" if self.queries == 1 else "prefill"
        form = "" if self.dim == DIM else f", heads of {self.dim} dims"
        return f"paged_attention, {kind}, {self.rows} x {self.queries} at {self.length}{form}"

    @property
    def stored(self) -> int:
        """Bytes of keys and values."""
        return self.rows * self.length * KV_HEADS * DIM * 4

    def inputs(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[AttentionIndex]]:
        """Create queries, their gate, caches, and `count` indexes into different blocks of the caches."""
        blocks = -(-self.length // 64)
        cache = arena(count * self.rows * blocks, self.dim)
        tables = torch.randperm(len(cache), device=DEVICE).int().view(count, self.rows, blocks)
        q = randn(self.rows * self.queries, HEADS * DIM // self.dim, self.dim)
        gate = randn(len(q), HEADS * DIM)
        decodes, none = self.rows if self.queries == 1 else 0, torch.empty(0, dtype=torch.int64, device=DEVICE)
        lens = [self.queries] * self.rows, [self.length] * self.rows
        indices = [attention_index(*lens, table, none, decodes, splits=SPLITS) for table in tables]
        return q, gate, cache[:, 0], cache[:, 1], indices

    def calls(self, attend: PagedAttention) -> list[Call]:
        q, gate, k, v, indices = self.inputs(turns(self.stored) if self.queries < 1024 else 1)
        return [lambda i=i: attend(q, k, v, i, self.dim**-0.5, None, gate) for i in indices]  # type: ignore[misc]

    def case(self, attend: PagedAttention) -> Case:
        pairs = self.rows * (self.queries * (self.length - self.queries) + self.queries * (self.queries + 1) / 2)
        moved = self.stored + 6 * self.rows * self.queries * HEADS * DIM
        return Case(self.name, moved, 4 * pairs * HEADS * DIM, lambda: self.calls(attend))


def shapes() -> list[Shape]:
    decodes = [Shape(rows, 1, length) for rows, length in DECODES]
    prefills = [Shape(1, *pair) for pair in (*PREFILLS, *LONG_PREFILLS)]
    return decodes + prefills + [Shape(1, *pair, NARROW) for pair in LONG_PREFILLS]


def input_case(ops: OpTable, tokens: int) -> Case:
    """Return the case of the operator that normalises and rotates queries and keys and stores keys and values."""
    width = (2 * HEADS + 2 * KV_HEADS) * DIM

    def make() -> list[Call]:
        sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, HEADS * DIM]
        count = turns(2 * tokens * width)
        rows = [torch.split(randn(tokens, width), sizes, 1) for _ in range(count)]
        heads = [[torch.unflatten(part, 1, (-1, DIM)) for part in parts] for parts in rows]
        norm = QKNorm(torch.rand(DIM, device=DEVICE), torch.rand(DIM, device=DEVICE), 1e-6)
        angles, positions = torch.rand(tokens, ROTARY, device=DEVICE), torch.arange(tokens, device=DEVICE)
        caches = [arena(-(-tokens // 64)) for _ in range(count)]
        return [
            lambda q=q, k=k, v=v, c=c: ops.qk_norm_rope_write(  # type: ignore[misc]
                q, k, v, norm, angles, positions, c[:, 0], c[:, 1], positions
            )
            for (q, k, v, _), c in zip(heads, caches, strict=True)
        ]

    return Case(f"qk_norm_rope_write, {tokens} tokens", 4 * tokens * (HEADS + 2 * KV_HEADS) * DIM, 0, make)


def cases() -> Iterator[Case]:
    ops = select_table("triton", False, False)
    yield from (shape.case(ops.paged_attention) for shape in shapes())
    yield from (input_case(ops, tokens) for tokens in (1, 32, 256, 8192))
    ordered = select_table("triton", True, False)
    for shape in (Shape(1, 128, 16384), Shape(1, 512, 4096), Shape(1, 16384, 16384, NARROW)):
        case = shape.case(ordered.paged_attention)
        yield Case(f"{case.name}, deterministic", case.num_bytes, case.flops, case.make)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--commit", default="", help="what to print as the commit where there is no repository")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, product = ceilings()
    versions = f"torch {torch.__version__}, commit {options.commit or commit_hash()}, {today()}"
    print(f"{torch.cuda.get_device_name()}, {versions}, bfloat16")
    print(f"ceilings: copy {copy / 1e12:.2f} TB/s, matrix product {product / 1e12:.0f} TFLOP/s\n")
    print_cases(cases(), options.only, copy, product)


if __name__ == "__main__":
    main()
