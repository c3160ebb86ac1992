"""Value rows of a state beside records and tokens, for the kernels of recorded rows: see record_kernel.py."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from forkpoint.ops.recurrence.lines import GATES

SIDE = tl.constexpr(32)  # keys of a value row that lie side by side in a tile
LANES = tl.constexpr(16)  # of a tile that is a factor of a product
TOKENS = tl.constexpr(4)  # of a row that read its state together
FOLDS = tl.constexpr(8)  # records that are folded together


class Sizes(NamedTuple):
    """Of heads, of lines of records, and of blocks."""

    H: int
    HV: int
    K: int
    V: int
    INTERVAL: int
    LENGTH: int  # of a line of keys, scales and decays
    BLOCK_K: int
    PAST: int  # records and tokens in a block, behind those that are folded
    LINE: int  # of updates
    DELTA: bool
    FOUND: int  # of a block of PAST in a product
    TF32: bool  # products of fp32 by the first 11 bits


@triton.jit
def state_tile(head_at, at, present, K: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr = SIDE):
    """(pointers, which of them there are) of K values at each of `head_at + at`, `[rows, BLOCK_K / SIDE, SIDE]`.

    The compiler gives a warp's lanes to the axes by what it takes to be contiguous: first to the last, the others to
    the first. With SIDE eight have a row: a sum over keys is three exchanges between lanes for every four rows, not
    five for each. With LANES four have one, and load four keys each.
    """
    col = tl.arange(0, BLOCK_K // SIDE)[None, :, None] * SIDE + tl.arange(0, SIDE)[None, None, :]
    place = tl.max_contiguous(head_at + at[:, None, None] + col, (2, 1, 4 if SIDE == LANES else SIDE))
    return place, present[:, None, None] & (col < K)


@triton.jit
def beside(key, SIDE: tl.constexpr = SIDE):
    """A key as it lies beside each row of a tile."""
    return tl.reshape(key, (key.shape[0] // SIDE, SIDE))[None, :, :]


@triton.jit
def product(state, key, SIDE: tl.constexpr = SIDE):
    return tl.sum(tl.sum(state * beside(key, SIDE), axis=1), axis=1)


@triton.jit
def as_factor(tile):
    """A tile `[rows, BLOCK_K / LANES, LANES]` as `[rows, BLOCK_K]`, with its keys in an order in which a product of
    tensor cores finds them in the lanes that have loaded them, and leaves its sums there."""
    ROWS: tl.constexpr = tile.shape[0]
    PARTS: tl.constexpr = tile.shape[1]
    parts = tl.permute(tl.reshape(tile, (ROWS, PARTS, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(parts, (ROWS, PARTS * LANES))


@triton.jit
def _tile_of(factor):
    """The tile of which `as_factor` makes this."""
    ROWS: tl.constexpr = factor.shape[0]
    PARTS: tl.constexpr = factor.shape[1] // LANES
    parts = tl.permute(tl.reshape(factor, (ROWS, PARTS, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(parts, (ROWS, PARTS, LANES))


@triton.jit
def _split(value):
    """The first 11 bits of each fp32 `value`, which a product takes as they are, and what is left."""
    high = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, value - high


@triton.jit
def _halves(tile):
    """Two tiles, each with half of the keys."""
    ROWS: tl.constexpr = tile.shape[0]
    PARTS: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, PARTS, LANES)), (0, 2, 3, 1)))


@triton.jit
def whole_product(a, b, TF32: tl.constexpr):
    """`a b` of fp32, in fp32."""
    return tl.dot(a, b, input_precision="tf32x3" if TF32 else "ieee")


@triton.jit
def multiplied(state, keys, TF32: tl.constexpr):
    """`[value rows, keys]`: each row of a tile by each key of another, with 22 bits of the state or all."""
    if not TF32 or keys.dtype == tl.float32:
        found = whole_product(as_factor(state), tl.trans(as_factor(keys.to(tl.float32))), TF32)
    else:  # four sums, of which none waits for all the others; keys of sixteen bits are exact
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
    """Of the records `[begin, end)` since `start`, FOLDS at most, each twice: updates of value rows `at`, keys, what is
    left of each of them at `end`, and what of the state."""
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
    # Of both the same to the last bit, since each has one part of an update.
    since = tl.reshape(tl.cumsum(tl.reshape(decay, (2, FOLDS)), axis=1), (2 * FOLDS,))
    total = tl.sum(tl.where(twice == FOLDS - 1, since, 0.0), axis=0)
    return update, key, tl.exp(total - since) * scale, tl.exp(total)


@triton.jit
def folded_in(state, recorded, TF32: tl.constexpr):
    """The state after records as of `to_fold`. What they bring is added to it last: tensor cores cut off what a sum has
    beyond 24 bits, which states that hardly decay would lose again and again."""
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
    """The state, of value rows `at`, after records `[begin, end)` of those since `start`."""
    for i in range(begin, end, FOLDS):
        state = folded_in(state, to_fold(i, end, start, own, head, at, records, S), S.TF32)
    return state


@triton.jit
def keys_and_queries(mixed, stride, token, count, key_head, H: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(pointers, which of them there are) of tiles: a key and a query of each of `count` tokens from `token` on."""
    both = tl.arange(0, 2 * TOKENS)
    at = (token + both // 2) * stride + (key_head + (1 - both % 2) * H) * K
    return state_tile(mixed, at, both // 2 < count, K, BLOCK_K, LANES)


@triton.jit
def _scattered(rows, columns):
    """Pointers `[rows, n / 4, 4]` to values that may lie anywhere, one a lane: four lanes have the last axis, eight the
    first, as in a product."""
    return tl.multiple_of(tl.max_contiguous(rows + columns, (2, 1, 4)), (1, 1, 1))


@triton.jit
def inputs_of(token, count, rest, head, at, mixed, stride, gates, line_at, begin, S: tl.constexpr):
    """Of `count` tokens from `token` on keys and queries, value rows `at` of the `rest` records since `begin`, and how
    much of each record they find."""
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
    """Store answers and updates of `count` tokens, TOKENS or MOST of them; `loaded` as of `inputs_of`."""
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
    for j in tl.static_range((MOST if MOST < TOKENS else TOKENS) - 1):  # what later ones find in each
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
        # Not even what is not finite counts before it.
        fresh, later = tl.sum(tl.where((one == j)[None, :], update, 0.0), axis=1)[:, None], (one > j)[None, :]
        if S.DELTA:
            update -= tl.where(later, fresh * (beta * others[2 * j])[None, :], 0.0)
        answer += tl.where(later, fresh * others[2 * j + 1][None, :], 0.0)
    answer += own[None, :] * update
    if skip is not None:
        answer += tl.load(skip + head) * value
    tl.debug_barrier()  # what is read of the line above is written over
    line = line_at + ((begin + rest + one) % S.LINE * (S.HV * S.V))[None, :] + at[:, None]
    tl.store(line, update, mask=there)
    out_at = out + ((token + one) * S.HV + head)[None, :] * S.V + at[:, None]
    tl.store(out_at, answer.to(out.dtype.element_ty), mask=there)


@triton.jit
def answer(state, loaded, token, count, rest, head, at, read, skip, out, S: tl.constexpr, MOST: tl.constexpr):
    """As `advance`, of at most MOST tokens; `read` are the last arguments of `inputs_of`."""
    advance(state, loaded, token, count, rest, head, at, *read, skip, out, S, MOST)
    if MOST > TOKENS:
        for t in range(TOKENS, count, TOKENS):
            tl.debug_barrier()  # the tokens before are records now
            more = inputs_of(token + t, count - t, rest + t, head, at, *read, S)
            advance(state, more, token + t, count - t, rest + t, head, at, *read, skip, out, S, MOST)
