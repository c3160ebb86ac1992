"""Synthetic traces: chats, agents, questions over shared documents, tree search. Lengths are tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

from forkpoint.checks import Bounds, Checker
from forkpoint.errors import TraceError
from forkpoint.sim.tokens import TokenMint, TokenSpans
from forkpoint.sim.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations: each prompt is the previous prompt, its answer and new tokens.

    Sessions start at random, `gap_s` apart on average; lengths and think times are exponential with the given means.
    """

    sessions: int = 100
    turns: int = 6
    system: int = 500
    first: int = 500
    new: int = 200
    answer: int = 300
    think_s: float = 30.0
    gap_s: float = 2.0
    seed: int = 0

    def requests(self) -> list[TraceRequest]:
        rng, mint, requests, start = random.Random(self.seed), TokenMint(), [], 0.0
        system = mint.fresh(self.system)
        for session in range(self.sessions):
            history = TokenSpans.join([system, mint.fresh(_length(rng, self.first))])
            for turn in range(1 + int(rng.expovariate(1 / max(self.turns - 1, 1e-9)))):
                answer = mint.fresh(_length(rng, self.answer))
                requests.append(
                    TraceRequest(
                        id=f"{session}-{turn}",
                        session=f"session-{session}",
                        prompt=history,
                        output=answer,
                        arrival_s=start,
                        after=f"{session}-{turn - 1}" if turn else None,
                        think_s=rng.expovariate(1 / self.think_s) if turn and self.think_s else 0.0,
                        breakpoints=(self.system,),
                    )
                )
                history = TokenSpans.join([history, answer, mint.fresh(_length(rng, self.new))])
            start += rng.expovariate(1 / self.gap_s)
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDocuments:
    """Questions over `per_prompt` of `documents` documents each, drawn by Zipf's law, which may repeat one.

    They come `gap_s` seconds apart on average; lengths are exponential with the given means.
    """

    questions: int = 500
    documents: int = 50
    length: int = 4000
    per_prompt: int = 1
    system: int = 200
    question: int = 100
    answer: int = 200
    gap_s: float = 1.0
    seed: int = 0

    def requests(self) -> list[TraceRequest]:
        rng, mint, requests, now = random.Random(self.seed), TokenMint(), [], 0.0
        system = mint.fresh(self.system)
        documents = [mint.fresh(_length(rng, self.length)) for _ in range(self.documents)]
        weights = [1 / rank for rank in range(1, self.documents + 1)]
        for number in range(self.questions):
            chosen = rng.choices(range(self.documents), weights, k=self.per_prompt)
            context = TokenSpans.join([system, *(documents[index] for index in chosen)])
            prompt = TokenSpans.join([context, mint.fresh(_length(rng, self.question))])
            output = mint.fresh(_length(rng, self.answer))
            ends = (self.system, context.num_tokens)
            requests.append(TraceRequest(f"{number}", f"question-{number}", prompt, output, now, breakpoints=ends))
            now += rng.expovariate(1 / self.gap_s)
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSearch:
    """Tree search over `depth` levels: each of `problems` is answered `branching` times, and `kept` answers go on.

    Answers have `step` tokens on average; problems start `gap_s` seconds apart.
    """

    problems: int = 20
    problem: int = 1500
    branching: int = 4
    kept: int = 2
    depth: int = 4
    step: int = 250
    gap_s: float = 10.0
    seed: int = 0

    def requests(self) -> list[TraceRequest]:
        rng, mint, requests, now = random.Random(self.seed), TokenMint(), [], 0.0
        for number in range(self.problems):
            frontier: list[tuple[TokenSpans, str | None]] = [(mint.fresh(_length(rng, self.problem)), None)]
            for level in range(self.depth):
                grown: list[tuple[TokenSpans, str | None]] = []
                for prompt, parent in frontier:
                    for _ in range(self.branching):
                        name = f"{number}-{level}-{len(grown)}"
                        output = mint.fresh(_length(rng, self.step))
                        requests.append(TraceRequest(name, f"problem-{number}", prompt, output, now, after=parent))
                        grown.append((TokenSpans.join([prompt, output]), name))
                frontier = rng.sample(grown, min(self.kept, len(grown)))
            now += rng.expovariate(1 / self.gap_s)
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents(Conversations):
    """Conversations with long tool lists, many short turns and little time between them."""

    sessions: int = 20
    turns: int = 30
    system: int = 15_000
    first: int = 2000
    new: int = 700
    think_s: float = 5.0
    gap_s: float = 20.0


LARGEST: Final = 1e6  # limit of each option; a workload with more sessions takes hours to create
Workload = Conversations | SharedDocuments | TreeSearch
WORKLOADS: Final[Mapping[str, Callable[..., Workload]]] = MappingProxyType(
    {"chat": Conversations, "agents": Agents, "rag": SharedDocuments, "tree": TreeSearch}
)


def make_workload(spec: str) -> Trace:
    """Create a trace from `kind` or `kind:option=value,...`, such as `chat:sessions=50,turns=4`. Raises TraceError."""
    kind, _, given = spec.partition(":")
    if kind not in WORKLOADS:
        raise TraceError(f"no workload {kind!r}; give one of {', '.join(WORKLOADS)}, or a trace file")
    make = WORKLOADS[kind]
    known = {field.name: field.type for field in fields(make())}
    options: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise TraceError(f"workload {kind} has no option {name!r}; it has {', '.join(known)}")
        try:
            options[name] = float(value) if name.endswith("_s") else int(value)
        except ValueError:
            raise TraceError(f"workload {kind}: {name}={value!r} is not a number") from None
        if name != "seed":
            bounds = Bounds(0.0, LARGEST, above=name != "think_s")
            Checker(TraceError, f"workload {kind}: ").number(name, options[name], bounds)
    try:
        return Trace(kind, tuple(make(**options).requests()))
    except OverflowError as error:
        raise TraceError(f"workload {spec} is too large: {error}") from error


def _length(rng: random.Random, mean: int) -> int:
    """Draw an exponential length with that mean, at most six times the mean and at least 1."""
    return 1 + min(int(rng.expovariate(1 / mean)), 6 * mean)
