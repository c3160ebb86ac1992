"""OpenAI's batch format: requests in one JSON-lines file, answers in another."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from forkpoint.checks import member, shown
from forkpoint.client.protocol import NO_KEY, Usage, refusal
from forkpoint.client.server import CHAT, COMPLETIONS, Reply, Server
from forkpoint.errors import ConfigError, ServerError, ServerUnreachableError

PATHS: Final = (CHAT, COMPLETIONS, "/v1/responses")
BUSY: Final = (429, 503)
# a refusal for these reasons is final; others (no key, no such model) may go away
WRONG_REQUEST: Final = (400, 413, 422)
START: Final = '{"id": "'  # of each line of the output
WAITS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input. If `error` is set, the line is wrong and is not sent."""

    custom_id: str | None
    path: str = CHAT
    body: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One line of the output file. Its `error` is the message of a failure, or None."""

    document: Mapping[str, Any]
    usage: Usage | None = None

    @property
    def error(self) -> str | None:
        message: str | None = member(self.document["error"], "message")
        return message


def read_batch(path: Path) -> list[BatchRequest]:
    """Read every line of the input that is not blank. A wrong line becomes a request with `error`.

    Raises ConfigError if the file cannot be read or has no lines.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # texts may contain other ends of lines
    except OSError as error:
        raise ConfigError(f"the batch {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the batch {path} is not UTF-8 text: {error}") from error
    seen: set[str | None] = set()
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            request = _read_line(line, f"line {number}", seen)
            seen.add(request.custom_id)
            found.append(request)
    if not found:
        raise ConfigError(f"the batch {path} has no lines")
    return found


def _read_line(line: str, where: str, seen: Collection[str | None]) -> BatchRequest:
    try:
        entry = json.loads(line)
    except ValueError as error:
        return BatchRequest(None, error=f"{where} is not JSON: {error}")
    except RecursionError:
        return BatchRequest(None, error=f"{where} is nested too deeply")
    if not isinstance(entry, dict) or not isinstance(entry.get("custom_id"), str):
        return BatchRequest(None, error=f"{where} must be an object with a text 'custom_id'")
    name, body = entry["custom_id"], entry.get("body")
    if name in seen:
        return BatchRequest(None, error=f"{where} has the custom_id {name!r} of an earlier line")
    for field, allowed in (("method", ("POST",)), ("url", PATHS)):
        if entry.get(field) not in allowed:
            return BatchRequest(
                name, error=f"{where} has {field}={shown(entry.get(field))}; give {' or '.join(allowed)}"
            )
    if not isinstance(body, dict):
        return BatchRequest(name, error=f"{where} must have an object 'body'")
    for field in ("stream", "background"):
        if body.get(field):
            return BatchRequest(name, error=f"{where} has {field}=true, but a batch needs whole answers; leave it out")
    return BatchRequest(name, entry["url"], body)


class BatchOutput:
    """The output file. Final answers of an earlier run are kept, so that a batch can be resumed.

    `done` are the custom ids that they answer. Devices and pipes are only written to.
    """

    def __init__(self, path: Path, requests: Sequence[BatchRequest]) -> None:
        """Rewrite `path` without lines to be tried again, and open it for appending; its folder is created.

        Raises ConfigError if it answers other requests than `requests`, is not a batch output, or cannot be written.
        """
        self.path = path
        # otherwise a device or a pipe, which is written to and never replaced
        is_file = not path.exists() or path.is_file()
        try:
            kept = [entry for entry in self._read() if _is_final(entry)] if is_file else []
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        self.done = frozenset(entry["custom_id"] for entry in kept)
        strange = self.done - {request.custom_id for request in requests}
        if strange:
            raise ConfigError(
                f"{path} answers {len(strange)} requests that the input does not have, such as {sorted(strange)[0]!r}; "
                "give another output file"
            )
        try:
            if is_file:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(path.name + ".partial")
                partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
                os.replace(partial, path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, answer: BatchAnswer) -> None:
        """Append an answer and flush. Raises ConfigError if it cannot be written (a full disk)."""
        try:
            self._file.write(json.dumps(answer.document) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}; run the same command again to resume"
            ) from error

    def close(self) -> None:
        """Close the file. What could not be written is lost, and `write` has raised an error for it."""
        with suppress(OSError):
            self._file.close()

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                if not line.startswith(START[: len(line)]):
                    self._refuse()
                continue  # cut off when an earlier run was killed
            if not isinstance(entry, dict) or "custom_id" not in entry or "response" not in entry:
                self._refuse()
            if not isinstance(entry["custom_id"], str | None):
                self._refuse()
            yield entry

    def _refuse(self) -> NoReturn:
        raise ConfigError(f"{self.path} exists and is not the output of a batch; give another file")


def _is_final(entry: Mapping[str, Any]) -> bool:
    """Return whether sending the request again would bring the same: it was answered, or refused as wrong."""
    status = member(entry["response"], "status_code")
    final = isinstance(status, int) and (status < 400 or status in WRONG_REQUEST)
    return final and entry["custom_id"] is not None


async def run_batch(
    server: Server,
    requests: Sequence[BatchRequest],
    on_answer: Callable[[BatchAnswer], None],
    *,
    max_concurrency: int,
    stop: asyncio.Event | None = None,
) -> None:
    """Send `requests`, at most `max_concurrency` at once, and call `on_answer` with each answer as it comes.

    Once `stop` is set no more are sent, and this returns when open ones have ended. Raises ServerUnreachableError if no
    connection can be opened, ServerRefusedError if the API key is refused, and what `on_answer` raises; open requests
    then get no answer.
    """
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            if stop is not None and stop.is_set():
                return
            on_answer(await _answer(server, request))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(max_concurrency, len(requests))):
                workers.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _answer(server: Server, request: BatchRequest) -> BatchAnswer:
    if request.error is not None:
        return _line(request, None, {"code": "invalid_line", "message": request.error})
    try:
        reply = await _exchange(server, request)
    except ServerUnreachableError:
        raise
    except ServerError as error:
        return _line(request, None, {"code": "no_answer", "message": str(error)})
    if reply.status == NO_KEY:  # all other requests would be refused, too
        reply.raise_for_status()
    if reply.status >= 400:
        return _line(request, reply, {"code": "refused", "message": str(refusal(reply.status, reply.body))})
    return _line(request, reply, None)


async def _exchange(server: Server, request: BatchRequest) -> Reply:
    """Return the server's answer. While it is busy, retry after each of WAITS_S; the last answer counts."""
    for wait_s in WAITS_S:
        reply = await server.exchange("POST", request.path, request.body)
        if reply.status not in BUSY:
            return reply
        await asyncio.sleep(wait_s)
    return await server.exchange("POST", request.path, request.body)


def _line(request: BatchRequest, reply: Reply | None, error: Mapping[str, str] | None) -> BatchAnswer:
    response, usage = None, None
    if reply is not None:
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        usage = Usage.read(reply.body)
    name = f"batch_req_{uuid.uuid4().hex}"
    document = {"id": name, "custom_id": request.custom_id, "response": response, "error": error}
    return BatchAnswer(document, usage)
