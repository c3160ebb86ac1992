"""Ids that may not come: against transformers, and on a real model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from forkpoint.engine.llm import LLM
from forkpoint.errors import InvalidParamsError, InvalidPromptError
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.masks import TokenRules, bad_word_ids, id_bits
from forkpoint.params import FinishReason, SamplingParams, StructuredOutputsParams
from forkpoint.sched.plan import IntArray
from tests.engine.tokenizers import byte_level, metaspace

VOCAB = 40
IDS = st.integers(0, 5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def ids_of(mask: IntArray | None, vocab_size: int = VOCAB) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]).tolist())


@given(
    words=st.lists(st.lists(IDS, min_size=1, max_size=4), min_size=1, max_size=8), outputs=st.lists(IDS, max_size=12)
)
@settings(max_examples=200, deadline=None)
def test_bad_words_are_those_of_transformers(words: list[list[int]], outputs: list[int]) -> None:
    oracle = NoBadWordsLogitsProcessor(words, eos_token_id=VOCAB - 1)
    rules = TokenRules(VOCAB, bad_words=words)
    for count in range(len(outputs) + 1):
        scores = oracle(torch.tensor([outputs[:count]], dtype=torch.long), torch.zeros(1, VOCAB))
        assert ids_of(rules.mask) == set(torch.isfinite(scores[0]).nonzero().ravel().tolist())
        if count < len(outputs):
            rules.accept(outputs[count])


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte_level", "metaspace"])
def test_words_are_taken_with_and_without_a_space(tokenizer: Any) -> None:
    words = [" fox", "the", "quick brown", "  jumps", "東京", "zzz", " "]
    expected = []
    for word in words:  # as vLLM's SamplingParams.update_from_tokenizer
        for add_prefix_space in (False, True):
            ids = tokenizer.hf.encode(
                (" " if add_prefix_space else "") + (word.lstrip() or word), add_special_tokens=False
            )
            if not add_prefix_space or (ids[0] != expected[-1][0] and len(ids) == len(expected[-1])):
                expected.append(ids)
    assert bad_word_ids(tokenizer, words) == expected


@given(token_ids=st.sets(st.integers(0, 200)), vocab_size=st.integers(1, 200))
def test_bits_name_ids(token_ids: set[int], vocab_size: int) -> None:
    found = id_bits(token_ids, vocab_size).view(np.int32)
    assert len(found) == -(-vocab_size // 32)
    assert ids_of(found, 32 * len(found)) == {token for token in token_ids if token < vocab_size}


def test_bad_words_hold_under_a_grammar_too() -> None:
    tokenizer = byte_level()
    vocab_size = tokenizer.backend.get_vocab_size()
    compiler = GrammarCompiler(tokenizer, vocab_size, {1})

    def start(words: list[str]) -> TokenRules:
        wanted = StructuredOutputsParams(regex="[a-c]{3}")
        rules = compiler.start(SamplingParams(structured_outputs=wanted, bad_words=words), {1})
        assert rules is not None
        return rules

    free = ids_of(start([]).mask, vocab_size)
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    assert {a, b, c} <= free
    rules = start(["a", "bc"])
    assert ids_of(rules.mask, vocab_size) == free - {a}
    rules.accept(b)
    assert {b} == ids_of(rules.mask, vocab_size) & {a, b, c}
    rules.accept(b)
    rules.accept(b)
    assert rules.mask is None
    with pytest.raises(InvalidParamsError, match=r"leave no token|no token of the vocabulary"):
        start([tokenizer.decode([token], skip_special_tokens=False) for token in free])


def ask(llm: LLM, prompt: Any, **changes: Any) -> Any:
    (output,) = llm.generate(prompt, dataclasses.replace(GREEDY, **changes), use_tqdm=False)
    return output


def test_bad_words_do_not_come(llm: LLM) -> None:
    free = ask(llm, "hello").outputs[0]
    word = free.text[3:6]
    without = ask(llm, "hello", bad_words=[word]).outputs[0]
    assert word in free.text and word not in without.text
    assert without.token_ids[:5] == free.token_ids[:5] and without.token_ids[5] != free.token_ids[5]
    assert len(without.token_ids) == 24


def test_only_allowed_ids_come(llm: LLM) -> None:
    output = ask(llm, "hello", allowed_token_ids=[97, 98, 99], temperature=1.0, n=3, seed=1)
    assert all(set(completion.token_ids) <= {97, 98, 99} for completion in output.outputs)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    (last,) = ask(llm, "hello", allowed_token_ids=[97, 98], stop_token_ids=[97], min_tokens=5).outputs
    assert last.token_ids[:5] == [98] * 5


def test_a_grammar_keeps_to_the_allowed_ids(llm: LLM) -> None:
    wanted = StructuredOutputsParams(regex="[a-z]{6}")
    output = ask(llm, "hello", structured_outputs=wanted, allowed_token_ids=list(b"xyz"), temperature=1.0)
    (completion,) = output.outputs
    assert len(completion.text) == 6 and set(completion.text) <= set("xyz")
    assert completion.finish_reason is FinishReason.STOP
    with pytest.raises(InvalidParamsError, match="structured_outputs cannot be met"):
        ask(llm, "hello", structured_outputs=wanted, allowed_token_ids=list(b"XYZ"))


def test_an_output_that_bad_words_lead_into_a_dead_end_ends_alone(llm: LLM) -> None:
    dead = dataclasses.replace(GREEDY, allowed_token_ids=[97, 98], bad_words=["aaaa", "b"])
    good, ended = llm.generate(["hello", "hello"], [GREEDY, dead], use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 24
    assert ended.outputs[0].text == "aaa" and ended.outputs[0].finish_reason is FinishReason.ERROR
    assert "bad_words" in (ended.outputs[0].error or "")


def test_the_last_tokens_of_a_prompt_are_kept(llm: LLM) -> None:
    long = "".join(chr(97 + i % 26) for i in range(5000))
    kept = ask(llm, long, truncate_prompt_tokens=100)
    assert kept.prompt_token_ids == list(long[-100:].encode()) and kept.prompt == long
    assert kept.outputs == ask(llm, long[-100:]).outputs
    most = ask(llm, long, truncate_prompt_tokens=-1)
    assert len(most.prompt_token_ids) == 1024 - 24
    assert ask(llm, "short", truncate_prompt_tokens=100).prompt_token_ids == list(b"short")
    with pytest.raises(InvalidPromptError, match="5000 tokens"):
        ask(llm, long)
    with pytest.raises(InvalidParamsError, match="at most 1023"):
        ask(llm, long, truncate_prompt_tokens=5000)
    conversation = [{"role": "user", "content": long}]
    (answer,) = llm.chat(conversation, dataclasses.replace(GREEDY, truncate_prompt_tokens=200), use_tqdm=False)
    assert len(answer.prompt_token_ids) == 200


def test_boundaries_move_with_the_prompt(llm: LLM) -> None:
    long = "ab" * 400
    whole = dataclasses.replace(llm._engine.inputs.prompt(long), breakpoints=(100, 640, 700))
    prompt = llm._engine.inputs.prompt(whole, SamplingParams(truncate_prompt_tokens=200))
    assert (prompt.num_dropped, prompt.breakpoints) == (600, (40, 100))
    params = SamplingParams(truncate_prompt_tokens=200, cache_breakpoints=[30, 664, 800])
    (request,) = llm._engine.inputs.requests("r", prompt, params, priority=0, number=0, arrival_s=0.0)
    assert request.breakpoints == (40, 64, 100, 200)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids names token id 1000000"),
        ({"bad_words": [""]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "every id that may come"),
        ({"allowed_token_ids": list(b"a"), "bad_words": ["a"]}, "no token can come"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParamsError, match=text):
        ask(llm, "x", **changes)
