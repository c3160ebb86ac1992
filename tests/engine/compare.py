"""The same request alone, cold, in a fresh engine with the cache off: what every other run has to agree with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forkpoint.config import CacheConfig
from forkpoint.engine.inputs import InputProcessor, Prompt
from forkpoint.outputs import CompletionOutput, Logprob, RequestOutput
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.request import Request
from tests.engine.real import ModelBank, Options, RealEngine, start
from tests.engine.sampling_oracle import forbidden_ids, resample

TOLERANCE = 1e-4  # of logits whose standard deviation is about 1
KEYS_TOLERANCE = 0.1  # where a last bit may move a key by a step of 2^-4
STATES_TOLERANCE = 0.5  # where states are rounded at other tokens, so that a token may take another expert


class Mismatch(AssertionError):
    """A run disagrees with the oracle."""


@dataclass(frozen=True)
class Answer:
    """A request's output, its sequences, and the logits behind each output token of each sequence."""

    output: RequestOutput
    requests: tuple[Request, ...]
    logits: tuple[tuple[Tensor, ...], ...]
    inputs: InputProcessor
    tolerance: float


def answer(run: RealEngine, request_id: str) -> Answer:
    """What a finished or aborted request got."""
    requests, output = tuple(run.requests[request_id]), run.outputs[request_id]
    logits = [
        tuple(run.probe.logits[request.id, i] for i in range(len(completion.token_ids)))
        for request, completion in zip(requests, output.outputs, strict=True)
    ]
    return Answer(output, requests, tuple(logits), run.engine.inputs, _tolerance(run.options))


def _tolerance(options: Options) -> float:
    if options.state_dtype == "bfloat16":
        return STATES_TOLERANCE
    return KEYS_TOLERANCE if options.kv_cache_dtype == "fp8" else TOLERANCE


class Oracle:
    """Answers are kept, so that duplicates cost nothing."""

    def __init__(self, bank: ModelBank) -> None:
        self._bank = bank
        self._known: dict[object, Answer] = {}

    def solve(self, options: Options, asked: Answer) -> Answer:
        """The same prompt, parameters and seed, alone."""
        no_cache = CacheConfig(enable_prefix_caching=False)
        interval = 1  # another one changes last bits of states in fp32
        if options.deterministic or options.state_dtype == "bfloat16":
            interval = options.state_write_interval
        alone = Options(**options.numbers, cache=no_cache, state_write_interval=interval)
        first = asked.requests[0]
        # what was cut off the prompt is not asked for again
        params = replace(first.params, seed=first.seed, truncate_prompt_tokens=None, cache_breakpoints=())
        prompt = Prompt(first.prompt_token_ids, images=first.images)
        images = tuple((image.start, image.digest) for image in first.images)
        key = (*alone.numbers.values(), interval, first.prompt_token_ids.tobytes(), images, repr(params))
        if key not in self._known:
            run = start(self._bank, alone)
            run.scrub = False
            self._known[key] = answer(run, run.ask(prompt, params))
        return self._known[key]


def compare(got: Answer, want: Answer, exact: bool) -> int:
    """Raise Mismatch unless the two agree: bit for bit if `exact`, else to `got.tolerance`.

    An aborted request agrees as far as it came, and so does a sequence of which a test made the logits fail. Returns
    in how many sequences a token differs although the logits agree: then each run's own logits must lead a fresh
    sampler to that run's token, so that only a tie within rounding explains it. What follows such a token cannot be
    compared.
    """
    within = 0.0 if exact else got.tolerance
    flips = sum(_compare_sequence(got, want, i, within) for i in range(len(want.requests)))
    if got.output.outputs[0].finish_reason is not FinishReason.ABORT:
        _compare_prompt_logprobs(got.output, want.output, within)
    return flips


def _compare_sequence(got: Answer, want: Answer, index: int, within: float) -> bool:
    mine, oracle = got.output.outputs[index], want.output.outputs[index]
    name = f"{got.requests[index].id} ({got.requests[index].num_prompt_tokens} tokens)"
    for i, (logits, expected) in enumerate(zip(got.logits[index], want.logits[index], strict=False)):
        _check(
            _agree(logits, expected, within), f"{name}: logits of output {i} are off by {_distance(logits, expected)}"
        )
        if mine.token_ids[i] != oracle.token_ids[i]:
            _check(within > 0, f"{name}: output {i} differs though the logits are the same bits")
            params = got.requests[index].params
            rivals: set[int] | None = None
            if params.structured_outputs is not None:  # a fresh sampler has no grammar
                if params.temperature:
                    return True
                rivals = {mine.token_ids[i], oracle.token_ids[i]}
            for run, completion, own in ((got, mine, logits), (want, oracle, expected)):
                token = resample(run.inputs, own, run.requests[index], list(completion.token_ids[:i]), rivals)
                _check(token == completion.token_ids[i], f"{name}: output {i} is not what its logits give")
            return True
    aborted = mine.finish_reason is FinishReason.ABORT or not_finite(mine)
    expected_ids = oracle.token_ids[: len(mine.token_ids)] if aborted else oracle.token_ids
    _check(mine.token_ids == expected_ids, f"{name}: {len(mine.token_ids)} outputs, expected {len(expected_ids)}")
    _compare_logprobs(mine, want, index, within, name)
    if aborted:
        return False
    for what in ("text", "finish_reason", "stop_reason", "error"):
        _check(
            getattr(mine, what) == getattr(oracle, what),
            f"{name}: {what} is {getattr(mine, what)!r}, expected {getattr(oracle, what)!r}",
        )
    return False


