"""Small traces by hand, and a way to run one request after another through an emulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forkpoint.sim.peers.scheduler import PeerScheduler
from forkpoint.sim.system import RequestCache
from forkpoint.sim.tokens import TokenMint, TokenSpans
from forkpoint.sim.trace import TraceRequest

MINT = TokenMint()


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


@dataclass
class Serial:
    """One request at a time; `chunks` are the prefill tokens of the steps of the last one."""

    system: PeerScheduler
    chunks: list[int] = field(default_factory=list)
    count: int = 0

    def ask(self, prompt: TokenSpans, output: TokenSpans | int = 1) -> RequestCache:
        self.count += 1
        asked = request(f"r{self.count}", prompt, output)
        assert self.system.add(asked), "refused"
        self.chunks.clear()
        while (load := self.system.plan(0.0)) is not None:
            if load.prefill_tokens:
                self.chunks.append(load.prefill_tokens)
            self.system.finish(0.0)
        return self.system.cache_report(asked.id)

    def cached(self, prompt: TokenSpans, output: TokenSpans | int = 1) -> int:
        return self.ask(prompt, output).num_cached_tokens
