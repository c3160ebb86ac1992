"""What every endpoint needs: the engine, the names of the model, the limits."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from forkpoint.engine.async_engine import AsyncEngine
from forkpoint.engine.inputs import Prompt
from forkpoint.errors import EngineStoppedError, InvalidPromptError, QueueFullError
from forkpoint.obs.logs import num_lost_lines
from forkpoint.obs.prometheus import Metrics
from forkpoint.params import SamplingParams
from forkpoint.server.config import ServerConfig
from forkpoint.server.errors import HTTPError
from forkpoint.server.generation import Generation


@dataclass(slots=True)
class Service:
    """Written by the server's life cycle alone: `closing` once the server takes no more requests."""

    engine: AsyncEngine
    config: ServerConfig
    model: str
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    closing: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.served_model_name or (self.model,)

    def check_healthy(self) -> None:
        """Raises the error with which requests are refused now."""
        if self.closing:
            raise EngineStoppedError("the server is shutting down")
        self.engine.check_ready()

    async def metrics_text(self) -> bytes:
        """Prometheus' text format, without the engine's figures where it cannot tell them."""
        stats = {}
        if self.engine.is_ready:
            with contextlib.suppress(EngineStoppedError):
                stats = await self.engine.call("stats")
        own = {"num_requests_open": self.engine.num_open, "log_lines_lost": num_lost_lines()}
        return self.metrics.text(own, stats, self.engine.facts)

    def served_name(self, asked: str | None) -> str:
        """The name to answer with. Raises HTTPError 404 for a model that is not served."""
        if not asked:
            return self.names[0]
        if asked not in self.names:
            raise HTTPError(
                404,
                f"the model {asked!r} does not exist; this server has {', '.join(self.names)}",
                "not_found_error",
                param="model",
                code="model_not_found",
            )
        return asked

    def open(self, name: str, prompts: Sequence[Prompt], params: SamplingParams, priority: int) -> Generation:
        """Send prompts to the engine. Raises QueueFullError beyond the server's own limit."""
        self.check_healthy()
        limit = self.config.max_open_requests
        if self.engine.num_open + len(prompts) > limit:
            raise QueueFullError(
                f"{self.engine.num_open} requests are open, {len(prompts)} more exceed max_open_requests={limit}; "
                "try again later"
            )
        return Generation.open(self.engine, name, prompts, params, priority)

    def text_of(self, token_ids: list[int]) -> str:
        """Raises InvalidPromptError without a tokenizer."""
        tokenizer = self.engine.inputs.tokenizer
        if tokenizer is None:
            raise InvalidPromptError("the server was started without a tokenizer; it knows token ids only")
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    def request_id(self, request: Request) -> str:
        """Of the HTTP request, made unique: clients may send the same X-Request-Id twice."""
        return uuid.uuid4().hex

    def now(self) -> int:
        return int(time.time())
