"""Launches on an NPU have at most 65,535 programs: at steps of 131,072 tokens, and of 256 rows, of any model here.

Nothing is computed: tensors have no memory, and a launch only tells its grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index, segment_index
from forkpoint.ops.linear.reference import PackedLinear
from forkpoint.ops.linear.scaled import ScaledLinear, ScaledMatrix
from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, KeySplits, RecordIndex, VerifyIndex
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
from forkpoint.ops.select import select_table, torch_table
from forkpoint.ops.table import OpTable
from forkpoint.ops.turns import ROWS as ROWS_OF
from forkpoint.ops.turns import by_turns
from forkpoint.platforms.npu import MOST_PROGRAMS, npu_traits
from forkpoint.platforms.table import PLATFORMS, traits_of
from tests.ascend.shapes import DENSE, FP32, KEYED, MIXTURE, SSD, Shape
from tests.ops.triton_cases import ON_GPU

TOKENS, ROWS, DRAFTS = 131_072, 256, 4
WIDE = replace(DENSE, name="27B", hidden=5120, inner=17_408, heads=24)
WIDE = replace(WIDE, recurrence=replace(WIDE.recurrence, num_v_heads=48))
LATENT = replace(KEYED, name="kda", recurrence=replace(KEYED.recurrence, num_k_heads=32, num_v_heads=32))
LATENT = replace(LATENT, recurrence=replace(LATENT.recurrence, key_dim=128, value_dim=128), hidden=2304, inner=9216)
LARGE = replace(MIXTURE, name="64 heads", hidden=4096, heads=32, experts=(512, 10, 1024, 4096))
LARGE = replace(LARGE, recurrence=replace(LARGE.recurrence, num_v_heads=64))
NARROW = replace(SSD, name="128 heads", hidden=4096, recurrence=Recurrence(8, 128, 128, 64, delta=False))
NARROW = replace(NARROW, heads=32, kv_heads=8, dim=128, vocab=131_072, scan=(8192, 16))
SHAPES = (DENSE, MIXTURE, WIDE, LARGE, LATENT, SSD, NARROW)


def real(*sizes: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(*sizes, dtype=dtype)


def whole(*sizes: int) -> Tensor:
    return torch.empty(*sizes, dtype=torch.int32)


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """(kernel, programs) of each launch, of tensors without memory, with an NPU's launch tables."""
    from triton.runtime.interpreter import GridExecutor

    found: list[tuple[str, int]] = []

    def launch(self: Any, *args: Any, **options: Any) -> None:
        grid = self.grid if isinstance(self.grid, tuple) else (self.grid,)
        found.append((self.fn.__name__, torch.Size(grid).numel()))

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setitem(PLATFORMS._named, "meta", SimpleNamespace(traits=lambda device: npu_traits(24)))
    with torch.device("meta"):
        yield found
    traits_of.cache_clear()


@pytest.mark.skipif(ON_GPU, reason="launches are told by the interpreter")
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_no_launch_has_more_programs(shape: Shape, deterministic: bool, grids: list[tuple[str, int]]) -> None:
    ops = select_table("triton-in-turns", deterministic, False)
    _of_tokens(shape, ops)
    _prefill(shape, ops)
    _decode(shape, ops)
    assert {name for name, programs in grids if programs > MOST_PROGRAMS} == set()
    assert len(grids) > 400 and max(programs for _, programs in grids) > 20_000


def test_rows_in_turns_are_the_rows_of_one_launch() -> None:
    ops, rows = torch_table(), 7
    logits, uniform = torch.randn(rows, 30), torch.rand(rows, dtype=torch.float64)
    columns = SamplingColumns(torch.ones(rows), torch.full((rows,), -9.0), whole(rows) * 0, torch.ones(rows), uniform)
    rule, x = RouteRule(top_k=2, num_shared=1, shared="gated"), torch.randn(rows, 12)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("silu_mul", (x,)),
        ("add_rmsnorm", (x, x.clone(), torch.ones(12), 1e-6)),
        ("route", (torch.randn(rows, 7), rule)),
        ("sample_rows", (logits, columns)),
    ]
    for name, args in cases:
        want = getattr(ops, name)(*(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))
        got = by_turns(getattr(ops, name), ROWS_OF[name], 3, *args)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        assert all(torch.equal(mine, own) for mine, own in pairs), name


