"""The thinking of an answer ends after a number of tokens."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import InvalidParamsError
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.masks import TokenRules
from forkpoint.params import SamplingParams, StructuredOutputsParams, Thinking
from forkpoint.sched.request import MOST_IN_FLIGHT
from tests.grammar.test_thinking import TOKENIZERS, spell

END = "\n</think>\n\n"


def start(tokenizer: Tokenizer, budget: int | None, thinking: Thinking = "open", **others: Any) -> TokenRules:
    end = tokenizer.backend.token_to_id("</s>")
    compiler = GrammarCompiler(tokenizer, tokenizer.backend.get_vocab_size(), {end})
    params = SamplingParams(thinking=thinking, thinking_token_budget=budget, **others)
    rules = compiler.start(params, {end})
    assert rules is not None
    return rules


def allowed(rules: TokenRules) -> list[int]:
    assert rules.mask is not None
    return np.flatnonzero(np.unpackbits(rules.mask.view(np.uint8), bitorder="little")).tolist()


def forced_text(tokenizer: Tokenizer, rules: TokenRules) -> str:
    """Follow forced ids to the last one, and return their text."""
    data = b""
    while len(ids := allowed(rules)) == 1:
        copied = rules.copy()  # as drafts are looked ahead with
        copied.accept(ids[0])
        rules.accept(ids[0])
        data += tokenizer.token_bytes(ids[0])
        assert copied.mask is not None and rules.mask is not None and (copied.mask == rules.mask).all()
    return data.decode()


def accept(tokenizer: Tokenizer, rules: TokenRules, text: str, *, whole_tags: bool = False) -> int:
    """Follow `text` and return the number of its tokens."""
    ids = spell(tokenizer, text, whole_tags=whole_tags)
    for token in ids:
        assert token in allowed(rules)
        rules.accept(token)
    return len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("whole_tags", [False, True])
def test_the_end_is_forced_after_so_many_tokens(name: str, whole_tags: bool) -> None:
    tokenizer = TOKENIZERS[name]
    for budget in (0, 1, 7):
        rules = start(tokenizer, budget)
        accept(tokenizer, rules, "x" * budget)
        assert forced_text(tokenizer, rules) == (END if budget else END[1:])
        assert len(allowed(rules)) > 300 and rules.is_free
        optional = start(tokenizer, budget, "optional")
        accept(tokenizer, optional, "\n<think>" + "x" * budget, whole_tags=whole_tags)
        assert forced_text(tokenizer, optional) == (END if budget else END[1:])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("whole_tags", [False, True])
def test_nothing_is_forced_where_the_model_ends_its_thinking(name: str, whole_tags: bool) -> None:
    tokenizer = TOKENIZERS[name]
    for thinking, text in (("open", "why</think>"), ("optional", "<think>why</think>"), ("optional", "no <think>")):
        rules = start(tokenizer, 11, thinking)  # type: ignore[arg-type]
        accept(tokenizer, rules, text, whole_tags=whole_tags)
        for _ in range(20):
            assert len(allowed(rules)) > 300
            accept(tokenizer, rules, "y")


def test_a_tag_or_character_that_is_begun_is_completed() -> None:
    tokenizer = TOKENIZERS["plain"]
    rules = start(tokenizer, 8)
    accept(tokenizer, rules, "a </thin")
    assert forced_text(tokenizer, rules) == "k>\n\n"
    rules = start(tokenizer, 2)
    euro = spell(tokenizer, "\u20ac", whole_tags=False)
    assert len(euro) == 3
    for token in euro:
        assert len(allowed(rules)) > 300
        rules.accept(token)
    assert forced_text(tokenizer, rules) == END


@pytest.mark.parametrize("data", [b"\xfb", b"\xc0", b"\xe0\x80", b"\xf5\x80", b"\x80"])
def test_bytes_that_begin_no_character_are_not_completed(data: bytes) -> None:
    tokenizer = TOKENIZERS["plain"]
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.backend.get_vocab_size())}
    rules = start(tokenizer, 1 + len(data))
    accept(tokenizer, rules, "x")
    for byte in data:
        assert len(allowed(rules)) > 300
        rules.accept(of_byte[bytes([byte])])
    assert forced_text(tokenizer, rules) == END


def test_the_end_has_the_text_of_the_template() -> None:
    tokenizer = TOKENIZERS["with tags"]
    rules = start(tokenizer, 1, thinking_end=" Enough.</think>")
    accept(tokenizer, rules, "x")
    assert forced_text(tokenizer, rules) == " Enough.</think>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_asked_for_follows_the_forced_end(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(5)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    for budget in (0, 3):
        rules, ids = start(tokenizer, budget, structured_outputs=wanted, bad_words=["</think>"]), list[int]()
        while rules.mask is not None and len(ids) < 80:
            ids.append(rng.choice(allowed(rules)))
            rules.accept(ids[-1])
        thought, end, content = b"".join(map(tokenizer.token_bytes, ids)).partition(b"</think>")
        assert end and json.loads(content.removesuffix(b"</s>"))["a"] in (1, 2), thought


def test_a_call_is_not_torn() -> None:
    tokenizer = TOKENIZERS["plain"]
    tokenizer.hf.add_tokens(["<tool_call>"])
    tokenizer = Tokenizer.wrap(tokenizer.hf)
    rules = start(tokenizer, 3)
    rules.accept(tokenizer.backend.token_to_id("<tool_call>"))
    for _ in range(9):
        assert len(allowed(rules)) > 300
        accept(tokenizer, rules, "x")


def test_rules_are_free_while_the_end_is_far() -> None:
    tokenizer, num = TOKENIZERS["plain"], MOST_IN_FLIGHT + 5
    rules = start(tokenizer, num)
    free = []
    for _ in range(num):
        free.append(rules.is_free)
        accept(tokenizer, rules, "x")
    assert free == [True] * 5 + [False] * MOST_IN_FLIGHT
    forced_text(tokenizer, rules)
    assert rules.is_free
    assert not start(tokenizer, num, bad_words=["zzz"]).is_free


@pytest.mark.parametrize("budget", [None, -1])
def test_without_a_budget_there_are_no_rules(budget: int | None) -> None:
    params = SamplingParams(thinking="open", thinking_token_budget=budget)
    assert not params.restricts_tokens
    assert not SamplingParams(thinking="none", thinking_token_budget=5).restricts_tokens
    with pytest.raises(InvalidParamsError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-2)
    with pytest.raises(InvalidParamsError, match="thinking_end"):
        SamplingParams(thinking_end="enough")
