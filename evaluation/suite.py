"""Held-out examples: questions whose facts and long system prompts occur in no training dialogue."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path

from evaluation.dialogue import Dialogue, Scored
from evaluation.tasks import make_dialogue
from evaluation.tasks.builder import Split, SystemPrompt
from evaluation.tasks.system import long_system_prompt
from forkpoint.errors import ConfigError

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
MAX_PROMPT_TOKENS = 7800
SYSTEM_TOKENS = 700
GENERATION_PROMPT_TOKENS = 3

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of distances in tokens: `low < distance <= high`."""

    name: str
    low: int
    high: int


BUCKETS = (
    Bucket("512", 0, 512),
    Bucket("1K", 512, 1024),
    Bucket("2K", 1024, 2048),
    Bucket("4K", 3072, 4096),
    Bucket("6K", 5120, 6144),
)
ANY = Bucket("any", 0, MAX_PROMPT_TOKENS)
KINDS = {
    "recall": {"fact"},
    "correction": {"fact"},
    "instruction": {"fact", "reply"},
    "made_up": {"fact"},
    "profile": {"profile"},
    "variables": {"variable"},
    "ledger": {"total"},
    "state": {"state"},
    "mixed": {"fact", "profile", "reply", "variable", "total", "state"},
}
CELLS = (
    *(("recall", bucket) for bucket in BUCKETS),
    *(("correction", bucket) for bucket in (BUCKETS[1], BUCKETS[3])),
    *(("instruction", bucket) for bucket in (BUCKETS[2], BUCKETS[4])),
    *((task, ANY) for task in ("made_up", "profile", "variables", "ledger", "state", "mixed")),
)


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with a question, and the one right answer.

    `num_tokens_back` counts from the end of the message with the newest fact that the answer depends on to the answer.
    `distance` names its bucket. `shared_system`: other examples of the suite have the same system prompt.
    """

    name: str
    task: str
    messages: tuple[Mapping[str, str], ...]
    answer: str
    distance: str
    num_tokens_back: int
    num_prompt_tokens: int
    shared_system: bool


def held_out_suite(
    seed: int = 0, num_examples: int = 260, *, num_systems: int = 4, count_tokens: CountTokens | None = None
) -> list[Example]:
    """Build examples in rounds. Each round has one example for each pair of task and distance.

    Half of the rounds share `num_systems` system prompts. Example i depends only on the seed, its place and
    `num_systems`. `count_tokens` measures distances, by default with the demo model's tokenizer. Prompts have at most
    MAX_PROMPT_TOKENS tokens.
    """
    if num_examples < 1 or num_systems < 1:
        raise ConfigError(f"num_examples is {num_examples}, num_systems is {num_systems}; give at least 1 of each")
    counted = _Counted(count_tokens or _demo_tokenizer())
    systems = [
        long_system_prompt(random.Random(f"held out {seed} system {number}"), Split.HELD_OUT, SYSTEM_TOKENS)
        for number in range(num_systems)
    ]
    return [_example(seed, place, systems, counted) for place in range(num_examples)]


class _Counted:
    """Remembers the counts of texts, because most messages occur often."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._count_tokens(text)
        return known


def _demo_tokenizer() -> CountTokens:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)


def _example(seed: int, place: int, systems: Sequence[SystemPrompt], counted: _Counted) -> Example:
    turn, cell = divmod(place, len(CELLS))
    task, bucket = CELLS[cell]
    system = systems[turn // 2 % len(systems)] if turn % 2 else None
    for attempt in count():
        rng = random.Random(f"held out {seed} {place} {attempt}")
        longest = MAX_PROMPT_TOKENS if bucket is ANY else min(MAX_PROMPT_TOKENS, bucket.high + 1500)
        size = int(max(300, bucket.low * 1.1) + rng.random() * (longest - max(300, bucket.low * 1.1)))
        dialogue = make_dialogue(task, rng, size, split=Split.HELD_OUT, system=system)
        fitting = list(_fitting(dialogue, bucket, counted))
        if fitting:
            scored, back, num_prompt_tokens = fitting[int(rng.random() * len(fitting))]
            return Example(
                name=f"{task}-{bucket.name}-{place:04d}",
                task=task,
                messages=tuple(
                    {"role": message.role, "content": message.content} for message in dialogue.messages[: scored.index]
                ),
                answer=dialogue.messages[scored.index].content,
                distance=next((b.name for b in BUCKETS if b.low < back <= b.high), "other"),
                num_tokens_back=back,
                num_prompt_tokens=num_prompt_tokens,
                shared_system=system is not None,
            )
    raise AssertionError("unreachable")


def _fitting(dialogue: Dialogue, bucket: Bucket, counted: _Counted) -> Iterator[tuple[Scored, int, int]]:
    """Yield the task's own answers whose distance is in the bucket, with the distance and the prompt's length."""
    ends = list(accumulate(counted(message.render()) for message in dialogue.messages))
    for scored in dialogue.scored:
        num_prompt_tokens = ends[scored.index - 1] + GENERATION_PROMPT_TOKENS
        back = num_prompt_tokens - ends[scored.source]
        if (
            scored.kind in KINDS[dialogue.task]
            and bucket.low < back <= bucket.high
            and num_prompt_tokens <= MAX_PROMPT_TOKENS
        ):
            yield scored, back, num_prompt_tokens