def _of_tokens(s: Shape, ops: OpTable) -> None:
    """Call the operators that know no rows."""
    x, weight = s.empty(TOKENS, s.hidden), real(s.hidden)
    ops.rmsnorm(x, weight, 1e-6)
    ops.add_rmsnorm(x, x, weight, 1e-6)
    heads, size = s.recurrence.num_v_heads, s.recurrence.value_dim
    ops.gated_rmsnorm(s.empty(TOKENS, heads, size), s.empty(TOKENS, heads, size), real(size), 1e-6)
    ops.silu_mul(s.empty(TOKENS, 2 * s.inner))
    ops.linear(x, PackedLinear(s.empty(3 * s.inner, s.hidden), None))
    ops.linear_silu_mul(x, PackedLinear(s.empty(2 * s.inner, s.hidden), None))
    codes, blocks = torch.empty(2 * s.inner, s.hidden, dtype=torch.uint8), (2 * s.inner // 128, s.hidden // 128)
    ops.linear_silu_mul(x, ScaledLinear(ScaledMatrix(codes, real(*blocks), 128, 128, s.dtype), None))
    q, k = s.empty(TOKENS, s.heads, s.dim), s.empty(TOKENS, s.kv_heads, s.dim)
    cache, at = s.empty(3000, s.kv_heads, 64, s.dim), torch.empty(TOKENS, dtype=torch.int64)
    ops.qk_norm_rope_write(q, k, k, QKNorm(real(s.dim), real(s.dim), 1e-6), real(8, 64), at, cache, cache, at)
    if s.latent is not None:
        rank, turned = s.latent
        own, cache = s.empty(TOKENS, rank + turned), s.empty(3000, 1, 64, rank + turned)
        rope = s.empty(TOKENS, s.heads, turned)
        ops.latent_write(rope, own, real(rank), 1e-6, real(8, turned), at, cache, at)
    if s.experts is not None:
        number, top, inner, hidden = s.experts
        packed = PackedExperts(s.empty(number + 1, 2 * inner, hidden), s.empty(number + 1, hidden, inner))
        rule = RouteRule(top_k=top, num_shared=1, shared="gated")
        ops.experts(s.empty(TOKENS, hidden), packed, *ops.route(s.empty(TOKENS, number + 1), rule))


def _params(s: Shape) -> RecurrenceParams:
    heads = s.recurrence.num_v_heads
    return RecurrenceParams(s.recurrence, real(heads), real(s.recurrence.num_decays), real(heads))


def _prefill(s: Shape, ops: OpTable) -> None:
    """Prefill one prompt, and as many prompts as there can be rows."""
    spec, pool = s.recurrence, s.empty(6, 3, s.recurrence.mixed_dim)
    states = real(6, spec.num_v_heads, spec.value_dim, spec.key_dim)
    for lens in ([TOKENS], [TOKENS // ROWS] * ROWS):
        count, device = len(lens), torch.device("meta")
        index = segment_index(lens, [0] * count, [1] * count, device=device)
        x, a = s.empty(TOKENS, spec.mixed_dim), s.empty(TOKENS, spec.num_decays)
        ops.conv_prefill(x, ConvTaps(s.empty(4, spec.mixed_dim).t(), None, True), pool, index)
        ops.window_prefill(x, pool, index)
        b = s.empty(TOKENS, spec.num_v_heads) if spec.delta else None
        ops.recurrence_prefill(RecurrenceInputs(x, a, b), _params(s), states, index)
        if s.scan is not None:
            ops.scan_prefill(_scanned(s, TOKENS), *_scan(s), index)
        _attend(s, ops, attention_index(lens, lens, whole(count, 2048), whole(TOKENS)), TOKENS)


def _scanned(s: Shape, count: int) -> ScanInputs:
    assert s.scan is not None
    wide, narrow = s.empty(count, s.scan[0]), s.empty(count, s.scan[1])
    return ScanInputs(wide, wide, narrow, narrow, wide)


def _scan(s: Shape) -> tuple[ScanParams, Tensor]:
    assert s.scan is not None
    channels, values = s.scan
    return ScanParams(real(channels, values), real(channels), real(channels)), real(6, channels, values)


def _attend(s: Shape, ops: OpTable, index: AttentionIndex, count: int) -> None:
    cache = s.empty(3000, s.kv_heads, 64, s.dim)
    ops.paged_attention(s.empty(count, s.heads, s.dim), cache, cache, index, 0.1, None)
    if s.latent is not None:
        rank, turned = s.latent
        cache = s.empty(3000, 1, 64, rank + turned)
        queries = s.empty(count, s.heads, rank + turned)
        ops.paged_attention(queries, cache, cache[..., :rank], index, 0.1, None)


def _decode(s: Shape, ops: OpTable) -> None:
    """Decode 256 rows of long contexts, with and without drafts."""
    spec, pool, rows = s.recurrence, s.empty(6, 3, s.recurrence.mixed_dim), DecodeIndex(whole(ROWS), whole(ROWS))
    states = real(6, spec.num_v_heads, spec.value_dim, spec.key_dim)
    count, weight = ROWS * (1 + DRAFTS), s.empty(4, spec.mixed_dim).t()
    x, a, b = (s.empty(count, n) for n in (spec.mixed_dim, spec.num_decays, spec.num_v_heads))
    b = b if spec.delta else None
    ops.conv_update(x[:ROWS], ConvTaps(weight, None, True), pool, rows)
    ops.window_update(x[:ROWS], pool, rows)
    ops.recurrence_decode(
        RecurrenceInputs(x[:ROWS], a[:ROWS], None if b is None else b[:ROWS]), _params(s), states, rows
    )
    if s.scan is not None:
        ops.scan_decode(_scanned(s, ROWS), *_scan(s), rows)
    index = VerifyIndex(*(whole(ROWS + (place == 2)) for place in range(9)))
    keys = (spec.num_k_heads, spec.key_dim)
    sizes = ((spec.num_v_heads, spec.value_dim), keys, keys if spec.per_key else (spec.num_v_heads,))
    inputs = [s.empty(2 * ROWS, 5, spec.mixed_dim)]
    ops.conv_verify(x, ConvTaps(weight, None, True), pool, index, inputs)
    ops.window_verify(x, pool, index, inputs)
    ops.recurrence_verify(
        RecurrenceInputs(x, a, b), _params(s), states, index, [real(2 * ROWS, 5, *size) for size in sizes]
    )
    if not spec.per_key:
        record, heads = RecordIndex(8, *(whole(ROWS + (place == 2)) for place in range(8))), (spec.num_v_heads,)
        lines = [real(ROWS, 12, *heads, spec.value_dim), *(real(ROWS, 17, *size) for size in (keys, keys[:1], heads))]
        ops.recurrence_record(RecurrenceInputs(x, a, b), _params(s), states, record, lines)
    table, splits = whole(ROWS, 512), KeySplits(64, 24)
    _attend(s, ops, attention_index([1] * ROWS, [32_768] * ROWS, table, whole(ROWS), ROWS, splits=splits), ROWS)
    logits, at = s.empty(count, s.vocab), torch.empty(count, dtype=torch.int64)
    ops.greedy(logits)
    ops.sample_rows(logits, SamplingColumns(*(real(count) for _ in range(2)), whole(count), real(count), real(count)))
    wide, words = real(count, s.vocab), whole(count, s.vocab // 32)
    ops.apply_penalties(wide, whole(count, s.vocab), PenaltyColumns(at, at, *(real(count) for _ in range(3))))
    ops.apply_bitmasks(wide, at, words)
