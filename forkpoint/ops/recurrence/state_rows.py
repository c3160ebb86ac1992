"""Value rows of a state beside records and tokens, for the kernels of recorded rows: see record_kernel.py."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from forkpoint.ops.recurrence.lines import GATES

SIDE = tl.constexpr(32)  # keys of a value row that lie side by side in a tile


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
    SIDE: int  # keys of a value row that lie side by side
    FOLDS: int  # records that are folded together
    MOST: int  # records that are folded, in a block


@triton.jit
def state_tile(head_at, at, present, K: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr = SIDE):
    """(pointers, which of them there are) of K values at each of `head_at + at`, `[rows, BLOCK_K / SIDE, SIDE]`.

    The compiler gives a warp's lanes to the axes by what it takes to be contiguous: eight to the last, four to the
    first. A sum over keys is then three exchanges between lanes for every four rows, not five for each.
    """
    col = tl.arange(0, BLOCK_K // SIDE)[None, :, None] * SIDE + tl.arange(0, SIDE)[None, None, :]
    place = tl.max_contiguous(head_at + at[:, None, None] + col, (2, 1, SIDE))
    return place, present[:, None, None] & (col < K)


@triton.jit
def beside(key, SIDE: tl.constexpr = SIDE):
    """A key as it lies beside each row of a tile."""
    return tl.reshape(key, (key.shape[0] // SIDE, SIDE))[None, :, :]


@triton.jit
def product(state, key, SIDE: tl.constexpr = SIDE):
    return tl.sum(tl.sum(state * beside(key, SIDE), axis=1), axis=1)


@triton.jit
def fold(state, begin, end, start, own, head, at, records, S: tl.constexpr):
    """The state, of value rows `at`, after records `[begin, end)` of those since `start`."""
    updates, keys, scales, decays = records
    FOLDS: tl.constexpr = S.FOLDS
    key_head, col, past = head // (S.HV // S.H), tl.arange(0, S.BLOCK_K), tl.arange(0, S.MOST)
    there, entry = (past >= begin) & (past < end), own * S.LENGTH + (start + past) % S.LENGTH
    since = tl.cumsum(tl.load(decays + entry * S.HV + head, mask=there, other=0.0), axis=0)
    total = tl.sum(tl.where(past == end - 1, since, 0.0), axis=0)
    share = tl.exp(total - since) * tl.load(scales + entry * S.H + key_head, mask=there, other=0.0)
    state *= tl.exp(total)
    share = tl.where(there, share, 0.0)
    for i in range(begin, end, FOLDS):
        us, ks = (), ()
        for j in tl.static_range(FOLDS):  # all is on its way before any of it is waited for
            place, is_one = start + i + j, i + j < end
            u_at = updates + ((own * S.LINE + place % S.LINE) * S.HV + head) * S.V + at
            us += (tl.load(u_at, mask=(at < S.V) & is_one, other=0.0),)  # type: ignore[assignment]
            key_at = keys + ((own * S.LENGTH + place % S.LENGTH) * S.H + key_head) * S.K + col
            ks += (tl.load(key_at, mask=(col < S.K) & is_one, other=0.0),)  # type: ignore[assignment]
        for j in tl.static_range(FOLDS):
            grown = tl.sum(tl.where(past == i + j, share, 0.0), axis=0)
            state += (grown * us[j])[:, None, None] * beside(ks[j].to(tl.float32), S.SIDE)
    return state


@triton.jit
def found_before(first, t, rest, head, mixed, stride, gates, S: tl.constexpr, CHUNK: tl.constexpr):
    """Of a row's tokens `t` to `t + CHUNK` keys, queries, and what the first kernel has left: gates, and what both find
    in the records and in each other."""
    key_head, col, past = head // (S.HV // S.H), tl.arange(0, S.BLOCK_K), tl.arange(0, S.PAST)
    ks, qs, gated, by_keys, by_queries, by_others = (), (), (), (), (), ()
    for j in tl.static_range(CHUNK):  # all is on its way before any of it is waited for
        token = first + t + j
        q_at = mixed + token * stride + key_head * S.K + col
        ks += (tl.load(q_at + S.H * S.K, mask=col < S.K, other=0.0),)  # type: ignore[assignment]
        qs += (tl.load(q_at, mask=col < S.K, other=0.0),)  # type: ignore[assignment]
        gate_at = gates + (token * S.HV + head) * (GATES + 2 * S.PAST)
        gated += (tl.load(gate_at), tl.load(gate_at + 1), tl.load(gate_at + 2), tl.load(gate_at + 3))  # type: ignore[assignment]
        by_keys += (tl.load(gate_at + GATES + past),)  # type: ignore[assignment]
        by_queries += (tl.load(gate_at + GATES + S.PAST + past),)  # type: ignore[assignment]
        before_at = gate_at + GATES + rest + t
        for i in tl.static_range(j):
            by_others += (tl.load(before_at + i), tl.load(before_at + S.PAST + i))  # type: ignore[assignment]
    return ks, qs, gated, by_keys, by_queries, by_others


@triton.jit
def advance(state, kept, given, skip, head, where, place, present, S: tl.constexpr, CHUNK: tl.constexpr):
    """The updates of CHUNK tokens, whose answers and updates are stored; `given` as of `found_before`. `where` are the
    first one's values, from one's to the next's, its answers, and the line in which its record is at `place`."""
    ks, qs, gated, by_keys, by_queries, by_others = given
    value_at, stride, out_at, line_at = where
    values, found, answers, fresh = (), (), (), ()
    for j in tl.static_range(CHUNK):
        value = tl.load(value_at + j * stride, mask=present, other=0.0)
        values += (value.to(tl.float32),)  # type: ignore[assignment]
    for j in tl.static_range(CHUNK):  # what they find in the state and the records
        if S.DELTA:
            by = gated[4 * j] * product(state, ks[j].to(tl.float32), S.SIDE)
            found += (by + tl.sum(by_keys[j][:, None] * kept, axis=0),)  # type: ignore[assignment]
        by = gated[4 * j + 3] * product(state, qs[j].to(tl.float32), S.SIDE)
        answers += (by + tl.sum(by_queries[j][:, None] * kept, axis=0),)  # type: ignore[assignment]
    for j in tl.static_range(CHUNK):  # and in each other
        answer, update = answers[j], values[j]  # type: ignore[var-annotated]
        if S.DELTA:
            update -= found[j]
            for i in tl.static_range(j):
                update -= by_others[j * (j - 1) + 2 * i] * fresh[i]
        update *= gated[4 * j + 1]
        for i in tl.static_range(j):
            answer += by_others[j * (j - 1) + 2 * i + 1] * fresh[i]
        answer += gated[4 * j + 2] * update
        if skip is not None:
            answer += tl.load(skip + head) * values[j]
        fresh += (update,)  # type: ignore[assignment]
        tl.store(out_at + j * (S.HV * S.V), answer.to(out_at.dtype.element_ty), mask=present)
        tl.store(line_at + (place + j) % S.LINE * (S.HV * S.V), update, mask=present)
    return fresh
