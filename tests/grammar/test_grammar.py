"""Masks of compiled grammars, token by token, against what the texts themselves say."""

from __future__ import annotations

import json
import random
import re
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import InvalidParamsError, StructuredOutputError
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.masks import TokenRules
from forkpoint.params import OUTPUT_WORDS, SamplingParams, StructuredOutputsParams
from tests.engine.tokenizers import byte_level, metaspace

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}


class Setup:
    def __init__(self, tokenizer: Tokenizer, padding: int = 7, compact: bool = False) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = int(tokenizer.backend.get_vocab_size()) + padding
        self.eos = tokenizer.eos_token_id or 0
        self.compiler = GrammarCompiler(tokenizer, self.vocab_size, {self.eos}, compact=compact)

    def start(self, stops: Any = None, **options: Any) -> TokenRules:
        own = {key: options.pop(key) for key in ("min_tokens", "max_tokens") if key in options}
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**options), **own)
        grammar = self.compiler.start(params, {self.eos} if stops is None else stops)
        assert grammar is not None
        return grammar

    def allowed(self, grammar: TokenRules) -> list[int]:
        assert grammar.mask is not None
        bits = np.unpackbits(grammar.mask.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def spell(self, text: str) -> list[int]:
        """Byte by byte."""
        names = self.tokenizer.hf.get_vocab()
        ids = [names.get(f"<0x{byte:02X}>") for byte in text.encode()]
        known = [token for token in ids if token is not None]
        return known or [t for char in text for t in self.tokenizer.encode(char, add_special_tokens=False)]

    def follow(self, grammar: TokenRules, text: str) -> None:
        for token in self.spell(text):
            assert token in self.allowed(grammar), (text, token)
            grammar.accept(token)

    def walk(self, grammar: TokenRules, seed: int, limit: int = 400) -> str | None:
        """The text of random allowed tokens up to the end; None if the limit comes first."""
        rng, ids = random.Random(seed), []
        for _ in range(limit):
            if grammar.mask is None:
                return self.text(ids)
            token = rng.choice(self.allowed(grammar))
            if token == self.eos:
                return self.text(ids)
            ids.append(token)
            grammar.accept(token)
        return None


BYTES = Setup(byte_level())


@pytest.fixture(scope="module", params=[byte_level, metaspace], ids=["byte level", "metaspace"])
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(request.param())


@pytest.mark.parametrize("pattern", [r"ab?c{2,3}", r"(yes|no)", r"[a-f]{3}-\d+", r"né+", r"(a|b)*c"])
def test_walks_match_the_pattern(setup: Setup, pattern: str) -> None:
    texts = [setup.walk(setup.start(regex=pattern), seed) for seed in range(12)]
    found = [text for text in texts if text is not None]
    assert found
    assert all(re.fullmatch(pattern, text) for text in found), found


PATCH = """
# the form of patches of a coding agent
start: "*** Begin" LF hunk+ "*** End" LF?
hunk: "*** Add: " NAME LF line+
NAME: /[a-z]{1,3}/
line: "+" /[ab{}"@%]{0,4}/ LF
%import common.LF
"""


def test_walks_match_a_grammar_in_lark(setup: Setup) -> None:
    texts = [setup.walk(setup.start(grammar=PATCH), seed) for seed in range(12)]
    found = [text for text in texts if text is not None]
    patch = re.compile(r'\*\*\* Begin\n(\*\*\* Add: [a-z]{1,3}\n(\+[ab{}"@%]{0,4}\n)+)+\*\*\* End\n?')
    assert found and all(map(patch.fullmatch, found)), found


def test_walks_under_a_schema_are_its_instances(setup: Setup) -> None:
    found = [setup.walk(setup.start(json=SCHEMA), seed) for seed in range(8)]
    values = [json.loads(text) for text in found if text is not None]
    assert len(values) > 3
    for value in values:
        assert set(value) <= {"name", "age", "tags"}
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 120
        assert set(value.get("tags", [])) <= {"a", "b"}
        assert len(value.get("tags", [])) <= 3


@pytest.mark.parametrize("wanted", [{"json": SCHEMA}, {"json_object": True}], ids=["json", "json_object"])
def test_a_model_that_prefers_white_space_ends_all_the_same(setup: Setup, wanted: dict[str, Any]) -> None:
    grammar, ids = setup.start(**wanted), []
    while grammar.mask is not None and len(ids) < 1000:
        allowed = [token for token in setup.allowed(grammar) if token != setup.eos]
        closing = sorted(allowed, key=lambda token: "}" not in setup.text([token]))  # what ends it soonest
        token = next((token for token in allowed if not setup.text([token]).strip()), closing[0])
        ids.append(token)
        grammar.accept(token)
    assert grammar.mask is None
    assert len(re.findall(r"\s", setup.text(ids))) < 200 and isinstance(json.loads(setup.text(ids)), dict)


def test_pretty_printed_json_is_allowed(setup: Setup) -> None:
    nested: Any = 1
    for _ in range(7):
        nested = {"a": nested}
    setup.follow(setup.start(json_object=True), json.dumps(nested, indent=4))


@pytest.mark.parametrize("by_request", [True, False])
@pytest.mark.parametrize("wanted", [{"json": SCHEMA}, {"json_object": True}], ids=["json", "json_object"])
def test_compact_json_is_as_dumps_writes_it(wanted: dict[str, Any], by_request: bool) -> None:
    setup = Setup(byte_level(), compact=not by_request)
    options = {**wanted, "disable_any_whitespace": True} if by_request else wanted
    setup.follow(setup.start(**options), '{"name": "a b", "age": 3, "tags": ["a", "b"]}')
    for text in ('{"name":', '{ "', '{"name": "x" ,', '{"name": "x",  ', "{\n", '{"name":  '):
        with pytest.raises(AssertionError):
            setup.follow(setup.start(**options), text + '"')


def test_json_object_is_any_object(setup: Setup) -> None:
    grammar = setup.start(json_object=True)
    setup.follow(grammar, '{"a": [1, {"b": null}], "c": "x"')
    assert grammar.mask is not None
    setup.follow(grammar, "}")
    assert grammar.mask is None
    with pytest.raises(AssertionError):
        setup.follow(setup.start(json_object=True), "[")


@pytest.mark.parametrize(
    "texts",
    [
        ["yes", "no"],
        ['"q"', "back\\slash", "tab\there", "né"],
        ["a", "ab", "", "abc"],
        ['"a"', 'say "bad"', "x\nfoo", "C:\\data", "\x00face", "\x7f0\x1fe"],
    ],
)
def test_choices_are_taken_literally(setup: Setup, texts: list[str]) -> None:
    found = {setup.walk(setup.start(choice=texts), seed) for seed in range(60)}
    assert found == set(texts)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n\t\x00\x1f\x7f0aF😀'), max_size=12)


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4).filter(any), st.lists(TEXTS, max_size=4), st.data())
def test_choices_are_all_that_is_accepted(texts: list[str], others: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(texts))
    at = data.draw(st.integers(0, len(chosen)))
    mutated = [chosen[:at], chosen + "a", chosen[:at] + "\\" + chosen[at:], chosen[:at] + chosen[at + 1 :]]
    for text in [*texts, *others, *mutated]:
        assert takes(BYTES, text, choice=texts) == (text in texts), (texts, text)


