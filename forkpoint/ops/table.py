"""The operators that a model calls, behind one table, so that a backend replaces them one by one.

`forkpoint.ops.select` builds the table; which backend serves each operator is decided there, explicitly,
and named in the start-up log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from forkpoint.ops.linear.scaled import Matrix
from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, RecordIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import (
    ConvTaps,
    KVScales,
    Out,
    QKNorm,
    Records,
    RecurrenceInputs,
    RecurrenceParams,
    RouteRule,
    ScanInputs,
    ScanParams,
)
from forkpoint.ops.rows.columns import IdColumns, LateColumns, WindowColumns
from forkpoint.ops.rows.reference import accept, catch_up, newest
from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns
from forkpoint.ops.sampling.reference import top_ids

STATE_OPERATORS = (
    "conv_prefill",
    "conv_update",
    "recurrence_prefill",
    "recurrence_decode",
    "scan_prefill",
    "scan_decode",
)


Inputs = TypeVar("Inputs", contravariant=True)
Params = TypeVar("Params", contravariant=True)
Index = TypeVar("Index", contravariant=True)
Linear: TypeAlias = Callable[[Tensor, Any], Tensor]
PrepareLinear: TypeAlias = Callable[[Matrix, Tensor | None], Any]
RMSNorm: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
SiluMul: TypeAlias = Callable[[Tensor], Tensor]
Experts: TypeAlias = Callable[[Tensor, Any, Tensor, Tensor], Tensor]


class GatedRMSNorm(Protocol):
    def __call__(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        gate_first: bool = False,
        sigmoid: bool = False,
    ) -> Tensor:
        """`rmsnorm(x) * weight * silu(gate)` per head of `[T, HV, V]`; with `gate_first` `rmsnorm(x * silu(gate)) *
        weight`; with `sigmoid` that in silu's place. `weight` `[V]` serves all heads, `[HV, V]` has each its own."""


