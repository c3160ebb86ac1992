"""What drafts bring: one long greedy answer without them and with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, RequestFailedError, UnsupportedModelError
from forkpoint.params import SamplingParams

METHODS = (None, "ngram", "mtp")
NUM_DRAFTS = 3
QUESTION = "Tell me about yourself, at length."
NUM_ROUNDS = 3  # the first warms up, the best of the others counts


@dataclass(frozen=True, slots=True)
class Answer:
    """The question answered once; `num_steps` of the model."""

    elapsed_s: float
    num_steps: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A method beside plain decoding."""

    method: str
    best: Answer
    plain: Answer

    @property
    def identical(self) -> bool:
        return self.best.token_ids == self.plain.token_ids


def run_drafts(model: str, *, max_tokens: int, options: dict[str, Any], say: Callable[[str], object]) -> list[DraftRow]:
    """A row for plain decoding and for each method that the model and the device can do; `say` is told why another
    cannot start. The methods take turns, so that a machine that is busy for a while slows all."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with ExitStack() as stack:
        llms = {method: stack.enter_context(llm) for method, llm in _engines(model, options, say)}
        rounds = [{method: _answer(llm, params) for method, llm in llms.items()} for _ in range(NUM_ROUNDS)]
    best = {method: min((r[method] for r in rounds[1:]), key=lambda answer: answer.elapsed_s) for method in llms}
    return [DraftRow(method or "none", answer, best[None]) for method, answer in best.items()]


def _engines(model: str, options: dict[str, Any], say: Callable[[str], object]) -> Iterator[tuple[str | None, LLM]]:
    for method in METHODS:
        config = {"method": method, "num_speculative_tokens": NUM_DRAFTS} if method else None
        try:
            yield method, LLM(model, **{**options, "speculative_config": config})
        except (ConfigError, UnsupportedModelError) as error:
            if method is None:
                raise
            say(f"no drafts of {method} here: {error}")


def _answer(llm: LLM, params: SamplingParams) -> Answer:
    llm.reset_prefix_cache()
    prompt = llm.render_chat([{"role": "user", "content": QUESTION}])
    num_steps, start = llm.get_metrics()["num_steps"], time.perf_counter()
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - start
    completion = output.outputs[0]
    if completion.error is not None:
        raise RequestFailedError(f"the demo's request failed: {completion.error}")
    return Answer(elapsed_s, llm.get_metrics()["num_steps"] - num_steps, completion.token_ids)


def cells(rows: Sequence[DraftRow]) -> list[tuple[str, ...]]:
    """Of the table, its titles first."""
    lines: list[tuple[str, ...]] = [("drafts", "tokens", "steps", "tokens a step", "tokens/s", "speed-up", "identical")]
    for row in rows:
        count, best = len(row.best.token_ids), row.best
        lines.append(
            (
                row.method,
                f"{count:,}",
                f"{best.num_steps:,}",
                f"{count / best.num_steps:.2f}",
                f"{count / best.elapsed_s:.0f}",
                f"{row.plain.elapsed_s / best.elapsed_s:.2f}x",
                "yes" if row.identical else "NO",
            )
        )
    return lines
