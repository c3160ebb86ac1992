"""What a router asks before it chooses a replica: the blocks that a request's prompt begins with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.requests import Request

from forkpoint.cache.hashing import HashChain
from forkpoint.config import BLOCK_SIZE
from forkpoint.routing.wire import sent_hash
from forkpoint.server.chat import prepare_chat
from forkpoint.server.completions import prepare_completion
from forkpoint.server.errors import HTTPError
from forkpoint.server.messages.endpoint import prepare_message
from forkpoint.server.responses.answer import PreparedResponse
from forkpoint.server.responses.endpoint import prepare_response
from forkpoint.server.sampling import Asked
from forkpoint.server.service import Service
from forkpoint.server.texts import Prepare, Texts


class PrefixReply(BaseModel):
    """Hashes of the blocks of a prompt that a request could take from a cache, as events name them; of a request with
    several prompts those of the first. None where nothing is published of what it could take."""

    block_hashes: list[int]


def add_prefix_route(app: FastAPI, service: Service) -> None:
    @app.post("/prefix/{path:path}", response_model=PrefixReply, include_in_schema=False)
    async def prefix(path: str, request: Request) -> Any:
        """The body is that of a request to `path`. Raises HTTPError or ForkpointError as that does."""
        if path not in PREPARED:
            raise HTTPError(404, f"{path[:80]!r} takes no prompt; give one of {', '.join(PREPARED)}", "not_found_error")
        salted = service.config.salts_by_key
        reply = await service.prepare(partial(read_prefix, path, salted), request)
        return Response(reply.model_dump_json(), media_type="application/json")


def read_prefix(path: str, salted: bool, texts: Texts, data: bytes) -> PrefixReply:
    """Runs in a reader's process."""
    asked = PREPARED[path](texts, data)
    if isinstance(asked, PreparedResponse):
        asked = asked.turn
    # A text: it goes on from a response that one replica has stored.
    if isinstance(asked, str) or salted or asked.params.cache_salt:
        return PrefixReply(block_hashes=[])
    token_ids = asked.prompts[0].token_ids
    chain = HashChain("")
    chain.extend(token_ids)
    usable = (len(token_ids) - 1) // BLOCK_SIZE
    return PrefixReply(block_hashes=[sent_hash(name) for name in chain.hashes[:usable]])


PREPARED: Final[Mapping[str, Prepare[Asked | PreparedResponse | str]]] = MappingProxyType(
    {
        "v1/chat/completions": prepare_chat,
        "v1/completions": prepare_completion,
        "v1/messages": prepare_message,
        "v1/responses": prepare_response,
    }
)
