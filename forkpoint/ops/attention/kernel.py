"""Paged attention in Triton.

The query heads of one key head are the rows of one product (GQA). Prefill programs compute tiles of queries. Decode
programs compute parts of a row's keys, which a second launch joins. Prefill also splits keys and joins them where its
tiles alone would leave most of the device idle. Launches depend only on tensor shapes, so a recorded graph can run any
step that fits them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forkpoint.ops.attention.decode_kernel import decode_kernel
from forkpoint.ops.attention.latent_kernel import latent_kernel
from forkpoint.ops.attention.partial_kernel import partial_kernel
from forkpoint.ops.attention.prefill_kernel import join_kernel, prefill_kernel
from forkpoint.ops.attention.softmax import LOG2_E, scratch
from forkpoint.ops.launch import capped_registers, overlap, straight
from forkpoint.ops.launch_table import launch_table, turns
from forkpoint.ops.metadata import TILE, AttentionIndex, AttentionWork
from forkpoint.ops.parameters import KVScales
from forkpoint.ops.rounding import ceil_div, next_power_of_2
from forkpoint.ops.side_by_side import SideBySide, one_after_other
from forkpoint.platforms.table import traits_of

WAVES_OF_PARTS = 16  # programs of `decode_kernel` per processor at most; with more parts, programs take turns
PREFILL_REGISTERS = 128  # per thread, for heads of up to 128 dims, so that two programs share a processor
MAX_WAVES = 4  # waves of programs that split keys, which bounds the memory of their sums
FEW_DECODES = 16  # rows; up to here each program has a processor and loads far ahead
SOME_DECODES = 64  # rows; up to here programs load as far ahead, with fewer keys a step (and other bits)


@functools.cache
def num_splits(num_programs: int, at_once: int, num_places: int) -> int:
    """Return over how many programs to split the keys of each of `num_programs` tiles and key heads.

    `at_once` programs run at the same time. The best split takes the fewest whole waves, if joining costs 0.4 % per
    split. Each split takes memory for the sums of `num_places` programs, of which at most MAX_WAVES waves are allowed.
    """

    def cost(splits: int) -> float:
        waves = -(-num_programs * splits // at_once)
        return waves / splits + 0.004 * splits

    return min(range(1, max(1, MAX_WAVES * at_once // num_places) + 1), key=cost)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's tensors and the sizes that follow from their shapes."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    index: AttentionIndex
    out: Tensor
    gate: Tensor | None
    scales: KVScales | None
    scale: float
    window: int | None

    @property
    def work(self) -> AttentionWork:
        assert self.index.work is not None
        return self.index.work

    @property
    def sizes(self) -> dict[str, Any]:
        kv_heads, block, dim, value_dim = *self.k_cache.shape[1:], self.v_cache.shape[3]
        return {
            "HEADS": kv_heads,
            "GROUP": self.q.shape[1] // kv_heads,
            "D": dim,
            "DV": value_dim,
            "BLOCK": block,
        }

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors that locate rows and keys, in the order of the kernels' arguments."""
        return self.index.kv_lens, self.index.table_rows, self.index.block_table

    @property
    def gate_token(self) -> int:
        return 0 if self.gate is None else self.gate.stride(0)

    @property
    def overlap(self) -> dict[str, Any]:
        return overlap(self.q.device, self.q.shape[0])

    def launch(
        self, kernel: Any, programs: int, where: tuple[Tensor | None, ...], counts: tuple[int, ...], **options: Any
    ) -> None:
        """Launch a kernel over keys and values. `where` precedes the tensors of `rows` in its arguments, `counts`
        follow."""
        scales = (None, None) if self.scales is None else (self.scales.k, self.scales.v)
        scale_block = None if self.scales is None else self.scales.k.stride(0)
        strides = (*self.q.stride()[:2], *self.k_cache.stride()[:2], *self.v_cache.stride()[:2], scale_block)
        kernel[(programs,)](
            *(self.q, self.k_cache, self.v_cache, *scales, self.out, self.gate, *where, *self.rows, *counts),
            *(self.index.block_table.stride(0), self.gate_token, *strides, self.scale, self.window),
            **self.sizes,
            **self.overlap,
            **options,
        )


