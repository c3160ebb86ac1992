"""The output head cut over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from forkpoint.models.cuts import padded_span
from forkpoint.models.head import OutputHead
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.select import torch_table
from tests.thread_ranks import on_each

VOCAB, HIDDEN = 100, 8  # with several ranks the first has 64 ids; of three the third has none
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_likeliest_id_is_that_of_all_logits(size: int) -> None:
    """With ids that are equally likely on two ranks, and logits that are not finite."""
    logits = torch.randint(-20, 20, (200, VOCAB)).float()
    logits[0], logits[1], logits[2], logits[3, 80], logits[4, 70] = 0.0, NAN, -INF, NAN, INF
    logits[5, :64], logits[6, 64:] = -INF, -INF
    want_ids, want_finite = torch_table().greedy(logits)
    assert (~want_finite).sum() == 4 and want_ids[0] == 0

    def run(ranks: Ranks) -> tuple[torch.Tensor, ...]:
        first, end = padded_span(VOCAB, ranks)
        padded = torch.nn.functional.pad(logits, (0, 64 * size), value=99.0)
        part = OutputHead(torch_table(), ranks, torch.zeros(end - first, HIDDEN), VOCAB)
        own = padded[:, first:end]
        return (*part.likeliest(own), part.whole(own))

    for ids, finite, whole in on_each(size, False, run):
        assert torch.equal(finite, want_finite) and torch.equal(ids[finite], want_ids[finite])
        assert torch.equal(whole.nan_to_num(), logits.nan_to_num())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_guesses_are_made_by_a_shortlist_where_there_is_one(size: int) -> None:
    """And nothing else is: logits stay those of the weights. Each rank names the likeliest of its own ids; a third of
    three has none."""
    weight, asked = torch.randn(VOCAB, HIDDEN), []
    hidden = torch.randn(50, HIDDEN)

    def shortlist(own: torch.Tensor, num_ids: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        def find(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append(num_ids)
            if not num_ids:
                return torch.zeros(len(rows), dtype=torch.int64), torch.full((len(rows),), -INF)
            tops, ids = (rows @ own[:num_ids].T).max(1)
            return ids, tops

        return find

    def run(ranks: Ranks) -> tuple[torch.Tensor, ...]:
        first, end = padded_span(VOCAB, ranks)
        own = torch.nn.functional.pad(weight, (0, 0, 0, 64 * size), value=99.0)[first:end]
        table = replace(torch_table(), shortlist=shortlist)
        plain, head = (OutputHead(table, ranks, own, VOCAB, guesses) for guesses in (False, True))
        assert torch.equal(head.own(hidden), plain.own(hidden)) and not asked
        return plain.guess(hidden), head.guess(hidden)

    want = (hidden @ weight.T).argmax(1)
    for plain, guessed in on_each(size, False, run):
        assert torch.equal(plain, want) and torch.equal(guessed, want)
    assert sorted(asked) == sorted([[100], [64, 36], [64, 36, 0]][size - 1])
