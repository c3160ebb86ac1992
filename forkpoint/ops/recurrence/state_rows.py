"""Tiles of a state's value rows, and their products with records and tokens, for record_kernel.py.

Tensor cores multiply fp32 by splitting each number into its first 11 bits and the rest. Tiles are loaded in the lane
order that such a product expects, so no value moves between lanes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from forkpoint.ops.recurrence.lines import GATES

SIDE = tl.constexpr(32)  # keys in the last axis of a tile that is summed over keys
LANES = tl.constexpr(16)  # keys in the last axis of a tile that is a factor of a tensor-core product
TOKENS = tl.constexpr(4)  # tokens of a row that read its state together
FOLDS = tl.constexpr(8)  # records that are folded in one product


class Sizes(NamedTuple):
    """Sizes of heads, of lines of records, and of blocks."""

    H: int
    HV: int
    K: int
    V: int
    INTERVAL: int
    LENGTH: int  # entries of a line of keys, key scales and decays
    BLOCK_K: int
    PAST: int  # unfolded records and tokens, padded to a power of two
    LINE: int  # entries of a line of updates
    DELTA: bool
    FOUND: int  # PAST, padded to what a tensor-core product needs
    TF32: bool  # whether products of fp32 use tensor cores


@triton.jit
def state_tile(head_at, at, present, K: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr = SIDE):
    """Return (pointers, mask) of K values at each of `head_at + at`, `[rows, BLOCK_K / SIDE, SIDE]`.

    The compiler assigns a warp's lanes to the last axis first and then to the first axis. With SIDE, eight lanes share
    a row, so a sum over keys takes three exchanges between lanes for four rows instead of five for one. With LANES,
    four lanes share a row and load four keys each.
    """
    col = tl.arange(0, BLOCK_K // SIDE)[None, :, None] * SIDE + tl.arange(0, SIDE)[None, None, :]
    place = tl.max_contiguous(head_at + at[:, None, None] + col, (2, 1, 4 if SIDE == LANES else SIDE))
    return place, present[:, None, None] & (col < K)


@triton.jit
def beside(key, SIDE: tl.constexpr = SIDE):
    """Reshape a key so that it broadcasts over the rows of a tile."""
    return tl.reshape(key, (key.shape[0] // SIDE, SIDE))[None, :, :]


@triton.jit
def product(state, key, SIDE: tl.constexpr = SIDE):
    return tl.sum(tl.sum(state * beside(key, SIDE), axis=1), axis=1)


@triton.jit
def as_factor(tile):
    """Reshape a tile `[rows, BLOCK_K / LANES, LANES]` to `[rows, BLOCK_K]` for a tensor-core product.

    The keys are permuted so that the product finds each one in the lane that loaded it."""
    ROWS: tl.constexpr = tile.shape[0]
    PARTS: tl.constexpr = tile.shape[1]
    parts = tl.permute(tl.reshape(tile, (ROWS, PARTS, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(parts, (ROWS, PARTS * LANES))


@triton.jit
def _tile_of(factor):
    """Undo `as_factor`."""
    ROWS: tl.constexpr = factor.shape[0]
    PARTS: tl.constexpr = factor.shape[1] // LANES
    parts = tl.permute(tl.reshape(factor, (ROWS, PARTS, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(parts, (ROWS, PARTS, LANES))


@triton.jit
def _split(value):
    """Split each fp32 value into its first 11 bits, which are exact in TF32, and the rest."""
    high = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, value - high


@triton.jit
def _halves(tile):
    """Split a tile into two, each with half of the keys."""
    ROWS: tl.constexpr = tile.shape[0]
    PARTS: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, PARTS, LANES)), (0, 2, 3, 1)))


@triton.jit
def whole_product(a, b, TF32: tl.constexpr):
    """Return the product of two fp32 matrices in fp32."""
    return tl.dot(a, b, input_precision="tf32x3" if TF32 else "ieee")


@triton.jit
def multiplied(state, keys, TF32: tl.constexpr):
    """Return the products `[value rows, keys]` of state rows and keys, with 22 bits of the state or all of them."""
    if not TF32 or keys.dtype == tl.float32:
        found = whole_product(as_factor(state), tl.trans(as_factor(keys.to(tl.float32))), TF32)
    else:  # four independent sums hide latency; 16-bit keys are exact in TF32
        high, low = _split(state)
        first, second = _halves(keys.to(tl.float32))
        high_first, high_second = _halves(high)
        low_first, low_second = _halves(low)
        first, second = tl.trans(as_factor(first)), tl.trans(as_factor(second))
        a = tl.dot(as_factor(high_first), first, input_precision="tf32")
        b = tl.dot(as_factor(high_second), second, input_precision="tf32")
        c = tl.dot(as_factor(low_first), first, input_precision="tf32")
        found = (a + b) + (c + tl.dot(as_factor(low_second), second, input_precision="tf32"))
    return found


@triton.jit
def to_fold(begin, end, start, own, head, at, records, S: tl.constexpr):
    """Load the records `[begin, end)` since `start`, at most FOLDS, each twice (once per part of its update).

    Returns (updates of value rows `at`, keys, decay of each record until `end`, decay of the state until `end`)."""
    updates, keys, scales, decays = records
    key_head, twice = head // (S.HV // S.H), tl.arange(0, 2 * FOLDS)
    one = twice % FOLDS
    there, place = begin + one < end, start + begin + one
    entry = own * S.LENGTH + place % S.LENGTH
    decay = tl.load(decays + entry * S.HV + head, mask=there, other=0.0)
    scale = tl.load(scales + entry * S.H + key_head, mask=there, other=0.0)
    update_at = updates + ((own * S.LINE + place % S.LINE) * S.HV + head) * S.V
    update = tl.load(update_at[None, :] + at[:, None], mask=(at < S.V)[:, None] & there[None, :], other=0.0)
    key_at, inside = state_tile(keys, (entry * S.H + key_head) * S.K, there, S.K, S.BLOCK_K, LANES)
    key = tl.load(key_at, mask=inside, other=0.0)
    # Both copies have equal decays, because each carries one part of an update.
    since = tl.reshape(tl.cumsum(tl.reshape(decay, (2, FOLDS)), axis=1), (2 * FOLDS,))
    total = tl.sum(tl.where(twice == FOLDS - 1, since, 0.0), axis=0)
    return update, key, tl.exp(total - since) * scale, tl.exp(total)


@triton.jit
def folded_in(state, recorded, TF32: tl.constexpr):
    """Return the state after the records that `to_fold` loaded.

    Their product is added to the state last. Tensor cores truncate sums to 24 bits, and a state that hardly decays
    would lose bits again and again if it took part in the product."""
    update, key, share, left = recorded
    update, is_first = update * share[None, :], (tl.arange(0, 2 * FOLDS) < FOLDS)[None, :]
    if TF32:
        high, low = _split(update)
        parts = tl.where(is_first, high, low)
        if key.dtype == tl.float32:
            brought = whole_product(parts, as_factor(key), TF32)
        else:
            brought = tl.dot(parts, as_factor(key.to(tl.float32)), input_precision="tf32")
    else:
        brought = whole_product(tl.where(is_first, update, 0.0), as_factor(key.to(tl.float32)), TF32)
    return state * left + _tile_of(brought)


@triton.jit
def fold(state, begin, end, start, own, head, at, records, S: tl.constexpr):
    """Return the state of value rows `at` after the records `[begin, end)` since `start`."""
    for i in range(begin, end, FOLDS):
        state = folded_in(state, to_fold(i, end, start, own, head, at, records, S), S.TF32)
    return state


@triton.jit
def keys_and_queries(mixed, stride, token, count, key_head, H: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return (pointers, mask) of a tile with the keys and queries, in turn, of `count` tokens from `token` on."""
    both = tl.arange(0, 2 * TOKENS)
    at = (token + both // 2) * stride + (key_head + (1 - both % 2) * H) * K
    return state_tile(mixed, at, both // 2 < count, K, BLOCK_K, LANES)


@triton.jit
def _scattered(rows, columns):
    """Return pointers `[rows, n / 4, 4]` to scattered values, one per lane, in the lane order of a product."""
    return tl.multiple_of(tl.max_contiguous(rows + columns, (2, 1, 4)), (1, 1, 1))


@triton.jit
def inputs_of(token, count, rest, head, at, mixed, stride, gates, line_at, begin, S: tl.constexpr):
    """Load keys and queries of `count` tokens, the updates of value rows `at` of `rest` records, and their scores."""
    both, past = tl.arange(0, 2 * TOKENS), tl.reshape(tl.arange(0, S.FOUND), (1, S.FOUND // 4, 4))
    place, inside = keys_and_queries(mixed, stride, token, count, head // (S.HV // S.H), S.H, S.K, S.BLOCK_K)
    given = tl.load(place, mask=inside, other=0.0)
    gate_at = gates + ((token + both // 2) * S.HV + head) * (GATES + 2 * S.PAST) + GATES + both % 2 * S.PAST
    there = (both // 2 < count)[:, None, None] & (past < rest)
    by = tl.load(_scattered(gate_at[:, None, None], past), mask=there, other=0.0)
    kept_at = _scattered(line_at + at[:, None, None], (begin + past) % S.LINE * (S.HV * S.V))
    kept = tl.load(kept_at, mask=(at < S.V)[:, None, None] & (past < rest), other=0.0)
    return given, kept, by


@triton.jit
def advance(
    state,
    loaded,
    token,
    count,
    rest,
    head,
    at,
    mixed,
    stride,
    gates,
    line_at,
    begin,
    skip,
    out,
    S: tl.constexpr,
    MOST: tl.constexpr,
):
    """Compute and store the outputs and updates of the next TOKENS tokens from what `inputs_of` loaded.

    `count` tokens are left, at most MOST, and may be fewer than TOKENS."""
    given, kept, by = loaded
    one, both = tl.arange(0, TOKENS), tl.arange(0, 2 * TOKENS)
    is_one, SIZE = one < count, GATES + 2 * S.PAST
    there = (at < S.V)[:, None] & is_one[None, :]
    value_at = mixed + (token + one)[None, :] * stride + (2 * S.H * S.K + head * S.V + at)[:, None]
    value = tl.load(value_at, mask=there, other=0.0)
    gate_at = gates + ((token + one) * S.HV + head) * SIZE
    grown_at = gates + ((token + both // 2) * S.HV + head) * SIZE + both % 2 * 3
    grown = tl.load(grown_at, mask=both // 2 < count, other=0.0)
    beta, own = tl.load(gate_at + 1, mask=is_one, other=0.0), tl.load(gate_at + 2, mask=is_one, other=0.0)
    others = ()
    # the scores of later tokens with each earlier one
    for j in tl.static_range((MOST if MOST < TOKENS else TOKENS) - 1):
        other_at, later = gate_at + GATES + rest + j, (one > j) & is_one
        others += (tl.load(other_at, mask=later, other=0.0),)  # type: ignore[assignment]
        others += (tl.load(other_at + S.PAST, mask=later, other=0.0),)  # type: ignore[assignment]
    kept = tl.reshape(kept, (kept.shape[0], S.FOUND))
    by = tl.trans(tl.reshape(by, (2 * TOKENS, S.FOUND)))
    found = multiplied(state, given, S.TF32) * grown[None, :] + whole_product(kept, by, S.TF32)
    by_key, answer = tl.split(tl.reshape(found, (at.shape[0], TOKENS, 2)))
    value = value.to(tl.float32)
    update = (value - by_key if S.DELTA else value) * beta[None, :]
    for j in tl.static_range(len(others) // 2):
        # A select, not a product with zero, because an update that is not finite must not reach earlier tokens.
        fresh, later = tl.sum(tl.where((one == j)[None, :], update, 0.0), axis=1)[:, None], (one > j)[None, :]
        if S.DELTA:
            update -= tl.where(later, fresh * (beta * others[2 * j])[None, :], 0.0)
        answer += tl.where(later, fresh * others[2 * j + 1][None, :], 0.0)
    answer += own[None, :] * update
    if skip is not None:
        answer += tl.load(skip + head) * value
    tl.debug_barrier()  # the records read above are overwritten below
    line = line_at + ((begin + rest + one) % S.LINE * (S.HV * S.V))[None, :] + at[:, None]
    tl.store(line, update, mask=there)
    out_at = out + ((token + one) * S.HV + head)[None, :] * S.V + at[:, None]
    tl.store(out_at, answer.to(out.dtype.element_ty), mask=there)


@triton.jit
def answer(state, loaded, token, count, rest, head, at, read, skip, out, S: tl.constexpr, MOST: tl.constexpr):
    """Compute and store up to MOST tokens of a row, TOKENS at a time, as `advance` does.

    `loaded` has what `inputs_of` returned for the first TOKENS; `read` are the last arguments of `inputs_of`.
    """
    advance(state, loaded, token, count, rest, head, at, *read, skip, out, S, MOST)
    if MOST > TOKENS:
        for t in range(TOKENS, count, TOKENS):
            tl.debug_barrier()  # the previous tokens are records now
            more = inputs_of(token + t, count - t, rest + t, head, at, *read, S)
            advance(state, more, token + t, count - t, rest + t, head, at, *read, skip, out, S, MOST)