def _join(call: _Call, sums: Sequence[Tensor], splits: int = 0, queries: int = 1, block: int = TILE) -> None:
    """Join the parts of decode rows, or the `splits` shares of each tile of `queries` queries, in `call.out[T, H,
    Dv]`. Shares are whole blocks of `block` keys."""
    work, index, heads = call.work, call.index, call.q.shape[1]
    form = {"HEADS": heads, "DV": call.sizes["DV"], "BLOCK": block, "QUERIES": queries}
    form |= {"FOLDED": 1 if splits else work.folded, "num_warps": 2}
    for tiles in turns(work.tiles, TILE * heads) if splits else (None,):
        num_queries = index.num_decodes if tiles is None else tiles.shape[0] * TILE
        parts = (work.part_ptr, None if splits else work.lead, tiles)
        operands = (*sums, call.out, call.gate, *parts, index.cu_queries, index.kv_lens)
        join_kernel[(num_queries * heads,)](*operands, splits, call.gate_token, call.window, **form, **call.overlap)


def _takes_steps(q: Tensor, cache: Tensor, rank: int) -> bool:
    """Return whether `latent_step_kernel` supports queries `[T, H, R + P]` and latents `[N, 1, block, R + P]`.

    Two of its programs must fit on a processor, and tensor descriptors must be able to describe the tiles."""
    (_, heads, dim), block = q.shape, cache.shape[2]
    fits = q.element_size() == 2 and heads <= 32 and rank in (64, 128, 256, 512) and dim - rank == 64
    fits = fits and block in (8, 16, 32, TILE)
    aligned = cache.data_ptr() % 16 == 0 and 2 * cache.stride(0) % 16 == 0
    return traits_of(q.device).has_warpgroups and fits and aligned


def _launch_steps(call: _Call, sums: Sequence[Tensor], shared_dim: int, **options: Any) -> None:
    """Launch `latent_step_kernel` over all parts of decode rows."""
    # imported late, because not every Triton has Gluon
    from forkpoint.ops.attention.latent_step_kernel import latent_steps

    work, rank = call.work, call.q.shape[2] - shared_dim
    where = (call.out, *sums, work.parts, work.part_ptr, *call.rows, call.index.num_decodes)
    options |= {**call.overlap, "FIRST": call.index.first_key}
    latent_steps(call.q, call.k_cache, rank, work.parts.shape[0], where, call.scale, options)


def _takes_warps(call: _Call) -> bool:
    """Return whether `prefill_warps_kernel` supports the call.

    A tile needs two heads of a key head to fill the rows of both groups of warps. Tensor descriptors must be able to
    describe the pages."""
    sizes, caches = call.sizes, (call.k_cache, call.v_cache)
    fits = call.q.element_size() == 2 and sizes["D"] == sizes["DV"] in (128, 256) and sizes["BLOCK"] == TILE
    plain = call.scales is None and call.window is None and 2 <= sizes["GROUP"] <= 64
    aligned = all(x.data_ptr() % 16 == 0 and all(2 * n % 16 == 0 for n in x.stride()[:2]) for x in caches)
    return traits_of(call.q.device).has_warpgroups and fits and plain and aligned


