"""Shows that the suite would notice a wrong cache, by asking the same questions with deliberate faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tqdm import tqdm

from evaluation.compare import PairedAccuracy, PairedMean, root_mean_square_change
from evaluation.evaluate import RESERVED, prepare, subject_pool
from evaluation.modes import BATCH_TOKENS, Paper
from evaluation.mutations import CONTROL, MUTATIONS, Measure, Mutation, find_served, mutated
from evaluation.question import Family, Question, SuiteExample, batches
from evaluation.score import is_right
from evaluation.subject import Reply, Subject
from forkpoint.errors import ForkpointError

DENSE = {"checkpoint_interval": 64}  # a state at every boundary, so that the one a block earlier can be served
LEAST_T = 3.0
MOST_P = 0.01  # of continuations that part from those of the sound cache
NUM_CONTINUED = 40  # tokens of a continuation: the answer and what the model goes on with behind it


@dataclass(frozen=True, slots=True)
class Marks:
    """The result of each question: whether the greedy answer was right, its tokens, and the right answer's
    log-probability (nats).

    The greedy continuation is included, which does not end with the answer.
    """

    right: tuple[bool, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    log_probabilities: tuple[float, ...] = ()
    continuations: tuple[Reply, ...] = ()

    def plus(self, other: Marks) -> Marks:
        return Marks(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def reversed(self) -> Marks:
        return Marks(*(getattr(self, f.name)[::-1] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class MutationResult:
    """The effects of a fault, compared with the sound cache.

    A continuation is lost if it differs from the sound cache's, and would not if that were asked again. It is gained in
    the opposite case. `logprob_noise` is the root mean square change (nats) of the log-probability of a continuation's
    token, up to the first different token.
    """

    mutation: Mutation
    num_right: int
    accuracy: PairedAccuracy
    log_probability: PairedMean
    num_same_continuations: int
    continuations: PairedAccuracy
    logprob_noise: float
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

    @property
    def lowers_continuations(self) -> bool:
        return self.continuations.difference < 0 and self.continuations.p_value < MOST_P

    def lowers(self, measure: Measure) -> bool:
        if measure is Measure.ANSWERS:
            return self.lowers_accuracy or self.lowers_log_probability
        return self.lowers_continuations


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The results of `python -m evaluation --mutations`."""

    num_questions: int
    num_right: int
    mean_log_probability: float  # of the right answers with the sound cache, nats
    least_log_probability: float
    control: MutationResult  # the sound cache, asked again
    results: tuple[MutationResult, ...]

    def noticed_by(self, result: MutationResult) -> list[str]:
        """Return the signs that distinguish the fault from the sound cache: scores, or at least the bits of
        log-probabilities."""
        signs = (
            ("accuracy", result.lowers_accuracy),
            ("log-prob", result.lowers_log_probability),
            ("continuations", result.lowers_continuations),
            ("bits", result.num_changed_scores > self.control.num_changed_scores),
        )
        return [name for name, noticed in signs if noticed]

    @property
    def problems(self) -> list[str]:
        """The faults that had to be noticed and were not."""
        missed = {
            Measure.ANSWERS: "neither the accuracy nor the log-probability of the right answers falls",
            Measure.CONTINUATIONS: "continuations do not part from those of the sound cache more than by chance",
        }
        return [
            f"{result.mutation.name}: {missed[result.mutation.lowers]}"
            for result in self.results
            if result.mutation.lowers and not result.lowers(result.mutation.lowers)
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
    """Ask every question from its cached prefix: unchanged, and spoilt by each mutation. Raises ConfigError."""
    asked = (CONTROL, *mutations)
    sound = Marks()
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
                sound, *spoilt = (a.plus(b) for a, b in zip((sound, *spoilt), marks, strict=True))
                subject.llm.reset_prefix_cache()
    again = spoilt[0]
    control, *results = (_result(mutation, sound, again, own) for mutation, own in zip(asked, spoilt, strict=True))
    return Sensitivity(
        num_questions=len(sound.right),
        num_right=sum(sound.right),
        mean_log_probability=sum(sound.log_probabilities) / len(sound.right),
        least_log_probability=min(sound.log_probabilities),
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
    """Return the marks of the sound cache, then those of each mutation. Dialogues share nothing, so a fault affects
    only its own."""
    asked = [(question, f"dialogue-{number}") for number, family in enumerate(batch) for question in family]
    asked = [(q, salt) for q, salt in asked if paper.layout.usable_prefix(q.num_prompt_tokens)]
    subject.ask([question.prompt for question, _ in asked], max_tokens=1, salts=[salt for _, salt in asked])
    marks = [_mark(subject, paper, asked)]
    advance(len(asked))
    for mutation in mutations:
        served = [find_served(subject, question, salt) for question, salt in asked]
        with mutated(subject.arena, served, mutation):
            again = mutation is CONTROL
            own = _mark(subject, paper, asked[::-1] if again else asked)
        marks.append(own.reversed() if again else own)
        advance(len(asked))
    return marks


def _mark(subject: Subject, paper: Paper, asked: Sequence[tuple[Question, str]]) -> Marks:
    """Return the marks of each question with its salt."""
    questions, salts = [question for question, _ in asked], [salt for _, salt in asked]
    prompts = [question.prompt for question in questions]
    replies = [reply for (reply,) in subject.ask(prompts, paper.max_tokens, salts=salts)]
    going_on = [reply for (reply,) in subject.ask(prompts, NUM_CONTINUED, salts=salts, ignore_eos=True)]
    for question, *both in zip(questions, replies, going_on, strict=True):
        usable = paper.layout.usable_prefix(question.num_prompt_tokens)
        if any(reply.num_cached_tokens != usable for reply in both):
            raise ForkpointError("a prompt that was to be served from the cache was not")
    return Marks(
        tuple(is_right(reply.text, question.answer) for question, reply in zip(questions, replies, strict=True)),
        tuple(reply.token_ids for reply in replies),
        tuple(subject.log_probabilities(prompts, [question.answer_ids for question in questions], salts)),
        tuple(going_on),
    )


def _result(mutation: Mutation, sound: Marks, again: Marks, spoilt: Marks) -> MutationResult:
    pairs = list(zip(sound.token_ids, spoilt.token_ids, strict=True))
    same, same_again = _same_continuations(sound, spoilt), _same_continuations(sound, again)
    return MutationResult(
        mutation=mutation,
        num_right=sum(spoilt.right),
        accuracy=PairedAccuracy.of(sound.right, spoilt.right),
        log_probability=PairedMean.of(sound.log_probabilities, spoilt.log_probabilities),
        num_same_continuations=sum(same),
        continuations=PairedAccuracy.of(same_again, same),
        logprob_noise=root_mean_square_change(sound.continuations, spoilt.continuations),
        num_changed_scores=sum(a != b for a, b in zip(sound.log_probabilities, spoilt.log_probabilities, strict=True)),
        num_changed_answers=sum(a != b for a, b in pairs),
        num_changed_tokens=sum(_num_changed(a, b) for a, b in pairs),
        num_tokens=sum(len(a) for a, _ in pairs),
    )


def _same_continuations(a: Marks, b: Marks) -> list[bool]:
    return [x.token_ids == y.token_ids for x, y in zip(a.continuations, b.continuations, strict=True)]


def _num_changed(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens of `a` for which `b` has another token, or none, at the same place."""
    return sum(index >= len(b) or token != b[index] for index, token in enumerate(a))
