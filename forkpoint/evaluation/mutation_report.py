"""What the faults changed, as one table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from forkpoint.evaluation.sensitivity import MutationResult, Sensitivity
from forkpoint.evaluation.text_table import aligned

HEADER = (
    "fault of the checkpoint",
    "right",
    "became wrong / right",
    "p",
    "changed answers",
    "changed tokens",
    "log-prob of the right answer",
    "t",
    "noticed by",
)


def mutation_table(sensitivity: Sensitivity) -> str:
    """A line for the sound cache, then one for each fault."""
    num, right = sensitivity.num_questions, sensitivity.num_right
    sound = ("none", f"{right}/{num}", "", "", "", "", f"{sensitivity.mean_log_probability:.3f}", "", "")
    return aligned([HEADER, sound, *(_line(result) for result in sensitivity.results)], rule_after=(0,))


def _line(result: MutationResult) -> tuple[str, ...]:
    accuracy, change = result.accuracy, result.log_probability
    return (
        result.mutation.name,
        f"{result.num_right}/{accuracy.num}",
        f"{accuracy.lost} / {accuracy.gained}",
        f"{accuracy.p_value:.1g}",
        f"{result.num_changed_answers}/{accuracy.num}",
        f"{result.num_changed_tokens}/{result.num_tokens}",
        f"{change.mean:+.3f}",
        f"{change.t:.1f}",
        noticed_by(result),
    )


def noticed_by(result: MutationResult) -> str:
    """What falls by more than chance explains."""
    found = [
        name
        for name, falls in (("accuracy", result.lowers_accuracy), ("log-prob", result.lowers_log_probability))
        if falls
    ]
    return ", ".join(found) or "nothing"


def mutation_summary(sensitivity: Sensitivity) -> list[str]:
    """Sentences; the last one tells whether all required faults were noticed."""
    lines = [
        f"{sensitivity.num_questions} questions, each asked from its cached prefix; a fault changes the state that is "
        "read there, keys and values stay right"
    ]
    if sensitivity.problems:
        return [*lines, *(f"FAILED {problem}" for problem in sensitivity.problems)]
    names = ", ".join(result.mutation.name for result in sensitivity.results if result.mutation.required)
    return [*lines, f"the suite notices: {names}"]


def as_json(sensitivity: Sensitivity) -> dict[str, Any]:
    return {
        "num_questions": sensitivity.num_questions,
        "num_right": sensitivity.num_right,
        "mean_log_probability": sensitivity.mean_log_probability,
        "problems": sensitivity.problems,
        "mutations": {
            result.mutation.name: {
                "about": result.mutation.about,
                "required": result.mutation.required,
                "num_right": result.num_right,
                "accuracy": {**asdict(result.accuracy), "p_value": result.accuracy.p_value},
                "log_probability": asdict(result.log_probability),
                "num_changed_answers": result.num_changed_answers,
                "num_changed_tokens": result.num_changed_tokens,
                "num_tokens": result.num_tokens,
            }
            for result in sensitivity.results
        },
    }
