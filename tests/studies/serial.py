"""One request after another through an emulated engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkpoint.outputs import CacheReport
from forkpoint.sim.tokens import TokenSpans
from studies.emulations.scheduler import EmulatedScheduler
from tests.sim.driving import request


@dataclass
class Serial:
    """One request at a time; `chunks` are the prefill tokens of the steps of the last one."""

    system: EmulatedScheduler
    chunks: list[int] = field(default_factory=list)
    count: int = 0

    def ask(self, prompt: TokenSpans, output: TokenSpans | int = 1) -> CacheReport:
        self.count += 1
        asked = request(f"r{self.count}", prompt, output)
        assert self.system.add(asked), "refused"
        self.chunks.clear()
        while (load := self.system.plan(0.0)) is not None:
            if load.prefill_tokens:
                self.chunks.append(load.prefill_tokens)
            finished = self.system.finish(0.0).finished
        return finished[asked.id]

    def cached(self, prompt: TokenSpans, output: TokenSpans | int = 1) -> int:
        return self.ask(prompt, output).num_cached_tokens
