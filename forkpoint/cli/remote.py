"""A server as the commands that print answers use it: from one thread, Ctrl-C ends the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from forkpoint.client.answer import Answer
from forkpoint.client.protocol import Delta
from forkpoint.client.server import Server

Result = TypeVar("Result")


class Remote:
    """One model of one server. Use it in a `with` statement; entering raises ServerError or ConfigError."""

    def __init__(self, url: str, *, model_name: str | None, api_key: str | None) -> None:
        self._server = Server(url, api_key=api_key)
        self._model_name = model_name
        self._runner = asyncio.Runner()
        self._model = ""

    def __enter__(self) -> Remote:
        try:
            self._model = self._runner.run(self._open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._server.__aexit__(None, None, None))
        self._runner.close()

    def stream(self, path: str, body: Mapping[str, Any], answer: Answer, show: Callable[[Delta], None]) -> None:
        """Fill `answer`, showing each delta. Raises ServerError, and KeyboardInterrupt after Ctrl-C."""
        self._run(self._stream(path, body, answer, show))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    async def _open(self) -> str:
        await self._server.__aenter__()
        return (await self._server.model(self._model_name)).id

    async def _stream(self, path: str, body: Mapping[str, Any], answer: Answer, show: Callable[[Delta], None]) -> None:
        deltas = self._server.stream(path, {"model": self._model, **body}, running_usage=True)
        async for delta in answer.read(deltas):
            show(delta)
