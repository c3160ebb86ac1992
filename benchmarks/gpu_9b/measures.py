"""The protocol: the calls of `LLM.generate`, and how they are timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forkpoint.engine.inputs import PromptInput
from forkpoint.engine.llm import LLM
from forkpoint.errors import ForkpointError
from forkpoint.outputs import RequestOutput
from forkpoint.params import SamplingParams

Ids = list[int]


class ProtocolError(ForkpointError):
    """Raised if the engine's counters contradict its reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens, batch sizes and repeats of the protocol."""

    prompt: int = 16_384
    extension: int = 128
    chat_start: int = 2000
    chat_end: int = 4000
    chat_answer: int = 150
    chat_new: int = 200
    decode_prompt: int = 256
    decode_tokens: int = 128
    decode_batches: tuple[int, ...] = (1, 32, 128)
    conversations: int = 32
    shared: int = 2000
    own: int = 2000
    turns: int = 10
    turn_answer: int = 64
    turn_new: int = 700
    repeats: int = 5

    @property
    def num_chat_turns(self) -> int:
        """Turns after the first whose prompt has at most `chat_end` tokens."""
        return (self.chat_end - self.chat_start) // (self.chat_answer + self.chat_new)


@dataclass(frozen=True, slots=True)
class Answer:
    """One call of `generate`: its outputs, its start (by time.perf_counter) and its duration."""

    outputs: list[RequestOutput]
    started_s: float
    seconds: float

    @property
    def num_computed(self) -> int:
        """Prompt tokens that entered the model."""
        return sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in self.outputs)

    @property
    def num_prompt(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def last_first_token_s(self) -> float:
        """Seconds from the call until every request had its first token."""
        return max(output.metrics.first_token_s or 0.0 for output in self.outputs) - self.started_s


class Client:
    """Asks an LLM for greedy tokens, and compares its counters with its reports after every call.

    With `copies` the engine was started so that it copies states, which is an error otherwise.
    """

    def __init__(self, llm: LLM, vocab_size: int, seed: int = 0, *, copies: bool = False) -> None:
        self._llm = llm
        self._copies = copies
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self.num_checked = 0

    def ids(self, count: int) -> Ids:
        """Return new token ids."""
        found: Ids = self._random.integers(1, self._vocab_size, count).tolist()
        return found

    def ask(self, prompts: Sequence[PromptInput], max_tokens: int) -> Answer:
        """Ask for greedy tokens.

        Raises ProtocolError if the engine copied state bytes, or if it computed other tokens than the prompts' without
        the cached ones, plus the outputs that were fed back.
        """
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        before = self._llm.get_metrics()
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        answer = Answer(outputs, started, seconds)
        self._check(answer, before, len(prompts) * (max_tokens - 1))
        return answer

    @property
    def slot_bytes_copied(self) -> int:
        """State bytes copied since the engine started."""
        return int(self._llm.get_metrics()["slot_bytes_copied"])

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def _check(self, answer: Answer, before: dict[str, int], num_decoded: int) -> None:
        errors = [completion.error for output in answer.outputs for completion in output.outputs if completion.error]
        if errors:
            raise ProtocolError(f"a request failed: {errors[0]}")
        after = self._llm.get_metrics()
        entered = after["num_model_tokens"] - before["num_model_tokens"]
        drafted, accepted = (after[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens"))
        expected = answer.num_computed + num_decoded + drafted - accepted
        if entered != expected and not (drafted and entered > expected):  # steps ahead may go beyond an end
            raise ProtocolError(
                f"{entered} tokens entered the model; prompts less cached tokens plus decoded ones and wrong drafts "
                f"are {expected}"
            )
        copied = after["slot_bytes_copied"] - before["slot_bytes_copied"]
        if copied and not self._copies:
            raise ProtocolError(f"{copied} bytes of states were copied; the copy-free path copies none")
        self.num_checked += 1


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one measurement, and the prompt tokens that a median call computed."""

    values: tuple[float, ...]
    num_computed: float

    @property
    def median(self) -> float:
        return float(np.median(self.values))


def time_to_first_token(client: Client, sizes: Sizes) -> tuple[Series, Series]:
    """Return (cold, warm): the seconds of a call for one token after a new prompt, then after the same prompt with a
    few more tokens."""
    cold, warm, cold_computed, warm_computed = [], [], [], []
    for _ in range(sizes.repeats):
        prompt = client.ids(sizes.prompt)
        answer = client.ask([prompt], 1)
        cold.append(answer.seconds)
        cold_computed.append(answer.num_computed)
        answer = client.ask([prompt + client.ids(sizes.extension)], 1)
        warm.append(answer.seconds)
        warm_computed.append(answer.num_computed)
    return (
        Series(tuple(cold), float(np.median(cold_computed))),
        Series(tuple(warm), float(np.median(warm_computed))),
    )


def chat_turns(client: Client, sizes: Sizes) -> list[Series]:
    """Return the seconds to the first token of every turn after the first, a series for each turn."""
    seconds = np.empty((sizes.num_chat_turns, sizes.repeats))
    computed = np.empty_like(seconds)
    for repeat in range(sizes.repeats):
        history = client.ids(sizes.chat_start)
        history += client.ask([history], sizes.chat_answer).outputs[0].outputs[0].token_ids
        for turn in range(sizes.num_chat_turns):
            history += client.ids(sizes.chat_new)
            answer = client.ask([history], sizes.chat_answer)
            history += answer.outputs[0].outputs[0].token_ids
            seconds[turn, repeat] = answer.last_first_token_s
            computed[turn, repeat] = answer.num_computed
    return [Series(tuple(row), float(np.median(own))) for row, own in zip(seconds, computed, strict=True)]


def decode_rate(client: Client, sizes: Sizes, batch: int) -> Series:
    """Return the tokens per second of `batch` rows, from the additional time of `decode_tokens` more tokens."""
    rates = []
    for _ in range(sizes.repeats):
        short, long = (
            client.ask([client.ids(sizes.decode_prompt) for _ in range(batch)], count).seconds
            for count in (1, sizes.decode_tokens + 1)
        )
        rates.append(batch * sizes.decode_tokens / (long - short))
    return Series(tuple(rates), batch * sizes.decode_prompt)


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One agent loop: total seconds of its calls, its prompt tokens, and the cached ones among them."""

    seconds: float
    num_prompt: int
    num_cached: int


def agent_loop(client: Client, sizes: Sizes) -> list[AgentRun]:
    """Run conversations with a shared beginning, all at once in each turn. Every repetition starts with an empty
    cache."""
    runs = []
    for _ in range(sizes.repeats):
        client.forget()
        shared = client.ids(sizes.shared)
        histories = [shared + client.ids(sizes.own) for _ in range(sizes.conversations)]
        seconds, num_prompt, num_cached = 0.0, 0, 0
        for _ in range(sizes.turns):
            answer = client.ask(histories, sizes.turn_answer)
            seconds += answer.seconds
            num_prompt += answer.num_prompt
            num_cached += answer.num_prompt - answer.num_computed
            for history, output in zip(histories, answer.outputs, strict=True):
                history += output.outputs[0].token_ids
                history += client.ids(sizes.turn_new)
        runs.append(AgentRun(seconds, num_prompt, num_cached))
    return runs


def warm_up(client: Client, sizes: Sizes) -> None:
    """Run every kind of step once, so that no kernel is compiled during a measurement."""
    prompt = client.ids(sizes.prompt)
    client.ask([prompt], 1)
    client.ask([prompt + client.ids(sizes.extension)], 1)
    for batch in sizes.decode_batches:
        client.ask([client.ids(sizes.decode_prompt) for _ in range(batch)], 66)
    histories = [client.ids(sizes.shared + sizes.own) for _ in range(sizes.conversations)]
    client.ask(histories, 2)
    client.ask([history + client.ids(sizes.turn_new) for history in histories], 2)
    client.forget()