def test_an_accepted_end_makes_the_output_whole() -> None:
    setup = Setup(byte_level())
    grammar = setup.start(stops=range(400), regex="[0-9]+", min_tokens=6)
    setup.follow(grammar, "1")
    assert setup.eos in setup.allowed(grammar), "all that may come ends the request, so min_tokens give way"
    grammar.accept(setup.eos)
    assert grammar.mask is None
    with pytest.raises(StructuredOutputError, match="is complete"):
        grammar.accept(setup.eos)


def test_what_takes_the_matcher_too_much_ends_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.grammar.source.limits", lambda: LLParserLimits(max_lexer_states=200))
    setup = Setup(byte_level())
    for _ in range(2):  # what one output used up is not missing for the next
        grammar = setup.start(regex="(.|\n)*[a-m](.|\n){12}")
        with pytest.raises(StructuredOutputError, match=r"too many states: 200.*; make structured_outputs simpler"):
            for seed in range(50):
                grammar.accept(random.Random(seed).choice(setup.allowed(grammar)))
    assert setup.start(regex="b+") is not None


def test_an_end_comes_only_after_a_whole_output() -> None:
    setup = Setup(byte_level())
    grammar = setup.start(regex="ab?")
    assert setup.eos not in setup.allowed(grammar)
    setup.follow(grammar, "a")
    assert setup.allowed(grammar) == sorted([setup.eos, *setup.tokenizer.encode("b", add_special_tokens=False)])
    setup.follow(grammar, "b")
    assert grammar.mask is None


