"""Value rows of a state beside records and tokens, for the kernels of recorded rows: see record_kernel.py."""

from __future__ import annotations

import triton
import triton.language as tl

from forkpoint.ops.recurrence.lines import GATES

SIDE = tl.constexpr(32)  # keys of a value row that lie side by side in a tile


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
def fold(
    state,
    begin,
    end,
    start,
    own,
    head,
    at,
    updates,
    keys,
    scales,
    decays,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    LINE: tl.constexpr,
    LENGTH: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FOLDS: tl.constexpr,
    SIDE: tl.constexpr = SIDE,
):
    """The state, of value rows `at`, after records `[begin, end)` of those since `start`."""
    key_head, col, past = head // (HV // H), tl.arange(0, BLOCK_K), tl.arange(0, PAST)
    there, entry = (past >= begin) & (past < end), own * LENGTH + (start + past) % LENGTH
    since = tl.cumsum(tl.load(decays + entry * HV + head, mask=there, other=0.0), axis=0)
    total = tl.sum(tl.where(past == end - 1, since, 0.0), axis=0)
    share = tl.exp(total - since) * tl.load(scales + entry * H + key_head, mask=there, other=0.0)
    state *= tl.exp(total)
    share = tl.where(there, share, 0.0)
    for i in range(begin, end, FOLDS):
        us, ks = (), ()
        for j in tl.static_range(FOLDS):  # all is on its way before any of it is waited for
            place, is_one = start + i + j, i + j < end
            u_at = updates + ((own * LINE + place % LINE) * HV + head) * V + at
            us += (tl.load(u_at, mask=(at < V) & is_one, other=0.0),)  # type: ignore[assignment]
            key_at = keys + ((own * LENGTH + place % LENGTH) * H + key_head) * K + col
            ks += (tl.load(key_at, mask=(col < K) & is_one, other=0.0),)  # type: ignore[assignment]
        for j in tl.static_range(FOLDS):
            grown = tl.sum(tl.where(past == i + j, share, 0.0), axis=0)
            state += (grown * us[j])[:, None, None] * beside(ks[j].to(tl.float32), SIDE)
    return state


@triton.jit
def found_before(
    first,
    t,
    rest,
    head,
    vectors,
    gates,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    PAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What the first kernel has left of a row's tokens `t` to `t + CHUNK`: keys, queries, gates, and what these find in
    the records and in each other."""
    key_head, col, past = head // (HV // H), tl.arange(0, BLOCK_K), tl.arange(0, PAST)
    ks, qs, gated, by_keys, by_queries, by_others = (), (), (), (), (), ()
    for j in tl.static_range(CHUNK):  # all is on its way before any of it is waited for
        token = first + t + j
        vector_at = vectors + (token * H + key_head) * 2 * K + col
        ks += (tl.load(vector_at, mask=col < K, other=0.0),)  # type: ignore[assignment]
        qs += (tl.load(vector_at + K, mask=col < K, other=0.0),)  # type: ignore[assignment]
        gate_at = gates + (token * HV + head) * (GATES + 2 * PAST)
        gated += (tl.load(gate_at), tl.load(gate_at + 1), tl.load(gate_at + 2))  # type: ignore[assignment]
        by_keys += (tl.load(gate_at + GATES + past),)  # type: ignore[assignment]
        by_queries += (tl.load(gate_at + GATES + PAST + past),)  # type: ignore[assignment]
        before_at = gate_at + GATES + rest + t
        for i in tl.static_range(j):
            by_others += (tl.load(before_at + i), tl.load(before_at + PAST + i))  # type: ignore[assignment]
    return ks, qs, gated, by_keys, by_queries, by_others


@triton.jit
def advance(
    state,
    kept,
    given,
    skip,
    head,
    value_at,
    value_stride,
    out_at,
    update_at,
    place,
    present,
    HV: tl.constexpr,
    V: tl.constexpr,
    LINE: tl.constexpr,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The updates of CHUNK tokens, whose answers and updates are stored; `given` as of `found_before`. The first one's
    record is at `place`."""
    ks, qs, gated, by_keys, by_queries, by_others = given
    values, found, answers, fresh = (), (), (), ()
    for j in tl.static_range(CHUNK):
        value = tl.load(value_at + j * value_stride, mask=present, other=0.0)
        values += (value.to(tl.float32),)  # type: ignore[assignment]
    for j in tl.static_range(CHUNK):  # what they find in the state and the records
        grown = gated[3 * j]
        if DELTA:
            by = grown * product(state, ks[j], SIDE) + tl.sum(by_keys[j][:, None] * kept, axis=0)
            found += (by,)  # type: ignore[assignment]
        by = grown * product(state, qs[j], SIDE) + tl.sum(by_queries[j][:, None] * kept, axis=0)
        answers += (by,)  # type: ignore[assignment]
    for j in tl.static_range(CHUNK):  # and in each other
        answer, update = answers[j], values[j]  # type: ignore[var-annotated]
        if DELTA:
            update -= found[j]
            for i in tl.static_range(j):
                update -= by_others[j * (j - 1) + 2 * i] * fresh[i]
        update *= gated[3 * j + 1]
        for i in tl.static_range(j):
            answer += by_others[j * (j - 1) + 2 * i + 1] * fresh[i]
        answer += gated[3 * j + 2] * update
        if skip is not None:
            answer += tl.load(skip + head) * values[j]
        fresh += (update,)  # type: ignore[assignment]
        tl.store(out_at + j * (HV * V), answer.to(out_at.dtype.element_ty), mask=present)
        tl.store(update_at + (place + j) % LINE * (HV * V), update, mask=present)
    return fresh
