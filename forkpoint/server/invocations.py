"""/invocations, the one address that SageMaker sends requests to."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from forkpoint.checks import json_value, member
from forkpoint.server.api_answer import answered
from forkpoint.server.chat.endpoint import ChatAnswer, PreparedChat, prepare_chat
from forkpoint.server.completions.endpoint import PreparedCompletion, TextAnswer, prepare_completion
from forkpoint.server.service import Service
from forkpoint.server.texts import Texts


async def invoke(service: Service, request: Request) -> Any:
    """Answer a body with `messages` as a chat completion, and any other as a text completion. Raises as `create`."""
    prepared = await service.prepare(prepare_invocation, request)
    if isinstance(prepared, PreparedChat):
        return await answered(service, prepared, ChatAnswer, request)
    return await answered(service, prepared, TextAnswer, request)


def prepare_invocation(texts: Texts, data: bytes) -> PreparedChat | PreparedCompletion:
    """Prepare a completion of the kind that the body asks for. Runs in a reader's process. Raises as both kinds do."""
    if member(json_value(data), "messages") is not None:
        return prepare_chat(texts, data)
    return prepare_completion(texts, data)
