"""The operator table of the compiled C++ operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forkpoint.ops.attention.inputs import Inputs
from forkpoint.ops.cpu.tile_attention import LEAST_QUERIES, TileAttention, has_matrix_tiles
from forkpoint.ops.linear.packed import PackedMatrix
from forkpoint.ops.linear.reference import OfLinear
from forkpoint.ops.linear.scaled import Matrix, ScaledMatrix, dense
from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import (
    ConvTaps,
    KVScales,
    Out,
    PoolRule,
    Records,
    RecurrenceInputs,
    RecurrenceParams,
    ScanInputs,
    ScanParams,
    into,
)
from forkpoint.ops.table import OpTable, operators_of


class OrderedLinear(NamedTuple):
    """A packed weight whose columns are in another order than those of x: `order[K]`."""

    packed: Any
    order: Tensor


class _Operators:
    """Operators whose C++ functions take other arguments: unpacked indexes, constants, scales and matrices."""

    def __init__(self, module: ModuleType, tiles: bool, deterministic: bool) -> None:
        self._module = module
        self._tiles, self._deterministic = tiles, deterministic
        self._made: dict[int, tuple[Any, Any]] = {}

    def _kept(self, own: Any, make: Callable[[], Any]) -> Any:
        """Return a layer's constants in their C++ form, created when the layer first runs.

        The key is the identity of the layer's own constants. They are kept alive, so that the key stays unique.
        """
        if id(own) not in self._made:
            self._made[id(own)] = own, make()
        return self._made[id(own)][1]

    def _taps(self, taps: ConvTaps) -> Any:
        return self._kept(taps.weight, lambda: self._module.ConvTaps(taps.weight, taps.bias))

    def _layer(self, params: RecurrenceParams) -> Any:
        s = params.spec

        def make() -> Any:
            spec = (s.num_k_heads, s.num_v_heads, s.key_dim, s.value_dim, s.double_beta, s.delta, s.step_limit)
            constants = (params.A_log, params.dt_bias, params.D)
            return self._module.RecurrenceLayer(*spec, *constants, s.per_key, s.bound or 0.0)

        return self._kept(params, make)

    def _scan(self, params: ScanParams) -> Any:
        return self._kept(params, lambda: self._module.ScanLayer(params.A, params.dt_bias, params.skip))

    def conv_prefill(self, x: Tensor, taps: ConvTaps, pool: Tensor, index: SegmentIndex) -> Any:
        return self._module.conv_prefill(x, self._taps(taps), pool, taps.silu, *index.columns)

    def conv_update(self, x: Tensor, taps: ConvTaps, pool: Tensor, index: DecodeIndex) -> Any:
        return self._module.conv_update(x, self._taps(taps), pool, taps.silu, *index.columns)

    def conv_verify(self, x: Tensor, taps: ConvTaps, pool: Tensor, index: VerifyIndex, records: Records) -> Any:
        return self._module.conv_verify(x, self._taps(taps), pool, taps.silu, index.single_columns, *records)

    def conv_fold(self, pool: Tensor, index: VerifyIndex, records: Records) -> None:
        self._module.conv_fold(pool, index.single_columns, *records)

    def recurrence_prefill(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: SegmentIndex, out: Out = None
    ) -> Any:
        return into(out, self._module.recurrence_prefill(*inputs, self._layer(params), pool, *index.columns))

    def recurrence_decode(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: DecodeIndex, out: Out = None
    ) -> Any:
        return into(out, self._module.recurrence_decode(*inputs, self._layer(params), pool, *index.columns))

    def recurrence_verify(
        self,
        inputs: RecurrenceInputs,
        params: RecurrenceParams,
        pool: Tensor,
        index: VerifyIndex,
        records: Records,
        out: Out = None,
    ) -> Any:
        layer = self._layer(params)
        return into(out, self._module.recurrence_verify(*inputs, layer, pool, index.columns, records))

    def recurrence_fold(self, pool: Tensor, index: VerifyIndex, records: Records) -> None:
        self._module.recurrence_fold(pool, index.columns, records)

    def scan_prefill(
        self, inputs: ScanInputs, params: ScanParams, pool: Tensor, index: SegmentIndex, out: Out = None
    ) -> Any:
        return into(out, self._module.scan_prefill(list(inputs), self._scan(params), pool, *index.columns))

    def scan_decode(
        self, inputs: ScanInputs, params: ScanParams, pool: Tensor, index: DecodeIndex, out: Out = None
    ) -> Any:
        return into(out, self._module.scan_decode(list(inputs), self._scan(params), pool, *index.columns))

    def scan_verify(
        self,
        inputs: ScanInputs,
        params: ScanParams,
        pool: Tensor,
        index: VerifyIndex,
        records: Records,
        out: Out = None,
    ) -> Any:
        layer = self._scan(params)
        return into(out, self._module.scan_verify(list(inputs), layer, pool, index.columns, index.line, records))

    def scan_fold(self, pool: Tensor, index: VerifyIndex, records: Records) -> None:
        *lines, rates, dt_bias = records
        self._module.scan_fold(pool, index.columns, index.line, lines, rates, dt_bias)

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, key_places: Tensor, scales: KVScales | None
    ) -> None:
        self._module.kv_write(k, v, k_cache, v_cache, key_places, *_both(scales))

    def paged_attention(
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
        return self._attend(q, k_cache, v_cache, index, scale, window, gate, scales)

    def choose_pools(self, q: Tensor, weights: Tensor, cache: Tensor, index: AttentionIndex, rule: PoolRule) -> Any:
        rows = (index.cu_queries, index.kv_lens, index.block_table, index.table_rows)
        return self._module.choose_pools(q, weights, cache, *rows, rule.size, rule.most)

    def pool_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        chosen: Tensor,
        rule: PoolRule,
        gate: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        return self._attend(q, k_cache, v_cache, index, scale, None, gate, scales, chosen, rule.size)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        window: int | None,
        gate: Tensor | None,
        scales: KVScales | None,
        chosen: Tensor | None = None,
        pool_size: int = 0,
    ) -> Tensor:
        """Attend to all keys, or to those of chosen pools."""
        rows = (index.num_decodes, index.cu_queries, index.kv_lens, index.block_table, index.table_rows)
        places = (*rows, scale, window, index.first_key, *_both(scales), chosen, pool_size)
        out: Tensor = self._module.paged_attention(q, k_cache, v_cache, *places)
        if gate is not None:
            out = self._module.sigmoid_mul(out.flatten(1), gate).view(out.shape)
        return out

    def prepare_linear(self, weight: Matrix, bias: Tensor | None) -> Any:
        """Pack a weight for `linear`. Quantised weights stay so: they decode small batches faster.

        Matrix tiles round quantised weights, and products of a few rows do not. A deterministic table therefore widens
        them here for tiles.
        """
        if self._tiles and self._deterministic:
            weight = dense(weight)
        if isinstance(weight, PackedMatrix):
            packed = self._module.prepare_four_bit_linear(*_fields(weight), bias, self._tiles)
            return packed if weight.order is None else OrderedLinear(packed, weight.order)
        if not isinstance(weight, ScaledMatrix):
            return self._module.prepare_linear(weight, bias)
        return self._module.prepare_scaled_linear(*_codes(weight), weight.by_block, bias, self._tiles)

    def linear(self, x: Tensor, packed: Any) -> Any:
        if isinstance(packed, OrderedLinear):
            return self._module.linear(x.index_select(1, packed.order), packed.packed)
        return self._module.linear(x, packed)

    def linear_silu_mul(self, x: Tensor, packed: Any) -> Any:
        if isinstance(packed, OrderedLinear):
            return self._module.linear_silu_mul(x.index_select(1, packed.order), packed.packed)
        return self._module.linear_silu_mul(x, packed)

    def prepare_experts(self, gate_up: Matrix, down: Matrix) -> Any:
        """Pack expert weights. They stay quantised if both are, in the same way: deterministic tables use vectors."""
        tiled = self._tiles and not self._deterministic
        if isinstance(gate_up, PackedMatrix) and isinstance(down, PackedMatrix):
            assert gate_up.order is None and down.order is None, "experts in several orders are loaded widened"
            return self._module.prepare_four_bit_experts(_fields(gate_up), _fields(down), tiled)
        if isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix):
            return self._module.prepare_scaled_experts(*_codes(gate_up), *_codes(down), gate_up.by_block, tiled)
        return self._module.prepare_experts(dense(gate_up), dense(down))


def _both(scales: KVScales | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scales is None else (scales.k, scales.v)


def _fields(matrix: PackedMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    return matrix.words, matrix.scales, matrix.factors, matrix.zeros, matrix.group


def _codes(matrix: ScaledMatrix) -> tuple[Tensor, Tensor, int]:
    return matrix.codes.view(torch.uint8), matrix.scales, matrix.rows


def cpp_table(module: ModuleType, base: OpTable, tiles: bool | None = None) -> OpTable:
    """Return `base` with the C++ operators of `module`, which `build.load_operators` loaded.

    The operators support float32 and bfloat16 CPU tensors. Each computes a row from that row alone, every element in
    one fixed order of operations, so it also serves deterministic tables. There are two exceptions with `tiles` (None:
    if the machine has matrix tiles) in a table that is not deterministic: products of many rows and a quantised weight
    round the weight, and torch computes the attention of many queries.
    """
    module.keep_freed_memory()
    if tiles is None:
        tiles = has_matrix_tiles()
    cpp = _Operators(module, tiles, base.deterministic)
    composed = OfLinear(cpp.prepare_linear, cpp.linear, module.silu_mul)
    inputs = Inputs(module.rmsnorm, module.rope, cpp.kv_write, module.store_rows)
    replaced = operators_of(composed, module, cpp, inputs)
    ours = f"cpp ({torch.backends.cpu.get_cpu_capability()}, fp32 accumulation)"
    backends = {**base.backends, **dict.fromkeys(replaced, ours)}
    if tiles and not base.deterministic:
        replaced["paged_attention"] = TileAttention(cpp.paged_attention, module.sigmoid_mul)
        backends["paged_attention"] = f"{ours}; torch (matrix tiles) from {LEAST_QUERIES} queries of a row on, bf16"
    return replace(base, **replaced, backends=backends)
