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
    "changed log-probs",
    "log-prob of the right answer",
    "t",
    "noticed by",
)


def mutation_table(sensitivity: Sensitivity) -> str:
    """Two lines for the sound cache, asked twice, then one for each fault."""
    num, right = sensitivity.num_questions, sensitivity.num_right
    sound = ("none", f"{right}/{num}", "", "", "", "", "", f"{sensitivity.mean_log_probability:.2g}", "", "")
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
        f"{result.num_changed_answers}/{accuracy.num}",
        f"{result.num_changed_tokens}/{result.num_tokens}",
        f"{result.num_changed_scores}/{accuracy.num}",
        f"{change.mean:+.2g}",
        f"{change.t:.1f}",
    )


def mutation_summary(sensitivity: Sensitivity) -> list[str]:
    """Sentences; the last one tells whether all required faults were noticed."""
    lines = [
        f"{sensitivity.num_questions} questions, each asked from its cached prefix; a fault changes the state that is "
        "read there, keys and values stay right"
    ]
    if sensitivity.problems:
        return [*lines, *(f"FAILED {problem}" for problem in sensitivity.problems)]
    lowers = [r.mutation.name for r in sensitivity.results if r.lowers_accuracy or r.lowers_log_probability]
    others = [r.mutation.name for r in sensitivity.results if r.mutation.name not in lowers]
    by_bits = [r.mutation.name for r in sensitivity.results if sensitivity.noticed_by(r) == ["bits"]]
    if others:
        lines.append(f"the score does not fall with: {', '.join(others)}")
    if by_bits:
        lines.append(f"bits of log-probabilities alone, which --deterministic holds equal, tell: {', '.join(by_bits)}")
    return [*lines, f"the score falls with: {', '.join(lowers)}"]


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
                "noticed_by": sensitivity.noticed_by(result),
                "num_right": result.num_right,
                "accuracy": {**asdict(result.accuracy), "p_value": result.accuracy.p_value},
                "log_probability": asdict(result.log_probability),
                "num_changed_scores": result.num_changed_scores,
                "num_changed_answers": result.num_changed_answers,
                "num_changed_tokens": result.num_changed_tokens,
                "num_tokens": result.num_tokens,
            }
            for result in (sensitivity.control, *sensitivity.results)
        },
    }
