"""`forkpoint eval`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forkpoint.cli.eval_options import MODES, EvalOptions
from forkpoint.cli.model import choose_model
from forkpoint.cli.options import engine_options, option_values
from forkpoint.errors import ConfigError
from forkpoint.evaluation import mutation_report, report
from forkpoint.evaluation.evaluate import evaluate
from forkpoint.evaluation.sensitivity import measure_sensitivity
from forkpoint.evaluation.suite import Example, held_out_suite


def run_eval(arguments: argparse.Namespace) -> int:
    """Print the table; 1 if a mode's answers are not those of the cold cache, or a fault would go unseen."""
    options = EvalOptions(**option_values(arguments, EvalOptions))
    engine = engine_options(arguments)
    model = choose_model(engine, arguments.model_tag)
    engine.pop("model", None)
    engine.setdefault("log_level", "error")
    seed = engine.get("seed", 0)
    examples = held_out_suite(seed, options.num_examples)
    shown: dict[str, Any] = {"seed": seed, "options": engine, "show_progress": sys.stderr.isatty()}
    if options.mutations:
        return _mutations(model, examples, options, shown)
    evaluation = evaluate(model, examples, modes=options.modes or MODES, **shown)
    print(report.table(evaluation), *report.summary(evaluation), sep="\n")
    _write(options.json, report.as_json(evaluation))
    return int(bool(evaluation.problems))


def _mutations(model: str, examples: Sequence[Example], options: EvalOptions, shown: dict[str, Any]) -> int:
    if options.modes:
        raise ConfigError("--mutations puts faults into the warm cache alone; leave out --modes")
    sensitivity = measure_sensitivity(model, examples, **shown)
    print(mutation_report.mutation_table(sensitivity), *mutation_report.mutation_summary(sensitivity), sep="\n")
    _write(options.json, mutation_report.as_json(sensitivity))
    return int(bool(sensitivity.problems))


def _write(path: str | None, content: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the results to {path}: {error}") from error
