"""Measures whether hard questions notice that states are rounded: `python -m scripts.rounded_states`.

The demo model reads dialogues that are harder than any in its training. Six names are tracked, with up to a dozen moves
each between two answers, so the state has to hold what no message says. After every turn up to two names that moved
twice or more are asked for.

Every question resumes from the last boundary. The state there is read unchanged, or rounded. It is rounded once, when
the question reads it, or always. Then each checkpoint is rounded when it is stored, so that all later tokens are
computed from rounded states.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evaluation.compare import PairedAccuracy, root_mean_square_change
from evaluation.mutations import find_served, round_to_steps, slot_tensors
from evaluation.question import Question, make_question
from evaluation.score import is_right
from evaluation.sensitivity import DENSE
from evaluation.subject import Reply, Subject
from evaluation.tasks.builder import DialogueBuilder, Split
from evaluation.tasks.ledger import LEDGER
from evaluation.tasks.state import COMPASS, CUPS, RING, WEEK
from evaluation.tasks.tracking import Machine, TrackingThread
from evaluation.text_table import aligned
from forkpoint.demo.model import default_model
from forkpoint.engine.inputs import Prompt

MACHINES: dict[str, Machine] = {"totals": LEDGER, "compass": COMPASS, "cups": CUPS, "ring": RING, "weekdays": WEEK}
NUM_NAMES, PATIENCE, LEAST_MOVES, NUM_ASKED = 6, 12, 2, 2
MAX_TOKENS = 8
UNCERTAIN = -0.05  # nats: answers with a token less likely than that have the noise that is shown
ARENA_BYTES = 600 << 20
GRID = 64


@dataclass(frozen=True, slots=True)
class HardExample:
    """An example in the form that `evaluation.question` takes."""

    messages: tuple[dict[str, str], ...]
    answer: str
    task: str
    distance: str = "any"


def one_scale(tensors: list[Tensor]) -> None:
    largest = torch.stack([values.float().abs().max() for values in tensors]).max()
    for values in tensors:
        round_to_steps(values, largest, 8)


def bfloat16(tensors: list[Tensor]) -> None:
    for values in tensors:
        values.copy_(values.bfloat16().float())


ROUNDINGS: dict[str, Callable[[list[Tensor]], None]] = {"8 bits, one scale": one_scale, "bfloat16": bfloat16}


def hard_examples(kind: str, number: int, num_tokens: int) -> Iterator[HardExample]:
    """Yield the questions of one dialogue, in order."""
    rng = random.Random(f"hard {kind} {number}")
    dialogue = DialogueBuilder(kind, num_tokens)
    thread = TrackingThread(rng, Split.HELD_OUT, MACHINES[kind], NUM_NAMES, waits=True, patience=PATIENCE)
    while not dialogue.is_full:
        thread.turn(dialogue)
        told = tuple({"role": message.role, "content": message.content} for message in dialogue.messages)
        moved = thread.moved(LEAST_MOVES)
        for question, answer in rng.sample(moved, min(len(moved), NUM_ASKED)):
            yield HardExample((*told, {"role": "user", "content": question}), answer, kind)


def ask(subject: Subject, questions: Sequence[Question]) -> list[Reply]:
    return [reply for (reply,) in subject.ask([question.prompt for question in questions], MAX_TOKENS)]


def rounded_once(
    subject: Subject, questions: Sequence[Question], rounding: Callable[[list[Tensor]], None]
) -> list[Reply]:
    """Round the states that the questions read, ask them, and restore the states."""
    tensors = [slot_tensors(subject.arena, slot) for slot in {find_served(subject, q, "").slot for q in questions}]
    kept = [[values.clone() for values in slot] for slot in tensors]
    for slot in tensors:
        rounding(slot)
    replies = ask(subject, questions)
    for slot, before in zip(tensors, kept, strict=True):
        for values, content in zip(slot, before, strict=True):
            values.copy_(content)
    return replies


def rounded_always(
    subject: Subject, questions: Sequence[Question], rounding: Callable[[list[Tensor]], None]
) -> list[Reply]:
    """Start from an empty cache, and compute each block of the dialogue from the rounded state before it."""
    subject.llm.reset_prefix_cache()
    seen: set[int] = set()
    for question in questions:
        prompt, end = question.prompt, subject.layout.usable_prefix(question.num_prompt_tokens)
        for boundary in range(GRID, end + 1, GRID):
            _round_at(subject, replace(prompt, token_ids=prompt.token_ids[: boundary + 1]), rounding, seen)
    return ask(subject, questions)


def _round_at(subject: Subject, prompt: Prompt, rounding: Callable[[list[Tensor]], None], seen: set[int]) -> None:
    """Store the checkpoint one token before the prompt's end, unless it exists, and round it."""
    cache, size = subject.cache, len(prompt.token_ids)
    if cache.lookup(cache.new_lease("script", "", prompt.token_ids), size).num_tokens < size - 1:
        subject.ask([prompt], 1)
    checkpoint = cache.lookup(cache.new_lease("script", "", prompt.token_ids), size).checkpoint
    assert checkpoint is not None and checkpoint.num_tokens == size - 1
    if checkpoint.slot not in seen:
        seen.add(checkpoint.slot)
        rounding(slot_tensors(subject.arena, checkpoint.slot))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--num-dialogues", type=int, default=2, help="of each kind")
    parser.add_argument("--num-tokens", type=int, default=1500, help="of a dialogue")
    options = parser.parse_args()
    asked: list[Question] = []
    sound: list[Reply] = []
    spoilt: dict[str, list[Reply]] = {}
    settings = {**DENSE, "kv_cache_memory_bytes": ARENA_BYTES, "log_level": "error", "device": "cpu"}
    with Subject(default_model(), settings) as subject:
        for kind in options.kinds:
            for number in range(options.num_dialogues):
                examples = hard_examples(kind, number, options.num_tokens)
                questions = [make_question(subject, example) for example in examples]
                questions = [q for q in questions if subject.layout.usable_prefix(q.num_prompt_tokens)]
                subject.llm.reset_prefix_cache()
                subject.ask([questions[-1].prompt], 1)
                ask(subject, questions)  # now each one's last boundary is cached
                asked += questions
                sound += ask(subject, questions)
                for name, rounding in ROUNDINGS.items():
                    spoilt.setdefault(f"{name}, once", []).extend(rounded_once(subject, questions, rounding))
                for name, rounding in ROUNDINGS.items():
                    spoilt.setdefault(f"{name}, always", []).extend(rounded_always(subject, questions, rounding))
    print(table(asked, sound, spoilt))


def table(questions: Sequence[Question], sound: Sequence[Reply], spoilt: dict[str, list[Reply]]) -> str:
    def marks(replies: Sequence[Reply]) -> list[bool]:
        return [is_right(reply.text, question.answer) for question, reply in zip(questions, replies, strict=True)]

    before = marks(sound)
    rows = [
        ("state", "right", "became wrong / right", "p", "noise of an uncertain log-prob"),
        ("as it is", f"{sum(before)}/{len(before)}", "", "", ""),
    ]
    for name, replies in spoilt.items():
        now = marks(replies)
        pairs = PairedAccuracy.of(before, now)
        uncertain = [pair for pair in zip(sound, replies, strict=True) if min(pair[0].logprobs) < UNCERTAIN]
        noise = root_mean_square_change([a for a, _ in uncertain], [b for _, b in uncertain])
        right, changed = f"{sum(now)}/{len(now)}", f"{pairs.lost} / {pairs.gained}"
        rows.append((name, right, changed, f"{pairs.p_value:.2g}", f"{noise:.2g}"))
    return aligned(rows, rule_after=(0,))


if __name__ == "__main__":
    main()
