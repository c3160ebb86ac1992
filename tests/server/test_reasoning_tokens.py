"""The number of reasoning tokens is exact: it does not depend on how tokens are merged into news, or on streaming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.engine.detokenize import StopStrings
from forkpoint.engine.outputs import Completion
from forkpoint.outputs import CompletionOutput
from forkpoint.params import FinishReason, SamplingParams
from forkpoint.sched.request import Request, RequestUpdate
from forkpoint.server.answer import AnswerParser
from forkpoint.server.talk import Talk
from tests.engine.tokenizers import byte_level

TOKENIZER = byte_level()
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PIECES = ["<think>", "</think>", "</thi", "<tool_call>", CALL, "\n", "  ", "a ", "END", "ü", "🙂", "`"]


class MergedGeneration:
    """Says a text token by token. News are taken after each of `sizes` tokens, and then at the end."""

    def __init__(self, text: str, sizes: Sequence[int], params: SamplingParams) -> None:
        self._ids = TOKENIZER.encode(text, add_special_tokens=False)
        self._sizes = sizes
        self._request = Request("r", np.asarray([1], np.int32), params, 1000, 0)
        stops = StopStrings(params.stop, include=False)
        self.completion = Completion(self._request, 0, TOKENIZER, stops)
        self.states = [SimpleNamespace(completions=[self.completion])]

    async def deltas(self) -> AsyncIterator[list[tuple[int, CompletionOutput]]]:
        ends = set(np.cumsum(self._sizes).tolist())
        for number, token in enumerate(self._ids, start=1):
            reason = FinishReason.STOP if number == len(self._ids) else None
            self.completion.apply(RequestUpdate(self._request, token, finish_reason=reason), 0.0)
            is_ended = self.completion.finish_reason is not None
            if (number in ends or is_ended) and (delta := self.completion.take_delta()) is not None:
                yield [(0, delta)]
            if is_ended:
                return

    def close(self) -> None:
        pass


def counted(text: str, sizes: Sequence[int], *, whole: bool, starts_inside: bool = False, stop: Any = None) -> int:
    turn = SimpleNamespace(
        customs=frozenset(),
        writes_text=False,
        parser=lambda: AnswerParser(reasoning=True, starts_inside=starts_inside, tools={"f": {}}),
        params=SimpleNamespace(n=1),
        reports_reasoning=True,
        names_call=False,
    )
    thinking: Any = "open" if starts_inside else "optional"
    generation = MergedGeneration(text, sizes, SamplingParams(max_tokens=1000, thinking=thinking, stop=stop))

    async def read() -> int:
        with ThreadPoolExecutor(1) as thread:
            talk = Talk(cast(Any, turn), cast(Any, generation), thread)
            counts = [talk.num_reasoning_tokens]
            async for _ in talk.news(whole=whole):
                counts.append(talk.num_reasoning_tokens)
            assert counts == sorted(counts)
            return counts[-1]

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("text", "starts_inside", "thought"),
    [
        ("no thought", False, ""),
        ("never ends", True, "never ends"),
        ("hm</think>so", True, "hm"),
        ("<think>hm\n</think>\n\nso it is", False, "hm\n"),
        ("<think>hmü🙂</think>so ü", False, "hmü🙂"),
        (f"I call f\n{CALL}\nand", True, "I call f\n"),
        ("<think>a</think>b\n<think>cd</think>e", False, "acd"),
        ("not opened\n</think>\nso", False, "not opened\n"),
        ("I </thi and `</think>` so</think>x", True, "I </thi and `"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("sizes", [[], [1] * 80, [3] * 30])
def test_tokens_that_begin_within_the_thinking_count(
    text: str, starts_inside: bool, thought: str, whole: bool, sizes: list[int]
) -> None:
    found = counted(text, sizes, whole=whole, starts_inside=starts_inside)
    assert found == len(TOKENIZER.encode(thought, add_special_tokens=False))


@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.booleans(),
    st.sampled_from([None, ["END"]]),
)
def test_the_way_of_merging_does_not_change_the_count(
    text: str, sizes: list[int], starts_inside: bool, stop: list[str] | None
) -> None:
    options: dict[str, Any] = {"starts_inside": starts_inside, "stop": stop}
    single = counted(text, [1] * len(text.encode()), whole=False, **options)
    assert counted(text, sizes, whole=False, **options) == single
    assert counted(text, sizes, whole=True, **options) == single
    assert counted(text, [], whole=True, **options) == single
