"""The scripted model says what it is given, in the given tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripted import SERVED_NAME, chat_body, scripted_server, write_scripted_model

SCRIPTS = {
    "plain": ["Hello", " there, ", "K\u00f6ln \u6771\u4eac \U0001f642\n", "\x00 <b>", " the end"],
    "again": ["no ", "no ", "no ", "a", "no ", "no "],
}


def test_a_script_is_said_word_for_word(tmp_path: Path) -> None:
    with scripted_server(tmp_path, SCRIPTS, after={"?": "again"}) as server, server.client() as client:

        def said(path: str, **body: object) -> tuple[str, int]:
            answer = client.post(path, json={"max_tokens": 50, **body}).raise_for_status().json()
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "stop"
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            return text, answer["usage"]["completion_tokens"]

        plain, again = ("".join(SCRIPTS["plain"]), 6), ("".join(SCRIPTS["again"]), 4)
        assert said("/v1/chat/completions", **chat_body("plain")) == plain
        assert said("/v1/chat/completions", **chat_body("again")) == again
        by_text = {"model": SERVED_NAME, "messages": [{"role": "user", "content": "again"}]}
        assert said("/v1/chat/completions", **by_text) == again
        assert said("/v1/completions", model=SERVED_NAME, prompt="so?") == again


def test_pieces_that_are_taken_are_joined(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path, SCRIPTS)
    assert model.tokens["plain"] == tuple(SCRIPTS["plain"])
    assert model.tokens["again"] == ("no ", "no no ", "ano no ")
    with pytest.raises(ValueError, match="'b' is a token"):
        write_scripted_model(tmp_path, {"a": ["x"], "b": ["x"]})
