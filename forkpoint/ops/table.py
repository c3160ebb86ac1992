"""The operators that a model calls, in one table, so that a backend can replace them one by one.

`forkpoint.ops.select` builds the table, chooses the backend of each operator, and names it in the start-up log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from forkpoint.ops.attention import pools, reference
from forkpoint.ops.attention.image import image_attention
from forkpoint.ops.conv1d import windows
from forkpoint.ops.linear.scaled import Matrix
from forkpoint.ops.metadata import AttentionIndex, DecodeIndex, RecordIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.norm.reference import add_layer_norm, mix_residuals
from forkpoint.ops.parameters import (
    ConvTaps,
    GateLimits,
    KVScales,
    Out,
    PoolRule,
    QKNorm,
    Records,
    RecurrenceInputs,
    RecurrenceParams,
    RouteRule,
    ScanInputs,
    ScanParams,
)
from forkpoint.ops.rows import host_rows
from forkpoint.ops.rows.columns import IdColumns, OptimisticColumns, SpanColumns
from forkpoint.ops.rows.reference import accept, catch_up, newest
from forkpoint.ops.sampling.columns import PenaltyColumns, SamplingColumns
from forkpoint.ops.sampling.reference import top_ids
from forkpoint.ops.side_by_side import SideBySide, one_after_other

STATE_OPERATORS = (
    "conv_prefill",
    "conv_update",
    "recurrence_prefill",
    "recurrence_decode",
    "scan_prefill",
    "scan_decode",
    "window_prefill",
    "window_update",
)


Inputs = TypeVar("Inputs", contravariant=True)
Params = TypeVar("Params", contravariant=True)
Index = TypeVar("Index", contravariant=True)
Linear: TypeAlias = Callable[[Tensor, Any], Tensor]
PrepareLinear: TypeAlias = Callable[[Matrix, Tensor | None], Any]
RMSNorm: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
SiluMul: TypeAlias = Callable[[Tensor], Tensor]


class Experts(Protocol):
    def __call__(
        self, x: Tensor, packed: Any, weights: Tensor, ids: Tensor, limits: GateLimits | None = None
    ) -> Tensor:
        """Return `sum_j weights[t, j] * expert_{ids[t, j]}(x[t])` for `x[T, H]` and packed weights of experts.

        `weights` and `ids` `[T, choices]` come from `route`. `limits` clamp both halves of a gated expert's first
        product, as `silu_mul` does in activation/reference.py."""


class GatedRMSNorm(Protocol):
    def __call__(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool = False, sigmoid: bool = False
    ) -> Tensor:
        """Return `rmsnorm(x) * weight * silu(gate)` for each head of `[T, HV, V]`.

        With `gate_first` it is `rmsnorm(x * silu(gate)) * weight`. With `sigmoid` the gate is a sigmoid. A weight
        `[V]` serves all heads; a weight `[HV, V]` has a row for each head."""


class MixResiduals(Protocol):
    def __call__(self, done: Tensor, current: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Return a mixture `[T, H]` of each token's residuals `done[N, T, H]` and, if given, `current[T, H]`.

        Their shares are the softmax of `rmsnorm(residual) . weight` over the residuals, with an fp32 `weight[H]`."""


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
        key_places: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Normalise and rotate queries and keys, and store keys and values in the cache; return the queries.

        The projections are `q[T, Hq, D]`, `k[T, Hkv, D]` and `v[T, Hkv, Dv]`; q and k may be overwritten. Each head of
        q and k is normalised unless `norm` is None. Its first `R` dims are rotated in neox style unless `cos_sin` is
        None: `[max_len, R]` fp32, the cosines first, then the sines. The caches are `[P, Hkv, 64, D]`, strided views
        of the arena. `positions[T]` and `key_places[T]` are int64; place -1 stores nothing. With `scales`, the
        operator stores 8-bit values and, as their scale, a head's largest magnitude / 448. -> `[T, Hq, D]`."""


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
        key_places: Tensor,
    ) -> Tensor:
        """Normalise and rotate latents and store them in `cache[P, 1, 64, R + P]`; return the rotated `q_rope`.

        The first R dims of `latent[T, R + P]` serve all heads as key and value; they are normalised with `weight[R]`.
        The other P dims belong to the key only; they are rotated in neox style unless `cos_sin[max_len, P]` is None.
        `q_rope[T, H, P]` is rotated in the same way."""


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
        """Return causal grouped-query attention of `q[T, Hq, D]` over the rows' blocks, `[T, Hq, Dv]`.

        The blocks include this step's tokens, which qk_norm_rope_write stored before. The output is multiplied by the
        sigmoid of `gate[T, Hq * Dv]` if there is a gate. 8-bit keys and values need their `scales`. For latents,
        `v_cache` is a view of the first Dv dims of `k_cache`, and there is no gate, window or scale."""


