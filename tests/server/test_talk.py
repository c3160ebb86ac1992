"""Answers that are hard to read do not hold up the event loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forkpoint.engine.call_writing import notation_name
from forkpoint.outputs import CompletionOutput
from forkpoint.params import FinishReason
from forkpoint.server.answer import AnswerParser
from forkpoint.server.notations import NOTATIONS
from forkpoint.server.talk import Talk
from tests.server.conditions.condition import AB, SB, START, TB, TOOLS

MAX_HELD_S = 0.02
NUM_CHARACTERS = 12_000
OTHER = "<tool_call><function=other>"


class ScriptedGeneration:
    """Says `text` in pieces, and measures how long the event loop's thread works after each of them."""

    def __init__(self, text: str, size: int) -> None:
        self._pieces = [text[start : start + size] for start in range(0, len(text), size)]
        self._started_s = 0.0
        self.worst_s = 0.0

    async def deltas(self) -> AsyncIterator[list[tuple[int, CompletionOutput]]]:
        for number, text in enumerate(self._pieces):
            reason = FinishReason.STOP if number == len(self._pieces) - 1 else None
            self._started_s = time.thread_time()
            yield [(0, CompletionOutput(0, text, (number,), finish_reason=reason))]
            self._measure()

    def close(self) -> None:
        self._measure()

    def _measure(self) -> None:
        self.worst_s = max(self.worst_s, time.thread_time() - self._started_s)


@pytest.mark.parametrize("size", [4, 100_000])
@pytest.mark.parametrize(
    ("parser", "begin", "again"),
    [
        ("qwen3_coder", "<tool_call><function=run><parameter=command>", "</tool_call>\n"),
        ("qwen3_coder", "<tool_call><function=run>", "<parameter=x>1</parameter>"),
        ("qwen3_coder", "<tool_call><function=run><parameter=options>{", "'a': 'b', "),
        ("qwen3_coder", "", "<tool_call>"),
        ("qwen3_coder", OTHER + "<parameter=x>", "<"),
        ("qwen3_coder", OTHER, "<parameter=x>1</parameter>"),
        ("qwen3_coder", "", " "),
        ("hermes", '<tool_call>{"name": "other", "arguments": {', '"x":1,'),
        ("llama3_json", "", '{"name": {"name": '),
        ("lfm2", START, "[run(command="),
        ("kimi_k2", SB, f'{TB}other:0{AB}{{"a": "'),
    ],
)
def test_no_answer_holds_up_the_event_loop(parser: str, begin: str, again: str, size: int) -> None:
    turn = SimpleNamespace(
        customs=frozenset(),
        writes_text=False,
        parser=lambda: AnswerParser(reasoning=True, tools=TOOLS, notation=NOTATIONS[notation_name(parser, None, "")]),
        params=SimpleNamespace(n=1),
        reports_reasoning=True,
        names_call=False,
    )
    text = begin + again * (NUM_CHARACTERS // len(again))

    async def held_s() -> float:
        generation = ScriptedGeneration(text, size)
        with ThreadPoolExecutor(1) as thread:
            async for _ in Talk(cast(Any, turn), cast(Any, generation), thread).news(whole=True):
                pass
        return generation.worst_s

    gc.collect()
    # What takes long takes long each time; a busy machine makes one piece of one reading slow.
    assert any(asyncio.run(held_s()) < MAX_HELD_S for _ in range(3))