@dataclass(frozen=True, slots=True)
class TritonPagedAttention:
    """The `paged_attention` operator.

    With `deterministic`, a query's sums are added in one order, however its prompt was cut and whatever else is in the
    batch. Otherwise the keys of a few queries are split among as many programs as the device can run."""

    deterministic: bool
    side_by_side: SideBySide = one_after_other

    def _decode_launch(self, num_rows: int) -> tuple[int, int]:
        """Return the keys per step of a decode program, and its number of loads in flight."""
        if num_rows <= FEW_DECODES:
            return 64, 3
        if self.deterministic:
            return 64, 2
        return 32, (3 if num_rows <= SOME_DECODES else 2)  # with 2 loads in flight, four programs fit on a processor

    def _splits(self, call: _Call, queries: int) -> int:
        """Return over how many programs to split the keys of prefill tiles, whose programs have `queries` queries.

        The step's tokens say how many programs it has. Most tiles of a recorded step may be padding."""
        if self.deterministic:
            return 1
        num_tokens, heads = len(call.q), call.sizes["HEADS"]
        num_programs = max(1, ceil_div(num_tokens - call.index.num_decodes, queries)) * heads
        # The scratch has places for decode rows, too. Recorded steps, which have no more of them than prompt tokens,
        # keep their splits.
        num_places = max(num_programs, ceil_div(num_tokens, 2 * queries) * heads)
        return num_splits(num_programs, traits_of(call.q.device).num_processors, num_places)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        window: int | None,
        gate: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Return attention over the rows' blocks, `[T, Hq, Dv]` (`table.PagedAttention`).

        `Hq / Hkv` is at most 64.
        """
        if v_cache.stride(2) != v_cache.shape[3]:
            assert window is None and gate is None, "latents are attended to without windows and gates"
            return self._latent(q, k_cache, v_cache.shape[3], index, scale)
        assert k_cache[0, 0].is_contiguous() and v_cache[0, 0].is_contiguous(), "a head's share of a block is dense"
        assert q.stride(2) == 1 and index.block_table.stride(1) == 1 and (gate is None or gate.stride(1) == 1)
        assert scales is None or scales.fit(k_cache), "scales lie in their blocks, one for each key"
        assert scale > 0, "largest scores are taken before they are scaled"
        out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
        call = _Call(q, k_cache, v_cache, index, out, gate, scales, scale * LOG2_E, window)
        decodes, prefills = call.work.parts.shape[0] or index.num_decodes, call.work.tiles.shape[0]
        if decodes and prefills:
            self.side_by_side(q.device, lambda: self._decode(call), lambda: self._prefill(call))
        elif decodes:
            self._decode(call)
        elif prefills:
            self._prefill(call)
        return out

    def partial(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        starts: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Return what rows with one query have of the keys here (`table.PartialAttention`)."""
        assert starts is None, "keys of layers with windows are not split between devices"
        (rows, heads, dim), rank, device = q.shape, v_cache.shape[3], q.device
        found = torch.empty((rows, heads, rank + 1), dtype=torch.float32, device=device)
        latent = v_cache.stride(2) != rank
        most = int(min(heads, launch_table(device).latent_heads)) if latent else heads
        for first in range(0, heads, most):
            part = q[:, first : first + most]
            call = _Call(part, k_cache, v_cache, index, found, None, scales, scale * LOG2_E, None)
            work, num_heads = call.work, part.shape[1]
            assert work.folded == 1, "a rank's keys do not grow with each token of a row"
            sums = scratch(work.parts.shape[0] * num_heads, rank, device)
            if work.parts.shape[0] and latent:
                self._launch_latent_parts(call, sums, dim - rank)
            elif work.parts.shape[0]:
                self._launch_parts(call, sums, PARTIAL=True)
            out = found[:, first : first + num_heads]
            form = {"HEADS": num_heads, "DV": rank, "num_warps": 2, **call.overlap}
            if rows:
                partial_kernel[(rows * num_heads,)](*sums, out, work.part_ptr, *out.stride()[:2], **form)
        return found

    def _launch_latent_parts(self, call: _Call, sums: Sequence[Tensor], shared_dim: int) -> None:
        """Compute the sums of all parts of rows with one query, of queries and latents in `call`."""
        q, cache, index, work, table = call.q, call.k_cache, call.index, call.work, launch_table(call.q.device)
        if _takes_steps(q, cache, q.shape[2] - shared_dim):
            _launch_steps(call, sums, shared_dim, PARTIAL=True)
            return
        rows, wide = max(16, next_power_of_2(q.shape[1])), q.dtype == torch.float32
        keys = table.latent_keys // 2 if wide or rows > table.latent_rows else table.latent_keys
        sizes = {"HEADS": q.shape[1], "R": q.shape[2] - shared_dim, "P": shared_dim, "BLOCK": cache.shape[2]}
        form = {"QUERIES": 1, "BLOCK_M": rows, "DECODE": True, "SPLIT": False, "KEYS": min(keys, cache.shape[2])}
        form |= {"num_warps": 8 if wide or rows > 32 else 4, "num_stages": 1 if wide else 2, "PARTIAL": True}
        operands = (q, cache, call.out, *sums, work.parts, work.part_ptr, index.cu_queries, *call.rows)
        counts = (index.num_decodes, work.parts.shape[0], 1)
        strides = (index.block_table.stride(0), *q.stride()[:2], cache.stride(0))
        options = {**sizes, **form, **straight(q.device), **call.overlap, "FIRST": index.first_key}
        latent_kernel[(work.parts.shape[0],)](*operands, *counts, *strides, call.scale, **options)

    def _latent(self, q: Tensor, cache: Tensor, rank: int, index: AttentionIndex, scale: float) -> Tensor:
        """Attend with all heads of `q[T, H, R + P]` to latents `cache[P, 1, block, R + P]`; return `[T, H, R]`."""
        (tokens, heads, dim), table = q.shape, launch_table(q.device)
        if heads > table.latent_heads:
            parts = torch.split(q, int(table.latent_heads), 1)
            return torch.cat([self._latent(part, cache, rank, index, scale) for part in parts], 1)
        out, wide = q.new_empty(tokens, heads, rank), q.dtype == torch.float32
        call = _Call(q, cache, cache[..., :rank], index, out, None, None, scale * LOG2_E, None)
        assert cache.shape[1] == 1 and cache[0, 0].is_contiguous() and q.stride(2) == 1
        work, num_parts, num_tiles = call.work, call.work.parts.shape[0], call.work.tiles.shape[0]
        form, wide_heads = straight(q.device), next_power_of_2(heads)
        block_m = max(16, table.latent_rows, wide_heads)
        queries = min(TILE, block_m // (wide_heads if form["STRAIGHT"] else heads))
        subs, splits = ceil_div(TILE, queries), self._splits(call, queries) if num_tiles else 1
        sums = scratch(max(num_parts, tokens * splits if splits > 1 else 0) * heads, rank, q.device)
        sizes = {"HEADS": heads, "R": rank, "P": dim - rank, "BLOCK": cache.shape[2], "QUERIES": queries, **form}
        in_turns = turns(work.tiles, subs * splits)
        stepped = num_parts and _takes_steps(q, cache, rank)
        decodes = (True, work.parts, max(16, wide_heads))
        for decode, items, rows in [decodes, *((False, tiles, block_m) for tiles in in_turns)]:
            # Limits of on-chip memory.
            keys = table.latent_keys // 2 if wide or rows > table.latent_rows else table.latent_keys
            if decode and stepped:
                _launch_steps(call, sums, dim - rank, PARTIAL=False)
            elif items.shape[0]:
                operands = (q, cache, out, *sums, items, work.part_ptr, index.cu_queries, *call.rows)
                counts = (index.num_decodes, items.shape[0], splits)
                strides = (index.block_table.stride(0), *q.stride()[:2], cache.stride(0))
                programs = items.shape[0] * (1 if decode else subs * splits)
                form = {"BLOCK_M": rows, "DECODE": decode, "SPLIT": splits > 1 and not decode}
                # The sums of a few rows fit in the registers of four warps.
                form |= {"num_warps": 8 if wide or rows > 32 else 4, "num_stages": 1 if wide else 2, **call.overlap}
                form |= {"KEYS": min(keys, cache.shape[2]), "FIRST": index.first_key if decode else 0}
                latent_kernel[(programs,)](*operands, *counts, *strides, call.scale, **sizes, **form)
            # Join parts before shares reuse the scratch.
            if decode and index.num_decodes:
                _join(call, sums)
        if splits > 1:
            _join(call, sums, splits, queries, cache.shape[2])
        return out

    def _decode(self, call: _Call) -> None:
        num_parts = call.work.parts.shape[0]
        sums = scratch(num_parts * call.work.folded * call.q.shape[1], call.sizes["DV"], call.q.device)
        if num_parts:
            self._launch_parts(call, sums)
        _join(call, sums)

    def _launch_parts(self, call: _Call, sums: Sequence[Tensor], **options: Any) -> None:
        """Compute the sums of all parts of rows with one query."""
        work, sizes, index = call.work, call.sizes, call.index
        keys, stages = self._decode_launch(index.num_decodes)
        most = WAVES_OF_PARTS * traits_of(call.q.device).num_processors
        call.launch(
            decode_kernel,
            min(work.parts.shape[0] * sizes["HEADS"], most),
            (*sums, work.parts, work.part_ptr, work.lead),
            (index.num_decodes,),
            FIRST=index.first_key,
            KEYS=min(keys, sizes["BLOCK"]),
            FOLDED=work.folded,
            num_warps=4,
            num_stages=stages if call.q.dtype != torch.float32 else 1,
            **options,
        )

    def _prefill_warps(self, call: _Call, sums: Sequence[Tensor], splits: int, queries: int) -> int:
        """Launch the kernel with groups of warps. Return the number of keys of its tiles, which shares do not cut."""
        # imported late, because not every Triton has Gluon
        from forkpoint.ops.attention.prefill_warps_kernel import prefill_warps

        where = (call.out, call.gate, *sums, call.work.tiles, call.index.cu_queries, *call.rows)
        # Tiles of one page give the bits of the portable kernel.
        caches, most_keys = (call.k_cache, call.v_cache), TILE if self.deterministic else 2 * TILE
        counts = (splits, queries, call.gate_token)
        return prefill_warps(call.q, caches, where, *counts, call.scale, most_keys, call.overlap)

    def _prefill(self, call: _Call) -> None:
        sizes, form, wide = call.sizes, straight(call.q.device), call.q.dtype == torch.float32
        most = launch_table(call.q.device).prefill_rows // (1 + wide)
        block_m = max(16, min(most, next_power_of_2(TILE * sizes["GROUP"])))
        heads_wide = next_power_of_2(sizes["GROUP"]) if form["STRAIGHT"] else sizes["GROUP"]
        queries = min(TILE, block_m // heads_wide)
        splits, (num_tokens, heads, _), block = self._splits(call, queries), call.q.shape, sizes["BLOCK"]
        sums = scratch(num_tokens * heads * splits if splits > 1 else 0, sizes["DV"], call.q.device)
        if _takes_warps(call):
            block = self._prefill_warps(call, sums, splits, queries)
        else:
            self._prefill_portable(call, sums, splits, {"QUERIES": queries, "BLOCK_M": block_m, **form})
        if splits > 1:
            _join(call, sums, splits, queries, block)

    def _prefill_portable(self, call: _Call, sums: Sequence[Tensor], splits: int, form: dict[str, Any]) -> None:
        sizes, wide, full = call.sizes, call.q.dtype == torch.float32, form["BLOCK_M"] == 128
        programs = ceil_div(TILE, form["QUERIES"]) * sizes["HEADS"] * splits  # programs per tile
        # Two such programs share a processor: one multiplies while the other computes exponentials.
        narrow = max(sizes["D"], sizes["DV"]) <= 128 and splits == 1 and not wide and call.scales is None
        capped = capped_registers(call.q.device, PREFILL_REGISTERS) if narrow and full else {}
        for tiles in turns(call.work.tiles, programs):
            call.launch(
                prefill_kernel,
                tiles.shape[0] * programs,
                (*sums, tiles, call.index.cu_queries),
                (tiles.shape[0], splits),
                **form,
                SPLIT=splits > 1,
                num_warps=8 if full or wide else 4,
                num_stages=1 if wide else 2,
                **capped,
            )