def test_without_an_end_of_sequence_a_grammar_goes_on_while_it_can() -> None:
    setup = Setup(byte_level())
    grammar = setup.start(stops=(), regex="ab?")
    setup.follow(grammar, "a")
    assert setup.text(setup.allowed(grammar)) == "b"
    setup.follow(grammar, "b")
    assert grammar.mask is None


def test_stop_tokens_wait_for_min_tokens_unless_nothing_else_can_come() -> None:
    setup = Setup(byte_level())
    (a,) = setup.tokenizer.encode("a", add_special_tokens=False)
    (b,) = setup.tokenizer.encode("b", add_special_tokens=False)
    grammar = setup.start(stops={setup.eos, b}, regex="[ab]{1,3}", min_tokens=2)
    assert setup.allowed(grammar) == [a]
    grammar.accept(a)
    assert setup.allowed(grammar) == [a], "the end of the sequence waits too"
    grammar.accept(a)
    assert setup.allowed(grammar) == sorted([setup.eos, a, b])
    grammar = setup.start(stops={setup.eos, b}, regex="bb", min_tokens=5)
    assert setup.allowed(grammar) == [b]


def test_special_tokens_and_padding_are_never_text(setup: Setup) -> None:
    grammar = setup.start(regex=r"[\s\S]*<\|im_start\|>")
    allowed = set(setup.allowed(grammar))
    assert not allowed & set(setup.tokenizer.hf.all_special_ids)
    assert not allowed & set(range(setup.vocab_size - 7, setup.vocab_size))
    assert len(allowed) > 200


def tag(content: dict[str, Any], begin: str = "<call>", end: str = "</call>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


SCHEMA_X = {"type": "json_schema", "json_schema": {"enum": ["x"]}}
CALLS = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag(SCHEMA_X), tag(SCHEMA_X, "<call>2:")]}
OLDER = {"structures": [{"begin": "<call>", "schema": {"enum": ["x"]}, "end": "</call>"}], "triggers": ["<call>"]}
AFTER_TEXT = {"type": "sequence", "elements": [{"type": "const_string", "value": "so "}, tag({"type": "any_text"})]}
GBNF = {"type": "grammar", "grammar": 'root ::= [0-9]+ ("," root)?'}


@pytest.mark.parametrize("wanted", [{"type": "structural_tag", "format": CALLS}, OLDER], ids=["newer", "older"])
def test_structural_tags_constrain_parts_of_free_text(setup: Setup, wanted: dict[str, Any]) -> None:
    grammar = setup.start(structural_tag=wanted)
    setup.follow(grammar, "free text ")
    assert setup.eos in setup.allowed(grammar)
    setup.follow(grammar, '<call>"x"')
    assert setup.eos not in setup.allowed(grammar)
    setup.follow(grammar, "</call>")
    assert setup.eos in setup.allowed(grammar)
    setup.follow(grammar, "more </call> <call>")
    with pytest.raises(AssertionError):
        setup.follow(grammar, "free")


