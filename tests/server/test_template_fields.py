"""Variables of chat templates, and flags of the server that change what its fields mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.running import RunningServer, start_server
from tests.server.test_fields import CHAT, MESSAGES, TEXT, ask

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}<|im_start|>{{ message.role }}\n"
    "{{ part.text }}<|im_end|>\n{% endfor %}{% endfor %}{% for document in documents or [] %}[{{ document.text }}]"
    "{% endfor %}effort={{ reasoning_effort }} thinking={{ enable_thinking }} style={{ style }}\n"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def configured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose template shows its variables, reads parts, and opens a reasoning part."""
    folder = tmp_path_factory.mktemp("configured")
    flags = ["--chat-template", TEMPLATE, "--default-chat-template-kwargs", '{"style": "calm"}', "--max-logprobs", "2"]
    flags += ["--response-role", "model", "--enable-force-include-usage", "--served-model-name", "tiny"]
    flags += ["--override-generation-config", '{"top_k": 1, "max_new_tokens": 5}']
    running = start_server(tiny_model, folder, *flags)
    try:
        yield running.wait_ready()
    finally:
        assert running.stop() == 0, running.log


def shown(server: RunningServer, **fields: Any) -> str:
    """The prompt that the template makes."""
    with server.client() as http:
        reply = ask(http, CHAT, return_token_ids=True, **fields).json()
        return str(http.post("/detokenize", json={"tokens": reply["prompt_token_ids"]}).json()["prompt"])


def test_variables_of_the_template(configured: RunningServer) -> None:
    assert "effort= thinking= style=calm" in shown(configured)
    assert "effort=low thinking=True" in shown(configured, reasoning_effort="low")
    assert "effort=none thinking=False" in shown(configured, reasoning_effort="none")
    own = {"enable_thinking": "own", "style": "loud"}
    assert "effort=high thinking=own style=loud" in shown(configured, reasoning_effort="high", chat_template_kwargs=own)
    for off in (
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"thinking": {"type": "enabled"}, "enable_thinking": False},
    ):
        assert "effort= thinking=False" in shown(configured, **off)
    assert "effort= thinking=True" in shown(configured, thinking={"type": "enabled", "budget_tokens": 100})
    assert "effort= thinking= " in shown(configured, thinking={"type": "adaptive"})
    assert "effort=low thinking=True" in shown(configured, reasoning={"effort": "low", "max_tokens": 5})
    assert "effort=none thinking=False" in shown(configured, reasoning={"effort": "none"})
    assert "[one][two]" in shown(configured, documents=[{"text": "one"}, {"text": "two"}])
    with configured.client() as http:
        told = http.post(
            "/tokenize", json={"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": 1}}
        ).json()
        text = http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
    assert "thinking=1 style=calm" in text
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    told = shown(configured, messages=[{"role": "user", "content": parts}])
    assert told.count("<|im_start|>") == 2  # the template reads parts, so it is given them


def test_reasoning_has_both_names_or_none(configured: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{configured.url}/v1", api_key="x", max_retries=0)
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}
    message: Any = client.chat.completions.create(**options).choices[0].message
    assert message.reasoning and message.reasoning == message.reasoning_content
    assert message.content is None and message.role == "model"
    chunks: list[Any] = list(client.chat.completions.create(**options, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "model"
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == message.reasoning
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        hidden: Any = client.chat.completions.create(**options, extra_body=fields)
        assert hidden.choices[0].message.content == "" and not hidden.choices[0].message.reasoning


def test_flags_of_the_server(configured: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{configured.url}/v1", api_key="x", max_retries=0)
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5  # the model's limit
    with configured.client() as http:
        greedy = [ask(http, TEXT, temperature=0).json(), ask(http, TEXT, max_tokens=3).json()]
        assert greedy[0]["choices"][0]["text"] == greedy[1]["choices"][0]["text"]  # top_k is 1 by default
        assert ask(http, TEXT, max_tokens=50).json()["usage"]["completion_tokens"] <= 5
        assert ask(http, TEXT, logprobs=2).status_code == 200
        reply = ask(http, TEXT, logprobs=3)
        assert reply.status_code == 400 and "--max-logprobs" in reply.json()["error"]["message"]
        assert ask(http, CHAT, logprobs=True, top_logprobs=3).status_code == 400
    assert "default sampling parameters: top_k=1, max_tokens=5, from --override-generation-config" in configured.log
