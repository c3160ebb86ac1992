"""The operator table of the compiled C++ operators."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from forkpoint.ops.attention import inputs
from forkpoint.ops.cpu.tiles import FEW_ROWS, TileLinear, has_matrix_tiles
from forkpoint.ops.linear import reference as linear
from forkpoint.ops.linear.scaled import Matrix, ScaledMatrix, dense
from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import (
    ConvTaps,
    KVScales,
    Out,
    Records,
    RecurrenceInputs,
    RecurrenceParams,
    ScanInputs,
    ScanParams,
)
from forkpoint.ops.table import OpTable


class _Constants:
    """What a layer's constants look like on the C++ side, made when the layer first runs.

    Keyed by the identity of the layer's own tensor, which is kept, so that the key stays taken.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}

    def get(self, key: Any, make: Any) -> Any:
        found = self._made.get(id(key))
        if found is None:
            found = self._made[id(key)] = (key, make())
        return found[1]


class _StateOperators:
    """Convolutions, recurrences and scans: the calls that unpack an index or a layer's constants."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._made = module, _Constants()

    def _taps(self, taps: ConvTaps) -> Any:
        return self._made.get(taps.weight, lambda: self._module.ConvTaps(taps.weight, taps.bias))

    def _layer(self, params: RecurrenceParams) -> Any:
        s = params.spec

        def make() -> Any:
            spec = (s.num_k_heads, s.num_v_heads, s.key_dim, s.value_dim, s.double_beta, s.delta, s.step_limit)
            constants = (params.A_log, params.dt_bias, params.D)
            return self._module.RecurrenceLayer(*spec, *constants, s.per_key, s.bound or 0.0)

        return self._made.get(params, make)

    def _scan(self, params: ScanParams) -> Any:
        return self._made.get(params, lambda: self._module.ScanLayer(params.A, params.dt_bias, params.skip))

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
        return _into(out, self._module.recurrence_prefill(*inputs, self._layer(params), pool, *index.columns))

    def recurrence_decode(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: DecodeIndex, out: Out = None
    ) -> Any:
        return _into(out, self._module.recurrence_decode(*inputs, self._layer(params), pool, *index.columns))

    def recurrence_verify(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: VerifyIndex, records: Any
    ) -> Any:
        return self._module.recurrence_verify(*inputs, self._layer(params), pool, index.columns, records)

    def recurrence_fold(self, pool: Tensor, index: VerifyIndex, records: Records) -> None:
        self._module.recurrence_fold(pool, index.columns, records)

    def scan_prefill(
        self, inputs: ScanInputs, params: ScanParams, pool: Tensor, index: SegmentIndex, out: Out = None
    ) -> Any:
        return _into(out, self._module.scan_prefill(list(inputs), self._scan(params), pool, *index.columns))

    def scan_decode(
        self, inputs: ScanInputs, params: ScanParams, pool: Tensor, index: DecodeIndex, out: Out = None
    ) -> Any:
        return _into(out, self._module.scan_decode(list(inputs), self._scan(params), pool, *index.columns))

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
        return _into(out, self._module.scan_verify(list(inputs), layer, pool, index.columns, index.line, records))

    def scan_fold(self, pool: Tensor, index: VerifyIndex, records: Records) -> None:
        *lines, rates, dt_bias = records
        self._module.scan_fold(pool, index.columns, index.line, lines, rates, dt_bias)


def _into(out: Out, found: Tensor) -> Tensor:
    return found if out is None else out.copy_(found)


def _both(scales: KVScales | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if scales is None else (scales.k, scales.v)


def _kv_write(module: ModuleType) -> Any:
    def kv_write(
        k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, scales: KVScales | None
    ) -> None:
        module.kv_write(k, v, k_cache, v_cache, slot_mapping, *_both(scales))

    return kv_write


def _paged_attention(module: ModuleType) -> Any:
    attend = module.paged_attention

    def paged_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        window: int | None,
        gate: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        rows = (index.num_decodes, index.cu_queries, index.kv_lens, index.block_table, index.table_rows)
        out: Tensor = attend(q, k_cache, v_cache, *rows, scale, window, index.first_key, *_both(scales))
        if gate is not None:
            out = module.sigmoid_mul(out.flatten(1), gate).view(out.shape)
        return out

    return paged_attention


class _Packing:
    """Weights as the C++ side reads them. FP8 stays, which decodes faster than bf16 does in batches of a few rows."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def linear(self, weight: Matrix, bias: Tensor | None) -> Any:
        if not isinstance(weight, ScaledMatrix):
            return self._module.prepare_linear(weight, bias)
        return self._module.prepare_scaled_linear(*_codes(weight), weight.by_block, bias)

    def experts(self, gate_up: Matrix, down: Matrix) -> Any:
        if isinstance(gate_up, ScaledMatrix) and isinstance(down, ScaledMatrix):
            return self._module.prepare_scaled_experts(*_codes(gate_up), *_codes(down), gate_up.by_block)
        return self._module.prepare_experts(dense(gate_up), dense(down))


def _codes(matrix: ScaledMatrix) -> tuple[Tensor, Tensor, int]:
    return matrix.codes.view(torch.uint8), matrix.scales, matrix.rows


def cpp_table(module: ModuleType, base: OpTable, tiles: bool | None = None) -> OpTable:
    """`base` with its operators replaced by those of `module`, which `build.load_operators` gave.

    The operators take float32 and bfloat16 CPU tensors. Each computes a row from that row alone, every element
    in one fixed order of operations, so that they serve deterministic tables as they are. With `tiles` (None:
    where the machine has them) linear layers of many rows go to torch, and a deterministic table keeps
    `base`'s linear layers.
    """
    module.keep_freed_memory()
    replaced: dict[str, Any] = {}
    for own in (module, _StateOperators(module)):
        replaced |= {each.name: getattr(own, each.name) for each in fields(base) if hasattr(own, each.name)}
    packing = _Packing(module)
    replaced |= {"prepare_linear": packing.linear, "prepare_experts": packing.experts}
    replaced["qk_norm_rope_write"] = partial(inputs.qk_norm_rope_write, module.rmsnorm, module.rope, _kv_write(module))
    replaced["latent_write"] = partial(inputs.latent_write, module.rmsnorm, module.rope, module.store_rows)
    replaced["paged_attention"] = _paged_attention(module)
    ours = f"cpp ({torch.backends.cpu.get_cpu_capability()}, fp32 accumulation)"
    backends = {**base.backends, **dict.fromkeys(replaced, ours)}
    if has_matrix_tiles() if tiles is None else tiles:
        if base.deterministic:
            del replaced["prepare_linear"], replaced["linear"]
            backends["prepare_linear"] = backends["linear"] = base.backends["linear"]
        else:
            both = TileLinear(replaced["prepare_linear"], module.linear, base.prepare_linear, base.linear)
            replaced |= {"prepare_linear": both.prepare, "linear": both}
            backends["linear"] = f"{ours} to {FEW_ROWS} rows; torch (oneDNN, matrix tiles) above, bf16"
    product, activation = replaced.get("linear", base.linear), replaced["silu_mul"]
    prepare = replaced.get("prepare_linear", base.prepare_linear)
    replaced["prepare_linear_heads"] = partial(linear.prepare_linear_heads, prepare)
    replaced["linear_heads"] = partial(linear.linear_heads, product)
    backends["prepare_linear_heads"] = backends["linear_heads"] = backends["linear"]
    replaced["linear_silu_mul"] = partial(linear.linear_silu_mul, product, activation)
    backends["linear_silu_mul"] = backends["linear"]
    return replace(base, **replaced, backends=backends)
