"""A whole run: from options to a folder with a scored model."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.dialogue import END_OF_TEXT, IM_END
from train.data import Feeder, Source
from train.options import SCORING_S, Options, parse

if TYPE_CHECKING:
    import torch

    from train.delta_rule import DeltaRule
    from train.model import HybridModel

REPORT = "run.json"
SAY_EVERY = 200  # steps
SAID_LOSSES = (
    ("answers", "loss_scored"),
    ("other replies", "loss_said"),
    ("given", "loss_given"),
    ("drafts of answers", "mtp_loss_scored"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    start = time.monotonic()
    options = parse(arguments)
    source = Source(options.tokenizer / "tokenizer.json", options.seed, options.tokens_per_batch)
    # Processes that generate dialogues start while torch is being imported.
    with Feeder(source, options.num_workers) as feeder:
        _Run(options, start).run(feeder)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary. `size` is that of the embedding, in whole tiles of 64; its last ids are not tokens."""

    size: int
    end_of_message: int
    padding: int


def vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary of the tokenizer in `folder`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    return Vocabulary(-(-tokenizer.get_vocab_size() // 64) * 64, ids[IM_END], ids[END_OF_TEXT])


class _Run:
    """Collects the report of a run and writes it, with the model, to the output folder."""

    def __init__(self, options: Options, start: float) -> None:
        self._options = options
        self._start = start
        self._vocabulary = vocabulary(options.tokenizer)
        tokenizer = (options.tokenizer / "tokenizer.json").read_bytes()
        self._report: dict[str, Any] = {
            "options": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()},
            "tokenizer_sha256": hashlib.sha256(tokenizer).hexdigest(),
            "log": [],
        }

    def run(self, feeder: Feeder) -> None:
        """Train, save, and score the saved model."""
        import torch

        from train.model import HybridModel
        from train.shape import ModelShape
        from train.storage import load_model

        options, device = self._options, torch.device(self._options.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rule = _delta_rule(device)

        def load(folder: Path) -> HybridModel:
            return load_model(folder, rule, dtype, device)

        torch.manual_seed(options.seed)
        if options.start_from is None:
            model = HybridModel(ModelShape(vocab_size=self._vocabulary.size), rule, dtype).to(device)
        else:
            model = load(options.start_from)
        self._report["num_parameters"] = sum(p.numel() for p in model.parameters())
        self._report["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        self._train(model, feeder)
        self._save(model)
        self._say("trained and saved")
        self._score(load)

    def _train(self, model: HybridModel, feeder: Feeder) -> None:
        from train.curriculum import RateSchedule
        from train.loop import Bounds, Plan, train
        from train.optimizer import Rates

        options = self._options
        limit = options.time_limit_s
        plan = Plan(
            bounds=Bounds(
                num_steps=options.num_steps, deadline=None if limit is None else self._start + limit - SCORING_S
            ),
            seed=options.seed,
            rates=Rates(options.matrix_rate, options.other_rate),
            schedule=RateSchedule(),
            compiled=options.compiled,
            num_ahead=3 * options.num_workers,
            on_log=self._log,
            on_save=lambda: self._save(model),
        )
        train(model, feeder, plan)

    def _score(self, load: Callable[[Path], HybridModel]) -> None:
        from train.held_out import held_out
        from train.scores import score, table

        options = self._options
        model = load(options.output)
        for name, examples in held_out(options.tokenizer / "tokenizer.json", options.num_scored, options.num_workers):
            scores = score(model, examples, self._vocabulary.end_of_message)
            self._report[name] = {"num_dialogues": len(examples), **scores.as_json()}
            self._write_report()
            self._say(f"{name}: {len(examples)}\n{table(scores)}")

    def _log(self, record: dict[str, Any]) -> None:
        self._report["log"].append(record)
        if record["step"] % SAY_EVERY == 0 or record["step"] == 1:
            losses = ((name, record[key]) for name, key in SAID_LOSSES)
            self._say(
                f"step {record['step']:6} {100 * record['progress']:5.1f} %  "
                f"{record['num_tokens'] / 1e6:7.1f} M tokens  waited {record['wait_s']:5.2f} s  "
                + "  ".join(f"{name} {loss:.4f}" for name, loss in losses)
            )

    def _save(self, model: HybridModel) -> None:
        from train.storage import save_model

        save_model(model, self._options.output, self._vocabulary.end_of_message, self._vocabulary.padding)
        self._write_report()

    def _write_report(self) -> None:
        self._report["elapsed_s"] = round(time.monotonic() - self._start, 1)
        (self._options.output / REPORT).write_text(json.dumps(self._report), encoding="utf-8")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._start:6.1f} s  {text}", flush=True)


def _delta_rule(device: torch.device) -> DeltaRule:
    """Return the fastest delta rule that `device` runs. On a GPU flash-linear-attention (`fla-core`) must be
    importable."""
    if device.type == "cpu":
        from train.delta_rule import torch_delta_rule

        return torch_delta_rule
    from train.fla_delta_rule import fla_delta_rule

    return fla_delta_rule
