"""The output head cut over ranks."""

from __future__ import annotations

import pytest
import torch

from forkpoint.models.cuts import padded_span
from forkpoint.models.head import OutputHead
from forkpoint.ops.linear import scaled
from forkpoint.ops.ranks import Ranks
from forkpoint.ops.select import torch_table
from forkpoint.platforms.platform import DeviceTraits
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


@pytest.mark.parametrize("size", [1, 2])
def test_guesses_are_made_by_weights_in_fp8_where_a_device_multiplies_it(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else is: logits stay those of the weights as loaded."""
    vocab, weight = 4224, torch.randn(4224, 128).to(torch.bfloat16)
    hidden = weight[torch.randperm(vocab)[:50]]  # each row's own id is the likeliest by far
    monkeypatch.setattr(scaled, "traits_of", lambda device: DeviceTraits(multiplies_fp8=True))
    narrow, whole = scaled.narrowed(weight), scaled.quantise(weight)
    assert narrow is not None and torch.equal(narrow.scales, whole.scales)
    assert torch.equal(narrow.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert scaled.narrowed(weight.float()) is None

    def run(ranks: Ranks) -> tuple[torch.Tensor, ...]:
        first, end = padded_span(vocab, ranks)
        heads = [OutputHead(torch_table(), ranks, weight[first:end], vocab, guesses) for guesses in (False, True)]
        plain, head = heads
        assert torch.equal(head.own(hidden), plain.own(hidden)) and torch.equal(plain.guess(hidden), head.guess(hidden))
        return head.guess(hidden), head.likeliest(head.own(hidden))[0]

    for guessed, ids in on_each(size, False, run):
        assert torch.equal(guessed, ids)
