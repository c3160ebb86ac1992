"""Shows an evaluation as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from evaluation.evaluate import Evaluation, ModeResult
from evaluation.modes import COLD
from evaluation.score import Count
from evaluation.text_table import aligned

Cell = Callable[[ModeResult], str]
ABSENT = "-"


def table(evaluation: Evaluation) -> str:
    """Return a column for each mode: the right answers, then the comparison with the cold cache, then the cache's
    counters."""
    results = evaluation.results
    rows = [("", *(result.mode.name for result in results))]
    for name, counts in (
        ("task", [r.score.tasks for r in results]),
        ("distance", [r.score.distances for r in results]),
    ):
        for key in counts[0]:  # those of the cold cache, in the suite's order
            rows.append((f"{name} {key}", *(_share(count.get(key, Count())) for count in counts)))
    rules = [0]
    for part in (_ACCURACY, _COMPARISON, _COUNTERS):
        rules.append(len(rows) - 1)
        rows += [(name, *(cell(result) for result in results)) for name, cell in part]
    return aligned(rows, rule_after=rules)


def summary(evaluation: Evaluation) -> list[str]:
    """Return sentences that summarise the table. The last one says whether everything passed."""
    mode = "deterministic mode" if evaluation.deterministic else "default mode"
    first = (
        f"{evaluation.num_examples} held-out examples and "
        f"{evaluation.num_questions - evaluation.num_examples} forks of them, "
        f"{evaluation.num_prompt_tokens:,} prompt tokens, seed {evaluation.seed}, {mode}"
    )
    lines = [first, *evaluation.skipped]
    if evaluation.problems:
        return [*lines, *(f"FAILED {problem}" for problem in evaluation.problems)]
    exact = "bit for bit" if evaluation.deterministic else "within the noise"
    names = ", ".join(result.mode.name for result in evaluation.results if result.mode is not COLD)
    return [
        *lines,
        f"the answers agree with those of the cold cache {exact}: {names}" if names else "nothing to compare",
    ]


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return everything in the table, unrounded."""
    return {
        "model": evaluation.model,
        "num_examples": evaluation.num_examples,
        "num_questions": evaluation.num_questions,
        "num_prompt_tokens": evaluation.num_prompt_tokens,
        "seed": evaluation.seed,
        "deterministic": evaluation.deterministic,
        "skipped": list(evaluation.skipped),
        "problems": evaluation.problems,
        "modes": {result.mode.name: _mode_json(result) for result in evaluation.results},
    }


def _mode_json(result: ModeResult) -> dict[str, Any]:
    accuracy = result.accuracy
    return {
        "examples": _count_json(result.score.total),
        "forks": _count_json(result.forks),
        "tasks": {task: _count_json(count) for task, count in result.score.tasks.items()},
        "distances": {distance: _count_json(count) for distance, count in result.score.distances.items()},
        "accuracy_vs_cold": {
            **asdict(accuracy),
            "difference": accuracy.difference,
            "half_width_95": accuracy.half_width,
            "p_value": accuracy.p_value,
        },
        "agreement_with_cold": asdict(result.agreement),
        "counters": asdict(result.sitting.counters),
        "elapsed_s": result.sitting.elapsed_s,
        "problems": list(result.problems),
    }


def _count_json(count: Count) -> dict[str, Any]:
    return {"num": count.num, "num_right": count.num_right}


def _share(count: Count) -> str:
    return f"{count.num_right}/{count.num}" if count.num else ABSENT


def _interval(result: ModeResult) -> str:
    """Return the accuracy's 95 % interval, computed from the number of questions alone."""
    low, high = result.score.total.interval()
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def _compared(cell: Cell) -> Cell:
    return lambda result: ABSENT if result.mode is COLD else cell(result)


def _difference(result: ModeResult) -> str:
    accuracy = result.accuracy
    return f"{100 * accuracy.difference:+.1f} ± {100 * accuracy.half_width:.1f}"


def _cached(result: ModeResult) -> str:
    counters = result.sitting.counters
    share = counters.num_cached_tokens / counters.num_asked_tokens if counters.num_asked_tokens else 0.0
    return f"{counters.num_cached_tokens:,} ({100 * share:.0f} %)"


_ACCURACY: Sequence[tuple[str, Cell]] = (
    ("examples right", lambda r: _share(r.score.total)),
    ("accuracy", lambda r: f"{100 * r.score.total.accuracy:.1f} %"),
    ("its 95 % interval", _interval),
    ("forks right", lambda r: _share(r.forks)),
)
_COMPARISON: Sequence[tuple[str, Cell]] = (
    ("difference to cold, points", _compared(_difference)),
    ("became wrong / right", _compared(lambda r: f"{r.accuracy.lost} / {r.accuracy.gained} of {r.accuracy.num}")),
    ("p (McNemar)", _compared(lambda r: f"{r.accuracy.p_value:.2g}")),
    ("token-identical answers", _compared(lambda r: f"{r.agreement.num_identical}/{r.agreement.num}")),
    ("largest change of a log-prob", _compared(lambda r: f"{r.agreement.largest_change:.2g}")),
)
_COUNTERS: Sequence[tuple[str, Cell]] = (
    ("tokens from the cache", _cached),
    ("tokens computed", lambda r: f"{r.sitting.counters.num_computed_tokens:,}"),
    ("preemptions", lambda r: f"{r.sitting.counters.num_preemptions:,}"),
    ("checkpoints evicted", lambda r: f"{r.sitting.counters.num_checkpoints_evicted:,}"),
    ("drafts", lambda r: f"{r.sitting.counters.num_draft_tokens:,}"),
    ("drafts accepted", lambda r: f"{r.sitting.counters.num_accepted_tokens:,}"),
    ("blocks evicted", lambda r: f"{r.sitting.counters.num_blocks_evicted:,}"),
    ("seconds", lambda r: f"{r.sitting.elapsed_s:.1f}"),
)
