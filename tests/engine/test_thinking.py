"""The content begins after the thinking, however the text is cut, and stop strings count from there."""

from __future__ import annotations

import re
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.engine.detokenize import StopStrings
from forkpoint.engine.outputs import Completion
from forkpoint.engine.thinking import ContentFinder
from forkpoint.params import FinishReason, SamplingParams, Thinking
from forkpoint.sched.request import Request, RequestUpdate
from tests.engine.tokenizers import byte_level

TOKENIZER = byte_level()
PIECES = st.lists(st.sampled_from(["<think>", "</think>", "</", "think>", "<", "\n", " ", "a", "b", "ab"]), max_size=9)


def content_start(text: str, thinking: Thinking) -> int | None:
    """The rule as one pattern on the whole text."""
    opening = {"none": "", "open": "(?s:.*?)</think>\n*", "optional": r"\s*<think>(?s:.*?)</think>" + "\n*"}[thinking]
    found = re.match(opening, text)
    if found is None:
        return 0 if thinking == "optional" and not text.lstrip().startswith("<think>") else None
    if thinking == "none" or found.end() < len(text):
        return found.end()
    return None


@given(PIECES, st.sampled_from(["none", "optional", "open"]), st.lists(st.integers(0, 40), max_size=6))
def test_the_content_begins_at_the_same_place_however_the_text_is_cut(
    pieces: list[str], thinking: Thinking, cuts: list[int]
) -> None:
    text = "".join(pieces)
    finder = ContentFinder(thinking)
    found = None
    for size in sorted({*(min(cut, len(text)) for cut in cuts), len(text)}):
        found = finder.find(text[:size], is_whole=size == len(text))
    assert found == content_start(text, thinking)


def told(text: str, cuts: list[int], **params: Any) -> tuple[str, str, Completion]:
    """What a completion tells of `text` in all, and before the last token came."""
    chosen = SamplingParams(max_tokens=1000, **params)
    request = Request("r", np.asarray([1], np.int32), chosen, 1000, 0)
    stops = StopStrings(chosen.stop, include=chosen.include_stop_str_in_output)
    completion = Completion(request, 0, TOKENIZER, copy(stops))
    edges = [0, *sorted(cuts), len(text)]
    ids = [i for a, b in pairwise(edges) for i in TOKENIZER.encode(text[a:b], add_special_tokens=False)]
    before, said = "", ""
    for number, token in enumerate(ids):
        before = said
        reason = FinishReason.LENGTH if number == len(ids) - 1 else None
        completion.apply(RequestUpdate(request, token, finish_reason=reason), 0.0)
        delta = completion.take_delta()
        said += delta.text if delta is not None else ""
        if completion.finish_reason is not None:
            break
    return said, before, completion


@pytest.mark.parametrize("cuts", [[], [3], [9, 20], list(range(1, 30))])
def test_stop_strings_of_the_thinking_do_not_end_the_answer(cuts: list[int]) -> None:
    text = "we\n\nthink END</think>\n\nthe fox END dog"
    said, _, completion = told(text, cuts, thinking="open", stop=["END", "\n\n"])
    assert said == "we\n\nthink END</think>\n\nthe fox "
    assert completion.output().stop_reason == "END"
    said, _, _ = told("<think>" + text, cuts, thinking="optional", stop=["END", "\n\n"])
    assert said == "<think>we\n\nthink END</think>\n\nthe fox "
    said, _, _ = told(text, cuts, stop=["END", "\n\n"])
    assert said == "we"


def test_thinking_is_told_without_waiting_for_stop_strings() -> None:
    _, before, _ = told("the dog E", [8], thinking="open", stop=["END"])
    assert before == "the dog "
    said, before, _ = told("END E", [3, 4], thinking="open", stop=["END"])
    assert (said, before) == ("END E", "END ")


@pytest.mark.parametrize("text", ["<thin", "  <", ""])
def test_an_answer_that_ends_where_thinking_might_begin_is_content(text: str) -> None:
    said, _, completion = told(text + "a", [], thinking="optional", stop=["<"])
    assert said == text.partition("<")[0] + "a" * ("<" not in text)
    assert completion.finish_reason is (FinishReason.STOP if "<" in text else FinishReason.LENGTH)
    assert told("<", [], thinking="optional", stop=["<"])[0] == ""


@given(PIECES, st.sampled_from(["none", "optional", "open"]), st.lists(st.integers(0, 9), max_size=4))
def test_stop_strings_are_those_of_the_content(pieces: list[str], thinking: Thinking, cuts: list[int]) -> None:
    text = "".join(pieces)
    if not text:
        return
    said, _, _ = told(text, [min(cut, len(text)) for cut in cuts], thinking=thinking, stop=["ab", "\n"])
    start = content_start(text, thinking)
    found = re.search("ab|\n", text[start:]) if start is not None else None
    assert said == (text if found is None or start is None else text[: start + found.start()])
