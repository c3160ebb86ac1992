"""Small traces by hand."""

from __future__ import annotations

from collections.abc import Sequence

from forkpoint.routing.router import Router
from forkpoint.sim.cost import H200, CostModel, StepLoad
from forkpoint.sim.replica import SimulatedReplica
from forkpoint.sim.shape import ModelShape
from forkpoint.sim.simulator import Simulator
from forkpoint.sim.tokens import TokenMint, TokenSpans
from forkpoint.sim.trace import Trace, TraceRequest

MINT = TokenMint()


def prefill_s(model: CostModel, start: int, end: int) -> float:
    """Seconds to compute tokens `[start, end)` of one prompt in one step."""
    return model.step_s(StepLoad(end - start, (end - start) * (start + end) / 2, num_segments=1, num_sampled=1))


def fresh(count: int) -> TokenSpans:
    return MINT.fresh(count)


def join(*parts: TokenSpans) -> TokenSpans:
    return TokenSpans.join(parts)


def request(name: str, prompt: TokenSpans, output: TokenSpans | int = 1, **options: object) -> TraceRequest:
    tokens = fresh(output) if isinstance(output, int) else output
    return TraceRequest(name, name, prompt, tokens, **options)  # type: ignore[arg-type]


def as_requests(paths: Sequence[tuple[int, ...]]) -> list[TraceRequest]:
    """Each letter is a block of 64 tokens; one more token, so that all blocks of the prompt are reusable."""
    made = []
    for index, path in enumerate(paths):
        blocks = [TokenSpans(((64 * letter, 64),)) for letter in path]
        prompt = TokenSpans.join([*blocks, TokenSpans(((1_000_000 + 10 * index, 1),))])
        made.append(TraceRequest(f"r{index}", "s", prompt, TokenSpans(((2_000_000 + 10 * index, 1),))))
    return made


def take_turns(output_tokens: int, more_tokens: int, num_turns: int) -> list[TraceRequest]:
    """Two conversations of 20,000 tokens; each goes on after the other has."""
    requests: list[TraceRequest] = []
    histories = [fresh(20_000), fresh(20_000)]
    for turn in range(num_turns):
        talk, answer = turn % 2, fresh(output_tokens)
        requests.append(request(f"{turn}", histories[talk], answer, arrival_s=60.0 * turn))
        histories[talk] = join(histories[talk], answer, fresh(more_tokens))
    return requests


def reused_by_talk(requests: list[TraceRequest], shape: ModelShape, system: SimulatedReplica) -> list[float]:
    """The reused share of both conversations' prompts, the first of each included."""
    trace = Trace("alternating", tuple(requests))
    records = Simulator(trace, [system], CostModel(shape, H200), Router("round-robin")).run().records
    return [
        sum(r.cache.num_cached_tokens for r in records[talk::2])
        / sum(r.request.prompt.num_tokens for r in records[talk::2])
        for talk in range(2)
    ]