def not_finite(completion: CompletionOutput) -> bool:
    """Whether the completion ended because its logits were not finite."""
    return completion.finish_reason is FinishReason.ERROR and "non-finite logits" in (completion.error or "")


def _compare_logprobs(mine: CompletionOutput, want: Answer, index: int, within: float, name: str) -> None:
    oracle = want.output.outputs[index]
    _check((mine.logprobs is None) == (oracle.logprobs is None), f"{name}: logprobs are there or missing")
    for i, (entries, expected) in enumerate(zip(mine.logprobs or (), oracle.logprobs or (), strict=False)):
        _compare_entries(entries, expected, within, f"{name}: logprobs of output {i}")
    _check(mine.logprobs is None or len(mine.logprobs) == len(mine.token_ids), f"{name}: logprobs are missing")


def _compare_prompt_logprobs(got: RequestOutput, want: RequestOutput, within: float) -> None:
    name = f"{got.request_id}: prompt logprobs"
    _check((got.prompt_logprobs is None) == (want.prompt_logprobs is None), f"{name} are there or missing")
    for i, (mine, oracle) in enumerate(zip(got.prompt_logprobs or (), want.prompt_logprobs or (), strict=True)):
        _check((mine is None) == (oracle is None), f"{name} of token {i} are there or missing")
        if mine is not None and oracle is not None:
            _compare_entries(mine, oracle, within, f"{name} of token {i}")


def _compare_entries(mine: Mapping[int, Logprob], want: Mapping[int, Logprob], within: float, name: str) -> None:
    """The chosen token, then the likeliest; where two are equally likely to rounding, either may be named."""
    if not within:
        _check(mine == want, f"{name}: {mine}, expected {want}")
        return
    _check(next(iter(mine)) == next(iter(want)), f"{name} speak of another token")
    best, expected = (sorted((e.logprob for e in entries.values()), reverse=True) for entries in (mine, want))
    num_best = min(len(best), len(expected))  # the chosen token may be one of the likeliest in only one of them
    _check(max(len(best), len(expected)) <= num_best + 1, f"{name}: {mine}, {want}")
    _check(_close(best[:num_best], expected[:num_best], within), f"{name}: {mine}, {want}")
    for token in mine.keys() & want.keys():
        _check(_close([mine[token].logprob], [want[token].logprob], within), f"{name}: {mine[token]}, {want[token]}")
        _check(mine[token].decoded_token == want[token].decoded_token, f"{name}: {mine[token]}, {want[token]}")


def _close(mine: Sequence[float], want: Sequence[float], within: float) -> bool:
    return len(mine) == len(want) and all(abs(a - b) <= 2 * within for a, b in zip(mine, want, strict=True))


def _agree(mine: Tensor, want: Tensor, within: float) -> bool:
    return bool(((mine - want).abs() <= within).all()) if within else torch.equal(mine, want)


def _distance(mine: Tensor, want: Tensor) -> float:
    return float((mine - want).abs().max())


def _check(ok: bool, text: str) -> None:
    if not ok:
        raise Mismatch(text)


def check_tokens_entered(run: RealEngine, request_id: str) -> None:
    """Tokens that entered the model = prompt - cached + outputs - 1, preempted sequences apart."""
    for request, completion in zip(run.requests[request_id], run.outputs[request_id].outputs, strict=True):
        reason = completion.finish_reason
        if request.num_preemptions or reason is FinishReason.ABORT or reason is FinishReason.ERROR:
            continue
        computed = run.probe.entered[request.id] - (len(completion.token_ids) - 1)
        expected = request.num_prompt_tokens - request.cache.num_cached_tokens
        ahead = run.options.async_scheduling and reason is FinishReason.STOP  # a step planned before the stop was seen
        # Drafts that were wrong, and those right ones that an end in mid-step cut off.
        drafted = request.num_draft_tokens if reason is FinishReason.STOP else 0
        computed -= request.num_draft_tokens - request.num_accepted_tokens
        assert expected <= computed <= expected + max(ahead, drafted), (
            f"{request.id}: {computed} prompt tokens entered the model, expected {expected}"
        )


def check_restrictions(run: RealEngine, request_id: str) -> None:
    """No output is an id that may not come, and none completes a bad word."""
    for request, completion in zip(run.requests[request_id], run.outputs[request_id].outputs, strict=True):
        for i, token in enumerate(completion.token_ids):
            assert token not in forbidden_ids(run.engine.inputs, request.params, completion.token_ids[:i])


def params_of(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **changes})  # type: ignore[arg-type]
