"""Writing latents and attending to them, in all tables, against a plain softmax over expanded keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.ops.attention import expanded_kernel, kernel
from forkpoint.ops.attention.reference import NO_KEYS
from forkpoint.ops.metadata import AttentionIndex, KeySplits
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable
from forkpoint.platforms.platform import DeviceTraits
from tests.ops.cpu_table import cpp
from tests.ops.gluon_host import on_host
from tests.ops.plain_attention import plain_attention
from tests.ops.triton_cases import DEVICE, ON_GPU, relative_error, triton_ops

HEADS, RANK, SHARED, EPS = 5, 40, 12, 1e-6
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if ON_GPU else 2e-2}


@pytest.fixture(scope="module", params=["torch", "torch fixed", "cpp", "triton"])
def ops(request: pytest.FixtureRequest) -> OpTable:
    if request.param == "cpp":
        if ON_GPU:
            pytest.skip("the C++ operators work on the host's memory")
        return cpp()
    return triton_ops() if request.param == "triton" else torch_table(request.param == "torch fixed")


class Batch:
    """Rows of latents in scattered blocks, NaN around them; row r's last `queries[r]` tokens ask."""

    def __init__(
        self,
        kv_lens: list[int],
        queries: list[int],
        decodes: int,
        dtype: torch.dtype,
        block: int = 64,
        sizes: tuple[int, int, int] = (HEADS, RANK, SHARED),
    ) -> None:
        heads, self.rank, shared = sizes
        generator = torch.Generator().manual_seed(0)
        widths = [-(-n // block) for n in kv_lens]
        order = torch.randperm(sum(widths) + 2, generator=generator).tolist()
        table = [[order.pop() for _ in range(width)] for width in widths]
        size = block * (self.rank + shared)
        wide = torch.full((sum(widths) + 2, size + 24), float("nan"), dtype=dtype, device=DEVICE)
        self.cache = wide[:, 8 : 8 + size].view(-1, 1, block, self.rank + shared)
        self.rows = [torch.randn(n, self.rank + shared, generator=generator).to(DEVICE, dtype) for n in kv_lens]
        for own, blocks in zip(self.rows, table, strict=True):
            for i, place in enumerate(blocks):
                part = own[block * i : block * i + block]
                self.cache[place, 0, : len(part)] = part
        self.q = torch.randn(sum(queries), heads, self.rank + shared, generator=generator).to(DEVICE, dtype)
        padded = torch.tensor([row + [-1] * (max(widths) - len(row)) for row in table], dtype=torch.int32)
        none = torch.empty(0, dtype=torch.int64, device=DEVICE)
        splits = KeySplits(block)
        self.index = attention_index(queries, kv_lens, padded.to(DEVICE), none, decodes, splits=splits)

    def run(self, ops: OpTable, index: AttentionIndex | None = None, q: Tensor | None = None) -> Tensor:
        q = self.q if q is None else q
        return ops.paged_attention(q, self.cache, self.cache[..., : self.rank], index or self.index, 0.2, None)

    def plain(self, first_key: int = 0) -> Tensor:
        keys = [own.unsqueeze(1) for own in self.rows]
        values = [own[..., : self.rank] for own in keys]
        return plain_attention(self.q, self.index.query_lens, keys, values, 0.2, first_key=first_key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_plain_softmax(ops: OpTable, dtype: torch.dtype) -> None:
    batch = Batch([1, 270, 64, 70, 3], [1, 1, 1, 9, 3], 3, dtype)
    got = batch.run(ops)
    assert got.dtype == dtype and relative_error(got, batch.plain()) <= BOUND[dtype]


@pytest.mark.skipif(ON_GPU, reason="runs on the host alone")
@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_steps_in_gluon(block: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for Hopper GPUs, which runs on the host: rows of one part and of several, with NaN after the last."""
    steps = pytest.importorskip("forkpoint.ops.attention.latent_step_kernel", exc_type=ImportError)
    traits = DeviceTraits(num_processors=100 if held == 2 else 1, has_warpgroups=True)
    batch = Batch([1, 64, 333, 1300, 70], [1] * 5, 5, torch.bfloat16, block, (5, 128, 64))
    monkeypatch.setattr(steps, "traits_of", lambda device: traits)
    monkeypatch.setattr(kernel, "_takes_steps", lambda q, cache, rank: True)
    with on_host(steps, "latent_step_kernel") as launched:
        got = batch.run(triton_ops())
    assert launched.num_programs and relative_error(got, batch.plain()) <= 1e-2
    with on_host(steps, "latent_step_kernel") as launched:
        check_partial_results(batch, triton_ops(), 0, 1e-2)
    assert launched.num_programs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_results(ops: OpTable, dtype: torch.dtype) -> None:
    """Outputs and logarithms of sums of exponentials. A row has no keys here, and another has only one.

    Drafts do not see the first key.
    """
    batch = Batch([1, 270, 0, 64, 70], [1] * 5, 5, dtype, block=32)
    check_partial_results(batch, ops, int(dtype == torch.bfloat16), BOUND[dtype])


def check_partial_results(batch: Batch, ops: OpTable, first_key: int, bound: float) -> None:
    index = replace(batch.index, first_key=first_key)
    found = ops.partial_attention(batch.q, batch.cache, batch.cache[..., : batch.rank], index, 0.2)
    rows, heads, _ = batch.q.shape
    assert found.dtype == torch.float32 and found.shape == (rows, heads, batch.rank + 1)
    has_keys = [row for row, keys in enumerate(batch.rows) if len(keys) > first_key]
    without = [row for row in range(rows) if row not in has_keys]
    assert found[without, :, :-1].eq(0).all() and found[without, :, -1].eq(NO_KEYS).all()
    assert relative_error(found[has_keys, :, :-1], batch.plain(first_key)[has_keys]) <= bound
    for row in has_keys:
        totals = (batch.q[row].double() @ batch.rows[row][first_key:].double().T * 0.2).logsumexp(1)
        torch.testing.assert_close(found[row, :, -1].double(), totals, rtol=1e-5, atol=1e-5)


def test_keys_before_the_first_are_not_seen(ops: OpTable) -> None:
    batch = Batch([2, 65, 270], [1] * 3, 3, torch.float32)
    got = batch.run(ops, replace(batch.index, first_key=1))
    assert relative_error(got, batch.plain(first_key=1)) <= BOUND[torch.float32]


@pytest.mark.parametrize("heads", [8, 20])
def test_steps_of_full_width(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which a Hopper GPU has a kernel of its own; last tiles in part, and NaN behind them."""
    for name, value in (("HEADS", heads), ("RANK", 512), ("SHARED", 64)):
        monkeypatch.setitem(globals(), name, value)
    batch = Batch([1, 270, 64, 333, 130, 70], [1, 1, 1, 1, 1, 9], 5, torch.bfloat16)
    assert relative_error(batch.run(triton_ops()), batch.plain()) <= BOUND[torch.bfloat16]
    check_partial_results(
        Batch([1, 270, 0, 64, 333], [1] * 5, 5, torch.bfloat16, block=32), triton_ops(), 0, BOUND[torch.bfloat16]
    )
    if ON_GPU:  # drafts do not see the first key
        batch = Batch([270, 64, 2], [1] * 3, 3, torch.bfloat16)
        got = batch.run(triton_ops(), replace(batch.index, first_key=1))
        assert relative_error(got, batch.plain(first_key=1)) <= BOUND[torch.bfloat16]


def test_few_queries_of_many_keys(ops: OpTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose keys programs share, where a table has such."""
    monkeypatch.setattr(kernel, "num_splits", lambda programs, at_once, places: 2)
    batch = Batch([330, 70, 2], [20, 9, 1], 0, torch.float32)
    assert relative_error(batch.run(ops), batch.plain()) <= BOUND[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_against_plain_softmax(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that start before, among and behind a row's new tokens."""
    monkeypatch.setattr(expanded_kernel, "PIECE", 128)
    monkeypatch.setattr(expanded_kernel, "QUERIES", 64)
    dim, value_dim, scale = 24, 20, 0.2
    batch = Batch([70, 300, 90], [5, 190, 90], 0, dtype)
    up = torch.randn(HEADS, dim + value_dim, RANK, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype) / 6
    q = batch.q[:, :, :dim].contiguous()
    shared = batch.q[:, :, RANK:]
    out = q.new_empty(*q.shape[:2], value_dim)
    prefill = triton_ops().latent_prefill
    assert prefill is not None
    start = 0
    for row, count in enumerate(batch.index.query_lens):
        at, rows = slice(start, start + count), batch.rows[row]
        start += count

        def expand(latent: Tensor) -> Tensor:
            return latent @ up.flatten(0, 1).t()

        prefill(q[at], shared[at], batch.cache, RANK, expand, batch.index, row, scale, out[at])
        made = expand(rows[:, :RANK]).unflatten(1, (HEADS, -1))
        keys = torch.cat((made[..., :dim], rows[:, None, RANK:].expand(-1, HEADS, -1)), -1)
        want = plain_attention(torch.cat((q[at], shared[at]), -1), [count], [keys], [made[..., dim:]], scale)
        assert relative_error(out[at], want) <= BOUND[dtype]


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_blocks_of_another_size(name: str) -> None:
    batch = Batch([200, 70], [1, 60], 1, torch.float32, 32)
    got = batch.run(triton_ops() if name == "triton" else torch_table())
    assert relative_error(got, batch.plain()) <= BOUND[torch.float32]


def test_fixed_tables_do_not_see_the_chunking() -> None:
    whole = Batch([130], [130], 0, torch.float32)
    tables = [torch_table(True), *([triton_ops()] if ON_GPU else [])]
    for ops in tables:
        want = whole.run(ops)
        for start, end in ((0, 64), (64, 130), (128, 130)):
            index = attention_index([end - start], [end], whole.index.block_table, whole.index.key_places)
            assert torch.equal(whole.run(ops, index, whole.q[start:end]), want[start:end])


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write(ops: OpTable, dtype: torch.dtype, rotated: bool) -> None:
    batch, generator = Batch([64, 64], [1, 1], 2, dtype), torch.Generator().manual_seed(1)
    projected = torch.randn(3, HEADS * SHARED + RANK + SHARED, generator=generator).to(DEVICE, dtype)
    q, latent = projected[:, : HEADS * SHARED].unflatten(1, (HEADS, SHARED)), projected[:, HEADS * SHARED :]
    weight = (torch.rand(RANK, generator=generator) + 0.5).to(DEVICE)
    angles = torch.rand(9, SHARED // 2, generator=generator).to(DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotated else None
    positions = torch.tensor([3, 0, 8], device=DEVICE)

    def turned(x: Tensor) -> Tensor:
        cos, sin = (part[positions].double() for part in (angles.cos(), angles.sin()))
        cos, sin = (part.view(3, *[1] * (x.dim() - 2), -1) for part in (cos, sin))
        low, high = x.double().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1) if rotated else x.double()

    wide = latent[:, :RANK].double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    want = torch.cat((normed, turned(latent[:, RANK:])), dim=-1)
    want_q, before = turned(q), batch.cache.clone()
    got = ops.latent_write(
        q, latent, weight, EPS, cos_sin, positions, batch.cache, torch.tensor([70, -1, 2], device=DEVICE)
    )
    assert got.dtype == dtype and relative_error(got, want_q) <= BOUND[dtype]
    assert relative_error(batch.cache[1, 0, 6], want[0]) <= BOUND[dtype]
    assert relative_error(batch.cache[0, 0, 2], want[2]) <= BOUND[dtype]
    before[1, 0, 6], before[0, 0, 2] = batch.cache[1, 0, 6], batch.cache[0, 0, 2]
    assert torch.equal(batch.cache.nan_to_num(7.0), before.nan_to_num(7.0))


def test_heads_have_weights_of_their_own(ops: OpTable) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2 * HEADS, 16).to(DEVICE)[:, ::2], torch.randn(HEADS, 24, 16).to(DEVICE)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert relative_error(ops.linear_heads(x, ops.prepare_linear_heads(weight)), want) <= 1e-5
