"""The delta rule against its definition, token by token, and the hand-written gradients against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from train.chunk_gradients import chunk_gradients
from train.delta_rule import l2_normalised, torch_delta_rule

ROWS, LENGTH, HEADS, VALUE_HEADS, KEY, VALUE = 2, 192, 2, 4, 16, 24


def random_inputs(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    q, k = (l2_normalised(torch.randn(ROWS, LENGTH, HEADS, KEY)) for _ in range(2))
    gates = (-torch.rand(ROWS, LENGTH, VALUE_HEADS) * 0.3, torch.rand(ROWS, LENGTH, VALUE_HEADS))
    return [q, k, torch.randn(ROWS, LENGTH, VALUE_HEADS, VALUE), *gates]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    q, k = (x.repeat_interleave(VALUE_HEADS // HEADS, 2) for x in (q, k))
    state = torch.zeros(ROWS, VALUE_HEADS, KEY, VALUE)
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], missing * beta[:, t, :, None])
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * KEY**-0.5)
    return torch.stack(out, 1)


def test_chunks_equal_single_tokens() -> None:
    inputs = random_inputs(0)
    torch.testing.assert_close(torch_delta_rule(*inputs), token_by_token(*inputs), rtol=1e-4, atol=1e-5)


def test_gradients_equal_those_of_single_tokens() -> None:
    weights = torch.randn(ROWS, LENGTH, VALUE_HEADS, VALUE)
    found = []
    for rule in (torch_delta_rule, token_by_token):
        inputs = [x.clone().requires_grad_() for x in random_inputs(1)]
        (rule(*inputs) * weights).sum().backward()
        found.append([x.grad for x in inputs])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_chunk_gradients_equal_autograd(seed: int) -> None:
    q, k, u, decay, _ = random_inputs(seed)
    num_chunks, scale = LENGTH // 64, KEY**-0.5
    summed = decay.view(ROWS, num_chunks, 64, -1).cumsum(2).view(decay.shape)
    w = torch.randn(ROWS, LENGTH, VALUE_HEADS, KEY)
    h, dh = torch.randn(2, ROWS, num_chunks, VALUE_HEADS, KEY, VALUE)
    do = torch.randn_like(u)
    q, k, w, summed = (x.requires_grad_() for x in (q, k, w, summed))

    def chunks(x: Tensor) -> Tensor:
        x = x.repeat_interleave(VALUE_HEADS // x.shape[2], 2)
        return x.view(ROWS, num_chunks, 64, VALUE_HEADS, -1).transpose(2, 3)

    def tokens(x: Tensor) -> Tensor:
        return x.transpose(2, 3).reshape(ROWS, LENGTH, VALUE_HEADS, -1)

    g = chunks(summed[..., None])
    fresh = chunks(u) - chunks(w) @ h
    fresh.retain_grad()
    scores = (chunks(q) @ chunks(k).mT * (g - g.mT).exp()).tril()
    out = ((chunks(q) * g.exp()) @ h + scores @ fresh) * scale
    after = h * g[..., -1:, :].exp() + (chunks(k) * (g[..., -1:, :] - g).exp()).mT @ fresh
    ((out * chunks(do)).sum() + (after * dh).sum()).backward()
    assert fresh.grad is not None
    got = chunk_gradients(
        q.detach(),
        k.detach(),
        tokens(fresh.detach()),
        do,
        tokens(fresh.grad),
        h,
        dh,
        summed.detach() / math.log(2),
        scale,
    )
    for x, want in zip(got, (q.grad, k.grad, w.grad, summed.grad), strict=True):
        torch.testing.assert_close(x, want, rtol=1e-3, atol=1e-3)
