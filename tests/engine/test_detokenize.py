from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.engine.detokenize import Detokenizer, StopStrings
from forkpoint.engine.tokenizer import Tokenizer
from tests.engine.tokenizers import byte_level, metaspace

BYTE_LEVEL, METASPACE = byte_level(), metaspace()
KINDS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte_level", "metaspace"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=40)


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    return [*(detokenizer.add(token) for token in output), detokenizer.flush()]


@KINDS
@given(text=st.one_of(TEXTS, st.sampled_from(["👩‍💻🙂 東京", " the dog", "naïve café"])))
@settings(max_examples=80, deadline=None)
def test_pieces_add_up_to_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    output = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(output, skip_special_tokens=True)
    assert "".join(stream(tokenizer, [], output)) == expected


@KINDS
def test_a_leading_space_after_the_prompt_is_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    prompt, output = ids[:2], ids[2:]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(prompt, skip_special_tokens=True) + "".join(stream(tokenizer, prompt, output)) == whole


@given(data=st.lists(st.integers(0, len(BYTE_LEVEL.hf) - 1), max_size=40), split=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_any_ids_stream_to_what_they_decode_to(data: list[int], split: int) -> None:
    prompt, output = data[:split], data[split:]
    before = BYTE_LEVEL.decode(prompt, skip_special_tokens=True)
    whole = BYTE_LEVEL.decode(data, skip_special_tokens=True)
    if before.endswith("\ufffd"):
        return  # the prompt ends inside a character; there is no text of the output alone to compare with
    assert before + "".join(stream(BYTE_LEVEL, prompt, output)) == whole


def test_a_character_of_several_tokens_comes_in_one_piece() -> None:
    output = BYTE_LEVEL.encode("😀x", add_special_tokens=False)
    pieces = stream(BYTE_LEVEL, [], output)
    assert len(output) > 2
    assert [piece for piece in pieces if piece] == ["😀", "x"]


def test_an_unfinished_character_is_told_at_the_end() -> None:
    output = BYTE_LEVEL.encode("a😀", add_special_tokens=False)[:-1]
    pieces = stream(BYTE_LEVEL, [], output)
    assert pieces[0] == "a" and pieces[-1].startswith("\ufffd") and "".join(pieces[1:-1]) == ""


def test_special_tokens_are_shown_on_demand() -> None:
    ids = BYTE_LEVEL.encode("fox<|im_end|>", add_special_tokens=False)
    shown = Detokenizer(BYTE_LEVEL, [], skip_special_tokens=False)
    assert "".join([*(shown.add(token) for token in ids), shown.flush()]) == "fox<|im_end|>"
    assert "".join(stream(BYTE_LEVEL, [], ids)) == "fox"


def feed(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        text += piece
        hit = stops.find(text, len(piece))
        if hit is not None:
            return text[: hit[1]], hit[0]
    return text, None


@pytest.mark.parametrize(
    ("pieces", "include", "expected"),
    [
        (["one two", " three"], False, ("one ", "two")),
        (["one t", "w", "o three"], False, ("one ", "two")),
        (["one t", "w", "o three"], True, ("one two", "two")),
        (["three four"], False, ("three four", None)),
        (["t", "t", "wo"], False, ("t", "two")),
    ],
)
def test_stop_strings_span_tokens(pieces: list[str], include: bool, expected: tuple[str, str | None]) -> None:
    assert feed(StopStrings(["two", "zebra"], include=include), pieces) == expected


def test_the_earliest_stop_string_wins() -> None:
    assert feed(StopStrings(["fox", "quick"], include=False), ["the quick brown fox"]) == ("the ", "quick")


@given(
    text=st.text("ab", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    stop=st.text("ab", min_size=1, max_size=4),
)
def test_a_stop_string_is_found_however_the_text_is_cut(text: str, cuts: list[int], stop: str) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    cut, found = feed(StopStrings([stop], include=False), pieces)
    assert (cut, found) == ((text[: text.find(stop)], stop) if stop in text else (text, None))


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    for text, held in (("abc", 0), ("abc#", 1), ("abc##", 2), ("E", 1), ("EN", 2), ("xE ", 0)):
        assert StopStrings(["###", "END"], include=False).num_undecided(text) == held


def undecided(stops: list[str], text: str) -> int:
    """Return the length of the longest end of the text that begins a stop string and is shorter than the longest
    one."""
    longest = max(map(len, stops))
    sizes = [n for n in range(1, min(longest, len(text) + 1)) if any(stop.startswith(text[-n:]) for stop in stops)]
    return max(sizes, default=0)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
)
@settings(deadline=None)
def test_what_is_held_back_is_what_may_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    found, text = StopStrings(stops, include=False), ""
    for piece in pieces:
        text += piece
        assert found.num_undecided(text) == undecided(stops, text)


def test_many_long_stop_strings_cost_what_one_short_one_costs() -> None:
    def seconds(stops: list[str]) -> float:
        found = StopStrings(stops, include=False)
        started = time.process_time()
        for length in range(0, 20_000, 4):
            found.num_undecided(text[:length])
        return time.process_time() - started

    text = "a" * 20_000
    many = ["a" * 63 + chr(ord("b") + i) for i in range(64)]
    assert min(seconds(many) for _ in range(3)) < 20 * min(seconds(["ab"]) for _ in range(3))
