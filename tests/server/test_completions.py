"""/v1/completions through the openai client, beside the same model without a server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion

from forkpoint import LLM, SamplingParams
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.server.logprobs import prompt_starts
from tests.engine.tokenizers import metaspace

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
LONG = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture
def special(tiny_model: Path) -> int:
    """A token that texts leave out."""
    tokenizer = Tokenizer.load(str(tiny_model))
    return next(id for id, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special)


def test_answers_are_those_of_the_engine(client: openai.OpenAI, oracle: LLM) -> None:
    answer = client.completions.create(prompt=LONG, **GREEDY)
    expected = oracle.generate(LONG, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    assert isinstance(answer, Completion)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_prompts_may_be_token_ids(client: openai.OpenAI, oracle: LLM) -> None:
    ids = oracle.generate(LONG, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    text = client.completions.create(prompt=LONG, **GREEDY).choices[0].text
    assert client.completions.create(prompt=list(ids), **GREEDY).choices[0].text == text
    both = client.completions.create(prompt=[list(ids), [1, 2, 3]], **GREEDY)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == text != both.choices[1].text


def test_batches_of_prompts_with_several_completions_each(client: openai.OpenAI) -> None:
    params: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "seed": 3, "n": 2}
    answer = client.completions.create(prompt=["one", "two", "three"], **params)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None and answer.usage.completion_tokens == 36
    assert answer.usage.prompt_tokens == len("onetwothree")
    alone = client.completions.create(prompt="two", **params)
    assert [c.text for c in answer.choices[2:4]] == [c.text for c in alone.choices]


def test_a_stream_of_a_batch_says_the_same(client: openai.OpenAI) -> None:
    prompts = ["first prompt", "second prompt"]
    whole = client.completions.create(prompt=prompts, **GREEDY)
    texts = {0: "", 1: ""}
    ended = {}
    options: Any = {"include_usage": True}
    for chunk in client.completions.create(prompt=prompts, stream=True, stream_options=options, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ended[choice.index] = choice.finish_reason
        last = chunk
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert ended == {0: "length", 1: "length"}
    assert last.usage is not None and last.usage.completion_tokens == 16


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=LONG, logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:i])) for i in range(8)]
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == value == top[token]
        assert len(top) <= 2


def test_log_probabilities_may_be_asked_for_as_in_chats(http: httpx2.Client) -> None:
    """Dspy sends `true` for `logprobs=True`."""
    for given, num_top in ((True, 1), (False, None), (0, 0), ("true", 1)):
        body = {"prompt": "x", "max_tokens": 2, "temperature": 0, "logprobs": given}
        logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        assert (logprobs is None) == (num_top is None)
        if logprobs is not None:
            assert len(logprobs["tokens"]) == 2 and len(logprobs["top_logprobs"][0]) == 1


def test_a_stream_tells_where_each_token_starts(client: openai.OpenAI) -> None:
    """Also of text that waits because a stop string may begin with it."""
    whole = client.completions.create(prompt=LONG, logprobs=0, **GREEDY).choices[0]
    assert whole.logprobs is not None
    stop = [f"{char} never said" for char in whole.text]
    chunks = list(client.completions.create(prompt=LONG, logprobs=0, stop=stop, stream=True, **GREEDY))
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert [offset for part in parts for offset in part.text_offset or ()] == whole.logprobs.text_offset


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_one_character_start_where_it_starts(client: openai.OpenAI, stream: bool) -> None:
    """A token is a byte here. Names of tokens are no part of the text."""
    text = "ünï 😀."
    starts = [at for at, char in enumerate(text) for _ in char.encode()]
    ids = {"return_tokens_as_token_ids": True}
    for extra in ({}, ids):
        answer: Any = client.completions.create(
            prompt=text, echo=True, logprobs=0, **GREEDY, stream=stream, extra_body={**extra, "allowed_token_ids": [65]}
        )
        parts = [choice.logprobs for chunk in (answer if stream else [answer]) for choice in chunk.choices]
        offsets = [offset for part in parts if part for offset in part.text_offset]
        assert offsets == [*starts, *range(len(text), len(text) + 8)]
        assert (parts[0].tokens[2] == "n") == (extra != ids)


def test_tokens_that_a_text_leaves_out_have_no_length_there(client: openai.OpenAI, special: int) -> None:
    for echo, start in ((False, 0), (True, 2)):
        fields = {"allowed_token_ids": [special], "ignore_eos": True}
        answer = client.completions.create(prompt="ab", echo=echo, logprobs=0, **GREEDY, extra_body=fields).choices[0]
        assert answer.logprobs is not None and len(answer.text) == start
        assert answer.logprobs.text_offset == [*range(start), *[start] * 8]


@pytest.mark.parametrize("first", ["", "<s>"])
def test_tokens_of_a_prompt_start_where_its_text_has_them(first: str) -> None:
    """SentencePiece puts a space before a text. A text that is given has no special tokens either."""
    tokenizer = metaspace()
    ids = tokenizer.encode(f"{first}the dog café", add_special_tokens=False)
    data = [tokenizer.token_bytes(token) for token in ids]
    starts = prompt_starts(data, len("the dog café"))
    words = [token.decode().strip() for token in data]
    assert starts[words.index("caf")] == len("the dog ") and starts[words.index("é")] == len("the dog caf")
    assert starts[0] == 0 and starts == sorted(starts)


def test_echo_repeats_the_prompt(client: openai.OpenAI, oracle: LLM) -> None:
    text = client.completions.create(prompt=LONG, **GREEDY).choices[0].text
    assert client.completions.create(prompt=LONG, echo=True, **GREEDY).choices[0].text == LONG + text
    ids = list(oracle.generate(LONG, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids)
    chunks = list(client.completions.create(prompt=ids, echo=True, stream=True, **GREEDY))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == LONG + text


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_log_probabilities_bypass_the_cache_and_say_so(client: openai.OpenAI, oracle: LLM, stream: bool) -> None:
    expected = oracle.generate(LONG, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1), use_tqdm=False)[0]
    answers = []
    for _ in range(2):
        answer: Any = client.completions.create(
            model="tiny", prompt=LONG, echo=True, logprobs=1, max_tokens=1, temperature=0, stream=stream
        )
        chunks = list(answer) if stream else [answer]
        extra = chunks[-1].model_extra["cache"]
        assert extra.pop("num_restored_tokens") == extra.pop("num_peer_tokens") == 0
        assert extra == {"num_tokens": 0, "kv_num_tokens": 0, "num_image_tokens": 0, "miss": "bypassed"}
        parts = [choice.logprobs for chunk in chunks for choice in chunk.choices]
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        assert "".join(tokens[:-1]) == LONG
        offsets = [offset for part in parts for offset in part.text_offset]
        assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        answers.append(values)
    assert answers[0] == answers[1]
    assert answers[0][0] is None
    told = [next(iter(entry.values())).logprob for entry in (expected.prompt_logprobs or ())[1:] if entry]
    assert answers[0][1:-1] == pytest.approx(told, abs=1e-4)


def test_a_prompt_alone_can_be_scored(client: openai.OpenAI) -> None:
    params: dict[str, Any] = {"model": "tiny", "prompt": "score me", "echo": True, "logprobs": 0}
    answer = client.completions.create(max_tokens=0, **params)
    assert answer.choices[0].text == "score me"
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list("score me")
    longer = client.completions.create(max_tokens=2, **params).choices[0].logprobs
    assert longer is not None and longer.token_logprobs is not None
    assert longer.token_logprobs[:8] == answer.choices[0].logprobs.token_logprobs


def test_an_echoed_prompt_has_its_scores_apart_where_no_others_are_asked_for(http: httpx2.Client) -> None:
    body = {"prompt": "score me", "echo": True, "prompt_logprobs": 1, "max_tokens": 2, "ignore_eos": True}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"].startswith("score me") and choice["logprobs"] is None
    assert len(choice["prompt_logprobs"]) == len("score me")


def test_logit_bias(client: openai.OpenAI) -> None:
    forced = client.completions.create(prompt="x", logit_bias={"65": 100}, **GREEDY)
    assert forced.choices[0].text == "AAAAAAAA"


def test_the_default_is_sixteen_tokens(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["model"] == "tiny"


def test_another_prompt_can_start_at_a_breakpoint(client: openai.OpenAI) -> None:
    shared = "Shared by two prompts. ".ljust(150, "s")

    def parted(salt: str, **extra: Any) -> dict[str, Any]:
        body = {"cache_salt": salt, **extra}
        client.completions.create(prompt=shared + "a" * 200, extra_body=body, **GREEDY)
        second = client.completions.create(prompt=shared + "b" * 200, extra_body={"cache_salt": salt}, **GREEDY)
        assert second.model_extra is not None
        found = dict(second.model_extra["cache"])
        assert found.pop("num_restored_tokens") == found.pop("num_peer_tokens") == 0
        return found

    none = {"num_tokens": 0, "kv_num_tokens": 0, "num_image_tokens": 0, "miss": "cold"}
    assert parted("breakpoint", cache_breakpoints=[150]) == {**none, "num_tokens": 128, "kv_num_tokens": 128}
    assert parted("none") == {**none, "kv_num_tokens": 128, "miss": "no_checkpoint"}


@pytest.mark.parametrize("stream", [False, True])
def test_invocations_answer_both_kinds_of_completion(http: httpx2.Client, stream: bool) -> None:
    """SageMaker sends every request to this address."""
    chat = {**GREEDY, "messages": [{"role": "user", "content": LONG}], "stream": stream}
    text = {**GREEDY, "prompt": LONG, "stream": stream}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        own, asked = (http.post(address, json=body).text for address in (path, "/invocations"))
        kind = re.search(r'"object":"[^"]*"', own)
        assert kind is not None and kind[0] in asked
        said = ["".join(re.findall(r'"(?:content|text)":"([^"]*)"', reply)) for reply in (own, asked)]
        assert said[0] == said[1] and said[0]
    refusal = http.post("/invocations", json={"inputs": "hello"})
    assert refusal.status_code == 400 and "prompt" in refusal.json()["error"]["message"]
