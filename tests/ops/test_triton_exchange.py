"""Sums and gathers over ranks that write to each other's memory, here all on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forkpoint.ops.exchange.kernel import PROGRAMS, WORDS, inbox_words, words_each
from forkpoint.ops.exchange.peers import Peers
from forkpoint.ops.select import torch_table
from tests.ops.triton_cases import DEVICE, sized, triton_ops

triton_ops()  # teaches the interpreter bfloat16
SIZE = 3


def come(inbox: Tensor, rank: int, x: Tensor, number: int, by_row: bool = False) -> None:
    """As if `rank` had sent `x`, so that who comes first need not wait."""
    words = x.reshape(-1).view(torch.int32).long() & 0xFFFFFFFF | number << 32
    for program, piece in enumerate(words.split(x.shape[-1] // 2 if by_row else words_each(len(words)))):
        place = (((number & 1) * PROGRAMS + program) * SIZE + rank) * WORDS
        inbox[place : place + len(piece)] = piece


def test_one_rank_after_the_other() -> None:
    """Values whose sums are exact; the last exchange goes as far as there is room."""
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
    ranks = [Peers(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(SIZE)]
    shapes = [(3, 40), (1, 2), (5, 1022), *sized([], [(128, 4096)])]
    for number, shape in enumerate(shapes * 2, 1):
        xs = [torch.randint(-64, 64, shape, device=DEVICE).bfloat16() for _ in range(SIZE)]
        for counted in ranks:
            counted._numbers.fill_(number - 1)  # as if all programs had been at work each time
        for rank, peers in enumerate(ranks):
            for later in range(rank + 1, SIZE):
                come(inboxes[rank], later, xs[later], number)
            found = peers.sum(xs[rank]) if number % 2 else peers.gather(xs[rank])
            want = xs[0] + xs[1] + xs[2] if number % 2 else torch.cat(xs, -1)
            assert torch.equal(found, want)


@pytest.mark.parametrize("shape", [(3, 40), (2, 1500), *sized([], [(1, 4096), (128, 4096)])])
def test_the_norm_of_a_sum(shape: tuple[int, int]) -> None:
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
    ranks = [Peers(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(SIZE)]
    weight = torch.rand(shape[1], device=DEVICE)
    for number in (1, 2, 3):
        *xs, residual = (torch.randint(-64, 64, shape, device=DEVICE).bfloat16() for _ in range(SIZE + 1))
        want, total = torch_table().add_rmsnorm(xs[0] + xs[1] + xs[2], residual.clone(), weight, 1e-6)
        for rank, peers in enumerate(ranks):
            for later in range(rank + 1, SIZE):
                come(inboxes[rank], later, xs[later], number, by_row=True)
            own = residual.clone()
            found = peers.sum_add_rmsnorm(xs[rank], own, weight, 1e-6)
            assert torch.equal(own, total)
            torch.testing.assert_close(found, want, atol=2e-2, rtol=1e-2)


def test_what_there_is_no_room_for() -> None:
    peers = Peers(0, [0, 0], torch.device("cpu"))
    assert peers.takes(torch.empty(256, 4096, dtype=torch.bfloat16))
    assert not peers.takes(torch.empty(257, 4096, dtype=torch.bfloat16))
    assert not peers.takes(torch.empty(4, 3, dtype=torch.bfloat16))