class PartialAttention(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        index: AttentionIndex,
        scale: float,
        starts: Tensor | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """Return `paged_attention` of decode rows to some of their keys, so that results can be merged.

        Row r sees all keys of the index from `starts[r]` on. The result is `[N, Hq, Dv + 1]` fp32: each output, and the
        logarithm of the sum of its scores' exponentials. A row without keys has zeros and `reference.NO_KEYS`."""


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
        """Write causal attention of one row's new tokens to `out[T, H, V]`.

        `expand` computes keys and values from latents: `[N, rank] -> [N, H * (K + V)]`, each head's key, then its
        value. The queries are `own[T, H, K]` and, for the part that all heads share, `shared[T, H, P]`. `cache` is
        `[P, 1, 64, rank + P]`. The index's host copies describe the row."""


class ChoosePools(Protocol):
    def __call__(self, q: Tensor, weights: Tensor, cache: Tensor, index: AttentionIndex, rule: PoolRule) -> Tensor:
        """Choose the pools of keys that each query attends to; return `[T, most]` int32.

        A pool's score is `sum_h weights[t, h] * relu(q[t, h] . key)`, computed in fp32 from `q[T, H, D]`, fp32
        `weights[T, H]` and the pool's index key. The complete pools with the highest scores are chosen, among equal
        scores the earlier ones. The result has their numbers in ascending order, then -1. `cache[P, 1, 64, D / size]`
        holds the `64 / size` index keys of each block, one after another."""


class PoolAttention(Protocol):
    def __call__(
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
        """Return `paged_attention` to the keys of the `chosen` pools, and to those after the last complete pool.

        For latents, `v_cache` is `k_cache`."""


class ImageAttention(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, num_heads: int, cos_sin: Tensor | None = None) -> Tensor:
        """Return `[patches, hidden]`: each patch attends to all patches, head by head.

        `q`, `k` and `v` are `[patches, hidden]`, with any stride of rows. With `cos_sin[patches, head_dim]` fp32, cos
        in the first half and sin in the second, queries and keys are rotated first. This may overwrite them.
        """


class TakeWindows(Protocol[Index]):
    def __call__(self, x: Tensor, pool: Tensor, index: Index) -> Tensor:
        """Return each token's last W inputs `[T, W, D]`, its own last, from `x[T, D]`.

        `pool[P, W-1, D]` holds the inputs before the segments or rows, and is updated as by a convolution."""


class WindowVerify(Protocol):
    def __call__(self, x: Tensor, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
        """Run window_update for rows with drafts: `x[T, D]` -> `[T, W, D]`. conv_fold folds its records, as those of
        conv_verify."""


class Conv(Protocol[Index]):
    def __call__(self, x: Tensor, taps: ConvTaps, pool: Tensor, index: Index) -> Tensor:
        """Return the depthwise causal convolution `[T, D]` of segments, or of one token per row.

        `x[T, D]` are raw inputs. `pool[P, W-1, D]` holds windows; row W-2 is the newest input. The operator stores the
        last W-1 raw inputs at `dst` and at each save."""


class Recur(Protocol[Inputs, Params, Index]):
    def __call__(self, inputs: Inputs, params: Params, pool: Tensor, index: Index, out: Out = None) -> Tensor:
        """Run a recurrence over segments, or one step for each row; return the outputs, in `out` if it is given.

        `pool[P, ...]` is a strided fp32 view of the states. A recurrence has `pool[P, HV, V, K]` and outputs
        `[T, HV, V]`; over segments it works in chunks of 64 tokens from each segment's start. Mamba's selective scan
        has `pool[P, D, N]` and outputs `[T, D]`: with `s = softplus(dt + dt_bias)`, `S = e^{s A} S + (s x) b^T` and
        `y = (S c + skip x) silu(z)`."""


class Recorded(Protocol[Inputs, Params, Index]):
    def __call__(
        self, inputs: Inputs, params: Params, pool: Tensor, index: Index, records: Records, out: Out = None
    ) -> Tensor:
        """Run a recurrence or scan whose tokens leave records; return the outputs, in `out` if it is given.

        recurrence_record equals recurrence_decode up to rounding, for rows whose states are written every few tokens,
        with or without drafts. For windows of up to `w` tokens the records are: updates `[L, interval + w - 1, HV, V]`
        in fp32, and in lines `[L, interval + 2 w - 1, ...]` keys `[H, K]` as in `mixed`, key scales `[H]` and decay
        logarithms g `[HV]`, both fp32.

        scan_verify equals, bit for bit, one call of scan_decode for each token of a row with drafts. Its records, in
        the inputs' dtype, are x and dt `[L, M, D]` in one line each, and b `[L, M, N]`. scan_fold gets A and dt_bias
        after the records.

        recurrence_verify equals, bit for bit, one call of recurrence_decode for each token of a row with drafts, in its
        outputs and in the states that are folded later. Its records are fp32: updates `[L, M, HV, V]`, keys
        `[L, M, H, K]`, and decays `[L, M, HV]`, or `[L, M, HV, K]` with a decay per key. A fold is
        `S <- decay S + update key^T`."""


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
        """Run conv_update on `inputs.mixed`, then recurrence_record on its output, for rows of one token.

        Return None for shapes that the kernel does not support."""


class Fold(Protocol):
    def __call__(self, pool: Tensor, index: VerifyIndex, records: Records) -> None:
        """Fold the records of accepted tokens into the states, as a verify operator does before its tokens.

        `records` ends with the layer's `fold_constants`."""


class ConvVerify(Protocol):
    def __call__(self, x: Tensor, taps: ConvTaps, pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
        """Run conv_update for rows with drafts: `x[T, D]` -> `[T, D]`.

        The records are raw inputs `[L, M, D]`: `M` tokens in each of `L` lines."""


class Route(Protocol):
    def __call__(self, scores: Tensor, rule: RouteRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token; return `weights[T, top_k + num_shared]` fp32 and int32 `ids` alike.

        `scores` is `[T, E]`, or `[T, E + 1]` with the gate of gated shared experts. `bias[E]` is fp32."""


@dataclass(frozen=True, slots=True)
class OpTable:
    """One backend's operators.

    `redirects` names the state operators that support `src != dst`. For the others, the runner copies the state with
    `state_copy` before the step. `backends` names the backend of each operator for the log."""

    # Pack a `[N, K]` weight, which may be FP8, and its bias, once at load. The result is opaque to the model.
    prepare_linear: PrepareLinear
    # (`x[T, K]`, packed weight) -> `y[T, N]` in x's dtype.
    linear: Linear
    # `silu(x gate^T) * (x up^T)`: `x[T, K] -> y[T, I]`, for a packed `[2I, K]` weight whose gate rows come first.
    linear_silu_mul: Linear
    # Pack one weight per head, `[H, N, K]`, once at load.
    prepare_linear_heads: Callable[[Tensor], Any]
    # Multiply each head with its own weight: `x[T, H, K] -> y[T, H, N]` in x's dtype.
    linear_heads: Linear
    # RMSNorm of (x, weight, eps) over the last dim, computed in fp32. The fp32 weight includes any `1 +`.
    # The result has x's dtype.
    rmsnorm: RMSNorm
    # (x, residual, weight, eps) -> (norm of `residual + x`, `residual + x`). May update the residual in place.
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
    # Fold the records that are due into the states, as recurrence_record does before its tokens.
    recurrence_flush: Callable[[Tensor, RecordIndex, Records], None]
    scan_prefill: Recur[ScanInputs, ScanParams, SegmentIndex]
    scan_decode: Recur[ScanInputs, ScanParams, DecodeIndex]
    scan_verify: Recorded[ScanInputs, ScanParams, VerifyIndex]
    scan_fold: Fold
    conv_verify: ConvVerify
    conv_fold: Fold
    recurrence_verify: Recorded[RecurrenceInputs, RecurrenceParams, VerifyIndex]
    recurrence_fold: Fold
    route: Route
    # Pack expert weights, either all FP8 or none. `gate_up[E, 2I, H]` and `down[E, H, I]` compute
    # `down(silu(gate) * up)`. An `up[E, I, H]` without gates computes `down(relu(up) ** 2)`.
    prepare_experts: Callable[[Matrix, Matrix], Any]
    experts: Experts
    # `pool[dst[i]] = pool[src[i]]` for each of the pools `[P, ...]`. A src of -1 gives zeros, a dst of -1 stores
    # nothing. One launch copies raw bits in any order. Any number of rows may read one slot, and a row may read and
    # write the same slot, but no row may read a slot that another row writes.
    state_copy: Callable[[list[Tensor], Tensor, Tensor], None]
    # `logits[N, V]` -> (ids `[N]` int64 of the largest logit, the lowest id among equals; `[N]` bool: the largest is
    # finite). Any NaN in a row makes its largest NaN. The id of a row that is not finite means nothing.
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    # Sample one id per row of `logits[N, V]`, by the inverse CDF in the order of ids, among the tokens that the columns
    # keep. Returns the same pair as greedy.
    sample_rows: Callable[[Tensor, SamplingColumns], tuple[Tensor, Tensor]]
    # Apply penalties in place to `logits[N, V]` fp32, with token counts `[L, V]` int32.
    apply_penalties: Callable[[Tensor, Tensor, PenaltyColumns], None]
    # Set the logits of ids whose bit is 0 to -inf, in place: `logits[N, V]` fp32, `rows[M]` int64,
    # `bits[M, ceil(V / 32)]` int32, id `i` at bit `i % 32` of word `i // 32`.
    apply_bitmasks: Callable[[Tensor, Tensor, Tensor], None]
    # Correct, in place, the inputs of a step (or of a drafting step) that depend on results only the device has.
    catch_up: Callable[[IdColumns, OptimisticColumns | None], None] = catch_up
    # (`windows[P, D]`, `records[L, M, D]`, slots, lines and numbers of pending tokens `[N]` int64) -> `[N, D]`: the
    # record of each row's newest pending token, or its slot's window if no token is pending.
    newest: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = newest
    # Compare the sampled ids of all positions with the drafts. Returns int64: the sampled ids, -1 where not finite,
    # followed by the number of accepted positions of each row. A position is accepted if every id sampled before it in
    # its row equals the draft there.
    accept: Callable[[Tensor, Tensor, SpanColumns], Tensor] = accept
    # Sort each row of `logits[N, V]` from the largest to the smallest, equal logits by id. (logits, `token_ids[N]`,
    # count) -> (the first ids `[N, count]`, the rank `[N]`, from 1, of token_ids), all int64.
    top_ids: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = top_ids
    partial_attention: PartialAttention = reference.partial_attention
    choose_pools: ChoosePools = pools.choose_pools
    pool_attention: PoolAttention = pools.pool_attention
    window_prefill: TakeWindows[SegmentIndex] = windows.window_prefill
    window_update: TakeWindows[DecodeIndex] = windows.window_update
    window_verify: WindowVerify = windows.window_verify
    # Keep tables `[N_i, D]` in the host's memory for a device. They are taken one at a time.
    prepare_host_rows: Callable[[Iterable[Tensor], torch.device], Any] = host_rows.prepare_host_rows
    # (prepared tables, `ids[T, S]` int64) -> their rows `[T, S, D]`. Ids count through all tables.
    host_rows: Callable[[Any, Tensor], Tensor] = host_rows.host_rows
    # Store `x[T, H, D]` in `cache[P, H, 64, D]`, a strided view of the arena, at `key_places[T]`.
    store_rows: Callable[[Tensor, Tensor, Tensor], None] = reference.store_rows
    mix_residuals: MixResiduals = mix_residuals
    image_attention: ImageAttention = image_attention
    # (x, added, weight, bias, eps) -> (layer norm of `x + added`, `x + added`), all `[T, D]`.
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_layer_norm
    # (device, a part of a layer, another part that needs nothing of it): issue both.
    side_by_side: SideBySide = one_after_other
    redirects: frozenset[str] = frozenset(STATE_OPERATORS)
    deterministic: bool = False  # a row's bits do not depend on the rest of the batch
    backends: dict[str, str] = field(default_factory=dict)
    latent_prefill: LatentPrefill | None = None  # cheaper than paged_attention for rows with many new tokens
    wide_linear: Linear | None = None  # `linear` of a bfloat16 x with fp32 weights, result in fp32
    # linear and experts that may return `unmade.Parts`, which only add_rmsnorm, the ranks and (for linear) route read.
    linear_parts: Linear | None = None
    experts_parts: Experts | None = None
    # linear with two packed matrices in one launch. Returns None where two launches are as fast.
    linear_both: Callable[[Tensor, Any, Any], tuple[Tensor, Tensor] | None] | None = None
    conv_record: ConvRecord | None = None
    # (head `weight[N, K]`, number of its rows that are ids) -> a function from `hidden[R, K]` to the likeliest id `[R]`
    # int64 and its logit `[R]` fp32. The id is nearly always exact, and the function reads less than the full head.
    # Returns None where no such function is faster.
    shortlist: Callable[[Tensor, int], Callable[[Tensor], tuple[Tensor, Tensor]] | None] | None = None
    # The table for FP8 models with scales by block: operators round the inputs of products while they produce them.
    rounding: OpTable | None = None
    rounds: bool = False  # whether this is such a table


def is_torch(table: OpTable, name: str) -> bool:
    """Return whether the table has torch's function for an operator that has a default."""
    own = getattr(table, name)
    default = next(one.default for one in fields(OpTable) if one.name == name)
    return getattr(own, "func", own) is default


def operator_names() -> tuple[str, ...]:
    """Return the names of the operators that every table has."""
    return tuple(one.name for one in fields(OpTable) if one.default is MISSING and one.name != "backends")


def operators_of(*owners: Any) -> dict[str, Any]:
    """Return the functions of modules or objects that are named like an operator, by that name."""
    names = [one.name for one in fields(OpTable)]
    return {name: getattr(own, name) for own in owners for name in names if callable(getattr(own, name, None))}
