"""The options of `python -m train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.suite import DEMO_MODEL

SCORING_S = 60.0  # kept of the time limit for saving and scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    output: Path
    start_from: Path | None
    tokenizer: Path
    seed: int
    num_steps: int | None
    time_limit_s: float | None
    tokens_per_batch: int
    num_workers: int
    matrix_rate: float
    other_rate: float
    num_scored: int
    device: str
    compiled: bool


def parse(arguments: Sequence[str] | None) -> Options:
    """Parse the options. Exits with a message for wrong ones."""
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights, config.json and run.json")
    parser.add_argument("--from", dest="start_from", type=Path, help="folder of an earlier run to go on from")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL, help="folder with tokenizer.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, help="end after so many steps: repeatable, unlike a time limit")
    parser.add_argument("--time-limit-s", type=float, help=f"end after so long, {SCORING_S:.0f} s of it for scoring")
    parser.add_argument("--tokens-per-batch", type=int, default=131072)
    parser.add_argument("--num-workers", type=int, default=12, help="processes that generate dialogues")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="learning rate of Muon")
    parser.add_argument("--other-rate", type=float, default=0.003, help="learning rate of AdamW")
    parser.add_argument("--num-scored", type=int, default=800, help="held-out dialogues to score at the end")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    values = vars(parser.parse_args(arguments))
    if values["num_steps"] is None and values["time_limit_s"] is None:
        parser.error("give --num-steps or --time-limit-s")
    return Options(**values)
