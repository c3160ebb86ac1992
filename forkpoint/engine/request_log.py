"""Writes one JSON line for every request that ended: enough to replay it, without its text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from forkpoint.cache.hashing import HashChain
from forkpoint.config import BLOCK_SIZE
from forkpoint.errors import ConfigError
from forkpoint.obs.logs import LOGGER
from forkpoint.params import FinishReason
from forkpoint.sched.request import Request, RequestUpdate


class RequestLog:
    """Appends lines to a file that `forkpoint simulate` reads. Raises ConfigError if it cannot be opened.

    By default prompts and outputs are recorded as hashes of their 64-token blocks. The hash key is drawn at every start
    and stored nowhere, so that equal prefixes are visible but texts cannot be guessed. With `token_ids` the tokens
    themselves are recorded.
    """

    def __init__(self, path: str, token_ids: bool = False) -> None:
        self._key = secrets.token_hex(16)
        self._token_ids = token_ids
        try:
            self._file: TextIO | None = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"log_requests={path!r} cannot be written: {error.strerror}; give another file"
            ) from error

    def write(self, request: Request, reason: FinishReason) -> None:
        """Record a request that ended. If writing fails, a warning says so, the log ends, the engine continues."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(self._record(request, reason)) + "\n")
        except OSError as error:
            LOGGER.warning("the request log ends here: %s", error)
            self.close()

    def write_ends(self, updates: Iterable[RequestUpdate]) -> None:
        """Record the requests that ended in `updates`."""
        for update in updates:
            if update.finish_reason is not None:
                self.write(update.request, update.finish_reason)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _record(self, request: Request, reason: FinishReason) -> dict[str, Any]:
        cache = request.cache
        record: dict[str, Any] = {
            "request_id": request.id,
            "ended_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "arrival_s": request.arrival_s,
            "first_scheduled_s": request.first_scheduled_s,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": len(request.output_token_ids),
            "num_cached_tokens": cache.num_cached_tokens,
            "kv_num_tokens": cache.kv_num_tokens,
            "miss": cache.miss.value if cache.miss is not None else None,
            "finish_reason": reason.value,
            "awaits_tool": request.awaits_tool,
            "num_preemptions": request.num_preemptions,
            "breakpoints": list(request.breakpoints),
        }
        if self._token_ids:
            return {**record, "token_ids": request.all_token_ids().tolist()}
        chain = HashChain(self._key + request.params.cache_salt, images=request.images)
        chain.extend(request.all_token_ids())
        return {**record, "block_size": BLOCK_SIZE, "block_hashes": [block_hash.hex() for block_hash in chain.hashes]}
