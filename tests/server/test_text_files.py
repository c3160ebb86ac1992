"""Files of requests that hold a text are read in all APIs; others are refused."""

from __future__ import annotations

import base64
from typing import Any

import httpx2
import pytest

from forkpoint.server.text_files import decoded_text, file_text

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/v1/messages": {"max_tokens": 1, "model": "tiny"},
}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def asked(path: str, data: bytes | None) -> dict[str, Any]:
    """A request with a file, or with the same text without data."""
    plain = {"type": "input_text" if path.endswith("responses") else "text", "text": "a.csv\nn,é\n"}
    part: dict[str, Any] = plain
    if data is not None and path.endswith("messages"):
        source = {"type": "base64", "media_type": "text/csv", "data": encoded(data)}
        part = {"type": "document", "title": "a.csv", "source": source}
    elif data is not None:
        file = {"filename": "a.csv", "file_data": f"data:text/csv;base64,{encoded(data)}"}
        part = {"type": "input_file", **file} if path.endswith("responses") else {"type": "file", "file": file}
    name = "input" if path.endswith("responses") else "messages"
    return {**BODIES[path], name: [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize("path", BODIES)
def test_a_text_file_is_read_with_its_name(http: httpx2.Client, path: str) -> None:
    def num_tokens(data: bytes | None) -> int:
        reply = http.post(path, json=asked(path, data)).raise_for_status().json()
        return int(reply["usage"].get("input_tokens") or reply["usage"]["prompt_tokens"])

    assert num_tokens("n,é\n".encode()) == num_tokens(None)


@pytest.mark.parametrize("path", BODIES)
def test_other_files_are_refused(http: httpx2.Client, path: str) -> None:
    reply = http.post(path, json=asked(path, b"%PDF-1.7 text"))
    assert reply.status_code == 400 and "send the text" in reply.text, reply.text


def test_what_a_text_is() -> None:
    assert decoded_text(encoded(b"a\n")) == "a\n" and decoded_text(encoded("\ufeffé".encode())) == "é"
    for data in (None, 5, "a", "%%%%", encoded(b"\xff\xfe"), encoded(b"a\0"), encoded(b"{\\rtf1}"), "data:,a"):
        assert decoded_text(data) is None
    assert file_text({"type": "input_file", "file_data": encoded(b"a")}) == "a"
    assert file_text({"type": "file", "file": {"file_id": "x"}}) is None and file_text({"type": "text"}) is None
