"""The prompts whose cached tokens the hit table compares. They are data, so that any engine can play them."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.sim.tokens import TokenMint, TokenSpans
from forkpoint.sim.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. Its number is the cached tokens of the last request.

    Requests of one round wait in the queue together, and a round starts when the round before has ended. With
    `preempt_after`, the last request is preempted once it has generated that many tokens. The row then counts the
    tokens that it finds cached when it resumes.
    """

    key: str
    text: str
    rounds: tuple[tuple[TraceRequest, ...], ...]
    preempt_after: int = 0

    @property
    def measured(self) -> TraceRequest:
        return self.rounds[-1][-1]


def cases() -> tuple[Case, ...]:
    """Return the rows in the order of the table. Every case has tokens of its own."""
    return (
        _again("resend", "a 5,000-token prompt, sent again after 600 tokens of output", 5000, 600),
        _second_turn(),
        _again("short", "a 900-token prompt, sent again", 900, 1),
        _shared("second", "3,000 shared + 2,000 own tokens: second request", 2),
        _shared("breakpoint", "the same, with a breakpoint at 3,000 (vLLM has no breakpoints)", 2, (3000,)),
        _shared("queue", "the same, both waiting in the queue", 2, together=True),
        _shared("third", "the same: third request", 3),
        _fork("fork", "20,000 tokens, forked at 9,000: first fork", 1),
        _fork("second_fork", "the same: second fork", 2),
        _extension(),
        _preempted(),
    )


def studies() -> tuple[Case, ...]:
    """Return longer loads that are not in the table. They check `studies/emulations/vllm.py`."""
    return (_agent_loop(), *(_thirty(prefix) for prefix in (800, 1500, 3000)))


def _request(name: str, prompt: TokenSpans, output: TokenSpans, breakpoints: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest(name, name, prompt, output, breakpoints=breakpoints)


def _one_by_one(*requests: TraceRequest) -> tuple[tuple[TraceRequest, ...], ...]:
    return tuple((request,) for request in requests)


def _again(key: str, text: str, length: int, num_outputs: int) -> Case:
    mint = TokenMint()
    prompt = mint.fresh(length)
    first = _request("first", prompt, mint.fresh(num_outputs))
    return Case(key, text, _one_by_one(first, _request("again", prompt, mint.fresh(1))))


def _second_turn() -> Case:
    mint = TokenMint()
    first = _request("turn 1", mint.fresh(5000), mint.fresh(600))
    prompt = TokenSpans.join([first.prompt, first.output, mint.fresh(500)])
    second = _request("turn 2", prompt, mint.fresh(1))
    return Case("turn_2", "turn 2: those 5,600 tokens and 500 new ones", _one_by_one(first, second))


def _shared(key: str, text: str, count: int, breakpoints: tuple[int, ...] = (), together: bool = False) -> Case:
    mint = TokenMint()
    shared = mint.fresh(3000)
    requests = [
        _request(f"request {i}", TokenSpans.join([shared, mint.fresh(2000)]), mint.fresh(1), breakpoints)
        for i in range(count)
    ]
    return Case(key, text, (tuple(requests),) if together else _one_by_one(*requests))


def _fork(key: str, text: str, count: int) -> Case:
    mint = TokenMint()
    trunk = _request("trunk", mint.fresh(20_000), mint.fresh(1))
    forks = [
        _request(f"fork {i}", TokenSpans.join([trunk.prompt.part(0, 9000), mint.fresh(500)]), mint.fresh(1))
        for i in range(count)
    ]
    return Case(key, text, _one_by_one(trunk, *forks))


def _extension() -> Case:
    mint = TokenMint()
    first = _request("first", mint.fresh(20_000), mint.fresh(1))
    longer = _request("longer", TokenSpans.join([first.prompt, mint.fresh(10)]), mint.fresh(1))
    return Case("extension", "20,000 tokens, then the same + 10", _one_by_one(first, longer))


def _preempted() -> Case:
    mint = TokenMint()
    text = "preempted after 600 decoded tokens on a 5,000-token prompt"
    return Case("preempted", text, _one_by_one(_request("long", mint.fresh(5000), mint.fresh(700))), 600)


def _agent_loop() -> Case:
    """20 turns: 4,000 tokens at first, each turn generates 300 and a tool adds 700."""
    mint = TokenMint()
    history, requests = mint.fresh(4000), []
    for turn in range(20):
        requests.append(_request(f"turn {turn}", history, mint.fresh(300)))
        history = TokenSpans.join([history, requests[-1].output, mint.fresh(700)])
    return Case("agent_loop", "agent loop of 20 turns", _one_by_one(*requests))


def _thirty(prefix: int) -> Case:
    mint = TokenMint()
    shared = mint.fresh(prefix)
    requests = [_request(f"request {i}", TokenSpans.join([shared, mint.fresh(1000)]), mint.fresh(1)) for i in range(30)]
    return Case(f"shared_{prefix}", f"30 requests share {prefix:,} tokens", _one_by_one(*requests))
