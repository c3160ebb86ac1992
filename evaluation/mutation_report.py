"""Shows the effects of the faults as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evaluation.mutations import Measure
from evaluation.sensitivity import MutationResult, Sensitivity
from evaluation.text_table import aligned

HEADER = (
    "fault of the checkpoint",
    "right",
    "became wrong / right",
    "p",
    "log-prob of the right answer",
    "t",
    "same continuations",
    "p",
    "noise of a log-prob",
    "noticed by",
)


def mutation_table(sensitivity: Sensitivity) -> str:
    """Return two lines for the sound cache, which is asked twice, then a line for each fault."""
    num, right = sensitivity.num_questions, sensitivity.num_right
    sound = ("none", f"{right}/{num}", "", "", f"{sensitivity.mean_log_probability:.2g}", *[""] * 5)
    results = (sensitivity.control, *sensitivity.results)
    lines = [(*_line(result), ", ".join(sensitivity.noticed_by(result)) or "nothing") for result in results]
    return aligned([HEADER, sound, *lines], rule_after=(0,))


def _line(result: MutationResult) -> tuple[str, ...]:
    accuracy, change = result.accuracy, result.log_probability
    return (
        result.mutation.name,
        f"{result.num_right}/{accuracy.num}",
        f"{accuracy.lost} / {accuracy.gained}",
        f"{accuracy.p_value:.1g}",
        f"{change.mean:+.2g}",
        f"{change.t:.1f}",
        f"{result.num_same_continuations}/{accuracy.num}",
        f"{result.continuations.p_value:.1g}",
        f"{result.logprob_noise:.2g}",
    )


def mutation_summary(sensitivity: Sensitivity) -> list[str]:
    """Return sentences. The last ones say which score falls with which fault, or which fault was not noticed."""
    lines = [
        f"{sensitivity.num_questions} questions, each asked from its cached prefix; a fault changes the state that is "
        "read there, keys and values stay right",
        f"with the right state the least certain right answer has a log-probability of "
        f"{sensitivity.least_log_probability:.2g}",
    ]
    if sensitivity.problems:
        return [*lines, *(f"FAILED {problem}" for problem in sensitivity.problems)]
    answers = [r.mutation.name for r in sensitivity.results if r.lowers(Measure.ANSWERS)]
    going_on = [r for r in sensitivity.results if r.mutation.name not in answers and r.lowers(Measure.CONTINUATIONS)]
    if going_on:
        lines.append(
            "answers stay right, but the model goes on with other words than with the sound cache: "
            + ", ".join(r.mutation.name for r in going_on)
        )
    return [*lines, f"answers become wrong: {', '.join(answers)}"]


def as_json(sensitivity: Sensitivity) -> dict[str, Any]:
    return {
        "num_questions": sensitivity.num_questions,
        "num_right": sensitivity.num_right,
        "mean_log_probability": sensitivity.mean_log_probability,
        "least_log_probability": sensitivity.least_log_probability,
        "problems": sensitivity.problems,
        "mutations": {
            result.mutation.name: {
                "about": result.mutation.about,
                "has_to_lower": result.mutation.lowers.value if result.mutation.lowers else None,
                "noticed_by": sensitivity.noticed_by(result),
                "num_right": result.num_right,
                "accuracy": {**asdict(result.accuracy), "p_value": result.accuracy.p_value},
                "log_probability": asdict(result.log_probability),
                "num_same_continuations": result.num_same_continuations,
                "continuations": {**asdict(result.continuations), "p_value": result.continuations.p_value},
                "logprob_noise": result.logprob_noise,
                "num_changed_scores": result.num_changed_scores,
                "num_changed_answers": result.num_changed_answers,
                "num_changed_tokens": result.num_changed_tokens,
                "num_tokens": result.num_tokens,
            }
            for result in (sensitivity.control, *sensitivity.results)
        },
    }
