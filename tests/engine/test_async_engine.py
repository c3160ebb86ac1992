"""The engine in its own process, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forkpoint import EngineNotReadyError, EngineStoppedError, ForkpointError, SamplingParams
from forkpoint.config import EngineConfig
from forkpoint.engine.async_engine import AsyncEngine, OpenRequest
from forkpoint.engine.inputs import Prompt
from forkpoint.engine.llm import LLM
from forkpoint.engine.messages import Call, CallReply
from forkpoint.engine.outputs import RequestState
from forkpoint.engine.tokenizer import Tokenizer, eos_token_ids
from forkpoint.outputs import CacheReport


class Fragile:
    """An observer that breaks on demand."""

    def __init__(self) -> None:
        self.broken = False
        self.num_finished = 0

    def step(self, num_tokens: int) -> None: ...

    def first_token(self, prompt: Prompt, cache: CacheReport, elapsed_s: float) -> None:
        if self.broken:
            raise KeyError("broken on purpose")

    def next_tokens(self, elapsed_s: Sequence[float]) -> None: ...

    def finished(self, state: RequestState) -> None:
        self.num_finished += 1

    def refused(self, error: ForkpointError) -> None: ...


async def tokenizer_of(model: Path) -> tuple[Tokenizer, frozenset[int]]:
    tokenizer = Tokenizer.load(str(model))
    return tokenizer, eos_token_ids(str(model), tokenizer)


@asynccontextmanager
async def two_prompts(folder: Path, **options: Any) -> AsyncIterator[tuple[AsyncEngine, OpenRequest]]:
    """Start an engine, and open a request of two prompts with long answers."""
    engine = AsyncEngine(EngineConfig.from_flat(model=str(folder), log_level="error", **options), Fragile())
    try:
        await engine.start(tokenizer_of(folder))
        request, params = OpenRequest(), SamplingParams(max_tokens=1500, ignore_eos=True)
        for name in ("one", "two"):
            engine.add(request, name, engine.inputs.prompt("tell me"), params)
        yield engine, request
    finally:
        await engine.close()


def test_deltas_add_up_and_no_request_hangs_when_this_side_breaks(tiny_model: Path, llm: LLM) -> None:
    prompt, params = "tell me in pieces", SamplingParams(temperature=0, max_tokens=20, n=2)
    [expected] = llm.generate(prompt, params, use_tqdm=False)

    async def run() -> None:
        observer = Fragile()
        engine = AsyncEngine(EngineConfig.from_flat(model=str(tiny_model), log_level="error", seed=7), observer)
        with pytest.raises(EngineNotReadyError):
            engine.check_ready()
        try:
            await engine.start(tokenizer_of(tiny_model))
            request = OpenRequest()
            engine.add(request, "one", engine.inputs.prompt(prompt), params)
            texts = {0: "", 1: ""}
            async for deltas in request.deltas():
                for _, delta in deltas:
                    texts[delta.index] += delta.text
            assert texts == {c.index: c.text for c in expected.outputs}
            assert observer.num_finished == 1 and engine.num_open == 0
            await engine.call("check_integrity")
            unsendable = SamplingParams()
            object.__setattr__(unsendable, "cache_salt", "\ud800")  # past the check of values
            with pytest.raises(UnicodeEncodeError):
                engine.add(OpenRequest(), "lost", engine.inputs.prompt(prompt), unsendable)
            assert engine.num_open == 0
            observer.broken = True
            request = OpenRequest()
            engine.add(request, "two", engine.inputs.prompt(prompt), params)
            with pytest.raises(EngineStoppedError, match="broken on purpose"):
                await asyncio.wait_for(anext(request.deltas(whole=True)), 20)
            assert "broken on purpose" in str(await asyncio.wait_for(engine.ended(), 5))
            with pytest.raises(EngineStoppedError):
                engine.add(OpenRequest(), "three", engine.inputs.prompt(prompt), params)
        finally:
            await engine.close()
            await engine.close()

    asyncio.run(run())


def test_who_reads_slowly_is_told_why_the_engine_ended(tiny_model: Path) -> None:
    """Not that the prompts behind the one that was read were aborted."""

    async def run() -> None:
        async with two_prompts(tiny_model, seed=7) as (engine, request):
            await request.first_news()
            deltas = request.deltas()
            await anext(deltas)
            engine._process._process.kill()  # type: ignore[union-attr]
            await asyncio.wait_for(engine.ended(), 60)
            with pytest.raises(EngineStoppedError, match="SIGKILL"):
                async for found in deltas:
                    assert all(delta.finish_reason is None for _, delta in found), "told as aborted"

    asyncio.run(run())


def test_the_first_news_do_not_wait_for_prompts_in_the_queue(tiny_model: Path) -> None:
    async def run() -> None:
        async with two_prompts(tiny_model, max_num_seqs=1) as (_, request):
            await asyncio.wait_for(request.first_news(), 60)
            assert [state.has_begun for state in request.states] == [True, False]

    asyncio.run(run())


def test_a_call_that_is_cancelled_while_its_answer_comes_stays_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the task that logs the load never ends, and neither does a server that is told to stop."""

    async def run() -> None:
        engine = AsyncEngine(EngineConfig(), Fragile())
        sent: list[Call] = []
        monkeypatch.setattr(engine, "check_ready", lambda: None)
        monkeypatch.setattr(engine._process, "send", sent.append)
        calling = asyncio.create_task(engine.call("stats"))
        await asyncio.sleep(0)
        engine._on_report(CallReply(sent[0].number, {}))
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(run())
