"""/v1/chat/completions through the client that most people use, beside the same model without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from forkpoint import LLM, SamplingParams
from tests.server.running import RunningServer

SYSTEM = "You answer briefly. " * 12
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}


def conversation(*texts: str, system: str = SYSTEM) -> list[Any]:
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *turns]


def cache_of(answer: Any) -> dict[str, Any]:
    """The extension object `cache`, which the client's types do not know."""
    return answer.model_extra["cache"]


def test_answers_are_those_of_the_engine(client: openai.OpenAI, oracle: LLM) -> None:
    messages = conversation("What is a fork?")
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    expected = oracle.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]
    assert isinstance(answer, ChatCompletion)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_an_answer_has_all_fields_that_openai_requires(http: httpx2.Client) -> None:
    body = {**GREEDY, "messages": conversation("What is a fork?"), "logprobs": True}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert {"role", "content", "refusal"} <= choice["message"].keys() and choice["message"]["refusal"] is None
    assert choice["logprobs"].keys() == {"content", "refusal"} and choice["logprobs"]["refusal"] is None


def test_usage_counts_the_tokens_of_reasoning(thinker: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="one", max_retries=0)
    asked: dict[str, Any] = {"messages": conversation("Think"), **GREEDY}
    usages = [client.chat.completions.create(**asked).usage]
    usages += [
        chunk.usage
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        if chunk.usage
    ]
    details = [usage.completion_tokens_details for usage in usages if usage is not None]
    assert [found.reasoning_tokens for found in details if found is not None] == [12, 12]


def test_a_later_turn_reuses_the_earlier_ones(client: openai.OpenAI) -> None:
    messages = conversation("Tell me about rivers, " * 4)
    first = client.chat.completions.create(messages=messages, **GREEDY)
    said = str(first.choices[0].message.content)
    longer = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(messages=longer, **GREEDY)
    assert first.usage and second.usage and second.usage.prompt_tokens_details
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= (first.usage.prompt_tokens - 64) // 64 * 64 > 64
    assert cache_of(second)["num_tokens"] == cached
    assert cache_of(second)["kv_num_tokens"] >= cached


def test_conversations_part_at_the_end_of_a_message(client: openai.OpenAI, http: httpx2.Client) -> None:
    system = "Parting is such sweet sorrow. " * 7
    client.chat.completions.create(messages=conversation("First question", system=system), **GREEDY)
    other = client.chat.completions.create(messages=conversation("Another one", system=system), **GREEDY)
    tokens = http.post("/tokenize", json={"messages": conversation("Another one", system=system)}).json()
    end_of_system = tokens["cache_breakpoints"][0]
    assert cache_of(other)["num_tokens"] == end_of_system // 64 * 64 > 0


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    messages = conversation("Stream this")
    whole = client.chat.completions.create(messages=messages, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert cache_of(chunks[-1])["num_tokens"] == chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_stream_reports_usage_only_where_asked(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(messages=conversation("x"), stream=True, n=2, **GREEDY))
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert cache_of(chunks[-1])["num_tokens"] >= 0
    assert sorted({choice.index for chunk in chunks for choice in chunk.choices}) == [0, 1]


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(messages=conversation("x"), stream=True, stream_options=options, **GREEDY)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts) and len(counts) > 2 and counts[-1] == 12


def test_seeds_make_answers_repeatable_and_n_makes_them_differ(client: openai.OpenAI, oracle: LLM) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny", messages=conversation("Roll a die"), max_tokens=12, seed=seed, n=3
        )
        return [choice.message.content for choice in answer.choices]

    first = texts(5)
    assert first == texts(5) != texts(6)
    assert len(set(first)) == 3
    params = SamplingParams(max_tokens=12, seed=5, n=3)
    expected = oracle.chat(conversation("Roll a die"), params, use_tqdm=False)[0]
    assert first == [completion.text for completion in expected.outputs]


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    messages = conversation("Stop me")
    whole = str(client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content)
    stop = whole[4:7]
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            messages=messages, stop=[stop, "never said"], stream=stream, **GREEDY
        )
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        told = "".join((c.delta.content or "") if stream else c.message.content for c in choices)
        assert told == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].model_extra["stop_reason"] == stop


