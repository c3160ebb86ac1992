"""Workloads of random tokens, or from files with recorded conversations and request traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from forkpoint.bench.images import RandomImages, image_limit, read_buckets
from forkpoint.bench.options import DatasetOptions
from forkpoint.bench.request import BenchRequest, TokenIds
from forkpoint.bench.vocabulary import Vocabulary
from forkpoint.checks import member
from forkpoint.errors import ConfigError
from forkpoint.json_options import json_object
from forkpoint.sim.readers import read_trace
from forkpoint.sim.trace import TraceRequest


class Synthesis:
    """A generator of the random tokens and lengths of one workload; the same seed gives the same ones."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._vocabulary = vocabulary

    def tokens(self, count: int) -> TokenIds:
        return self._vocabulary.random(self.rng, count)

    def length(self, middle: int, ratio: float) -> int:
        """Draw a length uniformly from `middle` minus to plus `middle * ratio` (rounded down), at least 1."""
        low, high = int(middle * (1 - ratio)), int(middle * (1 + ratio))
        return max(1, int(self.rng.integers(low, high + 1)))


def _request(tokens: TokenIds, num_output_tokens: int) -> BenchRequest:
    return BenchRequest(tokens, len(tokens), num_output_tokens)


def random_requests(options: DatasetOptions, synthesis: Synthesis) -> Iterator[BenchRequest]:
    """Yield prompts of a shared random prefix and a random body of their own, without end."""
    prefix, ratio = synthesis.tokens(options.random_prefix_len), options.random_range_ratio
    while True:
        body = synthesis.tokens(synthesis.length(options.random_input_len, ratio))
        yield _request(np.concatenate([prefix, body]), synthesis.length(options.random_output_len, ratio))


def random_mm_requests(options: DatasetOptions, synthesis: Synthesis) -> Iterator[BenchRequest]:
    """Yield the requests of `random_requests` without end, each with random images of its own.

    Raises ConfigError for an option of the images that is not allowed, and without Pillow.
    """
    images = RandomImages(
        read_buckets(options.random_mm_bucket_config),
        options.random_mm_base_items_per_request,
        options.random_mm_num_mm_items_range_ratio,
        image_limit(json_object("random_mm_limit_mm_per_prompt", options.random_mm_limit_mm_per_prompt)),
    )
    for request in random_requests(options, synthesis):
        yield replace(request, images=tuple(images.draw(synthesis.rng)))


def prefix_repetition_requests(options: DatasetOptions, synthesis: Synthesis) -> Iterator[BenchRequest]:
    """Yield a prefix and a new suffix each, without end. Every round uses each prefix once, in random order."""
    prefixes = [
        synthesis.tokens(options.prefix_repetition_prefix_len) for _ in range(options.prefix_repetition_num_prefixes)
    ]
    while True:
        for number in synthesis.rng.permutation(len(prefixes)):
            suffix = synthesis.tokens(options.prefix_repetition_suffix_len)
            yield _request(np.concatenate([prefixes[number], suffix]), options.prefix_repetition_output_len)


def multi_turn_requests(options: DatasetOptions, synthesis: Synthesis) -> Iterator[BenchRequest]:
    """Yield conversations one after the other, without end: a first message, then turns that follow it."""
    prefix, output = synthesis.tokens(options.multi_turn_prefix_len), options.multi_turn_output_len
    count = 0
    while True:
        yield _request(np.concatenate([prefix, synthesis.tokens(options.multi_turn_first_len)]), output)
        for _ in range(options.multi_turn_num_turns - 1):
            count += 1
            yield _follow(
                synthesis.tokens(options.multi_turn_input_len), output, count - 1, options.multi_turn_think_time
            )
        count += 1


def fork_requests(options: DatasetOptions, synthesis: Synthesis) -> Iterator[BenchRequest]:
    """Yield without end a context, then each branch's messages, of which the first follows the context's answer."""
    output, count = options.fork_output_len, 0
    while True:
        context = count
        yield _request(synthesis.tokens(options.fork_context_len), output)
        count += 1
        for _ in range(options.fork_num_branches):
            parent = context
            for _ in range(options.fork_num_turns):
                yield _follow(synthesis.tokens(options.fork_branch_len), output, parent)
                parent, count = count, count + 1


