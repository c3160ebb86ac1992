"""Triton paged attention against a plain softmax over each row's own keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.ops.activation.reference import sigmoid_mul
from forkpoint.ops.attention import kernel
from forkpoint.ops.attention.kernel import MAX_WAVES, TritonPagedAttention, num_splits
from forkpoint.ops.attention.reference import NO_KEYS
from forkpoint.ops.metadata import MAX_PARTS, PART_BLOCKS, AttentionIndex, AttentionWork, KeySplits, running_total
from forkpoint.platforms.platform import DeviceTraits
from tests.ops.plain_attention import plain_attention
from tests.ops.triton_cases import DEVICE, ON_GPU, gpu_only, relative_error, sized, triton_ops

OURS = triton_ops()
BOUND = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    dim: int
    value_dim: int


class Batch:
    """Rows of random keys and values in scattered blocks; row r's last `queries[r]` tokens ask."""

    def __init__(
        self,
        kv_lens: list[int],
        queries: list[int],
        decodes: int,
        heads: Heads,
        dtype: torch.dtype,
        block: int = 64,
    ) -> None:
        torch.manual_seed(0)
        self.heads, self.block = heads, block
        widths = [-(-n // block) for n in kv_lens]
        order = torch.randperm(sum(widths) + 3).tolist()
        table = [[order.pop() for _ in range(width)] for width in widths]
        # NaN where nothing was stored, and behind each block.
        self.k_cache, self.v_cache = (self._cache(sum(widths) + 3, d, dtype) for d in (heads.dim, heads.value_dim))
        self.k = [torch.randn(n, heads.keys, heads.dim).to(DEVICE, dtype) for n in kv_lens]
        self.v = [torch.randn(n, heads.keys, heads.value_dim).to(DEVICE, dtype) for n in kv_lens]
        self.q = torch.randn(sum(queries), heads.queries, heads.dim).to(DEVICE, dtype)
        self.gate = torch.randn(sum(queries), heads.queries * heads.value_dim + 8).to(DEVICE, dtype)[:, 8:]
        for row, length in enumerate(kv_lens):
            for i, place in enumerate(table[row]):
                part = slice(block * i, min(block * i + block, length))
                count = part.stop - part.start
                self.k_cache[place, :, :count] = self.k[row][part].transpose(0, 1)
                self.v_cache[place, :, :count] = self.v[row][part].transpose(0, 1)
        padded = [row + [-1] * (max(widths) - len(row)) for row in table]
        lines = torch.randperm(len(padded))  # the table's lines stand in another order than the rows
        self.table = torch.tensor(padded, dtype=torch.int32)[lines].to(DEVICE)
        self.lines = lines.argsort().tolist()
        self.index = self.index_of(range(len(kv_lens)), queries, kv_lens, decodes)

    def _cache(self, blocks: int, dim: int, dtype: torch.dtype) -> Tensor:
        size = self.heads.keys * self.block * dim
        wide = torch.full((blocks, size + 48), float("nan"), dtype=dtype, device=DEVICE)
        return wide[:, 16 : 16 + size].view(blocks, self.heads.keys, self.block, dim)

    def index_of(self, rows: range | list[int], queries: list[int], kv_lens: list[int], decodes: int) -> AttentionIndex:
        none = torch.empty(0, dtype=torch.int64, device=DEVICE)
        lines, splits = [self.lines[row] for row in rows], KeySplits(self.block)
        return attention_index(queries, kv_lens, self.table, none, decodes, lines, splits)

    def run(self, window: int | None, index: AttentionIndex | None = None, q: Tensor | None = None) -> Tensor:
        q = self.q if q is None else q
        return OURS.paged_attention(q, self.k_cache, self.v_cache, index or self.index, 0.2, window)

    def plain(self, window: int | None, first_key: int = 0) -> Tensor:
        return plain_attention(self.q, self.index.query_lens, self.k, self.v, 0.2, window, first_key)


def test_partial_results_of_some_keys() -> None:
    """Outputs and logarithms of sums of exponentials, without the first key, in a step with padded rows."""
    for dtype in DTYPES:
        batch = Batch([1, 270, 64, 70], [1] * 4, 4, Heads(6, 1, 16, 24), dtype, block=32)
        index = replace(padded(batch.index, 2), first_key=1)
        q = torch.cat((batch.q, torch.full_like(batch.q[:2], float("nan"))))
        found = OURS.partial_attention(q, batch.k_cache, batch.v_cache, index, 0.2)
        no_keys = torch.tensor([0, 4, 5])  # the first row has one key, which it does not see
        assert found[no_keys, :, :-1].eq(0).all() and found[no_keys, :, -1].eq(NO_KEYS).all()
        assert relative_error(found[1:4, :, :-1], batch.plain(None, first_key=1)[1:]) <= BOUND[dtype]
        for row in range(1, 4):
            totals = (batch.q[row].double() @ batch.k[row][1:, 0].double().T * 0.2).logsumexp(1)
            torch.testing.assert_close(found[row, :, -1].double(), totals, rtol=1e-5, atol=1e-5)


def padded(index: AttentionIndex, more_rows: int) -> AttentionIndex:
    """The index as a recorded step has it: `more_rows` decode rows of no tokens, room for more tiles and parts, no
    host copies."""
    assert index.work is not None
    n, work = index.num_decodes, index.work
    ptr, rows = work.part_ptr, torch.zeros(more_rows, dtype=torch.int32, device=DEVICE)
    tiles = torch.where(work.tiles[:, :1] >= n, work.tiles + torch.tensor([more_rows, 0], device=DEVICE), -1)
    stale = torch.tensor([[7, 0, 99]] * 5, dtype=torch.int32, device=DEVICE)
    return replace(
        index,
        num_decodes=n + more_rows,
        cu_queries=torch.cat(
            (index.cu_queries[:n], torch.arange(n, n + more_rows, device=DEVICE), index.cu_queries[n:] + more_rows)
        ).int(),
        kv_lens=torch.cat((index.kv_lens[:n], rows, index.kv_lens[n:])),
        table_rows=torch.cat((index.table_rows[:n], rows, index.table_rows[n:])),
        work=AttentionWork(
            torch.cat((tiles, torch.full((2, 2), -1, device=DEVICE))).int(),
            torch.cat((work.parts, stale)),
            torch.cat((ptr, ptr[-1:].expand(more_rows))),
        ),
        query_lens=(),
        host_kv_lens=(),
    )


SMALL = Heads(4, 2, 16, 24)
SHAPES = sized(
    [SMALL, Heads(3, 1, 40, 40)],
    [
        Heads(16, 4, 256, 256),
        Heads(32, 8, 128, 128),
        Heads(8, 8, 64, 64),
        Heads(6, 1, 96, 96),
        Heads(14, 2, 192, 128),
        Heads(8, 1, 256, 256),
    ],
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("heads", SHAPES)
def test_against_plain_softmax(heads: Heads, window: int | None, dtype: torch.dtype) -> None:
    odd = (SHAPES.index(heads) + DTYPES.index(dtype) + bool(window)) % 2
    if odd and not ON_GPU:
        pytest.skip("under the interpreter each two of the three together, not all three")
    batch = Batch([1, 600, 64, 330, 100], [1, 1, 1, 37, 100], 3, heads, dtype)
    got = batch.run(window)
    assert got.dtype == dtype and relative_error(got, batch.plain(window)) <= BOUND[dtype]


@pytest.mark.parametrize("wanted", [2, 12])
@pytest.mark.parametrize(("folded", "window"), [(2, None), (4, None), (4, 70)])
def test_tokens_of_a_row_whose_keys_are_read_together(wanted: int, folded: int, window: int | None) -> None:
    lens, counts = np.array([1, 5, 3, 2], np.int32), [64, 300, 130, 66]
    batch = Batch(counts, lens.tolist(), 0, Heads(6, 2, 16, 24), torch.float32)
    kv_lens = np.repeat(np.array(counts) - lens + 1 - running_total(lens)[:-1], lens) + np.arange(lens.sum())
    rows, tokens = np.repeat(np.arange(len(lens)), lens).tolist(), int(lens.sum())
    index = batch.index_of(rows, [1] * tokens, kv_lens.tolist(), tokens)
    parts, pointers, lead = KeySplits(64, wanted, folded).folded_table(kv_lens.astype(np.int32), lens)
    assert index.work is not None and (parts[:, 0] == np.repeat(np.arange(tokens), np.diff(pointers))).all()
    folds = [torch.from_numpy(array).to(DEVICE) for array in (parts, pointers, lead)]
    own = replace(index, work=AttentionWork(index.work.tiles, *folds, folded))
    got = OURS.paged_attention(batch.q, batch.k_cache, batch.v_cache, own, 0.2, window, batch.gate)
    want = sigmoid_mul(batch.plain(window).flatten(1), batch.gate)
    assert relative_error(got.flatten(1), want) <= BOUND[torch.float32]


def test_blocks_of_another_size() -> None:
    batch = Batch([33, 100, 60], [1, 1, 40], 2, SMALL, torch.float32, 32)
    assert relative_error(batch.run(40), batch.plain(40)) <= BOUND[torch.float32]


@pytest.mark.parametrize("heads", sized([Heads(8, 1, 16, 16)], []))
def test_widest_group_of_heads(heads: Heads) -> None:
    batch = Batch([130, 70], [1, 9], 1, heads, torch.float32)
    assert relative_error(batch.run(None), batch.plain(None)) <= BOUND[torch.float32]


def test_keys_before_the_first_are_not_seen() -> None:
    lens = [2, 65, 300]
    batch = Batch(lens, [1] * len(lens), len(lens), SMALL, torch.float32)
    got = batch.run(None, replace(batch.index, first_key=1))
    assert relative_error(got, batch.plain(None, 1)) <= BOUND[torch.float32]


@pytest.mark.parametrize("window", [None, 70])
def test_padding_changes_no_bits_and_gives_zeros(window: int | None) -> None:
    batch = Batch([300, 64, 190, 70], [1, 1, 20, 9], 2, SMALL, torch.float32)
    want = batch.run(window)
    q = torch.cat((batch.q[:2], torch.full((3, 4, 16), float("nan"), device=DEVICE), batch.q[2:]))
    got = batch.run(window, padded(batch.index, 3), torch.cat((q, q[:4])))  # and tokens of no row at the end
    assert torch.equal(got[:2], want[:2]) and relative_error(got[5 : len(q)], want[2:]) <= BOUND[torch.float32]
    assert not got[2:5].any()


def test_padding_alone() -> None:
    batch = Batch([64], [1], 1, SMALL, torch.float32)
    nothing = replace(padded(batch.index, 1), kv_lens=torch.zeros(2, dtype=torch.int32, device=DEVICE))
    assert nothing.work is not None
    work = replace(nothing.work, part_ptr=torch.zeros(3, dtype=torch.int32, device=DEVICE))
    q = torch.full((2, 4, 16), float("nan"), device=DEVICE)
    assert not batch.run(None, replace(nothing, work=work), q).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_multiplies_what_would_be_stored(dtype: torch.dtype) -> None:
    batch = Batch([130, 140], [1, 9], 1, SMALL, dtype)
    got = OURS.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.index, 0.2, None, batch.gate)
    want = sigmoid_mul(batch.run(None).flatten(1), batch.gate)
    assert relative_error(got.flatten(1), want) <= {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("heads", sized([SMALL], [Heads(16, 4, 256, 256), Heads(8, 8, 128, 128)]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts_on_the_grid_leave_the_bits_alone_in_deterministic_mode(heads: Heads, dtype: torch.dtype) -> None:
    whole, attend = Batch([200], [200], 0, heads, dtype), TritonPagedAttention(True)
    want = attend(whole.q, whole.k_cache, whole.v_cache, whole.index, 0.2, None)
    assert relative_error(want, whole.plain(None)) <= BOUND[dtype]
    for start, end in ((0, 64), (64, 200), (128, 200)):
        index = whole.index_of([0], [end - start], [end], 0)
        got = attend(whole.q[start:end], whole.k_cache, whole.v_cache, index, 0.2, None)
        assert torch.equal(got, want[start:end])


def test_decode_rows_do_not_see_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([5, 600, 64], [1, 1, 1], 3, SMALL, torch.float32)
    want = batch.run(None)
    with monkeypatch.context() as patch:  # of two programs, which take turns
        patch.setattr(kernel, "WAVES_OF_PARTS", 2)
        patch.setattr(kernel, "traits_of", lambda device: DeviceTraits(num_processors=1))
        assert torch.equal(batch.run(None), want)
    for row, length in ((0, 5), (1, 600)):
        alone = batch.index_of([row], [1], [length], 1)
        assert torch.equal(batch.run(None, alone, batch.q[row : row + 1]), want[row : row + 1])


@pytest.mark.parametrize("heads", sized([SMALL], [Heads(16, 4, 256, 256)]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_how_far_ahead_keys_are_loaded_leaves_the_bits_alone(
    heads: Heads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, found = Batch([70, 300], [1, 1], 2, heads, dtype), []
    for most in (2, 1):  # rows up to which keys are loaded far ahead
        monkeypatch.setattr(kernel, "FEW_DECODES", most)
        found.append(TritonPagedAttention(True)(batch.q, batch.k_cache, batch.v_cache, batch.index, 0.2, None))
    assert torch.equal(*found)


def test_parts_of_several_blocks() -> None:
    """A row of more than MAX_PARTS smallest parts; in windows, parts that see nothing."""
    length = (2 * MAX_PARTS * PART_BLOCKS + 1) * 64 + 5
    batch = Batch([length], [1], 1, Heads(1, 1, 16, 16), torch.float32)
    assert batch.index.work is not None and len(batch.index.work.parts) <= MAX_PARTS
    for window in (None, 1000):
        assert relative_error(batch.run(window), batch.plain(window)) <= BOUND[torch.float32]


@gpu_only
@pytest.mark.parametrize("queries", [1, 100])
def test_long_context(queries: int) -> None:
    batch = Batch([262_144], [queries], int(queries == 1), Heads(16, 4, 256, 256), torch.bfloat16)
    assert relative_error(batch.run(None), batch.plain(None)) <= BOUND[torch.bfloat16]


def test_keys_are_shared_where_programs_are_few() -> None:
    def splits(num_programs: int) -> int:
        return num_splits(num_programs, 132, num_programs)

    assert num_splits(1, 1, 1) <= MAX_WAVES
    assert splits(16) == 8
    assert splits(128) == splits(1000) == splits(5000) == 1
    assert all(splits(n) * n <= max(n, MAX_WAVES * 132) for n in range(1, 600))


@pytest.mark.parametrize("latent", [False, True])
def test_padding_does_not_change_how_keys_are_shared(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tokens of prefill rows count, not the tiles of padding that a recorded step has."""
    found: list[int] = []
    monkeypatch.setattr(kernel, "num_splits", lambda programs, at_once, places: found.append(programs) or 3)
    batch = Batch([300, 400, 70], [1, 70, 20], 1, Heads(2, 1, 64, 64), torch.float32)
    v_cache = batch.k_cache[..., :48] if latent else batch.v_cache
    got = [
        TritonPagedAttention(False)(batch.q, batch.k_cache, v_cache, index, 0.2, None)
        for index in (batch.index, padded(batch.index, 0))
    ]
    assert torch.equal(*got) and len(found) == 2 and len(set(found)) == 1


@pytest.mark.parametrize(("num_kv_heads", "queries"), [(1, 1), (2, 16), (8, 16)])
@pytest.mark.parametrize("num_tokens", [1, 20, 100, 832, 5000])
def test_decode_rows_bound_the_memory_of_shares(
    num_kv_heads: int, queries: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have places in the scratch, but recorded steps, which have no more of them than prompt tokens, do not lose
    programs to them."""
    monkeypatch.setattr(kernel, "traits_of", lambda device: DeviceTraits(num_processors=132))
    cache, found = torch.empty(1, num_kv_heads, 64, 1), list[int]()
    for num_decodes in (0, num_tokens, 1000):
        q, index = torch.empty(num_decodes + num_tokens, num_kv_heads, 1), SimpleNamespace(num_decodes=num_decodes)
        call = kernel._Call(q, cache, cache, index, q, None, None, 1.0, None)  # type: ignore[arg-type]
        found.append(TritonPagedAttention(False)._splits(call, queries))
        assert found[-1] == 1 or len(q) * found[-1] * num_kv_heads <= 2 * MAX_WAVES * 132 * queries
    assert found[0] == found[1] and (num_tokens > 20 or found[0] > 1)