def test_log_probabilities(client: openai.OpenAI, oracle: LLM) -> None:
    messages = conversation("How likely?")
    answer = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **GREEDY)
    expected = oracle.chat(messages, SamplingParams(temperature=0, max_tokens=12, logprobs=3), use_tqdm=False)[0]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry, one in zip(logprobs.content, expected.outputs[0].logprobs or (), strict=True):
        chosen = next(iter(one.values()))
        assert entry.logprob == pytest.approx(chosen.logprob, abs=1e-4)
        assert entry.bytes == list(entry.token.encode())
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and values[0] == entry.logprob
    chunks = client.chat.completions.create(messages=messages, logprobs=True, stream=True, **GREEDY)
    told = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs and c.logprobs.content]
    assert [entry.token for part in told for entry in part] == [entry.token for entry in logprobs.content]
    assert all(entry.top_logprobs == [] for part in told for entry in part)


def test_fields_of_other_engines_are_understood(client: openai.OpenAI) -> None:
    greedy = client.chat.completions.create(messages=conversation("Extra"), **GREEDY).choices[0].message.content
    hot: dict[str, Any] = {"model": "tiny", "temperature": 1.5, "max_tokens": 12, "messages": conversation("Extra")}
    assert client.chat.completions.create(**hot, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert client.chat.completions.create(**hot, extra_body={"min_p": 1.0}).choices[0].message.content == greedy
    everything = {
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 12,
        "stop_token_ids": [257],
        "skip_special_tokens": False,
        "priority": 0,
        "cache_breakpoints": [70, 128],
    }
    answer = client.chat.completions.create(**hot, extra_body=everything, user="me", metadata={"a": "b"}, store=False)
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_stop_token_ids_and_the_reason(client: openai.OpenAI, oracle: LLM) -> None:
    messages = conversation("End by id")
    ids = oracle.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0].outputs[0].token_ids
    answer = client.chat.completions.create(messages=messages, extra_body={"stop_token_ids": [ids[5]]}, **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra is not None and answer.choices[0].model_extra["stop_reason"] == ids[5]
    assert answer.usage is not None and answer.usage.completion_tokens == ids.index(ids[5]) + 1


def test_a_salt_keeps_prefixes_apart(client: openai.OpenAI) -> None:
    messages = conversation("Who may see this?", system="Private. " * 20)

    def ask(salt: str) -> dict[str, Any]:
        return cache_of(client.chat.completions.create(messages=messages, extra_body={"cache_salt": salt}, **GREEDY))

    assert ask("a")["num_tokens"] == 0
    assert ask("a")["num_tokens"] > 0
    other = ask("b")
    assert other["num_tokens"] == 0 and other["miss"] == "cold"


def test_the_last_message_can_be_carried_on(client: openai.OpenAI, oracle: LLM) -> None:
    messages = [*conversation("Count"), {"role": "assistant", "content": "One, two"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    marked: list[Any] = [[*messages[:-1], {**messages[-1], mark: True}] for mark in ("prefix", "partial")]
    answers = [client.chat.completions.create(messages=messages, extra_body=extra, **GREEDY)]
    answers += [client.chat.completions.create(messages=each, **GREEDY) for each in marked]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = oracle.chat(messages, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)[
        0
    ]
    assert [answer.choices[0].message.content for answer in answers] == [expected.outputs[0].text] * 3


def test_without_a_limit_an_answer_ends_with_the_context(http: httpx2.Client) -> None:
    body = {"messages": conversation("Go on for ever"), "ignore_eos": True, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_many_at_once_are_answered_as_one_by_one(server: Any, client: openai.OpenAI) -> None:
    asked = [conversation(f"Question {i}") for i in range(6)]
    alone = [client.chat.completions.create(messages=m, **GREEDY).choices[0].message.content for m in asked]

    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as many:
            answers = await asyncio.gather(*(many.chat.completions.create(messages=m, **GREEDY) for m in asked))
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask_all()) == alone
