"""Thinking blocks of the Messages API, which clients send back with their next request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from forkpoint.server.messages.history import chat_messages
from tests.server.running import RunningServer
from tests.server.test_messages import ask, ignore


@pytest.fixture
def client(thinker: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker.url, api_key="one", max_retries=0) as client:
        yield client


def count(client: anthropic.Anthropic, block: dict[str, Any]) -> int:
    """The tokens of a conversation whose answer is `block`."""
    messages: list[Any] = [*ask("Think")["messages"], {"role": "assistant", "content": [block]}]
    messages.append({"role": "user", "content": "So?"})
    return client.messages.count_tokens(model="tiny", messages=messages).input_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", [None, "summarized"])
def test_a_block_that_is_shown_is_signed(client: anthropic.Anthropic, display: str | None, stream: bool) -> None:
    """pi sends a block without a signature back as text of the answer."""
    thinking: Any = {"type": "adaptive", **({"display": display} if display else {})}
    block, kinds = answer(client, thinking, stream)
    assert block["thinking"] and block["signature"]
    assert not stream or "thinking_delta" in kinds
    assert count(client, block) == count(client, {**block, "signature": ""})


@pytest.mark.parametrize("stream", [False, True])
def test_a_block_that_is_omitted_comes_back_by_its_signature(client: anthropic.Anthropic, stream: bool) -> None:
    """Claude Code asks for it where it does not show the thinking, and sends the block back in the next request."""
    shown, _ = answer(client, {"type": "adaptive"}, stream)
    block, kinds = answer(client, {"type": "adaptive", "display": "omitted"}, stream)
    assert block["thinking"] == "" and "thinking_delta" not in kinds
    assert count(client, block) == count(client, shown) > count(client, {**block, "signature": ""})


def answer(client: anthropic.Anthropic, thinking: Any, stream: bool) -> tuple[dict[str, Any], list[str]]:
    """The only block of an answer, and the types of the deltas of a stream."""
    asked = ask("Think", thinking=thinking, extra_body={"temperature": 0})
    if not stream:
        [block] = client.messages.create(**asked).content
        return block.model_dump(), []
    with client.messages.stream(**asked) as events:
        kinds: list[str] = [event.delta.type for event in events if event.type == "content_block_delta"]
        [block] = events.get_final_message().content
    assert kinds[-1] == "signature_delta"
    return block.model_dump(), kinds


@pytest.mark.parametrize("signature", ["", "EpYCCkYIBxgCKkA=", None])
def test_a_signature_of_another_server_holds_no_thinking(signature: str | None) -> None:
    """A conversation may have begun with Anthropic's servers, which encrypt the thinking."""
    block = {"type": "thinking", "thinking": "", "signature": signature}
    [message] = chat_messages("assistant", [block, {"type": "text", "text": "Yes"}], ignore)
    assert message == {"role": "assistant", "content": "Yes"}
