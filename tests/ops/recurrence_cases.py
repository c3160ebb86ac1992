"""Inputs for state operators, and a per-token oracle for recurrences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.indices import segment_index
from forkpoint.ops.metadata import DecodeIndex, SegmentIndex
from forkpoint.ops.parameters import Recurrence, RecurrenceInputs, RecurrenceParams

GATED_NORMS = [(False, False), (True, False), (False, True)]  # (gate_first, sigmoid): GDN, Mamba-2, KDA


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def segments(
    lens: list[int], src: list[int], dst: list[int], saves: list[list[tuple[int, int]]] | None = None
) -> SegmentIndex:
    """A SegmentIndex; `saves[n]` lists (position, slot) of segment n."""
    return segment_index(lens, src, dst, saves or ())


def rows(src: list[int], dst: list[int]) -> DecodeIndex:
    return DecodeIndex(ints(src), ints(dst))


def padded_pool(num_slots: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Random slots with a gap behind each, as strided views of an arena have."""
    size = 1
    for dim in shape:
        size *= dim
    return torch.randn(num_slots, size + 24).to(dtype)[:, 8 : 8 + size].view(num_slots, *shape)


@dataclass(frozen=True)
class RecurrenceCase:
    mixed: Tensor
    a: Tensor
    b: Tensor
    params: RecurrenceParams

    @property
    def inputs(self) -> RecurrenceInputs:
        return RecurrenceInputs(self.mixed, self.a, self.b)


def recurrence_case(
    num_tokens: int, shape: Recurrence, decay: str = "slow", dtype: torch.dtype = torch.float32, seed: int = 0
) -> RecurrenceCase:
    torch.manual_seed(seed)
    heads = shape.num_v_heads
    a_log = {"slow": -3.0, "strong": 3.0, "none": -40.0, "mixed": 0.0}[decay] + torch.randn(heads) * 0.3
    return RecurrenceCase(
        (torch.randn(num_tokens, shape.mixed_dim) * (1.0 if shape.delta else 0.4)).to(dtype),
        torch.randn(num_tokens, shape.num_decays).to(dtype),
        torch.randn(num_tokens, heads).to(dtype),
        RecurrenceParams(
            shape, a_log, torch.randn(shape.num_decays) * 0.5 - 1, None if shape.delta else torch.rand(heads) + 0.5
        ),
    )


def recurrence_by_token(case: RecurrenceCase, state: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs `[T, HV, V]`, states after each token `[T, HV, V, K]`) in fp64, token by token."""
    shape = case.params.spec
    h, hv, dk, dv = shape.num_k_heads, shape.num_v_heads, shape.key_dim, shape.value_dim
    outputs, states = [], []
    state = state.double().clone()
    for t in range(case.mixed.shape[0]):
        row = case.mixed[t].double()
        q, k = row[: h * dk].view(h, dk), row[h * dk : 2 * h * dk].view(h, dk)
        v = row[2 * h * dk :].view(hv, dv)
        raw = (case.a[t].double() + case.params.dt_bias.double()).view(hv, -1)  # one column, or one for each key
        rate, step = torch.exp(case.params.A_log.double()).unsqueeze(-1), F.softplus(raw).clamp(*shape.step_limit)
        g, beta = -rate * step if shape.bound is None else shape.bound * torch.sigmoid(rate * raw), step
        if shape.delta:
            q, k = F.normalize(q, dim=-1) * dk**-0.5, F.normalize(k, dim=-1)
            beta = torch.sigmoid(case.b[t].double()) * (2 if shape.double_beta else 1)
        out = torch.empty(hv, dv, dtype=torch.float64)
        for head in range(hv):
            kh, qh = k[head // (hv // h)], q[head // (hv // h)]
            kept = state[head] * torch.exp(g[head])
            had = kept @ kh if shape.delta else 0.0
            state[head] = kept + torch.outer(beta[head] * (v[head] - had), kh)
            out[head] = state[head] @ qh
            if case.params.D is not None:
                out[head] += case.params.D[head] * v[head]
        outputs.append(out)
        states.append(state.clone())
    return torch.stack(outputs), torch.stack(states)
