"""Times every C++ operator on the shapes of the 131 M-parameter model, and recurrences of other models.

    python -m benchmarks.ops --only prefill --no-torch

Each line gives the least CPU time of several runs on one thread (least affected by what else the machine does), the
floor (bytes over the measured copy rate, or operations over the measured fp32 matrix rate, whichever is more)
and their ratio. The torch operator's time stands beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.indices import attention_index, segment_index
from benchmarks.model131m import SHAPE_131M as MODEL
from forkpoint.ops.cpu.build import load_operators
from forkpoint.ops.cpu.table import cpp_table
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex
from forkpoint.ops.parameters import ConvTaps, Recurrence, RecurrenceInputs, RecurrenceParams, ScanInputs, ScanParams
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable

DTYPE = torch.bfloat16
HYBRID = Recurrence(MODEL.num_key_heads, MODEL.num_value_heads, MODEL.state_dim, MODEL.state_dim)
# Recurrences of other models, by name.
OTHERS = {
    "Qwen3.5-9B": Recurrence(16, 32, 128, 128),
    "KDA": Recurrence(8, 8, 128, 128, per_key=True),
    "Granite-4.0-350M": Recurrence(1, 48, 128, 32, delta=False),
    "Granite-4.0-Tiny": Recurrence(1, 48, 128, 64, delta=False),
    "Falcon-H1-0.5B": Recurrence(1, 24, 128, 64, delta=False),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One operator at one size: a function that runs it on a table, and the least bytes and operations it needs."""

    name: str
    make: Callable[[OpTable], Callable[[], Any]]
    num_bytes: float
    flops: float = 0.0


