"""Keys and values in 8 bits with a scale for each token and head, on every backend, against torch's own float8 and a
plain softmax in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.cache.layer_spec import KVSpec
from forkpoint.cache.layout import CacheLayout
from forkpoint.ops.attention.reference import kv_write
from forkpoint.ops.metadata import AttentionIndex
from forkpoint.ops.parameters import KVScales
from forkpoint.ops.select import torch_table
from forkpoint.ops.table import OpTable
from forkpoint.platforms.table import resolve_platform
from forkpoint.runtime.buffers import ArenaBuffer
from tests.ops.cpu_table import cpp
from tests.ops.plain_attention import plain_attention
from tests.ops.triton_cases import DEVICE, ON_GPU, relative_error, sized, triton_ops

DTYPES = [torch.float32, torch.bfloat16]
# The interpreter cuts bfloat16 off instead of rounding it.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Heads:
    queries: int
    keys: int
    dim: int
    value_dim: int


def _triton(deterministic: bool) -> OpTable:
    from forkpoint.ops.triton_table import triton_table

    return triton_table(torch_table(True)) if deterministic else triton_ops()


TABLES: dict[str, Callable[[bool], OpTable]] = {"torch": torch_table, "cpp": cpp, "triton": _triton}


@pytest.fixture(params=list(TABLES))
def backend(request: pytest.FixtureRequest) -> Callable[[bool], OpTable]:
    triton_ops()
    return TABLES[request.param]


def kept(x: Tensor) -> Tensor:
    """What is left of `x[T, H, D]` in 8 bits, by torch's float8."""
    factor = x.float().abs().amax(-1, keepdim=True) / 448 + 1e-30
    return (x.float() / factor).to(torch.float8_e4m3fn).float() * factor