@pytest.mark.parametrize(
    ("wanted", "taken", "refused"),
    [
        (CALLS | {"at_least_one": True, "stop_after_first": True}, ['a<call>2:"x"</call>'], ["a", '<call>"x"</call>a']),
        (AFTER_TEXT, ["so <call>any < text</call>"], ["so <call>", "<call></call>"]),
        ({"type": "or", "elements": [GBNF, {"type": "regex", "pattern": "a/?"}]}, ["12,3", "a/", "a"], ["12,", "aa"]),
        (
            {"type": "tags_with_separator", "tags": [tag(GBNF, "(", ")")], "separator": "; ", "at_least_one": True},
            ["(1)", "(1); (2,3)"],
            ["", "(1)(2)", "(1); "],
        ),
        ({"type": "optional", "content": {"type": "plus", "content": SCHEMA_X}}, ['"x"', '"x""x"'], ['"', '"y"']),
    ],
)
def test_formats_of_structural_tags(wanted: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not takes(BYTES, text, structural_tag={"format": wanted})] == []
    assert [text for text in refused if takes(BYTES, text, structural_tag={"format": wanted})] == []


def test_tags_name_special_tokens() -> None:
    grammar = BYTES.start(structural_tag={"format": tag({"type": "any_text"}, "<|im_start|>", "<|im_start|>")})
    start = BYTES.tokenizer.hf.convert_tokens_to_ids("<|im_start|>")
    assert BYTES.allowed(grammar) == [start]
    grammar.accept(start)
    BYTES.follow(grammar, "text")
    assert BYTES.eos not in BYTES.allowed(grammar)
    grammar.accept(start)
    assert grammar.mask is None


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        ('root ::= [a-z]+ "a"', ["ba", "aaa"], ["b", "a"]),
        (
            '# "x\nroot ::= e # y\ne ::= t (("+" | "-") t)*\n  | "no"\nt ::= [0-9]+ | "(" e ")"',
            ["1+(2-34)", "no"],
            ["1+"],
        ),
        ('# where it starts ::=\nroot ::= "a" | # or x ::=\n "b"', ["a", "b"], ["c"]),
        ('root ::= ws "a" ws b\nws ::= [ \\t]*\nb ::= "x" b | "y"', ["a y", " \ta xxy"], ["a x"]),
        ('root ::= "\\u0041\\x42\\U0001F600\\"\\n" [^"\\n/]{2,3} B\nB ::= "/" | b\nb ::= "c"', ['AB😀"\nxy/'], ["AB"]),
        ('root ::= "a" root | "b" | "\\[\\]"', ["aab", "a[]"], ["aa"]),
        ('root ::= "a"* x?\nx ::= "b" x | "c"', ["aabbc", "", "aa"], ["ab"]),
    ],
)
def test_grammars_are_those_of_gbnf(setup: Setup, text: str, taken: list[str], refused: list[str]) -> None:
    assert [one for one in taken if not takes(setup, one, grammar=text)] == []
    assert [one for one in refused if takes(setup, one, grammar=text)] == []


