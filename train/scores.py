"""Scores a model on whole dialogues: right answers, and accepted drafts of the MTP head.

One forward pass over a dialogue scores all of its answers. Greedy decoding gives an answer if and only if, with the
answer itself as input, the largest logit names each of its tokens in turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from train.delta_rule import CHUNK
from train.examples import Example
from train.model import HybridModel, make_rows

DISTANCES = (256, 512, 1024, 2048, 4096, 6144, 8192)
MAX_ANSWER = 24


@dataclass(slots=True)
class Count:
    """The number of right answers, and of all answers."""

    right: int = 0
    num: int = 0

    def add(self, right: int, num: int = 1) -> None:
        self.right += right
        self.num += num

    @property
    def share(self) -> float:
        return self.right / self.num if self.num else float("nan")


@dataclass(slots=True)
class Scores:
    """Right answers in `by_group[group][bucket]`. `bucket` is the first of DISTANCES that is not exceeded.

    A draft counts as accepted if it is the model's own next token. `turn_drafts` are those along the assistant messages
    of the dialogues. `answer_drafts` are those along the model's own greedy answers, of which `num_left_out` wrong ones
    were not decoded. The first token of a message is never drafted.
    """

    by_group: dict[str, dict[int, Count]] = field(default_factory=dict)
    turn_drafts: Count = field(default_factory=Count)
    answer_drafts: Count = field(default_factory=Count)
    num_left_out: int = 0

    def within(self, distance: int, beyond: int = 0, group: str | None = None) -> Count:
        """Count all answers whose facts are more than `beyond` and at most `distance` tokens back."""
        total = Count()
        for name, buckets in self.by_group.items():
            for bucket, count in buckets.items():
                if beyond < bucket <= distance and group in (None, name):
                    total.add(count.right, count.num)
        return total

    def as_json(self) -> dict[str, Any]:
        return {
            "by_group": {
                group: {str(b): [c.right, c.num] for b, c in sorted(buckets.items())}
                for group, buckets in sorted(self.by_group.items())
            },
            "turn_drafts": [self.turn_drafts.right, self.turn_drafts.num],
            "answer_drafts": [self.answer_drafts.right, self.answer_drafts.num],
            "num_answers_not_decoded": self.num_left_out,
        }


@torch.no_grad()
def score(
    model: HybridModel,
    examples: Sequence[Example],
    end_of_message: int,
    *,
    tokens_per_batch: int = 131072,
    max_decoded: int = 256,
) -> Scores:
    """Run the model over all examples. Decode at most `max_decoded` of the wrong answers."""
    scores = Scores()
    wrong: list[tuple[int, ...]] = []
    for group in _groups(examples, lambda example: len(example.tokens), tokens_per_batch):
        own, drafts = _choices(model, [example.tokens for example in group])
        for row, example in enumerate(group):
            _count(scores, wrong, example, own[row], drafts[row])
    scores.num_left_out = max(0, len(wrong) - max_decoded)
    for prompts in _groups(wrong[:max_decoded], lambda prompt: len(prompt) + MAX_ANSWER, tokens_per_batch):
        _decode(model, prompts, end_of_message, scores.answer_drafts)
    return scores


def _count(scores: Scores, wrong: list[tuple[int, ...]], example: Example, own: Tensor, drafts: Tensor) -> None:
    tokens = torch.tensor(example.tokens)
    for span in example.said:
        accepted = own[span.start : span.end - 1] == drafts[span.start - 1 : span.end - 2]
        scores.turn_drafts.add(int(accepted.sum()), len(accepted))
        if span.distance is None:
            continue
        right = bool((own[span.start - 1 : span.end - 1] == tokens[span.start : span.end]).all())
        bucket = DISTANCES[bisect_left(DISTANCES, span.distance)]
        scores.by_group.setdefault(span.group, {}).setdefault(bucket, Count()).add(right)
        if right:
            scores.answer_drafts.add(int(accepted.sum()), len(accepted))
        else:
            wrong.append(example.tokens[: span.start])


def _choices(model: HybridModel, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return two `[rows, T]` on the CPU: the token with the largest logit after each token, and the draft of the one
    after that, given the next token."""
    device = model.model.embed_tokens.weight.device
    length = -(-max(map(len, sequences)) // CHUNK) * CHUNK
    tokens = torch.zeros(len(sequences), length, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    flat = tokens.to(device).flatten()
    rows = make_rows(model.shape, len(sequences), length, device)
    hidden = model(flat, rows)
    drafted = model.draft(hidden, flat.roll(-1), rows)
    own, drafts = (model.logits(x).argmax(-1).view(len(sequences), length).cpu() for x in (hidden, drafted))
    return own, drafts


def _decode(model: HybridModel, prompts: Sequence[tuple[int, ...]], end_of_message: int, accepted: Count) -> None:
    """Decode greedy answers by repeated passes over the whole rows, and count their drafts."""
    sequences = [list(prompt) for prompt in prompts]
    is_open = [True] * len(prompts)
    for _ in range(MAX_ANSWER):
        own, _ = _choices(model, sequences)
        for row, sequence in enumerate(sequences):
            if is_open[row]:
                sequence.append(int(own[row, len(sequence) - 1]))
                is_open[row] = sequence[-1] != end_of_message
        if not any(is_open):
            break
    own, drafts = _choices(model, sequences)
    for row, prompt in enumerate(prompts):
        end = len(sequences[row])
        same = own[row, len(prompt) : end - 1] == drafts[row, len(prompt) - 1 : end - 2]
        accepted.add(int(same.sum()), len(same))


def _groups(items: Iterable[Any], length: Callable[[Any], int], tokens_per_batch: int) -> list[list[Any]]:
    """Group items of about the same length. No group has more tokens than wanted after padding."""
    groups: list[list[Any]] = []
    for item in sorted(items, key=length, reverse=True):
        longest = -(-length(groups[-1][0]) // CHUNK) * CHUNK if groups else 0
        if not groups or (len(groups[-1]) + 1) * longest > tokens_per_batch:
            groups.append([])
        groups[-1].append(item)
    return groups


def table(scores: Scores) -> str:
    """Return the percentages of right answers by task (rows) and distance (columns), with counts."""
    lines = ["              " + "".join(f"{f'to {d}':>16}" for d in DISTANCES)]
    for group in [*sorted(scores.by_group), None]:
        cells = []
        for beyond, distance in zip((0, *DISTANCES), DISTANCES, strict=False):
            count = scores.within(distance, beyond, group)
            cells.append(f"{100 * count.share:.1f} of {count.num}" if count.num else "-")
        lines.append(f"{group or 'all':14}" + "".join(f"{cell:>16}" for cell in cells))
    for name, count in (("answers", scores.answer_drafts), ("whole turns", scores.turn_drafts)):
        lines.append(f"first drafts accepted along {name}: {100 * count.share:.1f} % of {count.num}")
    return "\n".join(lines)
