"""Runs the held-out suite in every mode and compares each with the cold cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from evaluation.compare import Agreement, PairedAccuracy
from evaluation.modes import COLD, MODES, Mode, Paper, Sitting, sit
from evaluation.question import SuiteExample, make_families
from evaluation.score import Count, Score, Verdict, is_right, score
from evaluation.subject import Subject
from forkpoint.errors import ConfigError, UnsupportedModelError

SPARE_TOKENS = 8  # of an answer beyond the longest right one
RESERVED = ("kv_cache_memory_bytes", "enable_prefix_caching", "mamba_cache_mode", "mamba_ssm_cache_dtype")


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The result of one mode, next to the cold cache.

    `score` covers the suite's own questions. `accuracy` compares these and the forks. `problems` are sentences.
    """

    mode: Mode
    sitting: Sitting
    score: Score
    forks: Count
    accuracy: PairedAccuracy
    agreement: Agreement
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of `python -m evaluation`."""

    model: str
    num_examples: int
    num_questions: int
    num_prompt_tokens: int
    seed: int
    deterministic: bool
    results: tuple[ModeResult, ...]
    skipped: tuple[str, ...] = ()  # why a mode was left out, a sentence each

    @property
    def problems(self) -> list[str]:
        return [f"{result.mode.name}: {problem}" for result in self.results for problem in result.problems]


@dataclass(slots=True)
class SubjectPool:
    """Holds one engine at a time. The next mode reuses it if its options are the same."""

    model: str
    options: Mapping[str, Any]
    _subject: Subject | None = None
    _own: dict[str, Any] = field(default_factory=dict)

    def get(self, own: dict[str, Any]) -> Subject:
        """Return the engine with the user's options and these."""
        if self._subject is None or own != self._own:
            self.close()
            self._subject, self._own = Subject(self.model, {**self.options, **own}), own
        return self._subject

    def close(self) -> None:
        if self._subject is not None:
            self._subject.close()
            self._subject = None


@contextmanager
def subject_pool(model: str, options: Mapping[str, Any], reserved: Sequence[str] = RESERVED) -> Iterator[SubjectPool]:
    """Open a pool of engines. Raises ConfigError for `reserved` options, which the evaluation sets."""
    given = sorted(set(options) & set(reserved))
    if given:
        raise ConfigError(f"evaluation sets {', '.join(given)} itself; leave them out")
    pool = SubjectPool(model, options)
    try:
        yield pool
    finally:
        pool.close()


def prepare(pool: SubjectPool, examples: Sequence[SuiteExample], seed: int) -> Paper:
    """Render every question with the engine that answers it with a cold cache."""
    subject = pool.get({"enable_prefix_caching": False})
    families = make_families(subject, examples)
    longest = max(len(question.answer_ids) for family in families for question in family)
    return Paper(tuple(families), longest + SPARE_TOKENS, seed, subject.layout)


def evaluate(
    model: str,
    examples: Sequence[SuiteExample],
    *,
    modes: Sequence[str],
    seed: int,
    options: Mapping[str, Any],
    show_progress: bool = False,
) -> Evaluation:
    """Ask the examples with a cold cache and in the `modes`. Raises ConfigError and what the engine raises."""
    deterministic = bool(options.get("deterministic"))
    chosen, skipped = _choose(modes, deterministic)
    with subject_pool(model, options) as pool:
        paper = prepare(pool, examples, seed)
        sittings: dict[str, Sitting] = {}
        for mode in chosen:
            try:
                subject = pool.get(mode.options(paper))
            except (ConfigError, UnsupportedModelError) as error:
                if not mode.drafts:
                    raise
                skipped.append(f"{mode.name} is left out: {error}")
                continue
            with _progress(mode.name, len(paper.questions), show_progress) as bar:
                sittings[mode.name] = sit(mode, subject, paper, bar.update)
    cold = sittings[COLD.name]
    results = [_result(mode, sittings[mode.name], cold, deterministic) for mode in chosen if mode.name in sittings]
    return Evaluation(
        model=model,
        num_examples=len(examples),
        num_questions=len(paper.questions),
        num_prompt_tokens=sum(question.num_prompt_tokens for question in paper.questions),
        seed=seed,
        deterministic=deterministic,
        results=tuple(results),
        skipped=tuple(skipped),
    )


def _choose(modes: Sequence[str], deterministic: bool) -> tuple[list[Mode], list[str]]:
    unknown = [name for name in modes if name not in MODES]
    if unknown:
        raise ConfigError(f"unknown mode {unknown[0]!r}; choose among {', '.join(MODES)}")
    chosen = [mode for mode in MODES.values() if mode is COLD or mode.name in modes]
    skipped = []
    if deterministic:
        skipped = [
            f"{mode.name} is left out: --deterministic needs states in fp32" for mode in chosen if not mode.promised
        ]
        chosen = [mode for mode in chosen if mode.promised]
    return chosen, skipped


def _progress(name: str, total: int, show: bool) -> Any:
    return tqdm(total=total, desc=f"{name:>9}", unit="question", disable=not show, dynamic_ncols=True, file=sys.stderr)


def _result(mode: Mode, sitting: Sitting, cold: Sitting, deterministic: bool) -> ModeResult:
    pairs = [
        (question, reference, reply)
        for question, replies in sitting.replies.items()
        for reference in cold.replies[question]
        for reply in replies
    ]
    was = [is_right(reference.text, question.answer) for question, reference, _ in pairs]
    now = [is_right(reply.text, question.answer) for question, _, reply in pairs]
    marks = list(zip((question for question, _, _ in pairs), now, strict=True))
    forks = [right for question, right in marks if question.is_fork]
    accuracy = PairedAccuracy.of(was, now)
    agreement = Agreement.of([reference for _, reference, _ in pairs], [reply for _, _, reply in pairs])
    return ModeResult(
        mode=mode,
        sitting=sitting,
        score=score(Verdict(q.task, q.distance, right) for q, right in marks if not q.is_fork),
        forks=Count(sum(forks), len(forks)),
        accuracy=accuracy,
        agreement=agreement,
        problems=tuple(_problems(mode, sitting, accuracy, agreement, deterministic)),
    )


def _problems(
    mode: Mode, sitting: Sitting, accuracy: PairedAccuracy, agreement: Agreement, deterministic: bool
) -> Iterator[str]:
    for fault in sitting.faults:
        yield f"it did not do what its name says: {fault}"
    if deterministic and mode.promised and not agreement.is_exact:
        yield (
            f"deterministic mode promises the answers of the cold cache bit for bit; {agreement.num_identical} of "
            f"{agreement.num} have the same tokens, log-probabilities differ by up to {agreement.largest_change:.2g}"
        )
    if not accuracy.is_noise:
        yield (
            f"accuracy differs from the cold cache's beyond noise: of {accuracy.num} answers {accuracy.lost} became "
            f"wrong and {accuracy.gained} right (p = {accuracy.p_value:.2g})"
        )
