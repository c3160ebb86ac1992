"""`python -m train.mtp`: trains the MTP head of a finished model to draft several tokens, without other changes.

The model itself writes the texts. The generator begins dialogues and the model continues them, every other one
greedily. At each token and step the head learns the model's own distribution there. Runs on a GPU or, slowly, on a CPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from evaluation.suite import DEMO_MODEL
from evaluation.tasks import make_training_dialogue
from forkpoint import LLM, SamplingParams
from train.curriculum import RateSchedule
from train.data import encode
from train.delta_rule import torch_delta_rule
from train.loop import Bounds, Progress
from train.loss import ahead
from train.model import HybridModel, Rows, make_rows
from train.optimizer import Optimizer, Rates
from train.run import vocabulary
from train.storage import load_model, save_model

TEMPERATURE = 0.7  # of the texts that are not greedy
SAY_EVERY = 100  # steps


def write_texts(folder: Path, count: int, length: int, seed: int, device: str) -> Tensor:
    """Return texts `[count, length]` int64. Every other one is greedy after its first words."""
    tokenizer, rng = Tokenizer.from_file(str(folder / "tokenizer.json")), random.Random(seed)
    prompts = []
    for _ in range(count):
        tokens, _ = encode(make_training_dialogue(rng, length), tokenizer)
        prompts.append({"prompt_token_ids": tokens[: rng.randrange(length // 16, length // 2)]})
    params = [
        SamplingParams(
            temperature=TEMPERATURE * (i % 2),
            seed=i,
            max_tokens=length - len(prompt["prompt_token_ids"]),
            ignore_eos=True,
        )
        for i, prompt in enumerate(prompts)
    ]
    with LLM(str(folder), device=device, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 30) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return torch.tensor(
        [[*p["prompt_token_ids"], *o.outputs[0].token_ids] for p, o in zip(prompts, outputs, strict=True)]
    )


def _rows(model: HybridModel, texts: Tensor) -> Rows:
    num_rows, length = texts.shape
    return make_rows(model.shape, num_rows, length, texts.device)


class HeadTraining:
    """Trains `model.mtp`. The parameters of `model.model` do not change."""

    def __init__(self, model: HybridModel, texts: Tensor, depth: int, rates: Rates) -> None:
        """Take `texts [count, length]` on the model's device."""
        self._model, self._texts, self._depth = model, texts, depth
        model.model.requires_grad_(False)
        self._optimizer = Optimizer(model.mtp.named_parameters(), rates)

    def loss(self, texts: Tensor) -> Tensor:
        """Return the mean cross entropy of each step's drafts `[depth]`, against the model's own distributions."""
        hidden, following, targets, known = self._prepare(texts)
        rows = _rows(self._model, texts)
        outputs = self._model.drafts(hidden, following, rows)
        losses = []
        for output, target, mask in zip(outputs, targets, known, strict=True):
            entropies = F.cross_entropy(self._model.logits(output).float(), target, reduction="none")
            losses.append((entropies * mask).sum() / mask.sum())
        return torch.stack(losses)

    def step(self, texts: Tensor, factor: float) -> Tensor:
        losses = self.loss(texts)
        losses.mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(factor)
        return losses.detach()

    def run(self, bounds: Bounds, rows_per_batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        progress, schedule, step = Progress(bounds), RateSchedule(warmup_steps=20, decay_from=0.3), 0
        while (share := progress.at(step)) < 1.0:
            chosen = torch.randint(len(self._texts), (rows_per_batch,), device=self._texts.device)
            losses = self.step(self._texts[chosen], schedule.factor(step, share))
            if step % SAY_EVERY == 0:
                print(f"step {step:6} {100 * share:5.1f} %  losses", *(f"{x:.4f}" for x in losses.tolist()), flush=True)
            step += 1

    @torch.no_grad()
    def _prepare(self, texts: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Return hidden states `[N, hidden]` with `N = rows * length`, and the targets of each step.

        The targets are the tokens `[N]`, the distributions to learn `[N, vocabulary]`, and 1 `[N]` where there is a
        target.
        """
        rows, tokens = _rows(self._model, texts), texts.flatten()
        hidden = self._model(tokens, rows)
        own = self._model.logits(hidden).float().softmax(-1)
        places = range(1, self._depth + 1)
        known = [(rows.positions < rows.length - count).float() for count in places]
        return (
            hidden,
            [ahead(tokens, rows, count) for count in places],
            [own.roll(-count, 0) for count in places],
            known,
        )


@torch.no_grad()
def accepted(model: HybridModel, texts: Tensor, depth: int, rows_per_batch: int = 8) -> list[float]:
    """Return the acceptance for 1 to `depth` drafts.

    It is the share of places in the second halves of texts where all drafts, and the text itself, are the model's own
    greedy choice.
    """
    right, num = torch.zeros(depth, dtype=torch.float64), 0
    for part in torch.split(texts, rows_per_batch):
        rows, tokens, length = _rows(model, part), part.flatten(), part.shape[1]
        hidden = model(tokens, rows)
        outputs = model.drafts(hidden, [ahead(tokens, rows, count) for count in range(1, depth + 1)], rows)
        own = model.logits(hidden).argmax(-1)
        counts = rows.positions >= length // 2
        for j, output in enumerate(outputs, 1):
            counts = counts & (rows.positions < length - depth - 1)
            if j == 1:
                num += int(counts.sum())
            counts = (
                counts
                & (model.logits(output).argmax(-1) == own.roll(-j, 0))
                & (own.roll(-j, 0) == tokens.roll(-j - 1, 0))
            )
            right[j - 1] += int(counts.sum())
    return [float(x) / max(1, num) for x in right]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m train.mtp", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the weights and config.json")
    parser.add_argument("--from", dest="start_from", type=Path, default=DEMO_MODEL, help="folder of the model")
    parser.add_argument("--depth", type=int, default=3, help="drafts one after the other")
    parser.add_argument("--num-texts", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512, help="tokens of a text, a multiple of 64")
    parser.add_argument("--num-scored", type=int, default=128, help="greedy texts that are not trained on")
    parser.add_argument("--rows-per-batch", type=int, default=64)
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--time-limit-s", type=float, help="of the steps alone")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="learning rate of Muon")
    parser.add_argument("--other-rate", type=float, default=0.002, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.num_steps is None and options.time_limit_s is None:
        parser.error("give --num-steps or --time-limit-s")
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)

    device = torch.device(options.device)
    count = options.num_texts + 2 * options.num_scored
    texts = write_texts(options.start_from, count, options.length, options.seed, options.device).to(device)
    say(f"{count} texts of {options.length} tokens")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(options.start_from, torch_delta_rule, dtype, device)
    held_out = texts[: 2 * options.num_scored : 2]
    say(f"accepted before: {_shares(accepted(model, held_out, options.depth + 1))}")
    training = HeadTraining(
        model, texts[2 * options.num_scored :], options.depth, Rates(options.matrix_rate, options.other_rate)
    )
    deadline = None if options.time_limit_s is None else time.monotonic() + options.time_limit_s
    training.run(Bounds(num_steps=options.num_steps, deadline=deadline), options.rows_per_batch, options.seed)
    ids = vocabulary(options.start_from)
    save_model(model, options.output, ids.end_of_message, ids.padding)
    saved = load_model(options.output, torch_delta_rule, dtype, device)
    say(f"accepted after:  {_shares(accepted(saved, held_out, options.depth + 1))}")


def _shares(shares: Sequence[float]) -> str:
    return f"{', '.join(f'{100 * share:.1f} %' for share in shares)}; {1 + sum(shares[:-1]):.2f} tokens a step"


if __name__ == "__main__":
    main()
