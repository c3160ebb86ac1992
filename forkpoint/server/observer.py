"""What the engine tells, as metrics."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.engine.outputs import RequestState
from forkpoint.errors import ForkpointError
from forkpoint.obs.prometheus import EndedRequest, Metrics


@dataclass(frozen=True, slots=True)
class MetricsObserver:
    """An `engine.async_engine.Observer`."""

    metrics: Metrics

    def step(self, num_tokens: int) -> None:
        self.metrics.step(num_tokens)

    def first_token(self, state: RequestState, elapsed_s: float) -> None:
        self.metrics.first_token(len(state.prompt.token_ids), state.cache, elapsed_s)

    def next_token(self, elapsed_s: float) -> None:
        self.metrics.next_token(elapsed_s)

    def finished(self, state: RequestState) -> None:
        reasons = [c.finish_reason.value for c in state.completions if c.finish_reason is not None]
        self.metrics.finished(
            EndedRequest(
                num_prompt_tokens=len(state.prompt.token_ids),
                num_output_tokens=tuple(completion.num_tokens for completion in state.completions),
                finish_reasons=tuple(reasons),
                cache=state.cache,
                timings=state.metrics,
            )
        )

    def refused(self, error: ForkpointError) -> None:
        self.metrics.refused(type(error).__name__)
