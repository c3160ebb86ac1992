"""Calls of every Triton operator at the shapes of models. Tests watch the launches; no result is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.indices import attention_index, segment_index
from forkpoint.ops.launch_table import launch_table
from forkpoint.ops.linear.device_linear import within
from forkpoint.ops.linear.kernel import multiply
from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.linear.scaled import ScaledMatrix
from forkpoint.ops.linear.tiles import FEW_GATED, fastest_gated_tile, fastest_tile, fixed_gated_tile, fixed_tile
from forkpoint.ops.metadata import DecodeIndex, KeySplits, RecordIndex, VerifyIndex
from forkpoint.ops.moe.device_experts import _tiles
from forkpoint.ops.moe.kernel import grouped_experts
from forkpoint.ops.moe.reference import PackedExperts
from forkpoint.ops.parameters import (
    ConvTaps,
    QKNorm,
    Recurrence,
    RecurrenceInputs,
    RecurrenceParams,
    RouteRule,
    ScanInputs,
    ScanParams,
)
from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns
from forkpoint.ops.select import torch_table
from forkpoint.ops.triton_table import triton_table
from forkpoint.platforms.npu import KERNEL_BLOCK_SIZES
from forkpoint.platforms.table import traits_of

BLOCK = KERNEL_BLOCK_SIZES[0]
SPLITS = KeySplits(BLOCK, 32)
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """The sizes of one model. `experts` are (number, experts per token, inner, hidden)."""

    name: str
    dtype: torch.dtype
    hidden: int
    inner: int
    recurrence: Recurrence
    heads: int
    kv_heads: int
    dim: int
    rotated: int
    vocab: int
    experts: tuple[int, int, int, int] | None = None
    latent: tuple[int, int] | None = None  # ranks of the latent and of its rotated part
    scan: tuple[int, int] | None = None  # channels and values of a selective scan

    def empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype or self.dtype)


BF16, FP32 = torch.bfloat16, torch.float32
SMALL = Recurrence(2, 4, 64, 64)
DENSE = Shape("9B", BF16, 4096, 12288, Recurrence(16, 32, 128, 128), 16, 4, 256, 64, 151936)
MIXTURE = Shape("35B-A3B", BF16, 2048, 512, Recurrence(16, 32, 128, 128), 16, 2, 256, 64, 151936, (256, 8, 512, 2048))
SHIPPED = Shape("shipped", BF16, 256, 768, SMALL, 4, 2, 64, 16, 1536, (16, 4, 64, 128))
ODD = Shape(
    "odd",
    FP32,
    72,
    104,
    Recurrence(1, 3, 24, 40, double_beta=True),
    6,
    2,
    40,
    12,
    1003,
    (6, 2, 40, 72),
    (40, 12),
    (70, 16),
)
KEYED = Shape("kda", BF16, 256, 768, Recurrence(4, 4, 64, 64, per_key=True), 32, 1, 64, 16, 1536, None, (512, 64))
SSD = Shape("ssd", BF16, 256, 768, Recurrence(1, 8, 128, 64, delta=False), 4, 2, 64, 16, 1536, None, None, (256, 16))
SHAPES = (DENSE, MIXTURE, SHIPPED, ODD, KEYED, SSD)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def calls(shape: Shape, deterministic: bool = False) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (label, call) of every operator, for few rows and many."""
    ops = triton_table(torch_table(deterministic))
    yield from _elementwise(shape, ops)
    yield from _attention(shape, ops)
    yield from _recurrence(shape, ops)
    yield from _drafts(shape, ops)
    yield from _products(shape, ops, deterministic)
    yield from _sampling(shape, ops)