def least(run: Callable[[], Any], budget: float = 0.4) -> float:
    """Return the least CPU seconds of as many runs as fit into `budget` seconds (three or more)."""
    run()
    best, spent, runs = float("inf"), 0.0, 0
    while spent < budget or runs < 3:
        start = time.process_time()
        run()
        took = time.process_time() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def machine_rates() -> tuple[float, float]:
    """Return (bytes per second that a large copy reads and writes, fp32 operations per second of a large product)."""
    source = torch.ones(32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * source.numel() / least(lambda: target.copy_(source)), 2 * 1024**3 / least(lambda: a @ b)


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def linear_case(rows: int, n: int, k: int) -> Case:
    x, w = torch.randn(rows, k).to(DTYPE), torch.randn(n, k).to(DTYPE)

    def make(ops: OpTable) -> Callable[[], Any]:
        packed = ops.prepare_linear(w, None)
        return lambda: ops.linear(x, packed)

    return Case(f"linear {n}x{k}, {rows} rows", make, 2.0 * (n * k + rows * (n + k)), 2.0 * rows * n * k)


def _recurrence_inputs(tokens: int, shape: Recurrence) -> tuple[RecurrenceInputs, RecurrenceParams, Tensor]:
    heads, decays = shape.num_v_heads, shape.num_decays
    pool = torch.zeros(min(tokens, 15) + 1, heads, shape.value_dim, shape.key_dim)
    params = RecurrenceParams(shape, torch.full((heads,), -2.0), torch.full((decays,), -1.0))
    mixed, a, b = (torch.randn(tokens, size).to(DTYPE) for size in (shape.mixed_dim, decays, heads))
    return RecurrenceInputs(mixed, a, b if shape.delta else None), params, pool


def recurrence_decode_case(rows: int) -> Case:
    inputs, params, pool = _recurrence_inputs(rows, HYBRID)
    index = DecodeIndex(_ints(list(range(rows))), _ints(list(range(rows))))
    states = 2.0 * rows * pool[0].numel() * 4
    return Case(
        f"recurrence_decode, {rows} rows",
        lambda ops: lambda: ops.recurrence_decode(inputs, params, pool, index),
        states,
    )


def _segment(tokens: int) -> SegmentIndex:
    return segment_index([tokens], [-1], [0], [[(tokens, 1)]])


def recurrence_prefill_case(tokens: int, s: Recurrence = HYBRID, model: str = "") -> Case:
    inputs, params, pool = _recurrence_inputs(tokens, s)
    # Multiply-adds of one value head: products with the state, and in triangles of a chunk of 64 tokens.
    triangles = 64 * (1 + s.delta) / 2 * (s.value_dim + s.key_dim * s.num_k_heads / s.num_v_heads)
    per_token = (2 + s.delta) * s.key_dim * s.value_dim + triangles
    return Case(
        f"recurrence_prefill, {tokens} tokens {model}".strip(),
        lambda ops: lambda: ops.recurrence_prefill(inputs, params, pool, _segment(tokens)),
        2.0 * inputs.mixed.numel(),
        2.0 * tokens * s.num_v_heads * per_token,
    )


def scan_prefill_case(tokens: int, channels: int, values: int) -> Case:
    sizes = (channels, channels, values, values, channels)
    inputs = ScanInputs(*(torch.randn(tokens, size).to(DTYPE) for size in sizes))
    params = ScanParams(-torch.rand(channels, values) - 0.1, torch.full((channels,), -1.0), torch.ones(channels))
    pool = torch.zeros(2, channels, values)
    return Case(
        f"scan_prefill, {tokens} tokens, {channels} channels",
        lambda ops: lambda: ops.scan_prefill(inputs, params, pool, _segment(tokens)),
        8.0 * tokens * channels,
        8.0 * tokens * channels * values,
    )


def attention_case(queries: int, kv_len: int, rows: int) -> Case:
    hq, hkv, dim = MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim
    blocks = -(-kv_len // 64)
    k, v = (torch.randn(blocks * rows, hkv, 64, dim).to(DTYPE) for _ in range(2))
    q = torch.randn(rows * queries, hq, dim).to(DTYPE)
    index = attention_index(
        [queries] * rows,
        [kv_len] * rows,
        torch.arange(blocks * rows, dtype=torch.int32).view(rows, blocks),
        torch.empty(0, dtype=torch.int64),
        rows if queries == 1 else 0,
    )
    pairs = rows * queries * (kv_len - (queries - 1) / 2)
    return Case(
        f"paged_attention, {rows} x {queries} queries, {kv_len} keys",
        lambda ops: lambda: ops.paged_attention(q, k, v, index, dim**-0.5, None),
        4.0 * rows * kv_len * hkv * dim,
        4.0 * pairs * hq * dim,
    )


def conv_case(tokens: int) -> Case:
    dim = 2 * MODEL.key_size + MODEL.value_size
    x, w = torch.randn(tokens, dim).to(DTYPE), torch.randn(dim, MODEL.conv_width).to(DTYPE)
    pool = torch.zeros(2, MODEL.conv_width - 1, dim, dtype=DTYPE)
    if tokens == 1:
        index = DecodeIndex(_ints([0]), _ints([0]))
        return Case(
            "conv_update, 1 row",
            lambda ops: lambda: ops.conv_update(x, ConvTaps(w, None, True), pool, index),
            8.0 * dim,
        )
    return Case(
        f"conv_prefill, {tokens} tokens",
        lambda ops: lambda: ops.conv_prefill(x, ConvTaps(w, None, True), pool, _segment(tokens)),
        4.0 * tokens * dim,
    )


def row_cases(rows: int) -> list[Case]:
    hidden, inner = MODEL.hidden_size, MODEL.intermediate_size
    x, y, both = (torch.randn(rows, n).to(DTYPE) for n in (hidden, hidden, 2 * inner))
    heads = torch.randn(2, rows, MODEL.num_value_heads, MODEL.state_dim).to(DTYPE)
    weight, head_weight = torch.ones(hidden), torch.ones(MODEL.state_dim)
    return [
        Case(f"add_rmsnorm, {rows} rows", lambda ops: lambda: ops.add_rmsnorm(x, y, weight, 1e-6), 8.0 * x.numel()),
        Case(f"silu_mul, {rows} rows", lambda ops: lambda: ops.silu_mul(both), 3.0 * both.numel()),
        Case(
            f"gated_rmsnorm, {rows} rows",
            lambda ops: lambda: ops.gated_rmsnorm(heads[0], heads[1], head_weight, 1e-6),
            3.0 * heads.numel(),
        ),
    ]


def cases() -> list[Case]:
    """Return cases of decode at batch 1 and 8, a warm continuation of 64 tokens, and a prefill step of 2,048 tokens."""
    hidden, inner = MODEL.hidden_size, MODEL.intermediate_size
    found: list[Case] = []
    for rows in (1, 8, 64, 2048):
        found += [linear_case(rows, 2 * inner, hidden), linear_case(rows, hidden, inner)]
    found += [
        recurrence_decode_case(1),
        recurrence_decode_case(8),
        recurrence_prefill_case(64),
        recurrence_prefill_case(2048),
        recurrence_prefill_case(1024),
        *(recurrence_prefill_case(1024, shape, model) for model, shape in OTHERS.items()),
        scan_prefill_case(256, 4096, 16),
    ]
    found += [attention_case(1, 192, 8), attention_case(1, 4096, 1), attention_case(64, 4160, 1)]
    found += [attention_case(2048, 4096, 1), conv_case(1), conv_case(2048)]
    return found + row_cases(1) + row_cases(2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the operators whose name contains this")
    parser.add_argument("--no-torch", action="store_true", help="leave out the torch column")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = torch_table()
    build = load_operators()
    if build.module is None:
        raise SystemExit(build.reason)
    ops = cpp_table(build.module, base)
    copy, product = machine_rates()
    print(f"copy {copy / 1e9:.1f} GB/s, fp32 product {product / 1e9:.0f} GFLOP/s, one thread, {DTYPE}")
    print(f"{'operator':48} {'ms':>9} {'floor':>9} {'ratio':>6} {'torch':>9}")
    for case in cases():
        if options.only not in case.name:
            continue
        took = least(case.make(ops))
        floor = max(case.num_bytes / copy, case.flops / product)
        other = "" if options.no_torch else f"{least(case.make(base)) * 1e3:9.3f}"
        print(f"{case.name:48} {took * 1e3:9.3f} {floor * 1e3:9.3f} {took / floor:6.1f} {other}")


if __name__ == "__main__":
    main()
