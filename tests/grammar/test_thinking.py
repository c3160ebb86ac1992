"""Grammars behind thinking: any text up to `</think>`, what was asked for after it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.masks import TokenRules
from forkpoint.params import SamplingParams, StructuredOutputsParams, Thinking
from tests.engine.tokenizers import SPECIALS, byte_level, metaspace

TAG: dict[str, Any] = {"type": "tag", "begin": "<|im_start|>", "end": "<|im_end|>"}
TAG["content"] = {"type": "regex", "pattern": "[0-9]{2}"}
CONTENTS: dict[str, tuple[dict[str, Any], str, str]] = {  # what is asked for, a text that is it, and one that is not
    "json": (
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        '{"a": 1}',
        "[",
    ),
    "choice": ({"choice": ["yes", "no"]}, "no", "maybe"),
    "regex": ({"regex": "[a-c]{3}"}, "abc", "d"),
    "grammar": ({"grammar": 'root ::= "x" root | "y"'}, "xxy", "z"),
    "structural_tag": ({"structural_tag": {"type": "structural_tag", "format": TAG}}, "<|im_start|>42<|im_end|>", "4"),
}


def plain() -> Tokenizer:
    return byte_level()


def with_tags() -> Tokenizer:
    """Tags as tokens that are shown, as Qwen3's."""
    tokenizer = byte_level()
    tokenizer.hf.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in ("<think>", "</think>")])
    return Tokenizer.wrap(tokenizer.hf)


def with_special_tags() -> Tokenizer:
    tokenizer = metaspace()
    tokenizer.hf.add_special_tokens({"additional_special_tokens": [*SPECIALS, "<think>", "</think>"]})
    return Tokenizer.wrap(tokenizer.hf)


TOKENIZERS = {"plain": plain(), "with tags": with_tags(), "with special tags": with_special_tags()}


def start(tokenizer: Tokenizer, thinking: Thinking, wanted: dict[str, Any], *openings: str) -> TokenRules:
    end = tokenizer.backend.token_to_id("</s>")
    compiler = GrammarCompiler(tokenizer, tokenizer.backend.get_vocab_size(), {end})
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(**wanted), thinking=thinking, call_openings=openings
    )
    rules = compiler.start(params, {end})
    assert rules is not None
    return rules


def is_allowed(rules: TokenRules, token: int) -> bool:
    return rules.mask is not None and bool(int(rules.mask[token // 32]) >> token % 32 & 1)


def spell(tokenizer: Tokenizer, text: str, *, whole_tags: bool) -> list[int]:
    """Spell `text` byte by byte, but special tokens, and thinking tags if `whole_tags`."""
    tags = [*SPECIALS, "<think>", "</think>"] if whole_tags else SPECIALS
    known = {tag: tokenizer.backend.token_to_id(tag) for tag in tags}
    ids: list[int] = []
    while text:
        part = next((tag for tag in known if known[tag] is not None and text.startswith(tag)), text[0])
        if part in known:
            ids.append(known[part])
        else:
            own = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in part.encode()]
            ids += own if None not in own else tokenizer.encode(part, add_special_tokens=False)
        text = text[len(part) :]
    return ids


def follow(tokenizer: Tokenizer, rules: TokenRules, text: str, *, whole_tags: bool) -> str:
    """Follow `text` as far as it is allowed; returns the rest, empty where all of it is and it may end here."""
    ids = spell(tokenizer, text, whole_tags=whole_tags)
    for number, token in enumerate(ids):
        if not is_allowed(rules, token):
            return tokenizer.decode(ids[number:], skip_special_tokens=False)
        copied = rules.copy()  # as drafts are looked ahead with
        copied.accept(token)
        rules.accept(token)
        assert (rules.mask is None) == (copied.mask is None)
    is_whole = rules.mask is None or is_allowed(rules, tokenizer.backend.token_to_id("</s>"))
    return "" if is_whole else "not whole"


@pytest.mark.parametrize("whole_tags", [False, True])
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_content_is_constrained_behind_thinking(name: str, kind: str, whole_tags: bool) -> None:
    tokenizer, (wanted, good, bad) = TOKENIZERS[name], CONTENTS[kind]
    thought = 'why {"b": [1]} not\n\nmaybe <thi </thi'

    def rest(thinking: Thinking, text: str) -> str:
        return follow(tokenizer, start(tokenizer, thinking, wanted), text, whole_tags=whole_tags)

    for breaks in ("", "\n", "\n\n"):
        assert rest("open", f"{thought}</think>{breaks}{good}") == ""
        assert rest("optional", f"<think>{thought}</think>{breaks}{good}") == ""
        assert rest("open", f"{thought}</think>{breaks}{bad}") != ""
    assert rest("optional", good) == ""
    assert rest("none", good) == ""
    assert rest("optional", bad) != ""
    assert rest("none", f"<think>{thought}</think>{good}") != ""
    assert rest("open", f"{thought}</think>\n\n\n\n{good}") != ""
    assert rest("open", thought) == "not whole"  # nothing ends the output within its thinking
    assert rest("optional", f"<think>{thought}") == "not whole"


@pytest.mark.parametrize("opening", ["<call>", "<|im_start|>"])
@pytest.mark.parametrize("kind", ["json", "choice", "regex", "grammar"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_call_need_not_match(name: str, kind: str, opening: str) -> None:
    tokenizer, (wanted, good, bad) = TOKENIZERS[name], CONTENTS[kind]

    def rest(thinking: Thinking, text: str) -> str:
        return follow(tokenizer, start(tokenizer, thinking, wanted, opening), text, whole_tags=True)

    call = f'{opening}{{"a": "</call> <|im_end|>"}}<|im_end|>'
    for thinking, before in (("none", ""), ("open", "why</think>\n\n"), ("optional", "<think>why</think>")):
        assert rest(thinking, before + call) == ""  # type: ignore[arg-type]
        assert rest(thinking, before + good) == ""  # type: ignore[arg-type]
        assert rest(thinking, before + bad) != ""  # type: ignore[arg-type]
        assert rest(thinking, before + good + call) != ""  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_outputs_match_behind_random_thinking(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(3)
    closing = spell(tokenizer, "</think>", whole_tags=True)
    for _ in range(5):
        rules = start(tokenizer, "open", CONTENTS["json"][0])
        thought = rng.choices([t for t in range(300) if is_allowed(rules, t)], k=rng.randrange(9))
        for token in [*thought, *closing]:
            if is_allowed(rules, token):  # a part of a character must be followed by its rest
                rules.accept(token)
        ids, end = [], tokenizer.backend.token_to_id("</s>")
        while rules.mask is not None and len(ids) < 60:
            allowed = [token for token in range(tokenizer.backend.get_vocab_size()) if is_allowed(rules, token)]
            if end in allowed:
                break
            ids.append(rng.choice(allowed))
            rules.accept(ids[-1])
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if len(ids) < 60:
            assert isinstance(json.loads(text.rpartition("</think>")[2])["a"], int), text
