"""`python -m evaluation.kl [MODEL] --kv-cache-dtype fp8`: measures how engine options change the next token's
distribution."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evaluation.subject import Subject
from evaluation.suite import Example, held_out_suite
from forkpoint.cli.main import run
from forkpoint.cli.model import choose_model
from forkpoint.cli.options import Parser, add_engine_options, engine_options
from forkpoint.cli.parser import MODEL_HELP
from forkpoint.errors import ConfigError
from forkpoint.models.context import ForwardContext
from forkpoint.runtime.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Divergence:
    """The KL divergence (nats) of a changed model from the plain one at each of `num_tokens` positions, and the number
    of positions where another token is the likeliest."""

    num_tokens: int
    mean: float
    largest: float
    num_other_tokens: int


def measure_kl(model: str, examples: Sequence[Example], options: Mapping[str, Any]) -> Divergence:
    """Compare the engine with `options` to the one without, over all tokens of the dialogues, answers included."""
    kl: list[Tensor] = []
    num_others = 0
    with Watched(model, {}) as one, Watched(model, options) as other:
        for example in examples:
            messages = [*example.messages, {"role": "assistant", "content": example.answer}]
            plain, changed = one.distributions(messages), other.distributions(messages)
            kl.append((plain.exp() * (plain - changed)).sum(-1))
            num_others += int((plain.argmax(-1) != changed.argmax(-1)).sum())
    values = torch.cat(kl)
    return Divergence(len(values), float(values.mean()), float(values.max()), num_others)


class Watched(Subject):
    """An engine whose hidden states are recorded."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        super().__init__(model, {"log_level": "error", "enable_prefix_caching": False, **options})
        runner = self.core._runner
        assert isinstance(runner, ModelRunner)
        self._model, self._found = runner._model, list[Tensor]()
        self._forward = self._model.forward
        self._model.forward = self._noting  # type: ignore[method-assign]

    def _noting(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        hidden = self._forward(token_ids, ctx)
        self._found.append(torch.log_softmax(self._model.logits(hidden).double(), -1))
        return hidden

    def distributions(self, messages: Sequence[Mapping[str, str]]) -> Tensor:
        """Return the log-probabilities of every next token of a dialogue, `[T, vocab_size]`, in nats."""
        self._found.clear()
        self.ask([self.llm.render_chat(messages)], max_tokens=1)
        return torch.cat(self._found)


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m evaluation.kl",
        description="Divergence of the next token's distribution with these engine options from that without them, "
        "over held-out dialogues.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--num-examples", type=int, default=30, metavar="INT", help="dialogues (default: 30)")
    add_engine_options(parser)
    parser.set_defaults(command=_run)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    model = choose_model(options, arguments.model_tag)
    options.pop("model", None)
    if not options:
        raise ConfigError("no engine option was given; give one whose effect is to be measured")
    found = measure_kl(model, held_out_suite(num_examples=arguments.num_examples), options)
    print(
        f"KL divergence over {found.num_tokens} tokens: mean {found.mean:.2e} nats, largest {found.largest:.2e}; the "
        f"likeliest token is another at {found.num_other_tokens}"
    )
    return 0


if __name__ == "__main__":
    run(build_parser)
