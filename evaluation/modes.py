"""The ways of asking the same questions: what each does to the cache, and how it verifies that it did so."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from evaluation.preempting import preempting
from evaluation.question import Family, Question, batches, flat
from evaluation.subject import Counters, Reply, Subject
from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE
from forkpoint.sched.admission import MIN_GAIN_TO_WAIT

BATCH_TOKENS: Final = 16_384  # prompt tokens asked at once where the arena is to hold them all
TIGHT_SLOTS: Final = 8
TIGHT_MARGIN: Final = 1.25  # of a tight arena's tokens over the longest question's
NUM_SIBLINGS: Final = 2  # completions of each prompt when forked
NUM_DRAFTS: Final = 3
PRESSURE_BATCH: Final = 2.0  # arenas' worth of dialogues that take turns under pressure

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Paper:
    """Every dialogue's questions, the tokens that an answer may take, and the sizes that follow from them."""

    families: tuple[Family, ...]
    max_tokens: int
    seed: int
    layout: CacheLayout

    @property
    def questions(self) -> list[Question]:
        return flat(self.families)

    @property
    def ample_bytes(self) -> int:
        """Bytes of an arena that keeps everything of a batch, including states at every boundary."""
        return max(self._ample_bytes(flat(batch)) for batch in batches(self.families, BATCH_TOKENS))

    def _ample_bytes(self, questions: Sequence[Question]) -> int:
        tokens = NUM_SIBLINGS * sum(self._length(question) for question in questions)
        slots = tokens // BLOCK_SIZE + NUM_SIBLINGS * len(questions)
        return self._bytes(tokens, slots)

    @property
    def tight_tokens(self) -> int:
        return int(TIGHT_MARGIN * max(self._length(question) for question in self.questions))

    @property
    def tight_bytes(self) -> int:
        """Bytes of an arena for little more than the longest question."""
        return self._bytes(self.tight_tokens, TIGHT_SLOTS)

    def _length(self, question: Question) -> int:
        """Return the tokens of the question and its answer, rounded up to whole blocks."""
        size = BLOCK_SIZE
        return -(-(question.num_prompt_tokens + self.max_tokens) // size) * size

    def _bytes(self, num_tokens: int, num_slots: int) -> int:
        return (self.layout.num_pages_for(num_tokens, num_slots) + 1) * self.layout.page_bytes


@dataclass(frozen=True, slots=True)
class Sitting:
    """The results of one mode: every question's replies, and the engine's counters meanwhile.

    It also has the reason if the mode did not do what its name says.
    """

    replies: Mapping[Question, Sequence[Reply]]
    counters: Counters
    faults: tuple[str, ...] = ()
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of asking. `options` are the engine's. `promised`: in deterministic mode its answers equal those of the
    cold cache, bit for bit."""

    name: str
    about: str
    options: Callable[[Paper], dict[str, Any]]
    sit: Callable[[Subject, Paper, Advance], Sitting]
    promised: bool = True
    drafts: bool = False  # which not every model and device can verify


@dataclass(slots=True)
class _Notes:
    """Collects replies and counters."""

    subject: Subject
    replies: dict[Question, Sequence[Reply]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    def ask(self, paper: Paper, questions: Sequence[Question], n: int = 1) -> None:
        before = self.subject.counters()
        answered = self.subject.ask([question.prompt for question in questions], paper.max_tokens, n=n)
        self.counters = self.counters.plus(self.subject.counters().since(before))
        self.replies.update(zip(questions, answered, strict=True))

    def sitting(self, *faults: str | None) -> Sitting:
        return Sitting(self.replies, self.counters, tuple(fault for fault in faults if fault))


def sit(mode: Mode, subject: Subject, paper: Paper, advance: Advance = lambda count: None) -> Sitting:
    """Ask every question in a mode, starting from an empty cache. `advance` is called with the number of answered
    questions."""
    started_s = time.perf_counter()
    subject.llm.reset_prefix_cache()
    done = mode.sit(subject, paper, advance)
    return Sitting(done.replies, done.counters, done.faults, time.perf_counter() - started_s)


def _cold(subject: Subject, paper: Paper, advance: Advance) -> Sitting:
    notes = _Notes(subject)
    for batch in batches(paper.families, BATCH_TOKENS):
        notes.ask(paper, flat(batch))
        advance(len(flat(batch)))
    cached = notes.counters.num_cached_tokens
    return notes.sitting(f"{cached} tokens came from the cache, which is to be off" if cached else None)


def _warm(subject: Subject, paper: Paper, advance: Advance) -> Sitting:
    """Ask every question twice. The second answer counts."""
    notes, short = _Notes(subject), 0
    for batch in batches(paper.families, BATCH_TOKENS):
        questions = flat(batch)
        subject.ask([question.prompt for question in questions], max_tokens=1)
        notes.ask(paper, questions)
        for question in questions:
            usable = paper.layout.usable_prefix(question.num_prompt_tokens)
            short += any(reply.num_cached_tokens < usable for reply in notes.replies[question])
        subject.llm.reset_prefix_cache()
        advance(len(questions))
    return notes.sitting(
        _nothing_cached(notes.counters),
        f"{short} of {len(notes.replies)} prompts seen before were not cached up to their last boundary"
        if short
        else None,
    )


def _drafted(subject: Subject, paper: Paper, advance: Advance) -> Sitting:
    """Ask as `_warm` does, while drafts of the answers are verified."""
    sitting = _warm(subject, paper, advance)
    fault = () if sitting.counters.num_draft_tokens else ("no token was drafted",)
    return replace(sitting, faults=(*sitting.faults, *fault))


def _forked(subject: Subject, paper: Paper, advance: Advance) -> Sitting:
    """Ask all questions of some dialogues at once, in any order, with `NUM_SIBLINGS` completions each."""
    notes, order = _Notes(subject), random.Random(paper.seed)
    for batch in batches(paper.families, BATCH_TOKENS):
        questions = flat(batch)
        order.shuffle(questions)
        notes.ask(paper, questions, n=NUM_SIBLINGS)
        subject.llm.reset_prefix_cache()
        advance(len(questions))
    worth_a_wait = [q for q in paper.questions if paper.layout.usable_prefix(q.num_prompt_tokens) >= MIN_GAIN_TO_WAIT]
    num_hits, num_siblings = notes.counters.num_hits, (NUM_SIBLINGS - 1) * len(worth_a_wait)
    return notes.sitting(
        _nothing_cached(notes.counters),
        f"only {num_hits} requests hit a state, of {num_siblings} siblings" if num_hits < num_siblings else None,
    )


def _preempted(subject: Subject, paper: Paper, advance: Advance) -> Sitting:
    """Preempt every request at least once, in an arena that holds little more than one request."""
    notes = _Notes(subject)
    with preempting(subject, paper.seed):
        for batch in batches(paper.families, BATCH_TOKENS):
            notes.ask(paper, flat(batch))
            advance(len(flat(batch)))
    hit = sum(reply.num_preemptions > 0 for replies in notes.replies.values() for reply in replies)
    total = len(notes.replies)
    return notes.sitting(
        f"{hit} of {total} requests were preempted, fewer than half" if 2 * hit < total else None,
        None if notes.counters.num_preemptions else "no request was preempted",
    )


def _pressure(subject: Subject, paper: Paper, advance: Advance) -> Sitting:
    """Ask dialogues in turn whose states fill several arenas, so that a dialogue's states are evicted before its next
    turn."""
    notes = _Notes(subject)
    for batch in batches(paper.families, int(PRESSURE_BATCH * paper.tight_tokens)):
        for turn in range(max(map(len, batch))):
            asked = [family[turn] for family in batch if turn < len(family)]
            notes.ask(paper, asked)
            advance(len(asked))
    evicted = notes.counters.num_checkpoints_evicted
    return notes.sitting(
        None if evicted else "no checkpoint was evicted; ask more or longer examples", _nothing_cached(notes.counters)
    )


def _nothing_cached(counters: Counters) -> str | None:
    return None if counters.num_cached_tokens else "no token came from the cache"


def _ample(paper: Paper) -> dict[str, Any]:
    return {"kv_cache_memory_bytes": paper.ample_bytes}


def _tight(paper: Paper) -> dict[str, Any]:
    return {"kv_cache_memory_bytes": paper.tight_bytes}


def _cold_options(paper: Paper) -> dict[str, Any]:
    return {"enable_prefix_caching": False}


def _bf16_options(paper: Paper) -> dict[str, Any]:
    return {**_ample(paper), "mamba_ssm_cache_dtype": "bfloat16"}


def _ngram_options(paper: Paper) -> dict[str, Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 5}
    return {**_ample(paper), "speculative_config": drafts}


def _mtp_options(paper: Paper) -> dict[str, Any]:
    return {**_ample(paper), "speculative_config": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}}


COLD: Final = Mode("cold", "the cache is off", _cold_options, _cold)
MODES: Final[Mapping[str, Mode]] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            COLD,
            Mode("warm", "every prompt has been seen before", _ample, _warm),
            Mode("forked", "questions at several depths of a dialogue at once, each with a sibling", _ample, _forked),
            Mode("preempted", "every request loses its memory and resumes", _tight, _preempted),
            Mode("pressure", "checkpoints give way between the turns of a dialogue", _tight, _pressure),
            Mode("ngram", "as warm, with drafts out of the prompt", _ngram_options, _drafted, drafts=True),
            Mode("mtp", "as warm, with drafts by the model's MTP layer", _mtp_options, _drafted, drafts=True),
            Mode("bf16", "as warm, with states in bfloat16", _bf16_options, _warm, promised=False),
        )
    }
)