def _elementwise(s: Shape, ops: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    weight, heads, size = s.empty(s.hidden, dtype=FP32), s.recurrence.num_v_heads, s.recurrence.value_dim
    for rows in (1, 300):
        x = s.empty(rows, s.hidden)
        yield f"rmsnorm {rows}", lambda x=x: ops.rmsnorm(x, weight, 1e-6)
        yield f"add_rmsnorm {rows}", lambda x=x: ops.add_rmsnorm(x, x.clone(), weight, 1e-6)
        head = s.empty(rows, heads, size)
        own = s.empty(heads, size, dtype=FP32)
        yield f"gated_rmsnorm {rows}", lambda h=head, w=own: ops.gated_rmsnorm(h, h, w[0], 1e-6)
        yield f"gated_rmsnorm of groups {rows}", lambda h=head, w=own: ops.gated_rmsnorm(h, h, w, 1e-6, True, True)
        yield f"silu_mul {rows}", lambda rows=rows: ops.silu_mul(s.empty(rows, 2 * s.inner))
    pools = [s.empty(6, 3, s.recurrence.mixed_dim), s.empty(6, heads, size, s.recurrence.key_dim, dtype=FP32)]
    yield "state_copy", lambda: ops.state_copy(pools, ints(0, -1), ints(1, 2))
    yield "state_copy 256", lambda: ops.state_copy(pools, ints(*[0] * 256), ints(*range(1, 257)))


def _attention(s: Shape, ops: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    table = torch.zeros(40, 40, dtype=torch.int32)
    keys = s.empty(41, s.kv_heads, BLOCK, s.dim)
    slots, positions = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    q, k = s.empty(3, s.heads, s.dim), s.empty(3, s.kv_heads, s.dim)
    norm = QKNorm(s.empty(s.dim, dtype=FP32), s.empty(s.dim, dtype=FP32), 1e-6)
    angles = s.empty(4096, s.rotated, dtype=FP32)
    for own, turn in ((norm, angles), (None, angles), (norm, None)):
        yield "inputs", lambda n=own, c=turn: ops.qk_norm_rope_write(q, k, k, n, c, positions, keys, keys, slots)
    cases = {
        "decode 3": ([1] * 3, [100, 500, 900], 3, None, True),
        "decode 20": ([1] * 20, [200] * 20, 20, None, True),
        "decode in a window": ([1] * 3, [100, 500, 900], 3, 128, False),
        "prefill, shared keys": ([200], [700], 0, None, True),
        "prefill": ([640] * 4, [640] * 4, 0, None, True),
        "prefill in a window": ([200], [700], 0, 128, True),
    }
    for name, (lens, kv_lens, decodes, window, gated) in cases.items():
        count = sum(lens)
        index = attention_index(lens, kv_lens, table, positions.repeat(count), decodes, splits=SPLITS)
        queries, gate = s.empty(count, s.heads, s.dim), s.empty(count, s.heads * s.dim) if gated else None
        yield (
            f"attention {name}",
            lambda i=index, w=window, q=queries, g=gate: ops.paged_attention(q, keys, keys, i, 0.1, w, g),
        )
        if s.latent is not None and window is None:
            rank, turned = s.latent
            cache, wide = s.empty(41, 1, BLOCK, rank + turned), s.empty(count, s.heads, rank + turned)
            yield (
                f"latent attention {name}",
                lambda i=index, c=cache, q=wide, r=rank: ops.paged_attention(q, c, c[..., :r], i, 0.1, None),
            )
    if s.latent is not None:
        rank, turned = s.latent
        latent, rope = s.empty(3, rank + turned), s.empty(3, s.heads, turned)
        weight, turn, cache = (
            s.empty(rank, dtype=FP32),
            s.empty(64, turned, dtype=FP32),
            s.empty(8, 1, BLOCK, rank + turned),
        )
        for c in (turn, None):
            yield "latent_write", lambda c=c: ops.latent_write(rope, latent, weight, 1e-6, c, positions, cache, slots)


def _recurrence(s: Shape, ops: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    spec, two = s.recurrence, DecodeIndex(ints(0, 1), ints(0, 3))
    dim, heads = spec.mixed_dim, spec.num_v_heads
    weight, pool = s.empty(4, dim).t(), s.empty(6, 3, dim)
    states = s.empty(6, heads, spec.value_dim, spec.key_dim, dtype=FP32)
    decays = s.empty(spec.num_decays, dtype=FP32)
    skip = None if spec.delta else s.empty(heads, dtype=FP32)
    params = RecurrenceParams(spec, s.empty(heads, dtype=FP32), decays, skip)
    saves = segment_index([100, 64], [0, -1], [2, 3], [[(64, 4)], []])
    long, many = segment_index([600], [0], [2]), segment_index([64] * 12, [0] * 12, [1] * 12)
    for name, index, count in (("with saves", saves, 164), ("long", long, 600), ("many", many, 768)):
        x, bias, beta = s.empty(count, dim), s.empty(dim), s.empty(count, heads) if spec.delta else None
        a = s.empty(count, spec.num_decays)
        yield f"conv_prefill {name}", lambda x=x, i=index: ops.conv_prefill(x, ConvTaps(weight, None, True), pool, i)
        yield (
            f"conv_prefill {name} bias",
            lambda x=x, b=bias, i=index: ops.conv_prefill(x, ConvTaps(weight, b, False), pool, i),
        )
        yield f"window_prefill {name}", lambda x=x, i=index: ops.window_prefill(x, pool, i)
        yield (
            f"recurrence_prefill {name}",
            lambda x=x, a=a, b=beta, i=index: ops.recurrence_prefill(RecurrenceInputs(x, a, b), params, states, i),
        )
    x, a, beta = s.empty(2, dim), s.empty(2, spec.num_decays), s.empty(2, heads) if spec.delta else None
    yield "conv_update", lambda: ops.conv_update(x, ConvTaps(weight, None, True), pool, two)
    yield "window_update", lambda: ops.window_update(x, pool, two)
    yield "recurrence_decode", lambda: ops.recurrence_decode(RecurrenceInputs(x, a, beta), params, states, two)
    if s.scan is None:
        return
    channels, values = s.scan
    scanned = ScanParams(*(s.empty(*sizes, dtype=FP32) for sizes in ((channels, values), (channels,), (channels,))))
    state = s.empty(6, channels, values, dtype=FP32)

    def inputs(count: int) -> ScanInputs:
        wide, narrow = s.empty(count, channels), s.empty(count, values)
        return ScanInputs(wide, wide, narrow, narrow, wide)

    yield "scan_prefill", lambda: ops.scan_prefill(inputs(164), scanned, state, saves)
    yield "scan_decode", lambda: ops.scan_decode(inputs(2), scanned, state, two)


def _drafts(s: Shape, ops: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Two rows, of three tokens and one, with a line of records each to read and to write."""
    spec, most = s.recurrence, 4
    columns = ([0, 1], [2, 3], [0, 3, 4], [1, 0], [1, 0], [4, -1], [0, 1], [2, 3], [0, 1])
    index = VerifyIndex(*(ints(*column) for column in columns))
    dim, heads = spec.mixed_dim, spec.num_v_heads
    pool, states = s.empty(6, 3, dim), s.empty(6, heads, spec.value_dim, spec.key_dim, dtype=FP32)
    skip = None if spec.delta else s.empty(heads, dtype=FP32)
    params = RecurrenceParams(spec, s.empty(heads, dtype=FP32), s.empty(spec.num_decays, dtype=FP32), skip)
    lines = [s.empty(4, most, dim)]
    keys = (spec.num_k_heads, spec.key_dim)
    sizes = ((heads, spec.value_dim), keys, keys if spec.per_key else (heads,))
    records = [s.empty(4, most, *size, dtype=FP32) for size in sizes]
    x, weight, a = s.empty(4, dim), s.empty(4, dim).t(), s.empty(4, spec.num_decays)
    for bias in (None, s.empty(dim)):
        yield "conv_verify", lambda b=bias: ops.conv_verify(x, ConvTaps(weight, b, True), pool, index, lines)
    yield "window_verify", lambda: ops.window_verify(x, pool, index, lines)
    yield "conv_fold", lambda: ops.conv_fold(pool, index, lines)
    beta = s.empty(4, heads) if spec.delta else None
    yield (
        "recurrence_verify",
        lambda: ops.recurrence_verify(RecurrenceInputs(x, a, beta), params, states, index, records),
    )
    yield "recurrence_fold", lambda: ops.recurrence_fold(states, index, records)
    if s.scan is not None:
        yield from _scanned_drafts(s, ops, index)
    if spec.per_key:
        return
    # States that are written every 8 tokens, without drafts and with up to three.
    for rows, tokens, most in ((4, [0, 1, 2, 3, 4], 1), (2, [0, 3, 4], 4)):
        columns = ([0, 1, 2, 3], [2, 3, 2, 3], tokens, [0, 1, 2, 3], [0, 8, 0, 0], [7, 9, 0, 0], [0, 8, 0, 0], [4] * 4)
        record = RecordIndex(8, *(ints(*(column if column is tokens else column[:rows])) for column in columns))
        kept = ((s.dtype, (spec.num_k_heads, spec.key_dim)), (FP32, (spec.num_k_heads,)), (FP32, (heads,)))
        lines = [s.empty(4, 7 + most, heads, spec.value_dim, dtype=FP32)]
        lines += [s.empty(4, 7 + 2 * most, *size, dtype=dtype) for dtype, size in kept]
        yield (
            f"recurrence_record {most}",
            lambda r=record, n=lines: ops.recurrence_record(RecurrenceInputs(x, a, beta), params, states, r, n),
        )
        yield f"recurrence_flush {most}", lambda r=record, n=lines: ops.recurrence_flush(states, r, n)


def _scanned_drafts(s: Shape, ops: Any, index: VerifyIndex) -> Iterator[tuple[str, Callable[[], Any]]]:
    assert s.scan is not None
    channels, values = s.scan
    scanned = ScanParams(*(s.empty(*sizes, dtype=FP32) for sizes in ((channels, values), (channels,), (channels,))))
    states, records = s.empty(6, channels, values, dtype=FP32), (channels, channels, values)
    lines = [s.empty(4, 4, size) for size in records]
    wide, narrow = s.empty(4, channels), s.empty(4, values)
    given = ScanInputs(wide, wide, narrow, narrow, wide)
    yield "scan_verify", lambda: ops.scan_verify(given, scanned, states, index, lines)
    yield "scan_fold", lambda: ops.scan_fold(states, index, [*lines, scanned.A, scanned.dt_bias])


def _scaled(s: Shape, *sizes: int) -> ScaledMatrix:
    """A matrix in FP8, as bytes."""
    *lead, rows, columns = sizes
    codes = torch.zeros(sizes, dtype=torch.uint8)
    return ScaledMatrix(codes, s.empty(*lead, -(-rows // 128), -(-columns // 128), dtype=FP32), 128, 128, s.dtype)


def _products(s: Shape, ops: Any, deterministic: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    choose = fixed_tile if deterministic else fastest_tile
    for rows in (1, 8, 16, 32, 64, 128, 600):
        for outputs, width in ((s.hidden, s.hidden), (s.recurrence.mixed_dim, s.hidden), (s.hidden, s.inner)):
            tile = choose(rows, outputs, width, s.dtype)
            if tile is not None:
                x, weight, tile = s.empty(rows, width), s.empty(outputs, width), within(tile, HOST)
                yield f"linear {rows} {tile}", lambda x=x, w=weight, t=tile: multiply(x, w, None, t)
        fast = fastest_gated_tile(rows, s.inner, s.dtype)
        gated = fixed_gated_tile(rows, s.inner, s.hidden, s.dtype) if deterministic else fast
        x, weight = s.empty(rows, s.hidden), s.empty(2 * s.inner, s.hidden)
        if gated is not None and gated.rows <= FEW_GATED:  # NPUs take the halves together beyond
            gated = within(gated, HOST)
            yield f"gated {rows} {gated}", lambda x=x, w=weight, t=gated: multiply(x, w, None, t, gated=True)
    yield from _products_in_fp8(s, ops)
    bias = PackedLinear(s.empty(s.hidden, s.hidden), s.empty(s.hidden))
    yield "linear with bias", lambda: ops.linear(s.empty(8, s.hidden), bias)
    if s.experts is None:
        return
    number, top, inner, hidden = s.experts
    packed = PackedExperts(s.empty(number + 1, 2 * inner, hidden), s.empty(number + 1, hidden, inner))
    weights, ids = s.empty(40, top + 1, dtype=FP32), torch.zeros(40, top + 1, dtype=torch.int32)
    few = s.empty(2, hidden)
    yield "experts of pairs", lambda: ops.experts(few, packed, weights[:2], ids[:2])
    for mean in (5, 50, 500):
        tiles = _tiles(s.dtype, min(mean, launch_table(HOST).most_expert_rows))
        yield (
            f"experts {mean}",
            lambda t=tiles: grouped_experts(s.empty(40, hidden), packed, weights, ids, *t),
        )
    yield "route", lambda: ops.route(s.empty(3, number + 1), RouteRule(top_k=top, num_shared=1, shared="gated"))
    rule = RouteRule(top_k=top, score="sigmoid", groups=2, top_groups=1)
    yield "route in groups", lambda: ops.route(s.empty(3, number), rule, s.empty(number, dtype=FP32))


def _products_in_fp8(s: Shape, ops: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield products in FP8 for a device without 8-bit floats."""
    if traits_of(HOST).has_fp8:
        return
    own = s.recurrence.mixed_dim
    for matrix in (_scaled(s, s.hidden, s.hidden), _scaled(s, 2 * own, s.hidden), _scaled(s, own, s.inner).by_row()):
        for rows in (1, 16, 32, 64, 128, 200):
            x, scaled = s.empty(rows, matrix.shape[1]), ops.prepare_linear(matrix, None)
            yield f"linear in FP8 {rows}", lambda x=x, w=scaled: ops.linear(x, w)
            yield f"gated in FP8 {rows}", lambda x=x, w=scaled: ops.linear_silu_mul(x, w)
    if s.experts is None:
        return
    number, top, inner, hidden = s.experts
    ids = torch.zeros(40, top + 1, dtype=torch.int32)
    pair = ops.prepare_experts(_scaled(s, number + 1, 2 * inner, hidden), _scaled(s, number + 1, hidden, inner))
    for mean in (1, 50):
        many = ids.repeat(1 + mean * number // ids.numel(), 1)
        yield (
            f"experts in FP8 {mean}",
            lambda i=many: ops.experts(s.empty(len(i), hidden), pair, s.empty(*i.shape, dtype=FP32), i),
        )


def _sampling(s: Shape, ops: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    def reals(*values: float) -> Tensor:
        return torch.tensor(values, dtype=FP32)

    uniform = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    columns = SamplingColumns(reals(1, 1, 0.5), reals(-1, -2, -3), ints(0, 5, 0), reals(1, 1, 0.9), uniform)
    for dtype in (s.dtype, FP32):
        yield f"greedy {dtype}", lambda d=dtype: ops.greedy(s.empty(3, s.vocab, dtype=d))
        yield f"sample_rows {dtype}", lambda d=dtype: ops.sample_rows(s.empty(3, s.vocab, dtype=d), columns)
    logits, rows = s.empty(3, s.vocab, dtype=FP32), ints(1, dtype=torch.int64)
    penalties = PenaltyColumns(rows, rows, reals(1.1), reals(0.5), reals(0.1))
    counts, bits = torch.zeros(2, s.vocab, dtype=torch.int32), torch.zeros(1, -(-s.vocab // 32), dtype=torch.int32)
    yield "apply_penalties", lambda: ops.apply_penalties(logits, counts, penalties)
    yield "apply_bitmasks", lambda: ops.apply_bitmasks(logits, rows, bits)
