"""The engine requests of one HTTP request, and the parts that the answers of all APIs share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.engine.async_engine import AsyncEngine, OpenRequest
from forkpoint.engine.outputs import RequestState
from forkpoint.outputs import CompletionOutput
from forkpoint.params import FinishReason
from forkpoint.server.errors import HTTPError


@dataclass(frozen=True, slots=True)
class Generation:
    """The running completions of an HTTP request's prompts. Close it when nobody waits for the answer any more.

    `reports_cache`: whether the answer may say how much of the prompts was cached.
    """

    engine: AsyncEngine
    opened: OpenRequest
    reports_cache: bool

    def close(self) -> None:
        """Abort the requests that still run. Does nothing once all have ended."""
        for state in self.states:
            self.engine.abort(state.request_id)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    async def first_news(self) -> None:
        """Wait until a prompt has an output token. Raises the error of a request that is refused or fails by then."""
        await self.opened.first_news()
        for state in self.states:
            for completion in state.completions:
                _check_end(completion.finish_reason, completion.error)

    async def deltas(self, *, whole: bool = False) -> AsyncIterator[list[tuple[int, CompletionOutput]]]:
        """Yield the deltas of `OpenRequest.deltas`, with the prompt's number.

        Raises HTTPError when a completion fails, after earlier deltas.
        """
        async for deltas in self.opened.deltas(whole=whole):
            for count, (_, delta) in enumerate(deltas):
                if delta.finish_reason in FAILURES:
                    if count:
                        yield deltas[:count]
                    _check_end(delta.finish_reason, delta.error)
            yield deltas

    @property
    def states(self) -> list[RequestState]:
        return self.opened.states

    def details(self) -> dict[str, Any]:
        """Return the fields `cache` and, with speculative decoding, `speculation`; None if they may not be reported."""
        states, cache = self.states, self.cache_info()
        if self.engine.config.speculative_config is None:
            return {"cache": cache}
        if cache is None:
            return {"cache": None, "speculation": None}
        counts = {
            "num_draft_tokens": sum(state.num_draft_tokens for state in states),
            "num_accepted_tokens": sum(state.num_accepted_tokens for state in states),
        }
        return {"cache": cache, "speculation": counts}

    def handover(self) -> dict[str, Any]:
        """Return the field with which another engine continues a single prompt; {} if nothing is offered."""
        states = self.states
        if len(states) != 1 or states[0].kv_transfer_params is None:
            return {}
        return {"kv_transfer_params": dict(states[0].kv_transfer_params)}

    def usage(self, *, counts_output: bool = True) -> dict[str, Any]:
        """Return the token counts so far over all prompts. Without `counts_output` output tokens count as 0."""
        num_prompt = sum(len(state.prompt.token_ids) for state in self.states)
        num_output = 0
        if counts_output:
            num_output = sum(completion.num_tokens for state in self.states for completion in state.completions)
        cache = self.cache_info()
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": self._prompt_details(cache),
        }

    def _prompt_details(self, cache: dict[str, Any] | None) -> dict[str, int] | None:
        if cache is None:
            return None
        num_image_tokens = sum(state.prompt.num_image_tokens for state in self.states)
        return {"cached_tokens": cache["num_tokens"], "image_tokens": num_image_tokens}

    def cache_info(self) -> dict[str, Any] | None:
        """Return counts summed over the prompts and the first prompt's reason for a miss, or None if not reported."""
        if not self.reports_cache:
            return None
        reports = [state.cache for state in self.states]
        return {
            "num_tokens": sum(report.num_cached_tokens for report in reports),
            "kv_num_tokens": sum(report.kv_num_tokens for report in reports),
            "num_image_tokens": sum(
                state.prompt.num_image_tokens_before(state.cache.num_cached_tokens) for state in self.states
            ),
            "num_restored_tokens": sum(report.num_restored_tokens for report in reports),
            "num_peer_tokens": sum(report.num_peer_tokens for report in reports),
            "miss": next((report.miss.value for report in reports if report.miss is not None), None),
        }


FAILURES: Final = (FinishReason.ERROR, FinishReason.ABORT)


def _check_end(reason: FinishReason | None, error: str | None) -> None:
    """Raise the HTTPError for a completion that failed or was ended from outside."""
    if reason is FinishReason.ERROR:
        raise HTTPError(500, error or "the request failed while it ran", "server_error", code="request_failed")
    if reason is FinishReason.ABORT:
        raise HTTPError(503, "the request was ended before its answer was complete", "server_error", code="aborted")
