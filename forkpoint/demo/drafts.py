"""Measures the gain of drafts: one long greedy answer without drafts and with each method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from forkpoint.demo.scenarios import Measurement, measure
from forkpoint.demo.shown import shown_flag
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, UnsupportedModelError
from forkpoint.params import SamplingParams

METHODS = (None, "ngram", "mtp")
NUM_DRAFTS = 3
QUESTION = "Tell me about yourself, at length."
NUM_ROUNDS = 3  # the first round warms up; the fastest of the others counts


@dataclass(frozen=True, slots=True)
class DraftRow:
    """The fastest answer with one method of drafting, next to that of plain decoding."""

    method: str
    best: Measurement
    plain: Measurement

    @property
    def identical(self) -> bool:
        return self.best.token_ids == self.plain.token_ids


def run_drafts(model: str, *, max_tokens: int, options: dict[str, Any], say: Callable[[str], object]) -> list[DraftRow]:
    """Measure plain decoding and each method that the model and the device support; plain decoding comes first.

    `say` is called with the reason why a method cannot start. The engines stay loaded together and take turns, so that
    other work on the machine slows all of them. Raises ConfigError or UnsupportedModelError if plain decoding cannot
    start.
    """
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
            say(f"the method {method} is left out: {error}")


def _answer(llm: LLM, params: SamplingParams) -> Measurement:
    llm.reset_prefix_cache()
    return measure(llm, llm.render_chat([{"role": "user", "content": QUESTION}]), params)


def cells(rows: Sequence[DraftRow]) -> list[tuple[str, ...]]:
    """Return the rows of the printed table, titles first."""
    titles = ("drafts", "tokens", "steps", "tokens a step", "tokens/s", "speed-up", "identical")
    return [titles, *map(_cells, rows)]


def _cells(row: DraftRow) -> tuple[str, ...]:
    best, count = row.best, len(row.best.token_ids)
    speed, speed_up = count / best.elapsed_s, row.plain.elapsed_s / best.elapsed_s
    counts = (f"{count:,}", f"{best.num_steps:,}", f"{count / best.num_steps:.2f}")
    return (row.method, *counts, f"{speed:.0f}", f"{speed_up:.2f}x", shown_flag(row.identical))