class Rows:
    """Rows of tokens whose heads differ a thousandfold, in a real arena; row r's last `queries[r]` tokens ask."""

    def __init__(
        self, ops: OpTable, heads: Heads, kv_lens: list[int], queries: list[int], decodes: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        self.ops, self.heads, self.kv_lens, self.queries = ops, heads, kv_lens, queries
        spec = KVSpec.of(heads.keys, heads.dim, heads.value_dim, "bfloat16", takes_fp8=True).in_fp8()
        widths = [-(-n // 64) for n in kv_lens]
        platform = resolve_platform(torch.device(DEVICE).type)
        arena = ArenaBuffer(CacheLayout.create([(spec,), (spec,)]), sum(widths) + 2, platform)
        arena.data.fill_(0xFF)  # NaN, in scales too
        cache = arena.layers[1]
        self.caches, self.scales = (cache["k"], cache["v"]), KVScales(cache["k_scale"], cache["v_scale"])
        order = torch.randperm(sum(widths) + 2).tolist()
        table = [[order.pop() for _ in range(width)] for width in widths]
        slots = [table[r][p // 64] * 64 + p % 64 for r, n in enumerate(kv_lens) for p in range(n)]
        self.slots = torch.tensor(slots, device=DEVICE)
        total = len(slots)
        self.k, self.v = (
            (torch.randn(total, heads.keys, d) * 10 ** (torch.rand(total, heads.keys, 1) * 3 - 2)).to(DEVICE, dtype)
            for d in (heads.dim, heads.value_dim)
        )
        self.k[0, 0] = 0  # no magnitude to scale by
        self.q = torch.randn(sum(queries), heads.queries, heads.dim).to(DEVICE, dtype)
        kv_write(self.k, self.v, *self.caches, self.slots, self.scales)
        padded = [row + [-1] * (max(widths) - len(row)) for row in table]
        self.table = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
        self.index = self.index_of(queries, kv_lens, decodes, list(range(len(kv_lens))))

    def index_of(self, queries: list[int], kv_lens: list[int], decodes: int, lines: list[int]) -> AttentionIndex:
        none = torch.empty(0, dtype=torch.int64, device=DEVICE)
        return attention_index(queries, kv_lens, self.table, none, decodes, lines)

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store keys and values with the table's own operator, which leaves keys unchanged without norm and
        rotation."""
        at = torch.zeros(len(k), dtype=torch.int64, device=DEVICE)
        self.ops.qk_norm_rope_write(k.clone(), k.clone(), v, None, None, at, *self.caches, slots, self.scales)

    def run(self, index: AttentionIndex, q: Tensor, window: int | None = None) -> Tensor:
        return self.ops.paged_attention(q, *self.caches, index, 0.2, window, None, self.scales)

    def plain(self, window: int | None) -> Tensor:
        keys, values = (torch.split(kept(x), self.kv_lens) for x in (self.k, self.v))
        return plain_attention(self.q, self.queries, keys, values, 0.2, window)


SMALL, WIDE = Heads(4, 2, 16, 24), Heads(10, 1, 40, 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_is_torchs_float8(backend: Callable[[bool], OpTable], dtype: torch.dtype) -> None:
    rows = Rows(backend(False), Heads(3, 3, 24, 40), [6], [1], 1, dtype)
    slots = torch.tensor([64, -1, 70, 127, 1], device=DEVICE)
    for cache in (*rows.caches, rows.scales.k, rows.scales.v):
        cache.view(torch.uint8).fill_(0xFF)
    rows.store(rows.k[:5], rows.v[:5], slots)
    present, absent = slots >= 0, torch.ones(128, dtype=torch.bool, device=DEVICE)
    absent[slots[present]] = False
    for given, cache, scale in ((rows.k, rows.caches[0], rows.scales.k), (rows.v, rows.caches[1], rows.scales.v)):
        got = (cache[:2].float() * scale[:2]).transpose(1, 2).flatten(0, 1)
        assert bool(got[absent].isnan().all()), "nothing else is written"
        given = given[:5][present].float()
        got = got[slots[present]]
        assert bool((got - given).abs().le(given.abs().amax(-1, keepdim=True) * 2**-4).all())
        # A device may divide with another last bit, which moves what lies between two numbers to the other one.
        assert float((got != kept(given)).float().mean()) <= (0.01 if ON_GPU else 0.0)


@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    sized(
        [
            (SMALL, None, torch.bfloat16),
            (SMALL, 70, torch.float32),
            (WIDE, None, torch.float32),
            (WIDE, 70, torch.bfloat16),
        ],
        [(Heads(10, 1, 128, 32), None, torch.bfloat16), (Heads(16, 4, 256, 256), 70, torch.bfloat16)],
    ),
)
def test_attention_is_softmax_over_what_is_kept(
    backend: Callable[[bool], OpTable], heads: Heads, window: int | None, dtype: torch.dtype
) -> None:
    ops = backend(False)
    lens, queries = ([1, 600, 64, 330, 100], [1, 1, 1, 37, 100])
    if backend is _triton and not ON_GPU:
        lens, queries = ([1, 200, 64, 90], [1, 1, 1, 9])
    rows = Rows(ops, heads, lens, queries, 3, dtype)
    got = rows.run(rows.index, rows.q, window)
    assert got.dtype == dtype and relative_error(got, rows.plain(window)) <= BOUND[dtype]


def test_cuts_and_neighbours_leave_the_bits_alone_in_deterministic_mode(backend: Callable[[bool], OpTable]) -> None:
    ops = backend(True)
    rows = Rows(ops, SMALL, [200, 130], [200, 1], 0, torch.bfloat16)
    whole = rows.run(rows.index, rows.q)
    for start, end in ((0, 64), (64, 200)):
        got = rows.run(rows.index_of([end - start], [end], 0, [0]), rows.q[start:end])
        assert torch.equal(got, whole[start:end])
    single = rows.index_of([1, 1], [130, 200], 2, [1, 0])
    both = rows.run(single, rows.q[[200, 199]])
    assert torch.equal(rows.run(rows.index_of([1], [130], 1, [1]), rows.q[200:]), both[:1])


def test_what_is_not_finite_stays_so(backend: Callable[[bool], OpTable]) -> None:
    """A request with such logits is taken out of the cache, so no rounding may hide them."""
    rows = Rows(backend(False), SMALL, [3], [1], 1, torch.float32)
    for bad in (float("nan"), float("inf")):
        k = rows.k.clone()
        k[1, 0, 3] = bad
        rows.store(k, rows.v, rows.slots)
        out = rows.run(rows.index, rows.q)
        assert bool(out[0, :2].isnan().all()) and bool(out[0, 2:].isfinite().all())