def takes(setup: Setup, text: str, **wanted: Any) -> bool:
    grammar = setup.start(**wanted)
    for token in setup.spell(text):
        if grammar.mask is None or token not in setup.allowed(grammar):
            return False
        grammar.accept(token)
    return grammar.mask is None or setup.eos in setup.allowed(grammar)


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "["},
        {"regex": "(a"},
        {"json": "{"},
        {"json": "[" * 100_000},
        {"json": "3"},
        {"json": {"type": "strin"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"allOf": 3}},
        {"json": {"properties": {"a": {"items": {"uniqueItems": True, "type": "array"}}}}},
        {"grammar": "root ::= x"},
        {"grammar": 'start ::= "a"'},
        {"structural_tag": "{}"},
        {"structural_tag": {"format": {"type": "dispatch"}}},
        {"structural_tag": {"format": {"type": "tag"}}},
        {"structural_tag": {"format": {"type": "grammar", "grammar": "root ::= x"}}},
        {"regex": "a" * 200_000},
    ],
)
def test_what_cannot_be_compiled_is_refused(wanted: dict[str, Any]) -> None:
    setup = Setup(byte_level())
    with pytest.raises(InvalidParamsError, match=f"^{OUTPUT_WORDS[next(iter(wanted))]} ") as error:
        setup.start(**wanted)
    assert "<state>" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_grammar_of_the_empty_text_is_refused() -> None:
    setup = Setup(byte_level())
    with pytest.raises(InvalidParamsError, match="only the empty text"):
        setup.start(regex="()")
    assert setup.eos in setup.allowed(setup.start(regex="a?"))


def test_names_of_properties_are_no_keywords() -> None:
    setup = Setup(byte_level())
    setup.start(json={"type": "object", "properties": {"not": {"type": "null"}, "if": {"enum": ["uniqueItems"]}}})
    setup.start(json={"type": "array", "uniqueItems": False, "items": {"allOf": [{"type": "null"}]}})


def test_what_is_prepared_reads_no_vocabulary_later(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(byte_level())
    setup.compiler.prepare()
    monkeypatch.setattr("forkpoint.grammar.compiler._read", None)
    assert setup.start(regex="a+").mask is not None
    GrammarCompiler(None, 10, {1}).prepare()


def test_a_tokenizer_that_the_library_does_not_know_refuses_requests_alone() -> None:
    """Its panic is no Exception; a token of some thousand bytes leads to one."""
    backend = Backend.from_str(byte_level().backend.to_str())
    backend.add_tokens(["x" * 5000])
    setup = Setup(Tokenizer.wrap(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")))
    setup.compiler.prepare()
    with pytest.raises(InvalidParamsError, match="are not possible with this tokenizer"):
        setup.start(regex="a+")


def test_a_grammar_needs_a_tokenizer() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidParamsError, match="tokenizer"):
        GrammarCompiler(None, 10, {1}).start(params, {1})
    assert GrammarCompiler(None, 10, {1}).start(SamplingParams(), {1}) is None


def test_tokens_that_may_not_come_and_dead_ends_are_errors() -> None:
    setup = Setup(byte_level())
    grammar = setup.start(regex="ab")
    with pytest.raises(StructuredOutputError, match="does not go on"):
        grammar.accept(setup.tokenizer.encode("b", add_special_tokens=False)[0])
    only = {setup.spell(char)[0] for char in "ab"}
    with pytest.raises(StructuredOutputError, match="after 0 tokens no token"):
        TokenRules(
            setup.vocab_size,
            allowed=only,
            matcher=setup.compiler._matcher(
                setup.compiler._description(SamplingParams(), StructuredOutputsParams(regex="c"), {setup.eos})
            ),
            num_ids=setup.vocab_size,
            ends={setup.eos},
        )


@pytest.mark.parametrize("error", [RuntimeError("the matcher has terminated"), KeyError(3)])
@pytest.mark.parametrize("method", ["consume_token", "unsafe_compute_mask_ptr"])
def test_what_the_matcher_raises_is_the_outputs_error(method: str, error: Exception) -> None:
    setup = Setup(byte_level())
    grammar = setup.start(regex="ab")
    grammar._matcher = Mock(**{f"{method}.side_effect": error})
    with pytest.raises(StructuredOutputError, match=f"could not be followed: {type(error).__name__}"):
        setup.follow(grammar, "a")


def test_a_token_that_takes_too_long_ends_the_request() -> None:
    setup = Setup(byte_level())
    grammar = setup.start(regex="a+")
    times = iter([0.0, 5.0])
    grammar._clock = lambda: next(times)
    with pytest.raises(StructuredOutputError, match=r"5\.0 s"):
        setup.follow(grammar, "a")
