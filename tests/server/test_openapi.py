"""The OpenAPI document is true: no server error, and every answer is as it says, for generated requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.running import RunningServer

# Not that every valid body is accepted: what the vocabulary and the context hold is not the document's to say.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
SETTINGS = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)
OPERATIONS = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/responses/compact",
    "GET /v1/responses/{name}",
    "GET /v1/responses/{name}/input_items",
    "DELETE /v1/responses/{name}",
    "POST /v1/responses/{name}/cancel",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /load",
    "GET /tokenizer_info",
    "GET /version",
    "GET /metrics",
    "POST /reset_prefix_cache",
    "POST /check_integrity",
}


def operations(server: RunningServer) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in schema.get_all_operations():
        yield result.ok()


def test_every_endpoint_is_documented(server: RunningServer) -> None:
    assert {operation.label for operation in operations(server)} == OPERATIONS


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_documented(server: RunningServer, mode: GenerationMode) -> None:
    statuses: Counter[int] = Counter()
    for operation in operations(server):
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing of it can be wrong

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
                _keep_short(case.body)
            reply = case.call_and_validate(checks=CHECKS, timeout=60)
            if case.operation.body:
                statuses[reply.status_code] += 1

        check()
    wanted = 200 if mode is GenerationMode.POSITIVE else 400
    assert statuses[wanted] >= 5, statuses  # most bodies that the document allows name unknown tokens or long contexts


def _keep_short(body: dict[str, Any]) -> None:
    """Bound the work of a valid request: 128 completions up to the end of the context say no more than 2 of 4."""
    for name, most in (("n", 2), ("max_tokens", 4), ("max_completion_tokens", 4), ("max_output_tokens", 4)):
        value = body.get(name)
        if value is None or (type(value) is int and value > most):
            body[name] = most
    body.pop("model", None)
    if isinstance(body.get("prompt"), list):
        del body["prompt"][4:]
