"""Shows that the suite would notice a wrong cache: the same questions with faults put in on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from forkpoint.errors import ForkpointError
from forkpoint.evaluation.compare import PairedAccuracy, PairedMean
from forkpoint.evaluation.evaluate import RESERVED, prepare, subject_pool
from forkpoint.evaluation.modes import BATCH_TOKENS, Paper
from forkpoint.evaluation.mutations import CONTROL, MUTATIONS, Mutation, find_served, mutated
from forkpoint.evaluation.question import Family, Question, SuiteExample, batches
from forkpoint.evaluation.score import is_right
from forkpoint.evaluation.subject import Reply, Subject

DENSE = {"checkpoint_interval": 64}  # a state at every boundary, so that the one a block earlier can be served
LEAST_T = 3.0


@dataclass(frozen=True, slots=True)
class Marks:
    """Of each question: whether the greedy answer was right, its tokens, the right answer's log-probability (nats)."""

    right: tuple[bool, ...]
    token_ids: tuple[tuple[int, ...], ...]
    log_probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MutationResult:
    """What a fault changed against the sound cache."""

    mutation: Mutation
    num_right: int
    accuracy: PairedAccuracy
    log_probability: PairedMean
    num_changed_scores: int  # right answers whose log-probability changed, be it in its last bit
    num_changed_answers: int
    num_changed_tokens: int
    num_tokens: int

    @property
    def lowers_accuracy(self) -> bool:
        return self.accuracy.difference < 0 and not self.accuracy.is_noise

    @property
    def lowers_log_probability(self) -> bool:
        return self.log_probability.t < -LEAST_T


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What `forkpoint eval --mutations` found."""

    num_questions: int
    num_right: int
    mean_log_probability: float
    control: MutationResult  # the sound cache, asked again
    results: tuple[MutationResult, ...]

    def noticed_by(self, result: MutationResult) -> list[str]:
        """What tells the fault from the sound cache: the score, or at least the bits of log-probabilities."""
        bits = result.num_changed_scores > self.control.num_changed_scores
        signs = (("accuracy", result.lowers_accuracy), ("log-prob", result.lowers_log_probability), ("bits", bits))
        return [name for name, noticed in signs if noticed]

    @property
    def problems(self) -> list[str]:
        """Faults that had to be noticed and were not."""
        return [
            f"{result.mutation.name}: neither the accuracy nor the log-probability of the right answers falls"
            for result in self.results
            if result.mutation.required and not (result.lowers_accuracy or result.lowers_log_probability)
        ]


def measure_sensitivity(
    model: str,
    examples: Sequence[SuiteExample],
    *,
    seed: int,
    options: Mapping[str, Any],
    mutations: Sequence[Mutation] = MUTATIONS,
    show_progress: bool = False,
) -> Sensitivity:
    """Ask every question from its cached prefix: as it is, and spoilt by each mutation. Raises ConfigError."""
    asked = (CONTROL, *mutations)
    sound = Marks((), (), ())
    spoilt = [sound] * len(asked)
    with subject_pool(model, options, (*RESERVED, *DENSE)) as pool:
        paper = prepare(pool, examples, seed)
        subject = pool.get({"kv_cache_memory_bytes": paper.ample_bytes, **DENSE})
        total = len(paper.questions) * (1 + len(asked))
        bar = tqdm(total=total, desc="mutations", unit="question", disable=not show_progress, dynamic_ncols=True)
        with bar:
            for batch in batches(paper.families, BATCH_TOKENS):
                before = subject.counters()
                marks = _ask_batch(subject, paper, batch, asked, bar.update)
                if subject.counters().since(before).num_checkpoints_evicted:
                    raise ForkpointError("checkpoints gave way while faults were put in; give more memory")
                sound, *spoilt = (_joined(a, b) for a, b in zip((sound, *spoilt), marks, strict=True))
                subject.llm.reset_prefix_cache()
    control, *results = (_result(mutation, sound, own) for mutation, own in zip(asked, spoilt, strict=True))
    return Sensitivity(
        num_questions=len(sound.right),
        num_right=sum(sound.right),
        mean_log_probability=sum(sound.log_probabilities) / len(sound.right),
        control=control,
        results=tuple(results),
    )


def _ask_batch(
    subject: Subject,
    paper: Paper,
    batch: Sequence[Family],
    mutations: Sequence[Mutation],
    advance: Any,
) -> list[Marks]:
    """The sound marks, then those of each mutation. Dialogues share nothing: a fault stays in its own."""
    asked = [(question, f"dialogue-{number}") for number, family in enumerate(batch) for question in family]
    asked = [(q, salt) for q, salt in asked if paper.layout.usable_prefix(q.num_prompt_tokens)]
    questions, salts = [question for question, _ in asked], [salt for _, salt in asked]
    subject.ask([question.prompt for question in questions], max_tokens=1, salts=salts)
    marks = [_mark(subject, paper, questions, salts)]
    advance(len(questions))
    for mutation in mutations:
        served = [find_served(subject, question, salt) for question, salt in asked]
        with mutated(subject.arena, served, mutation):
            marks.append(_mark(subject, paper, questions, salts))
        advance(len(questions))
    return marks


def _mark(subject: Subject, paper: Paper, questions: Sequence[Question], salts: Sequence[str]) -> Marks:
    prompts = [question.prompt for question in questions]
    replies: list[Reply] = [reply for (reply,) in subject.ask(prompts, paper.max_tokens, salts=salts)]
    for question, reply in zip(questions, replies, strict=True):
        if reply.num_cached_tokens != paper.layout.usable_prefix(question.num_prompt_tokens):
            raise ForkpointError("a prompt that was to be served from the cache was not")
    return Marks(
        tuple(is_right(reply.text, question.answer) for question, reply in zip(questions, replies, strict=True)),
        tuple(reply.token_ids for reply in replies),
        tuple(subject.log_probabilities(prompts, [question.answer_ids for question in questions], salts)),
    )


def _joined(a: Marks, b: Marks) -> Marks:
    return Marks(a.right + b.right, a.token_ids + b.token_ids, a.log_probabilities + b.log_probabilities)


def _result(mutation: Mutation, sound: Marks, spoilt: Marks) -> MutationResult:
    pairs = list(zip(sound.token_ids, spoilt.token_ids, strict=True))
    return MutationResult(
        mutation=mutation,
        num_right=sum(spoilt.right),
        accuracy=PairedAccuracy.of(sound.right, spoilt.right),
        log_probability=PairedMean.of(sound.log_probabilities, spoilt.log_probabilities),
        num_changed_scores=sum(a != b for a, b in zip(sound.log_probabilities, spoilt.log_probabilities, strict=True)),
        num_changed_answers=sum(a != b for a, b in pairs),
        num_changed_tokens=sum(_num_changed(a, b) for a, b in pairs),
        num_tokens=sum(len(a) for a, _ in pairs),
    )


def _num_changed(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens of `a` at whose place `b` has another one, or none."""
    return sum(index >= len(b) or token != b[index] for index, token in enumerate(a))
