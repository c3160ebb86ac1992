"""The examples that score models: whole held-out dialogues with many answers each, and the suite of single
questions."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tokenizers import Tokenizer

from evaluation.dialogue import Dialogue, Message
from evaluation.suite import Example as Question
from evaluation.suite import held_out_suite
from evaluation.tasks import TASKS, make_dialogue
from evaluation.tasks.builder import Split
from train.examples import Example, Span, locate

LENGTHS = (700, 1500, 3000, 5500, 7900)
MAX_TOKENS = 8192


def held_out(tokenizer_file: Path, count: int, num_workers: int) -> Iterator[tuple[str, list[Example]]]:
    """Yield the examples by name: `count` dialogues of all tasks and several lengths, then half as many questions. They
    are always the same."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(num_workers, get_context("spawn")) as pool:
        rounds = range(0, count, len(TASKS) * len(LENGTHS))
        yield "dialogues", [e for part in pool.map(partial(_dialogues, tokenizer_file, count), rounds) for e in part]
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    yield "suite", [question_example(question, tokenizer) for question in held_out_suite(num_examples=count // 2)]


def question_example(question: Question, tokenizer: Tokenizer) -> Example:
    """Return a question of the suite with its answer, grouped by its task."""
    messages = [Message(message["role"], message["content"]) for message in question.messages]
    dialogue = Dialogue(question.task, (*messages, Message("assistant", question.answer)), ())
    example = locate(dialogue, tokenizer, MAX_TOKENS)
    last = example.said[-1]
    span = Span(last.start, last.end, question.task, question.num_tokens_back)
    return Example(example.tokens[: last.end], (span,))


def _dialogues(tokenizer_file: Path, count: int, start: int) -> list[Example]:
    """Return dialogues from `start` on, one for each task and length."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    cells = [(task, length) for task in TASKS for length in LENGTHS]
    out = []
    for index, (task, length) in enumerate(cells[: count - start], start=start):
        dialogue = make_dialogue(task, random.Random(f"held out {index}"), length, split=Split.HELD_OUT)
        out.append(locate(dialogue, tokenizer, MAX_TOKENS))
    return out
