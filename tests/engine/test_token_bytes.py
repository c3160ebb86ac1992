"""The bytes of tokens: joined they are the text, wherever it is cut into tokens."""

from __future__ import annotations

import pytest

from forkpoint.engine.outputs import logprob_dict
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.sched.plan import TokenLogprobs
from tests.engine.tokenizers import byte_level, metaspace

TEXTS = ["the quick brown fox", "naïve café \U0001f642 東京", "a\n\n\tb  c", "\x00\x7f­ÿ", "👩‍💻", "\ufffd"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens_are_the_text(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_sentencepiece_tokens_are_the_text_after_a_space(text: str) -> None:
    tokenizer = metaspace()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" " + text.encode()


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte level", "metaspace"])
def test_bytes_of_special_tokens_are_their_text(tokenizer: Tokenizer) -> None:
    [token] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokenizer.token_bytes(token) == b"<|im_end|>"


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte level", "metaspace"])
def test_bytes_of_every_token_are_its_text(tokenizer: Tokenizer) -> None:
    for token in range(tokenizer.backend.get_vocab_size()):
        shown = tokenizer.decode([token], skip_special_tokens=False)
        read = tokenizer.token_bytes(token).decode("utf-8", "replace")
        if "\ufffd" not in shown:
            assert read.removeprefix(" ") == shown.removeprefix(" "), token


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte level", "metaspace"])
def test_texts_of_tokens_with_log_probabilities_are_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("café the dog", add_special_tokens=False)
    told = [logprob_dict(TokenLogprobs(token, -1.0, 1, (), ()), tokenizer)[token].decoded_token for token in ids]
    assert "".join(told).removeprefix(" ") == "café the dog"


def test_an_id_without_a_token_has_no_bytes() -> None:
    assert byte_level().token_bytes(10**6) == b""
