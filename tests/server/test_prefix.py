"""A server tells routers what its cache holds and what a request begins with; the two are of one language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from forkpoint.routing.feed import EventFeed
from tests.engine.test_events import wait_for
from tests.server.conftest import EVENTS
from tests.server.running import RunningServer

LONG = "".join(f"the {number}th of many words, " for number in range(12))


@pytest.fixture
def feed(server: RunningServer) -> Iterator[EventFeed]:
    found = EventFeed(**{name: at.format(server.log_path.parent) for name, at in EVENTS.items()})
    yield found
    found.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "one " + LONG}]}),
        ("v1/completions", {"prompt": "two " + LONG}),
        ("v1/completions", {"prompt": [[number * number % 250 for number in range(300)]]}),
        ("v1/messages", {"messages": [{"role": "user", "content": "three " + LONG}]}),
        ("v1/responses", {"input": "four " + LONG}),
    ],
)
def test_what_is_published_is_what_the_next_request_finds(
    http: httpx2.Client, feed: EventFeed, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "max_output_tokens" if path == "v1/responses" else "max_tokens": 1}
    hashes = http.post(f"/prefix/{path}", json=body).json()["block_hashes"]
    assert hashes and feed.index.restorable(hashes) == 0
    assert http.post(path, json=body).status_code == 200
    wait_for(lambda: feed.index.restorable(hashes) > 0)
    assert cached_tokens(http.post(path, json=body).json()["usage"]) == 64 * feed.index.restorable(hashes)


def cached_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    found: int = usage["cache_read_input_tokens"] if "cache_read_input_tokens" in usage else details["cached_tokens"]
    return found


def test_a_salted_prompt_tells_nothing_and_a_wrong_one_why(http: httpx2.Client) -> None:
    body = {"prompt": LONG, "max_tokens": 1}
    assert http.post("/prefix/v1/completions", json={**body, "cache_salt": "mine"}).json() == {"block_hashes": []}
    assert http.post("/prefix/v1/responses", json={"input": "on", "previous_response_id": "resp_1"}).json() == {
        "block_hashes": []
    }
    refused = http.post("/prefix/v1/completions", json={**body, "max_tokens": "many"})
    assert refused.status_code == 400 and "max_tokens" in refused.text
    assert http.post("/prefix/v1/models", json=body).status_code == 404
