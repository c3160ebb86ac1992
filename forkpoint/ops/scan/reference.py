"""The selective scan in torch (Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces").

State `S[D, N]`, each channel with N values of its own decay. One token, with `s = softplus(dt + dt_bias)`:
`S = e^{s A} S + (s x) B^T`, `y = (S C + skip x) silu(z)`. The decay depends on both channel and state value, so there
is no form in matrix products. Tokens are computed one after another, so the bits do not depend on where a prompt is
cut. All arithmetic is fp32, whatever the dtype of inputs and pool. VerifyIndex describes rows with drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forkpoint.ops.activation.reference import silu, softplus
from forkpoint.ops.metadata import TILE, DecodeIndex, SegmentIndex, VerifyIndex
from forkpoint.ops.parameters import Out, Records, ScanInputs, ScanParams, into
from forkpoint.ops.state_copy.reference import folded, read_slots, verified, write_slots


def scan_changes(x: Tensor, dt: Tensor, b: Tensor, rates: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor and the summand of a state for tokens `[..., D]` and b `[..., N]`: both `[..., D, N]`."""
    step = softplus(dt.float() + dt_bias)
    return torch.exp(step.unsqueeze(-1) * rates), (step * x.float()).unsqueeze(-1) * b.float().unsqueeze(-2)


def scan_tokens(inputs: ScanInputs, params: ScanParams, states: Tensor) -> tuple[Tensor, Tensor]:
    """Scan L tokens of R sequences, `[L, R, D]` and `[L, R, N]`, from `states[R, D, N]`; return (y, new states)."""
    x, c, z = (value.float() for value in (inputs.x, inputs.c, inputs.z))
    passed = []
    for decay, new in zip(*scan_changes(inputs.x, inputs.dt, inputs.b, params.A, params.dt_bias), strict=True):
        states = decay * states + new
        passed.append(states)
    y = (torch.stack(passed) * c.unsqueeze(-2)).sum(-1)
    return (y + params.skip * x) * silu(z), states


def scan_prefill(inputs: ScanInputs, params: ScanParams, pool: Tensor, index: SegmentIndex, out: Out = None) -> Tensor:
    """Run the scan over segments of `T` tokens, with states in `pool[P, D, N]`; return `[T, D]`, in `out` if given."""
    answer = torch.empty_like(inputs.x) if out is None else out
    states = read_slots(pool, index.src).float()
    ptr, positions, slots = index.save_ptr.tolist(), index.save_pos.tolist(), index.save_dst.tolist()
    start = 0
    for n, length in enumerate(index.on_host()):
        saves = {positions[e]: slots[e] for e in range(ptr[n], ptr[n + 1]) if slots[e] >= 0}
        state = states[n : n + 1]
        for low in range(0, length, TILE):
            high = min(low + TILE, length)
            tile = slice(start + low, start + high)
            y, state = scan_tokens(ScanInputs(*(value[tile].unsqueeze(1) for value in inputs)), params, state)
            answer[tile] = y.squeeze(1).to(answer.dtype)
            state = state.to(pool.dtype).float()  # round as if the state were stored and resumed here
            if high in saves:
                pool[saves[high]] = state[0].to(pool.dtype)
        states[n] = state[0]
        start += length
    write_slots(pool, index.dst, states)
    return answer


def scan_decode(inputs: ScanInputs, params: ScanParams, pool: Tensor, index: DecodeIndex, out: Out = None) -> Tensor:
    """Advance each row's state by one token; return the outputs `[B, D]`, in `out` if it is given."""
    y, states = scan_tokens(
        ScanInputs(*(value.unsqueeze(0) for value in inputs)), params, read_slots(pool, index.src).float()
    )
    write_slots(pool, index.dst, states)
    return into(out, y.squeeze(0).to(inputs.x.dtype))


def scan_verify(
    inputs: ScanInputs, params: ScanParams, pool: Tensor, index: VerifyIndex, records: Records, out: Out = None
) -> Tensor:
    """Compute the tokens of rows with drafts; return `[T, D]`, in `out` if it is given.

    `index` says which states of `pool[P, D, N]` and which records are read and written.
    """
    answer, (x, dt, b) = torch.empty_like(inputs.x) if out is None else out, records

    def advance(own: Tensor, at: Tensor, rows: Tensor, i: int) -> Tensor:
        mine, line = ScanInputs(*(value[at] for value in inputs)), index.line[rows].long()
        x[line, i], dt[line, i], b[index.write[rows].long(), i] = mine[:3]
        y, after = scan_tokens(ScanInputs(*(value.unsqueeze(0) for value in mine)), params, own)
        answer[at] = y.squeeze(0).to(answer.dtype)
        return after

    verified(_folded(pool, index, [*records, params.A, params.dt_bias]), pool, index, advance)
    return answer


def scan_fold(pool: Tensor, index: VerifyIndex, records: Records) -> None:
    """Fold the pending tokens' records into the states, and store the states at the marks."""
    write_slots(pool, index.dst, _folded(pool, index, records))


def _folded(pool: Tensor, index: VerifyIndex, records: Records) -> Tensor:
    x, dt, b, rates, dt_bias = records

    def fold(own: Tensor, rows: Tensor, i: int) -> Tensor:
        line, shared = index.line[rows].long(), index.read[rows].long()
        decay, new = scan_changes(x[line, i], dt[line, i], b[shared, i], rates, dt_bias)
        return decay * own + new

    return folded(pool, index, fold)
