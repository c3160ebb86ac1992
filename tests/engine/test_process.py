"""Sequences under a grammar in the engine process: compiling holds up nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from forkpoint.engine.messages import AddSequence, Call, CallReply, EndSequences, Report, StepReport, Stop
from forkpoint.engine.process import EngineLoop
from forkpoint.grammar.compiler import GrammarCompiler
from forkpoint.grammar.masks import TokenRules
from forkpoint.params import FinishReason, SamplingParams, StructuredOutputsParams
from forkpoint.sched.request import Request
from forkpoint.worker.codec import decoder, encoder
from tests.engine.real import ModelBank, Options, RealEngine, start

CHOKES = 77  # a length at which the compiler, or the queue, raises what nobody foresaw


class SlowGrammars(GrammarCompiler):
    """Compiles nothing until it is told to."""

    def __init__(self, run: RealEngine) -> None:
        inputs = run.engine.inputs
        super().__init__(inputs.tokenizer, inputs.vocab_size, inputs.eos_token_ids)
        self.may_compile = threading.Event()

    def start(self, params: SamplingParams, stop_token_ids: Collection[int]) -> TokenRules | None:
        assert self.may_compile.wait(300)
        if params.max_tokens == CHOKES:
            raise KeyError("a fault of the compiler")
        return super().start(params, stop_token_ids)


class Client:
    """The other end of an EngineLoop's sockets."""

    def __init__(self, run: RealEngine, grammars: SlowGrammars) -> None:
        self._run, self._context, self._numbers = run, zmq.Context(), iter(range(1000))
        self._encode, self._decode = encoder(), decoder(Report)
        sockets = [self._context.socket(kind) for kind in (zmq.PULL, zmq.PUSH, zmq.PUSH, zmq.PULL)]
        inbox, outbox, self._commands, self._reports = sockets
        for listening, calling, name in ((inbox, self._commands, "commands"), (self._reports, outbox, "reports")):
            listening.bind(f"inproc://{name}")
            calling.connect(f"inproc://{name}")
        loop = EngineLoop(run.core, grammars, inbox, outbox)
        self._pool = ThreadPoolExecutor(1)
        self._loop = self._pool.submit(loop.run)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.refused: dict[str, str] = {}

    def send(self, command: Any) -> None:
        self._commands.send(self._encode(command))

    def add(self, **options: Any) -> str:
        number = next(self._numbers)
        params = SamplingParams(temperature=0.0, **options)
        inputs = self._run.engine.inputs
        prompt = inputs.prompt([5, 6, 7])
        (request,) = inputs.requests(f"r{number}", prompt, SamplingParams(), priority=0, number=number, arrival_s=0.0)
        request.params, request.max_tokens = params, params.max_tokens or 16
        self.tokens[request.id] = []
        self.send(AddSequence(request))
        return request.id

    def wait_for(self, *names: str) -> None:
        """Take in reports until these have ended or were refused."""
        while not all(name in self.ends or name in self.refused for name in names):
            assert self._reports.poll(120_000), f"nothing more comes; ended: {self.ends}, refused: {self.refused}"
            self._take(self._decode(self._reports.recv()))

    def _take(self, report: Any) -> None:
        assert isinstance(report, StepReport)
        for name, token in zip(report.ids, report.token_ids, strict=True):
            self.tokens[name].append(token)
        for news in report.news:
            if news.token_id is not None:
                self.tokens[news.id].append(news.token_id)
            if news.finish_reason is not None:
                self.ends[news.id] = news.finish_reason
        self.refused |= {name: failure.text for name, failure in report.refused}

    def call(self) -> None:
        """Returns once the loop has carried out what was sent before."""
        self.send(Call(1, "stats"))
        while not isinstance(report := self._decode(self._reports.recv()), CallReply):
            self._take(report)

    def text(self, name: str) -> str:
        tokenizer = self._run.engine.inputs.tokenizer
        assert tokenizer is not None
        return tokenizer.decode(self.tokens[name], skip_special_tokens=True)

    def close(self) -> None:
        self.send(Stop())
        self._loop.result(300)
        self._pool.shutdown()
        self._context.destroy(linger=0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Client, SlowGrammars]]:
    run = start(ModelBank(tmp_path), Options(model="qwen3"))
    to_prepare = [1, 2, 3]
    run.core.prepare = lambda: bool(to_prepare) and to_prepare.pop() > 0
    grammars = SlowGrammars(run)
    client = Client(run, grammars)
    yield client, grammars
    grammars.may_compile.set()
    until = time.monotonic() + 60
    while to_prepare and time.monotonic() < until:  # an idle engine prepares later steps
        time.sleep(0.005)
    client.close()
    assert not to_prepare or run.core.has_unfinished()


def matching(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def test_compiling_holds_up_nobody_else(served: tuple[Client, SlowGrammars]) -> None:
    client, grammars = served
    bound = client.add(structured_outputs=matching("[xyz]{9}"))
    broken = client.add(structured_outputs=matching("("))
    free = client.add(max_tokens=40, ignore_eos=True)
    client.wait_for(free)
    assert len(client.tokens[free]) == 40
    assert not client.tokens[bound]
    grammars.may_compile.set()
    client.wait_for(bound, broken)
    assert client.ends[bound] is FinishReason.STOP
    assert len(client.text(bound)) == 9
    assert set(client.text(bound)) <= set("xyz")
    assert "regular expression" in client.refused[broken]


def test_a_sequence_that_ends_while_its_grammar_is_compiled_never_runs(served: tuple[Client, SlowGrammars]) -> None:
    client, grammars = served
    gone = client.add(structured_outputs=matching("[xyz]{9}"))
    also_gone = client.add(structured_outputs=matching("[xy]{9}"))
    client.send(EndSequences((gone, also_gone)))
    client.call()
    grammars.may_compile.set()
    kept = client.add(structured_outputs=matching("ab"))
    client.wait_for(kept)
    assert client.text(kept) == "ab"
    assert not client.tokens[gone]
    assert not client.tokens[also_gone]


def test_what_one_sequence_makes_raise_concerns_it_alone(
    served: tuple[Client, SlowGrammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, grammars = served
    grammars.may_compile.set()
    scheduler = client._run.sched
    queue = scheduler.add

    def choke(request: Request) -> None:
        if request.max_tokens == CHOKES:
            raise ZeroDivisionError("a fault of the queue")
        queue(request)

    monkeypatch.setattr(scheduler, "add", choke)
    free = client.add(max_tokens=40, ignore_eos=True)
    uncompiled = client.add(structured_outputs=matching("[xyz]{9}"), max_tokens=CHOKES)
    unqueued = client.add(max_tokens=CHOKES)
    client.wait_for(free, uncompiled, unqueued)
    assert "KeyError" in client.refused[uncompiled] and "a fault of the queue" in client.refused[unqueued]
    assert len(client.tokens[free]) == 40


def test_many_that_come_at_once_are_taken_between_steps(
    served: tuple[Client, SlowGrammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = served
    core = client._run.core
    queue = core.add
    tokens_before: list[int] = []

    def slowly(request: Request) -> None:
        time.sleep(0.003)
        tokens_before.append(core.num_model_tokens)
        queue(request)

    first = client.add(max_tokens=40, ignore_eos=True)
    while len(client.tokens[first]) < 2:
        client._take(client._decode(client._reports.recv()))
    monkeypatch.setattr(core, "add", slowly)
    others = [client.add(max_tokens=1) for _ in range(60)]
    client.wait_for(first, *others)
    assert len(set(tokens_before)) > 5, "no step came between the commands"
