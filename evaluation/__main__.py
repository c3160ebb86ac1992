"""`python -m evaluation [MODEL]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from evaluation import mutation_report, report
from evaluation.evaluate import evaluate
from evaluation.options import MODES, EvalOptions
from evaluation.sensitivity import measure_sensitivity
from evaluation.suite import Example, held_out_suite
from forkpoint.cli.main import run
from forkpoint.cli.model import choose_model
from forkpoint.cli.options import Parser, add_engine_options, add_option_group, engine_options, option_values
from forkpoint.cli.parser import MODEL_HELP
from forkpoint.cli.result_file import ResultFile
from forkpoint.errors import ConfigError


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m evaluation",
        description="Ask held-out questions in several ways that use the prefix cache, and compare the answers with "
        "those of a cold cache; exit code 1 if they differ. --seed draws the questions.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_option_group(parser, "evaluation options", EvalOptions)
    add_engine_options(parser)
    parser.set_defaults(command=run_eval)
    return parser


def run_eval(arguments: argparse.Namespace) -> int:
    """Print the table. Return 1 if a mode's answers differ from those of the cold cache, or a fault would not be
    noticed."""
    options = EvalOptions(**option_values(arguments, EvalOptions))
    file = ResultFile(options.json)
    engine = engine_options(arguments)
    model = choose_model(engine, arguments.model_tag)
    engine.pop("model", None)
    engine.setdefault("log_level", "error")
    seed = engine.get("seed", 0)
    examples = held_out_suite(seed, options.num_examples)
    shown: dict[str, Any] = {"seed": seed, "options": engine, "show_progress": sys.stderr.isatty()}
    if options.mutations:
        if options.modes:
            raise ConfigError("--mutations puts faults into the warm cache alone; leave out --modes")
        return _mutations(model, examples, file, shown)
    evaluation = evaluate(model, examples, modes=options.modes or MODES, **shown)
    print(report.table(evaluation), *report.summary(evaluation), sep="\n")
    file.write(report.as_json(evaluation))
    return int(bool(evaluation.problems))


def _mutations(model: str, examples: Sequence[Example], file: ResultFile, shown: dict[str, Any]) -> int:
    sensitivity = measure_sensitivity(model, examples, **shown)
    print(mutation_report.mutation_table(sensitivity), *mutation_report.mutation_summary(sensitivity), sep="\n")
    file.write(mutation_report.as_json(sensitivity))
    return int(bool(sensitivity.problems))


if __name__ == "__main__":
    run(build_parser)