class QKNormRopeWrite(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: QKNorm | None,
        cos_sin: Tensor | None,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        """From the projections `q[T, Hq, D]`, `k[T, Hkv, D]`, `v[T, Hkv, Dv]` to what attention reads: each head of q
        and k normalised (unless `norm` is None), its first `R` dims rotated neox style (unless `cos_sin[max_len, R]`
        is None; fp32, cos half, then sin half), keys and values stored in `[P, Hkv, 64, D]` caches (strided views of
        the arena). `positions[T]`, `slot_mapping[T]` int64; slot -1 stores nothing. With `scales`, which it stores, a
        factor is a head's largest magnitude over 448. q and k may be overwritten. -> queries `[T, Hq, D]`."""


class LatentWrite(Protocol):
    def __call__(
        self,
        q_rope: Tensor,
        latent: Tensor,
        weight: Tensor,
        eps: float,
        cos_sin: Tensor | None,
        positions: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """From `latent[T, R + P]`, whose first R dims serve all heads as key and value and whose others are a part of
        the key alone, to what attention reads in `cache[P, 1, 64, R + P]`: the first normalised with `weight[R]`, the
        others rotated neox style (unless `cos_sin[max_len, P]` is None). -> `q_rope[T, H, P]`, rotated alike."""


class PagedAttention(Protocol):
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
        """Causal GQA attention of `q[T, Hq, D]` over the rows' blocks, this step's tokens included, which
        qk_norm_rope_write has stored before, multiplied by the sigmoid of `gate[T, Hq * Dv]` if there is one. Keys and
        values in 8 bits come with their `scales`. Where both are one latent, `v_cache` is a view of the first Dv dims
        of `k_cache`, without gate, window and scales. -> `[T, Hq, Dv]`."""


class LatentPrefill(Protocol):
    def __call__(
        self,
        own: Tensor,
        shared: Tensor,
        cache: Tensor,
        rank: int,
        expand: Callable[[Tensor], Tensor],
        index: AttentionIndex,
        row: int,
        scale: float,
        out: Tensor,
    ) -> None:
        """Causal attention of the new tokens of one row, which the index's host copies describe, over the keys and
        values that `expand` makes of latents: `[N, rank] -> [N, H * (K + V)]`, each head's key, then its value. Queries
        are `own[T, H, K]` and, for the part that heads share, `shared[T, H, P]`; `out[T, H, V]`, all of that row's
        tokens; `cache[P, 1, 64, rank + P]`."""


class Conv(Protocol[Index]):
    def __call__(self, x: Tensor, taps: ConvTaps, pool: Tensor, index: Index) -> Tensor:
        """Depthwise causal conv of segments, or of one token per row. `x[T, D]` raw inputs, `pool[P, W-1,
        D]` (row W-2 newest); stores the last W-1 raw inputs at `dst` and at each save. -> `[T, D]`."""


class Recur(Protocol[Inputs, Params, Index]):
    def __call__(self, inputs: Inputs, params: Params, pool: Tensor, index: Index, out: Out = None) -> Tensor:
        """Over segments, or one step for each row; `pool[P, ...]` fp32, a strided view. The answer is in `out` if that
        is given.

        A recurrence has `pool[P, HV, V, K]` and answers `[T, HV, V]`; over segments it takes chunks of 64 tokens from
        each one's start. Mamba's selective scan has `pool[P, D, N]` and answers `[T, D]`: with
        `s = softplus(dt + dt_bias)`, `S = e^{s A} S + (s x) b^T` and `y = (S c + skip x) silu(z)`."""


class Recorded(Protocol[Inputs, Params, Index]):
    def __call__(
        self, inputs: Inputs, params: Params, pool: Tensor, index: Index, records: Records, out: Out = None
    ) -> Tensor:
        """The same where tokens leave records.

        recurrence_record is recurrence_decode, equal to rounding, for rows whose states are written every few tokens,
        with drafts or without. Records of windows of up to `w` tokens: updates `[L, interval + w - 1, HV, V]` fp32, and
        in lines `[L, interval + 2 w - 1, ...]` keys `[H, K]` as they are in `mixed`, their scales `[H]` and g `[HV]`,
        both fp32.

        scan_verify is scan_decode for rows with drafts, with the bits of as many calls of it. Records, in the inputs'
        dtype: x and dt `[L, M, D]` in one line each, b `[L, M, N]`; scan_fold is given A and dt_bias behind them."""


class ConvRecord(Protocol):
    def __call__(
        self,
        inputs: RecurrenceInputs,
        taps: ConvTaps,
        windows: Tensor,
        rows: DecodeIndex,
        params: RecurrenceParams,
        pool: Tensor,
        index: RecordIndex,
        records: Records,
        out: Out = None,
    ) -> Tensor | None:
        """conv_update of what `inputs` have in `mixed`, then recurrence_record of what it makes, for rows of one token;
        None for shapes that it does not take."""


class Fold(Protocol):
    def __call__(self, pool: Tensor, index: VerifyIndex, records: Records) -> None:
        """What a verify operator does before the tokens: take states on by the records of tokens that count, and by
        what the layer's part has for it as `fold_constants`, which stand behind them."""


class ConvVerify(Protocol):
    def __call__(self, x: Tensor, taps: ConvTaps, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
        """conv_update for rows with drafts: `x[T, D]` -> `[T, D]`. Records are raw inputs `[L, M, D]`: `M` tokens in
        each of `L` lines."""


class RecurrenceVerify(Protocol):
    def __call__(
        self, inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: VerifyIndex, records: Records
    ) -> Tensor:
        """recurrence_decode for rows with drafts -> `[T, HV, V]`. The outputs, and the states
        that are folded later, have the bits of as many calls of recurrence_decode. Records, fp32: updates
        `[L, M, HV, V]`, keys `[L, M, H, K]`, decays `[L, M, HV]`, or `[L, M, HV, K]` where each key has its own; a
        fold is `S <- decay S + update key^T`."""


class Route(Protocol):
    def __call__(self, scores: Tensor, rule: RouteRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token. `scores[T, E]`, or `[T, E + 1]` with the gate of shared experts that are gated;
        `bias[E]` fp32. -> `weights[T, top_k + num_shared]` fp32, `ids` of the same shape, int32."""


@dataclass(frozen=True, slots=True)
class OpTable:
    """One backend's operators. `redirects` names the state operators that honour `src != dst`; for the
    others the runner copies the state with `state_copy` before the step. `backends` is for the log."""

    # Pack a `[N, K]` weight, which may be in FP8, and its bias, once at load; the result is opaque to the model.
    prepare_linear: PrepareLinear
    # `x[T, K]`, packed -> `y[T, N]` in x's dtype.
    linear: Linear
    # silu_mul of it: `silu(x gate^T) * (x up^T)`, `x[T, K] -> y[T, I]`, for a packed `[2I, K]` weight, gate rows first.
    linear_silu_mul: Linear
    # Pack a weight for each head, `[H, N, K]`, once at load.
    prepare_linear_heads: Callable[[Tensor], Any]
    # Each head through its own weight: `x[T, H, K] -> y[T, H, N]` in x's dtype.
    linear_heads: Linear
    # Of x, weight and eps over the last dim in fp32, weight fp32 (any `1 +` folded in at load); result in x's dtype.
    rmsnorm: RMSNorm
    # Of x, residual, weight and eps: `residual += x` (may be in place); (norm of the new residual, the new residual).
    add_rmsnorm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gated_rmsnorm: GatedRMSNorm
    # `silu(x[:, :I]) * x[:, I:]` for `x[T, 2I]`.
    silu_mul: SiluMul
    qk_norm_rope_write: QKNormRopeWrite
    latent_write: LatentWrite
    paged_attention: PagedAttention
    conv_prefill: Conv[SegmentIndex]
    conv_update: Conv[DecodeIndex]
    recurrence_prefill: Recur[RecurrenceInputs, RecurrenceParams, SegmentIndex]
    recurrence_decode: Recur[RecurrenceInputs, RecurrenceParams, DecodeIndex]
    recurrence_record: Recorded[RecurrenceInputs, RecurrenceParams, RecordIndex]
    # What recurrence_record does to pool, index and records before the tokens.
    recurrence_settle: Callable[[Tensor, RecordIndex, Records], None]
    scan_prefill: Recur[ScanInputs, ScanParams, SegmentIndex]
    scan_decode: Recur[ScanInputs, ScanParams, DecodeIndex]
    scan_verify: Recorded[ScanInputs, ScanParams, VerifyIndex]
    scan_fold: Fold
    conv_verify: ConvVerify
    conv_fold: Fold
    recurrence_verify: RecurrenceVerify
    recurrence_fold: Fold
    route: Route
    # Pack expert weights, all in FP8 or none: `gate_up[E, 2I, H]` and `down[E, H, I]`, whose experts are
    # `down(silu(gate) * up)`, or `[E, I, H]`, whose experts have no gate: `down(relu(up) ** 2)`.
    prepare_experts: Callable[[Matrix, Matrix], Any]
    # `sum_j weights[t, j] * expert_{ids[t, j]}(x[t])` of `x[T, H]`, packed, weights and ids `[T, choices]` as of route.
    experts: Experts
    # `pool[dst[i]] = pool[src[i]]` for every one of the pools `[P, ...]`; -1 as src gives zeros, as dst nothing. One
    # launch copies bits, whatever their dtype, in any order of rows and parts of slots: any number of rows may read one
    # slot, a row may name its own slot twice, but none may read what another row writes.
    state_copy: Callable[[list[Tensor], Tensor, Tensor], None]
    # `logits[N, V]` -> (ids of the largest `[N]` int64, the lowest id among equals; `[N]` bool: the largest is neither
    # NaN, which any NaN makes it, nor infinite; else the id is some id).
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    # One id per row of `logits[N, V]`, by inverse CDF in the order of ids over the tokens kept by columns -> as greedy.
    sample_rows: Callable[[Tensor, SamplingColumns], tuple[Tensor, Tensor]]
    # In place on `logits[N, V]` fp32; `counts[L, V]` int32.
    apply_penalties: Callable[[Tensor, Tensor, PenaltyColumns], None]
    # -inf for ids whose bit is 0: `logits[N, V]` fp32 in place, `rows[M]` int64, `bits[M, ceil(V / 32)]` int32, id `i`
    # at bit `i % 32` of word `i // 32`.
    apply_bitmasks: Callable[[Tensor, Tensor, Tensor], None]
    # Put right, in place, what only the device knows of a step's rows, or of those of drafts, before the model runs.
    catch_up: Callable[[IdColumns, LateColumns | None], None] = catch_up
    # Of `windows[P, D]`, their `records[L, M, D]`, and slots, lines and numbers of pending tokens `[N]` int64: each
    # row's newest pending token's record, or else its slot's window -> `[N, D]`.
    newest: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = newest
    # From what was sampled at all positions, as greedy says it: the ids, -1 where not finite, and behind them how many
    # positions of each row count, int64. One counts if all ids sampled before it in its row were the drafts there.
    accept: Callable[[Tensor, Tensor, WindowColumns], Tensor] = accept
    # The order of each row of `logits[N, V]`, from the largest to the smallest, equal ones by id: the first so many ids
    # `[N, count]` and the rank `[N]`, from 1, of `token_ids[N]`, all int64.
    top_ids: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = top_ids
    redirects: frozenset[str] = frozenset(STATE_OPERATORS)
    deterministic: bool = False  # rows do not depend on what else is in the batch, bit for bit
    backends: dict[str, str] = field(default_factory=dict)
    latent_prefill: LatentPrefill | None = None  # what is cheaper than paged_attention for many tokens of a row
    wide_linear: Linear | None = None  # `linear` with weights in fp32 of an x in bfloat16, in fp32
    # linear and experts whose answers may be `unmade.Parts`: for add_rmsnorm, ranks and, of linear, route alone
    linear_parts: Linear | None = None
    experts_parts: Experts | None = None
    # linear by each of two packed matrices; None where that is no faster in one
    linear_both: Callable[[Tensor, Any, Any], tuple[Tensor, Tensor] | None] | None = None
    conv_record: ConvRecord | None = None
    # Of a head `weight[N, K]`, whose first so many rows are ids: what finds of `hidden[R, K]` the likeliest ids `[R]`
    # int64 and their logits `[R]` fp32, nearly always, and reads less than the head; None where none is faster.
    shortlist: Callable[[Tensor, int], Callable[[Tensor], tuple[Tensor, Tensor]] | None] | None = None
    rounding: OpTable | None = None  # the same for models in FP8 by block: what products read is rounded as it is made
    rounds: bool = False  # this is such a table


def operator_names() -> tuple[str, ...]:
    """Of those that every table has."""
    return tuple(one.name for one in fields(OpTable) if one.default is MISSING and one.name != "backends")


def operators_of(*owners: Any) -> dict[str, Any]:
    """The functions of modules, or of objects, that have the name of an operator: each is it."""
    names = [one.name for one in fields(OpTable)]
    return {name: getattr(own, name) for own in owners for name in names if callable(getattr(own, name, None))}
