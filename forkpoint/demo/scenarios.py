"""Runs the demo: a chat, two users of one system prompt, and forks of one long prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from forkpoint.demo.conversation import STORIES, STORY_REPLY, DemoTurn, conversation, look_ups, system_prompts
from forkpoint.engine.inputs import Prompt
from forkpoint.engine.llm import LLM
from forkpoint.errors import RequestFailedError
from forkpoint.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Measurement:
    """The answer to one prompt, with its times and counters."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    time_to_first_token_s: float
    elapsed_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Row:
    """One turn of a scenario, answered with the cache on and with it off."""

    scenario: str
    turn: DemoTurn
    on: Measurement
    off: Measurement

    @property
    def identical(self) -> bool:
        return self.on.token_ids == self.off.token_ids

    @property
    def right(self) -> bool:
        return self.on.text.strip() == self.turn.answer


# answers the turn after the messages, with the cache on and off
Ask: TypeAlias = Callable[[str, Sequence[dict[str, str]], DemoTurn], Row]


def run_demo(model: str, *, max_tokens: int, options: dict[str, Any]) -> tuple[list[Row], list[Row]]:
    """Run every scenario with the cache on and off. Return the rows of the chat, and those of the other scenarios.

    Both engines answer each prompt in turn, so that other work on the machine slows both. Raises RequestFailedError.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with (
        LLM(model, **{**options, "enable_prefix_caching": True}) as on,
        LLM(model, **{**options, "enable_prefix_caching": False}) as off,
    ):

        def ask(scenario: str, messages: Sequence[dict[str, str]], turn: DemoTurn) -> Row:
            prompt = on.render_chat([*messages, {"role": "user", "content": turn.text}])
            return Row(scenario, turn, measure(on, prompt, params), measure(off, prompt, params))

        _warm_up(on)
        _warm_up(off)
        return _chat(ask), [*_system_prompt(ask), *_forks(ask)]


def _chat(ask: Ask) -> list[Row]:
    system = system_prompts()[0]
    messages = [{"role": "system", "content": system.text}]
    rows = []
    for number, turn in enumerate(conversation(system), start=1):
        rows.append(ask(f"chat, turn {number}", messages, turn))
        messages.append({"role": "user", "content": turn.text})
        messages.append({"role": "assistant", "content": rows[-1].on.text})
    return rows


def _system_prompt(ask: Ask) -> list[Row]:
    system = system_prompts()[1]
    message = {"role": "system", "content": system.text}
    turns = look_ups(system, range(5, 7))
    return [ask(f"one system prompt, user {number}", [message], turn) for number, turn in enumerate(turns, start=1)]


def _forks(ask: Ask) -> list[Row]:
    """Run three prompts that differ in the middle of a message, and return their rows."""
    names = ("fork, original", "fork, first branch", "fork, second branch")
    system = system_prompts()[2]
    (turn,) = look_ups(system, range(3, 4))
    rows = []
    for name, story in zip(names, STORIES, strict=True):
        history = ({"role": "user", "content": story}, {"role": "assistant", "content": STORY_REPLY})
        rows.append(ask(name, [{"role": "system", "content": system.text}, *history], turn))
    return rows


def measure(llm: LLM, prompt: Prompt, params: SamplingParams) -> Measurement:
    """Answer one prompt and measure it. Raises RequestFailedError if it fails or has no token."""
    num_steps, start = llm.get_metrics()["num_steps"], time.perf_counter()
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    elapsed_s, num_steps = time.perf_counter() - start, llm.get_metrics()["num_steps"] - num_steps
    first, completion = output.metrics.time_to_first_token_s, output.outputs[0]
    if completion.error is not None or first is None:
        raise RequestFailedError(f"the demo's request failed: {completion.error}")
    cached, ids = output.num_cached_tokens, tuple(completion.token_ids)
    return Measurement(prompt, completion.text, ids, cached, first, elapsed_s, num_steps)


def _warm_up(llm: LLM) -> None:
    """Run two prompts and empty the cache, because first calls load code and fill pools."""
    for size in (200, 2000):
        llm.generate("-" * size, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    llm.reset_prefix_cache()
