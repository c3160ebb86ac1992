"""Recurrences in torch: the gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"), and, without
its correction, that of Mamba-2 (Dao, Gu 2024, "Transformers are SSMs").

State `S[V, K]` per value head. One token: `S' = e^g S`, `u = beta (v - S' k)`, `S = S' + u k^T`, `o = S q + D v`;
`u = beta v` without the delta rule, where in the formulas below `V'` is `diag(beta) V`.
A chunk of C tokens, with `c = cumsum(g)` and `A_ij = beta_i (k_i . k_j) e^{c_i - c_j}` for i > j:
`(I + A) [U | W] = [diag(beta) V | diag(beta e^c) K]`, `V' = U - W S^T`,
`O = diag(e^c) Q S^T + tril(Q K^T e^{c_i - c_j}) V'`, `S <- e^{c_C} S + sum_j e^{c_C - c_j} v'_j k_j^T`.
With a decay per key (Kimi Team 2025, "Kimi Linear"), the exponentials move inside the products of keys.
All arithmetic is fp32, whatever the dtype of inputs and pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forkpoint.ops.activation.reference import sigmoid, softplus
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex
from forkpoint.ops.parameters import Out, Recurrence, RecurrenceInputs, RecurrenceParams, into
from forkpoint.ops.state_copy.reference import read_slots, write_slots

CHUNK = 64
SUB = 16  # rows per block in `_decayed`
L2_EPS = 1e-6


class Tokens(NamedTuple):
    """Prepared inputs, fp32: q, k `[T, H, K]` (normalised, q scaled), v `[T, HV, V]`, beta `[T, HV]`, and g `[T, HV]`
    or, with a decay per key, `[T, HV, K]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def prepare(inputs: RecurrenceInputs, params: RecurrenceParams) -> Tokens:
    (mixed, a, b), shape = inputs, params.spec
    keys = shape.num_k_heads * shape.key_dim
    wide = mixed.float()
    qk = wide[:, : 2 * keys].reshape(-1, 2, shape.num_k_heads, shape.key_dim)
    v = wide[:, 2 * keys :].reshape(-1, shape.num_v_heads, shape.value_dim)
    raw, rate = a.float() + params.dt_bias, torch.exp(params.A_log)
    if shape.per_key:
        raw, rate = raw.view(-1, shape.num_v_heads, shape.key_dim), rate.unsqueeze(-1)
    step = softplus(raw).clamp(*shape.step_limit)
    g = step * -rate if shape.bound is None else shape.bound * sigmoid(rate * raw)
    if not shape.delta:
        return Tokens(qk[:, 0], qk[:, 1], v, g, step)
    assert b is not None, "the delta rule needs b"
    qk = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + L2_EPS)
    beta = sigmoid(b.float())
    if shape.double_beta:
        beta = beta * 2.0
    return Tokens(qk[:, 0] * shape.key_dim**-0.5, qk[:, 1], v, g, beta)


class _Chunks(NamedTuple):
    """Operands of the serial pass over NC chunks, all fp32 and per value head.

    q_decayed `[NC, HV, C, K]` = `e^c q`, k_decayed `[NC, HV, C, K]` = `e^{c_C - c} k`,
    intra `[NC, HV, C, C]`, u `[NC, HV, C, V]`, w `[NC, HV, C, K]` (None without the delta rule),
    decay `[NC, HV, 1 or K, 1]` = `e^{c_C}`.
    """

    q_decayed: Tensor
    k_decayed: Tensor
    intra: Tensor
    u: Tensor
    w: Tensor | None
    decay: Tensor


def _chunk_rows(lens: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return (chunked row of each token `[T]`, first chunk of each segment and the end `[N + 1]`)."""
    rows: list[Tensor] = []
    first = [0]
    for length in lens:
        rows.append(torch.arange(length, device=device) + first[-1] * CHUNK)
        first.append(first[-1] - (-length // CHUNK))
    return torch.cat(rows), first


def _to_chunks(x: Tensor, rows: Tensor, num_chunks: int) -> Tensor:
    """Rearrange `[T, heads, ...]` to `[NC, heads, C, ...]`. Rows past a segment's end are zeros."""
    padded = x.new_zeros(num_chunks * CHUNK, *x.shape[1:])
    padded[rows] = x
    return padded.view(num_chunks, CHUNK, *x.shape[1:]).transpose(1, 2)


def _within_chunks(tokens: Tokens, rows: Tensor, num_chunks: int, shape: Recurrence) -> _Chunks:
    q, k, v, g, beta = (_to_chunks(x, rows, num_chunks).contiguous() for x in tokens)
    beta, group = beta.unsqueeze(-1), shape.num_v_heads // shape.num_k_heads
    total = (g if shape.per_key else g.unsqueeze(-1)).cumsum(-2)  # [NC, HV, C, K or 1]
    grown, last, xs = total.exp(), total[:, :, -1:], (k, q) if shape.delta else (q,)
    *system, intra = [_decayed(x, k, total) for x in xs] if shape.per_key else _scored(xs, k, total)
    if group > 1:
        q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    u, w = v * beta, None
    if shape.delta:
        # The solver takes the diagonal as ones and does not read above it.
        rhs = torch.cat((u, k * (beta * grown)), dim=-1)
        u, w = torch.linalg.solve_triangular(system[0].mul_(beta), rhs, upper=False, unitriangular=True).split(
            [shape.value_dim, shape.key_dim], dim=-1
        )
    return _Chunks(q * grown, k * (last - total).exp(), intra, u, w, grown[:, :, -1:].transpose(-1, -2))


def _scored(xs: tuple[Tensor, ...], k: Tensor, total: Tensor) -> list[Tensor]:
    """Return `(x_i . k_j) e^{c_i - c_j}` for i >= j, else 0, of each x: `[NC, H, C, K]` -> `[NC, HV, C, C]`."""
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).triu(1)
    # Mask before the exponential, which may overflow above the diagonal.
    decays = (total - total.transpose(-1, -2)).masked_fill_(upper, float("-inf")).exp_()
    products = (torch.cat(xs, dim=2) @ k.transpose(-1, -2)).chunk(len(xs), dim=2)  # one product for all xs
    group = total.shape[1] // k.shape[1]
    return [(x if group == 1 else x.repeat_interleave(group, dim=1)) * decays for x in products]


def _decayed(x: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return `sum_d x_id k_jd e^{c_id - c_jd}` for i >= j, else 0: `_scored` with a decay per key.

    A block of rows counts decays from its first row, so that no exponent is positive. Within a block on the diagonal,
    every pair has its own exponential.
    """
    out = x.new_zeros(*x.shape[:3], CHUNK)
    behind = torch.ones(SUB, SUB, dtype=torch.bool, device=x.device).tril().unsqueeze(-1)
    for start in range(0, CHUNK, SUB):
        rows = slice(start, start + SUB)
        at, own = total[:, :, rows], x[:, :, rows]
        if start:
            first = at[:, :, :1]
            earlier = k[:, :, :start] * (first - total[:, :, :start]).exp()
            out[:, :, rows, :start] = (own * (at - first).exp()) @ earlier.transpose(-1, -2)
        steps = (at.unsqueeze(3) - at.unsqueeze(2)).masked_fill_(~behind, float("-inf")).exp_()
        out[:, :, rows, rows] = (own.unsqueeze(3) * k[:, :, rows].unsqueeze(2) * steps).sum(-1)
    return out


def recurrence_prefill(
    inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: SegmentIndex, out: Out = None
) -> Tensor:
    """Run the recurrence over segments; return `[T, HV, V]`, in `out` if it is given.

    Reads and writes `pool[P, HV, V, K]` as `index` says. Everything inside chunks is batched over segments,
    heads and chunks; only the pass over a segment's chunks is serial.
    """
    shape = params.spec
    lens = index.on_host()
    rows, first = _chunk_rows(lens, inputs.mixed.device)
    tokens = prepare(inputs, params)
    chunks = _within_chunks(tokens, rows, first[-1], shape)
    states = read_slots(pool, index.src).float().transpose(-1, -2).contiguous()  # [N, HV, K, V]
    saves = _saves_by_chunk(index)
    answers = torch.empty_like(chunks.u)
    for step in range(max(-(-length // CHUNK) for length in lens)):
        live = [n for n in range(len(index)) if first[n] + step < first[n + 1]]
        at = torch.tensor([first[n] + step for n in live], device=inputs.mixed.device)
        everyone = len(live) == len(index)
        before = states
        if not everyone:
            before = states[live]
        fresh = chunks.u[at]
        if chunks.w is not None:
            fresh = fresh - chunks.w[at] @ before
        answers[at] = chunks.q_decayed[at] @ before + chunks.intra[at] @ fresh
        after = before * chunks.decay[at] + chunks.k_decayed[at].transpose(-1, -2) @ fresh
        after = after.to(pool.dtype).float()  # round as if the state were stored and resumed here
        if everyone:
            states = after
        else:
            states[live] = after
        for n, dst in saves.get(step, ()):
            pool[dst] = states[n].transpose(-1, -2).to(pool.dtype)
    write_slots(pool, index.dst, states.transpose(-1, -2))
    answer = _skip(answers.transpose(1, 2).reshape(-1, shape.num_v_heads, shape.value_dim)[rows], tokens.v, params)
    return into(out, answer.to(inputs.mixed.dtype))


def _skip(answer: Tensor, v: Tensor, params: RecurrenceParams) -> Tensor:
    if params.D is None:
        return answer
    return answer + params.D.unsqueeze(-1) * v


def _saves_by_chunk(index: SegmentIndex) -> dict[int, list[tuple[int, int]]]:
    """Map each chunk number to the (segment, slot) pairs to save after it."""
    ptr, positions, slots = index.save_ptr.tolist(), index.save_pos.tolist(), index.save_dst.tolist()
    found: dict[int, list[tuple[int, int]]] = {}
    for n in range(len(index)):
        for e in range(ptr[n], ptr[n + 1]):
            if slots[e] >= 0:
                found.setdefault(-(-positions[e] // CHUNK) - 1, []).append((n, slots[e]))
    return found


def recurrence_decode(
    inputs: RecurrenceInputs, params: RecurrenceParams, pool: Tensor, index: DecodeIndex, out: Out = None
) -> Tensor:
    """Advance each row's state by one token; return the outputs `[B, HV, V]`, in `out` if it is given.

    The old state is read once, for `S k` and `S q` together: `o = e^g S q + u (k . q)`.
    """
    tokens = prepare(inputs, params)
    states = read_slots(pool, index.src).float()
    answer, _, _ = advance(states, tokens, params)
    write_slots(pool, index.dst, states)
    return into(out, answer.to(inputs.mixed.dtype))


def advance(states: Tensor, tokens: Tokens, params: RecurrenceParams) -> tuple[Tensor, Tensor, Tensor]:
    """Advance `states[B, HV, V, K]` fp32 in place by one token each.

    Returns the outputs `[B, HV, V]`, the updates u `[B, HV, V]`, and the decays `[B, HV, 1]`, or `[B, HV, K]` with a
    decay per key."""
    shape = params.spec
    group = shape.num_v_heads // shape.num_k_heads
    kq = torch.stack((tokens.k, tokens.q), dim=-1).repeat_interleave(group, dim=1)  # [B, HV, K, 2]
    decays = tokens.g.exp().view(*states.shape[:2], -1)
    decay = decays
    if shape.per_key:
        states.mul_(decays.unsqueeze(-2))
        decay = torch.ones_like(tokens.beta).unsqueeze(-1)
    read = states @ kq
    u = (tokens.v - decay * read[..., 0] if shape.delta else tokens.v) * tokens.beta.unsqueeze(-1)
    overlap = (tokens.k * tokens.q).sum(-1, keepdim=True).repeat_interleave(group, dim=1)
    fold(states, u, kq[..., 0], decay)
    return _skip(decay * read[..., 1] + u * overlap, tokens.v, params), u, decays


def fold(states: Tensor, u: Tensor, keys: Tensor, decay: Tensor) -> None:
    """Apply `S <- e^g S + u k^T` in place: u `[B, HV, V]`, keys `[B, HV, K]`, decays `[B, HV, 1]` or `[B, HV, K]`."""
    states.mul_(decay.unsqueeze(-2)).add_(u.unsqueeze(-1) * keys.unsqueeze(-2))
