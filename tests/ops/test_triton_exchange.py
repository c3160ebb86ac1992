"""Sums and gathers over ranks that write to each other's memory, here all on one device."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from forkpoint.ops.attention.reference import NO_KEYS
from forkpoint.ops.exchange import rank_exchange as exchanges
from forkpoint.ops.exchange import rows_kernel as rows
from forkpoint.ops.exchange.kernel import PROGRAMS, WORDS, words_each
from forkpoint.ops.exchange.kernel import inbox_words as few_inbox_words
from forkpoint.ops.exchange.rank_exchange import RankExchange, inbox_words
from forkpoint.ops.linear import fp8_kernel
from forkpoint.ops.linear.fp8_kernel import Rounded, narrow
from forkpoint.ops.select import torch_table
from forkpoint.ops.unmade import Parts
from tests.ops.triton_cases import DEVICE, sized, triton_ops

triton_ops()  # teaches the interpreter bfloat16
SIZE = 3


def come(inbox: Tensor, rank: int, x: Tensor, number: int, by_row: bool = False) -> None:
    """Write to the inbox as if `rank` had sent `x`, so that the first rank need not wait."""
    words = x.reshape(-1).view(torch.int32).long() & 0xFFFFFFFF | number << 32
    for program, piece in enumerate(words.split(x.shape[-1] // 2 if by_row else words_each(len(words)))):
        place = (((number & 1) * PROGRAMS + program) * SIZE + rank) * WORDS
        inbox[place : place + len(piece)] = piece


def test_one_rank_after_the_other() -> None:
    """Values whose sums are exact; the last exchange goes as far as there is room."""
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
    ranks = [RankExchange(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(SIZE)]
    shapes = [(3, 40), (1, 2), (5, 1022), *sized([], [(128, 2048)])]
    for number, shape in enumerate(shapes * 2, 1):
        xs = [torch.randint(-64, 64, shape, device=DEVICE).bfloat16() for _ in range(SIZE)]
        for counted in ranks:
            counted._few.numbers.fill_(number - 1)  # as if all programs had been at work each time
        for rank, exchange in enumerate(ranks):
            for later in range(rank + 1, SIZE):
                come(inboxes[rank], later, xs[later], number)
            found = exchange.sum(xs[rank]) if number % 2 else exchange.gather(xs[rank])
            want = xs[0] + xs[1] + xs[2] if number % 2 else torch.cat(xs, -1)
            assert torch.equal(found, want)


@pytest.mark.parametrize("shape", [(3, 40), (2, 1500), *sized([], [(1, 4096), (128, 2048)])])
def test_the_norm_of_a_sum(shape: tuple[int, int]) -> None:
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
    ranks = [RankExchange(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(SIZE)]
    weight = torch.rand(shape[1], device=DEVICE)
    for number in (1, 2, 3):
        *xs, residual = (torch.randint(-64, 64, shape, device=DEVICE).bfloat16() for _ in range(SIZE + 1))
        want, total = torch_table().add_rmsnorm(xs[0] + xs[1] + xs[2], residual.clone(), weight, 1e-6)
        for rank, exchange in enumerate(ranks):
            for later in range(rank + 1, SIZE):
                come(inboxes[rank], later, xs[later], number, by_row=True)
            own = residual.clone()
            found = exchange.sum_add_rmsnorm(xs[rank], own, weight, 1e-6)
            assert torch.equal(own, total)
            torch.testing.assert_close(found, want, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("few_bytes", [1 << 19, 0])
@pytest.mark.parametrize("kind", ["experts", "splits"])
def test_parts_of_a_sum_and_the_norm_in_fp8(kind: str, few_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that each have a share, in bfloat16, or splits of K, in fp32; of exact values, so that orders agree."""
    monkeypatch.setattr(exchanges, "FEW_BYTES", few_bytes)
    monkeypatch.setattr(fp8_kernel, "FEW_SCALED", 0)
    monkeypatch.setattr(fp8_kernel, "traits_of", lambda device: SimpleNamespace(multiplies_fp8=True))
    count, width, num_parts = 3, 256, 3
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
    ranks = [RankExchange(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(SIZE)]
    weight, residual = torch.rand(width, device=DEVICE), torch.randint(-9, 9, (count, width), device=DEVICE).bfloat16()
    owns = torch.randint(-9, 9, (SIZE, num_parts, count, width), device=DEVICE).float()
    if kind == "experts":
        shares = torch.randint(1, 4, (SIZE, count, num_parts), device=DEVICE).float()
        xs = (owns.transpose(1, 2) * shares[..., None]).sum(2).bfloat16()
        answers = owns.transpose(1, 2).bfloat16().contiguous()
        parts = [Parts.of(*pair) for pair in zip(answers, shares, strict=True)]
    else:
        xs, parts = owns.sum(1).bfloat16(), [Parts.of(own.transpose(0, 1)) for own in owns]
    want, total = torch_table().add_rmsnorm(xs.sum(0), residual.clone(), weight, 1e-6)
    for rank, later in itertools.combinations(range(SIZE), 2):
        come(inboxes[rank], later, xs[later], 1, by_row=True)
        rows_come(inboxes[rank], later, rank, xs[later], [1] * count)
    for rank, exchange in enumerate(ranks):
        own = residual.clone()
        found = exchange.sum_add_rmsnorm(parts[rank], own, weight, 1e-6, rounded=True)
        assert torch.equal(own, total) and isinstance(found, Rounded)
        torch.testing.assert_close(found.as_subclass(Tensor), want, atol=2e-2, rtol=1e-2)
        codes, scales = narrow(found.as_subclass(Tensor), 128)
        assert torch.equal(found.codes[:count].float(), codes[:count].float())
        assert torch.equal(found.scales[:count], scales[:count])


def rows_come(inbox: Tensor, rank: int, receiver: int, x: Tensor, numbers: list[int]) -> None:
    """The same of many rows; `numbers` are those of their programs' exchanges."""
    own, sender = inbox[few_inbox_words(SIZE) :].view(torch.int32), (rank - receiver - 1) % SIZE
    for row, number in enumerate(numbers):
        place = ((number & 1) * (SIZE - 1) + sender) * rows.MOST_ROWS + row
        own[place * rows.WIDEST :][: x.shape[1] // 2] = x[row].view(torch.int32)
        own[2 * (SIZE - 1) * rows.MOST_ROWS * rows.WIDEST + place] = number


@pytest.mark.parametrize("words_at_once", [0, 60, 4096])
def test_many_rows(words_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of sums, and gathers: rows whose programs have others behind them, in several launches, of all widths.

    Programs send up to four rows: in two flags, in a full and a partly filled one, or in one."""
    most, programs = 7, 2
    for module, name, value in ((exchanges, "FEW_BYTES", 0), (rows, "PROGRAMS", programs), (rows, "MOST_ROWS", most)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(rows, "WORDS_AT_ONCE", words_at_once)
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
    ranks = [RankExchange(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(SIZE)]
    counts = [0] * programs  # exchanges that each program was at work in
    for count, width in ((most, 40), (1, 50), (12, 24), (6, 40)):
        *xs, residual = (torch.randint(-64, 64, (count, width), device=DEVICE).bfloat16() for _ in range(SIZE + 1))
        weight = torch.rand(width, device=DEVICE)
        want, total = torch_table().add_rmsnorm(xs[0] + xs[1] + xs[2], residual.clone(), weight, 1e-6)
        for first in range(0, count, most):
            size = min(most, count - first)
            counts = [number + (size > program) for program, number in enumerate(counts)]
            for rank, later in itertools.combinations(range(SIZE), 2):
                numbers = [counts[row % programs] for row in range(size)]
                rows_come(inboxes[rank], later, rank, xs[later][first:], numbers)
        for rank, exchange in enumerate(ranks):
            if count == 1:
                halves = Parts.of(torch.stack([xs[rank].float() - 0.25, torch.full_like(xs[rank], 0.25).float()], 1))
                assert torch.equal(exchange.gather(halves if rank else xs[rank]), torch.cat(xs, -1))
                continue
            own = residual.clone()
            found = exchange.sum_add_rmsnorm(xs[rank], own, weight, 1e-6)
            assert torch.equal(own, total)
            torch.testing.assert_close(found, want, atol=2e-2, rtol=1e-2)


def heads_come(inbox: Tensor, rank: int, receiver: int, parts: Tensor, number: int) -> None:
    """The same of the receiver's heads, for which `rank` has found `parts`."""
    own, sender = inbox[few_inbox_words(SIZE) :].view(torch.int32), (rank - receiver - 1) % SIZE
    for row, head in enumerate(parts[:, receiver].flatten(0, 1)):
        place = ((number & 1) * (SIZE - 1) + sender) * rows.MOST_ROWS + row
        own[place * rows.WIDEST :][: len(head)] = head.view(torch.int32)
        own[2 * (SIZE - 1) * rows.MOST_ROWS * rows.WIDEST + place] = number


@pytest.mark.parametrize(("count", "group", "width"), [(1, 2, 8), (3, 2, 5), (2, 1, 64)])
def test_heads_are_merged(count: int, group: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over all ranks' keys, in one launch or several. One rank has no keys for the heads of another."""
    monkeypatch.setattr(rows, "PROGRAMS", 2)
    monkeypatch.setattr(rows, "MOST_ROWS", 4)
    scores = torch.randn(SIZE, count, SIZE, group, 6, dtype=torch.float64)
    scores[1, :, 0] = float("-inf")
    values = torch.randn(*scores.shape, width, dtype=torch.float64)
    shares = scores.movedim(0, -2).flatten(-2).softmax(-1).unflatten(-1, (SIZE, 6)).movedim(-2, 0)
    want = (shares[..., None] * values).sum((0, -2)).float()  # [count, ranks, group, width]
    heads = (scores.softmax(-1).nan_to_num()[..., None] * values).sum(-2)
    log_sums = scores.logsumexp(-1, keepdim=True).clip(min=NO_KEYS)
    parts = torch.cat((heads, log_sums), -1).float().to(DEVICE)
    inboxes = [torch.zeros(inbox_words(SIZE), dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
    ranks = [RankExchange(rank, [inbox.data_ptr() for inbox in inboxes], DEVICE) for rank in range(SIZE)]
    for rank, later in itertools.combinations(range(SIZE), 2):
        for number, some in enumerate(parts[later].split(4 // group), 1):
            heads_come(inboxes[rank], later, rank, some, number)
    for rank, exchange in enumerate(ranks):
        assert exchange.merges(parts[rank])
        found = exchange.merge(parts[rank], torch.empty(count, group, width, device=DEVICE))
        torch.testing.assert_close(found.cpu(), want[:, rank], atol=1e-5, rtol=1e-5)


def test_what_there_is_no_room_for() -> None:
    exchange = RankExchange(0, [0, 0], torch.device("cpu"))
    assert exchange.takes(torch.empty(256, 4096, dtype=torch.bfloat16))
    assert not exchange.takes(torch.empty(257, 4096, dtype=torch.bfloat16))
    assert not exchange.takes(torch.empty(4, 3, dtype=torch.bfloat16))