def _follow(tokens: TokenIds, num_output_tokens: int, after: int, think_s: float = 0.0) -> BenchRequest:
    return BenchRequest(tokens, len(tokens), num_output_tokens, after=after, think_s=think_s, continues=True)


Maker = Callable[[DatasetOptions, Synthesis], Iterator[BenchRequest]]
SYNTHETIC: Final[Mapping[str, Maker]] = MappingProxyType(
    {
        "random": random_requests,
        "random-mm": random_mm_requests,
        "prefix_repetition": prefix_repetition_requests,
        "multi_turn": multi_turn_requests,
        "fork": fork_requests,
    }
)


def synthetic(options: DatasetOptions, vocabulary: Vocabulary, count: int, seed: int) -> list[BenchRequest]:
    """Return the first `count` requests of the synthetic dataset that `options` names. Raises ConfigError."""
    return list(islice(SYNTHETIC[options.dataset_name](options, Synthesis(vocabulary, seed)), count))


# tokens; conversations with other lengths are left out, as in vLLM's benchmark
MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048


def sharegpt_requests(options: DatasetOptions, vocabulary: Vocabulary, count: int, seed: int) -> list[BenchRequest]:
    """Return first messages of conversations in random order, with the lengths of their answers as output.

    Only MIN_LEN to MAX_TOTAL_LEN tokens are taken. If fewer than `count` fit, they are repeated; [] if none fits.
    Raises ConfigError for a file that cannot be read.
    """
    conversations = _sharegpt(Path(options.dataset_path or ""))
    order = np.random.default_rng(seed).permutation(len(conversations))
    found: list[BenchRequest] = []
    for index in order:
        if len(found) == count:
            break
        prompt, answer = conversations[index]
        num_prompt = len(vocabulary.encode(prompt))
        num_output = options.sharegpt_output_len or len(vocabulary.encode(answer))
        fits = MIN_LEN <= num_prompt <= MAX_PROMPT_LEN and num_prompt + num_output <= MAX_TOTAL_LEN
        if fits and (options.sharegpt_output_len or num_output >= MIN_LEN):
            found.append(BenchRequest(prompt, num_prompt, num_output))
    return list(islice(cycle(found), count))


def trace_requests(options: DatasetOptions, vocabulary: Vocabulary, count: int, seed: int) -> list[BenchRequest]:
    """Return the first `count` requests of a trace (of its first sessions), with its times divided by the speed.

    Random tokens stand for the trace's, equal for equal ones; `trace_shrink` keeps a share of them. Raises TraceError.
    """
    trace = read_trace(Path(options.dataset_path or ""), limit=count)
    shrink = options.trace_shrink
    places: dict[str, int] = {}
    found: list[BenchRequest] = []
    for request in _chosen(trace.requests, count, options.trace_num_sessions):
        places[request.id] = len(found)
        names = request.prompt.array()
        kept = names[names % shrink == 0]
        if not len(kept):
            kept = names[:1]
        content = vocabulary.of_names(kept, seed)
        found.append(
            BenchRequest(
                content=content,
                num_content_tokens=len(content),
                num_output_tokens=-(-request.output.num_tokens // shrink),
                arrival_s=request.arrival_s / options.trace_speed,
                after=None if request.after is None else places[request.after],
                think_s=request.think_s / options.trace_speed,
            )
        )
    return found


def _chosen(requests: Sequence[TraceRequest], count: int, num_sessions: int | None) -> list[TraceRequest]:
    if num_sessions is None:
        return list(requests[:count])
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    turns = zip_longest(*list(sessions.values())[:num_sessions])
    return [request for turn in turns for request in turn if request is not None][:count]


def _sharegpt(path: Path) -> list[tuple[str, str]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"dataset_path={str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"dataset_path={str(path)!r} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"dataset_path={str(path)!r} must hold a list of conversations")
    return [pair for entry in entries if (pair := _first_exchange(entry)) is not None]


def _first_exchange(entry: Any) -> tuple[str, str] | None:
    turns = member(entry, "conversations") or member(entry, "conversation")
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    prompt, answer = (member(turn, "value") for turn in turns[:2])
    if not isinstance(prompt, str) or not isinstance(answer, str):
        return None
    return prompt, answer
