"""Teaching the MTP head: what it is asked, that it learns, and that nothing else changes."""

from __future__ import annotations

import torch

from tests.train.small import small_model, small_shape
from train.model import make_rows
from train.mtp import HeadTraining, accepted
from train.optimizer import Rates

LENGTH = 64


def test_a_step_after_the_first_sees_the_step_before() -> None:
    """The second draft by hand: one more row of keys behind those of the text."""
    model, known = small_model(), 40
    tokens = torch.randint(3, small_shape().vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = make_rows(model.shape, 1, LENGTH, tokens.device)
        hidden = model(tokens, rows)
        first, second = model.drafts(hidden, [tokens.roll(-1), tokens.roll(-2)], rows)
        torch.testing.assert_close(first, model.draft(hidden, tokens.roll(-1), rows))
        changed = torch.cat([hidden[: known + 1], first[known : known + 1], hidden[known + 2 :]])
        want = model.draft(changed, tokens.roll(-1), rows)[known + 1]
    torch.testing.assert_close(second[known], want)


def test_the_head_learns_and_the_rest_stays() -> None:
    model = small_model()
    texts = torch.randint(3, 60, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training = HeadTraining(model, texts, 3, Rates(0.02, 0.003))
    losses = [training.step(texts, 1.0) for _ in range(12)]
    assert bool((losses[-1] < losses[0]).all())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("model."), name
    shares = accepted(model, texts, 3)
    assert shares == sorted(shares, reverse=True)
