"""What the demo runs: a three-turn chat, two users of one system prompt, and forks of one long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.engine.inputs import Prompt
from forkpoint.engine.llm import LLM
from forkpoint.errors import RequestFailedError
from forkpoint.params import SamplingParams

RULES = (
    "Answer in one sentence.",
    "Name the shelf where a book stands, never the room.",
    "Opening hours are nine to six; on Saturdays the reading room closes at two.",
    "Loans run four weeks and may be renewed twice unless somebody is waiting.",
    "Maps and manuscripts are read in the reading room and do not leave it.",
    "Where a title is not in the catalogue, offer to order it and say how long that takes.",
    "Fees are told in full before they are charged.",
    "Never guess a call number.",
)
QUESTIONS = ("Where do I find the atlas of 1913?", "May I take it home?", "And when do you close on Saturday?")
OTHER_QUESTIONS = ("Which maps may be copied?", "Who may renew a loan for me?")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt, answered once."""

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    time_to_first_token_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a scenario, answered with the cache on and with it off."""

    scenario: str
    on: Measurement
    off: Measurement

    @property
    def identical(self) -> bool:
        return self.on.token_ids == self.off.token_ids


@dataclass(frozen=True, slots=True)
class Pair:
    """The same model with the cache on and off. Both answer each prompt in turn, so that a machine that is
    busy for a while slows both."""

    on: LLM
    off: LLM
    params: SamplingParams

    def ask(self, scenario: str, messages: Sequence[dict[str, str]]) -> Row:
        """Answer the conversation with both."""
        prompt = self.on.render_chat(messages)
        return Row(scenario, _measure(self.on, prompt, self.params), _measure(self.off, prompt, self.params))


def run_demo(model: str, *, max_tokens: int, options: dict[str, Any]) -> list[Row]:
    """Run every scenario with the cache on and off."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with (
        LLM(model, **{**options, "enable_prefix_caching": True}) as on,
        LLM(model, **{**options, "enable_prefix_caching": False}) as off,
    ):
        _warm_up(on)
        _warm_up(off)
        pair = Pair(on, off, params)
        return _chat(pair) + _system_prompt(pair) + _forks(pair)


def _chat(pair: Pair) -> list[Row]:
    messages = [{"role": "system", "content": _system_text("the city library", 14)}]
    rows = []
    for turn, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question})
        rows.append(pair.ask(f"chat, turn {turn}", messages))
        messages.append({"role": "assistant", "content": rows[-1].on.text})
    return rows


def _system_prompt(pair: Pair) -> list[Row]:
    system = {"role": "system", "content": _system_text("the map archive", 18)}
    return [
        pair.ask(f"one system prompt, user {number}", [system, {"role": "user", "content": question}])
        for number, question in enumerate(OTHER_QUESTIONS, start=1)
    ]


def _forks(pair: Pair) -> list[Row]:
    """Prompts that part in the middle of a text, where no message ends."""
    names = ("fork, original", "fork, first branch", "fork, second branch")
    trunk = _system_text("the music school", 14)
    branches = (
        _system_text("the concert hall", 6),
        _system_text("the rehearsal rooms", 6),
        _system_text("the attic", 6),
    )
    return [
        pair.ask(name, [{"role": "user", "content": trunk + branch}])
        for name, branch in zip(names, branches, strict=True)
    ]


def _measure(llm: LLM, prompt: Prompt, params: SamplingParams) -> Measurement:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    first = output.metrics.time_to_first_token_s
    completion = output.outputs[0]
    if completion.error is not None or first is None:
        raise RequestFailedError(f"the demo's request failed: {completion.error}")
    return Measurement(prompt, completion.text, completion.token_ids, output.num_cached_tokens, first)


def _warm_up(llm: LLM) -> None:
    """First calls load code and fill pools; that is not what the table is about."""
    for size in (200, 2000):
        llm.generate("-" * size, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    llm.reset_prefix_cache()


def _system_text(place: str, count: int) -> str:
    rules = (f"{number}. {RULES[(number - 1) % len(RULES)]}" for number in range(1, count + 1))
    return f"You answer visitors of {place}.\n" + "\n".join(rules) + "\n"
