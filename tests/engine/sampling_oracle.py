"""Which ids a sampler may take, worked out without the engine's masks and sampling state."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from forkpoint.engine.inputs import InputProcessor
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.ops.select import torch_table
from forkpoint.params import SamplingParams
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.runtime.row_sampling import RowSampling, TokenCounts
from forkpoint.runtime.sampler import Sampler
from forkpoint.sched.plan import AddedRow, TokenMasks
from forkpoint.sched.request import Request


def forced_ids(inputs: InputProcessor, params: SamplingParams, outputs: Sequence[int]) -> list[int]:
    """Return the ids that have to come next after `outputs`, because the thinking has been long enough."""
    if not params.limits_thinking:
        return []
    assert inputs.tokenizer is not None and params.thinking_token_budget is not None and params.thinking == "open"
    text = b""
    for num_thought in range(len(outputs) + 1):
        if b"</think>" in text or inputs.tool_call_token_ids.intersection(outputs[:num_thought]):
            return []
        if num_thought >= params.thinking_token_budget and not ends_within_character(text):
            begun = max(size for size in range(len("</think>")) if text.endswith(b"</think>"[:size]))
            end = "</think>\n\n"[begun:]
            if text and not begun and not text.endswith(b"\n"):
                end = "\n" + end
            ids = inputs.tokenizer.encode(end, add_special_tokens=False)
            early = ids[: max(params.min_tokens - num_thought, 0)]
            num_forced = next((i for i, token in enumerate(early) if token in params.stop_token_ids), len(ids))
            return ids[len(outputs) - num_thought : num_forced]
        if num_thought < len(outputs):
            text += inputs.tokenizer.token_bytes(outputs[num_thought])
    return []


def ends_within_character(text: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


def is_forced(inputs: InputProcessor, request: Request) -> bool:
    """Return whether the end of the request's thinking was forced."""
    outputs = request.output_token_ids
    return any(forced_ids(inputs, request.params, outputs[:i]) for i in range(len(outputs)))


def forbidden_ids(inputs: InputProcessor, params: SamplingParams, outputs: Sequence[int]) -> set[int]:
    """Return the ids that `allowed_token_ids` and `bad_words` exclude after `outputs`, worked out as vLLM does it."""
    if forced := forced_ids(inputs, params, outputs):
        return set(range(inputs.vocab_size)) - {forced[0]}
    forbidden: set[int] = set()
    if params.allowed_token_ids is not None:
        forbidden = set(range(inputs.vocab_size)).difference(params.allowed_token_ids)
    for word in params.bad_words:
        assert inputs.tokenizer is not None
        for ids in spellings(inputs.tokenizer, word):
            if len(ids) <= len(outputs) + 1 and list(outputs[len(outputs) + 1 - len(ids) :]) == ids[:-1]:
                forbidden.add(ids[-1])
    return forbidden


@functools.cache
def spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Return the ids of a bad word at the start of a text, and after a space if they are as many."""
    bare = word.lstrip()
    first, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (bare, " " + bare))
    return [first, spaced] if spaced[0] != first[0] and len(spaced) == len(first) else [first]


def resample(
    inputs: InputProcessor, logits: Tensor, request: Request, outputs: list[int], among: set[int] | None
) -> int:
    """Return what a sampler that starts afresh takes from `logits[V]` after `outputs`, if need be only from `among`."""
    known = np.concatenate([request.prompt_token_ids, np.asarray(outputs, np.int32)])
    stops = tuple(sorted(request.stop_token_ids))
    added = AddedRow(
        0, request.id, known, request.num_prompt_tokens, request.params, request.seed, stops, np.empty(0, np.int32)
    )
    row = RowSampling.create(added, TokenCounts(1, logits.shape[-1], CpuPlatform()))
    sampler = Sampler(torch_table(), CpuPlatform())
    allowed = np.ones(-(-inputs.vocab_size // 32) * 32, np.bool_)
    allowed[list(forbidden_ids(inputs, request.params, outputs))] = False
    if among is not None:
        allowed &= np.isin(np.arange(len(allowed)), list(among))
    masks = TokenMasks(np.zeros(1, np.int32), np.packbits(allowed, bitorder="little").view(np.int32)[None])
    return int(sampler.sample(logits[None], [row], np.asarray([len(outputs)], np.int32), masks).token_ids[0])
