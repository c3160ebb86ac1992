"""GET /tokenizer_info, as lm-eval's remote tokenizer uses it next to /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path

import httpx2
import jinja2

from forkpoint.engine.tokenizer import Tokenizer
from tests.server.conftest import MAX_MODEL_LEN


def test_a_client_can_tokenise_at_the_server(http: httpx2.Client, tiny_model: Path) -> None:
    info = http.get("/tokenizer_info").json()
    tokenizer = Tokenizer.load(str(tiny_model))
    assert info["eos_token"] == tokenizer.hf.eos_token and info["model_max_length"] == MAX_MODEL_LEN
    assert {"bos_token", "pad_token", "unk_token", "tokenizer_class"} <= info.keys()
    said = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert http.post("/tokenize", json=said).json()["tokens"] == [tokenizer.hf.eos_token_id]
    messages = [{"role": "user", "content": "hello"}]
    text = jinja2.Template(info["chat_template"]).render(messages=messages, add_generation_prompt=True)
    ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert ids == http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
