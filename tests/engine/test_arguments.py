"""Whatever the public API is given, it answers or raises an error of its own; the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from forkpoint.config import EngineConfig
from forkpoint.engine.llm import LLM
from forkpoint.errors import ConfigError, ForkpointError, InvalidParamsError, InvalidPromptError, RequestError
from forkpoint.params import SamplingParams
from tests.engine.chat_templates import STYLES

SHORT = SamplingParams(temperature=0.0, max_tokens=2)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(), max_size=4),
    st.binary(max_size=3),
    st.sampled_from([np.int64(3), np.float32(1), np.bool_(True), np.asarray(3), Decimal(1), 1j, object(), int, SHORT]),
)
KEYS = st.sampled_from(["prompt", "prompt_token_ids", "role", "content", "tool_calls", 3, None])
WILD = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(st.integers(0, 300), max_size=4).map(np.asarray),
    ),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries({"role": st.just("user") | WILD, "content": st.text(max_size=3) | WILD})
RELAXED = settings(deadline=None, max_examples=80, derandomize=True, suppress_health_check=list(HealthCheck))
OPTIONS = sorted(
    {
        "tokenizer",
        "skip_tokenizer_init",
        "load_format",
        "max_model_len",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "enforce_eager",
        "seed",
        "deterministic",
        "num_threads",
        "enable_prefix_caching",
        "checkpoint_interval",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_queue_len",
        "async_scheduling",
        "log_requests",
    }
)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_model_len=256, log_level="error") as engine:
        yield engine


@given(prompts=st.text(max_size=3) | WILD, params=st.just(SHORT) | WILD, priority=st.just(0) | WILD)
@RELAXED
def test_generate_answers_or_raises_an_error_of_its_own(llm: LLM, prompts: Any, params: Any, priority: Any) -> None:
    try:
        outputs = llm.generate(prompts, params, priority=priority, use_tqdm=False)
    except RequestError as error:
        assert len(str(error)) < 2000
    else:
        assert all(output.finished for output in outputs)
    (good,) = llm.generate("good", SHORT, use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 2


@given(messages=st.lists(MESSAGE, max_size=2) | WILD, tools=st.none() | WILD, variables=st.none() | WILD)
@RELAXED
def test_chat_answers_or_raises_an_error_of_its_own(llm: LLM, messages: Any, tools: Any, variables: Any) -> None:
    try:
        llm.chat(messages, SHORT, tools=tools, chat_template_kwargs=variables, use_tqdm=False)
    except RequestError as error:
        assert len(str(error)) < 2000


@given(options=st.dictionaries(st.sampled_from(OPTIONS), WILD, max_size=2), model=st.just("m") | WILD)
@RELAXED
def test_options_are_taken_or_refused_by_name(options: dict[str, Any], model: Any) -> None:
    try:
        config = EngineConfig.from_flat(model=model, **options)
    except ConfigError as error:
        assert any(name in str(error) for name in [*options, "model"]) and len(str(error)) < 2000
        return
    assert type(config.model) is str and type(config.gpu_memory_utilization) is float
    assert type(config.deterministic) is bool and type(config.cache.checkpoint_interval) is int


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"enforce_eager": "false"}, "enforce_eager='false' is not allowed; give True or False"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching=0 is not allowed; give True or False"),
        ({"max_num_seqs": "512"}, "max_num_seqs='512' is not allowed; give an integer"),
        ({"max_num_seqs": 2**64}, "max_num_seqs=.* is not allowed; give an integer"),
        ({"dtype": 16}, "dtype=16 is not allowed; give one of 'auto'"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9' is not allowed; give a number"),
        ({"tokenizer": 5}, "tokenizer=5 is not allowed; give a string"),
    ],
)
def test_options_of_a_wrong_type_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM("m", **options)


def test_a_folder_may_be_a_path(tiny_model: Path) -> None:
    assert EngineConfig.from_flat(model=tiny_model).model == str(tiny_model)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"prompts": 5}, InvalidPromptError, "prompts=5 is not allowed"),
        ({"prompts": b"abc"}, InvalidPromptError, "prompts=b'abc' is not allowed"),
        ({"prompts": ["a", b"abc"]}, InvalidPromptError, "b'abc' is not a prompt"),
        ({"prompts": "a", "sampling_params": "greedy"}, InvalidParamsError, "sampling_params='greedy' is not allowed"),
        ({"prompts": "a", "sampling_params": [{"n": 2}]}, InvalidParamsError, "sampling_params=.* is not allowed"),
        ({"prompts": "a", "priority": "high"}, InvalidParamsError, "priority='high' is not allowed"),
        ({"prompts": "a", "priority": 2**31}, InvalidParamsError, "priority=2147483648 is not allowed"),
        ({"prompts": "a", "priority": True}, InvalidParamsError, "priority=True is not allowed"),
        ({"prompts": "a", "use_tqdm": "no"}, InvalidParamsError, "use_tqdm='no' is not allowed; give True, False, or"),
        ({"prompts": "a", "lora_request": [None, 1]}, InvalidParamsError, "adapters are not supported"),
        ({"prompts": "a", "tokenization_kwargs": {"padding": 1}}, InvalidParamsError, "give prompts as token ids"),
    ],
)
def test_wrong_arguments_are_named(llm: LLM, arguments: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        llm.generate(**{"use_tqdm": False, **arguments})


def test_a_call_as_vllm_takes_it(llm: LLM) -> None:
    """lm-eval and TRL name arguments that ask for nothing, and may create the progress bar themselves."""
    made: list[int] = []

    def bar(total: int, **options: Any) -> tqdm[Any]:
        made.append(total)
        return tqdm(total=total, disable=True, **options)

    none: dict[str, Any] = {"lora_request": None, "priority": None, "tokenization_kwargs": {}}
    assert not llm.generate([], SHORT, lora_request=[])  # type: ignore[arg-type]
    want = llm.generate(["a", "b"], SHORT, use_tqdm=False)
    found = llm.generate(["a", {"prompt": "b"}], SHORT, use_tqdm=bar, mm_processor_kwargs={"max_pixels": 9}, **none)
    assert made == [2] and [each.outputs for each in found] == [each.outputs for each in want]
    conversation = [{"role": "user", "content": "x"}]
    text = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}!{% endfor %}"
    for template, form in ((text, "auto"), (text, "openai"), (text, "string"), (None, "string")):
        options = {"chat_template": template, "chat_template_content_format": form, **none}
        (answer,) = llm.chat(conversation, SHORT, False, **options)  # type: ignore[arg-type]
        own = llm.chat(conversation, SHORT, False)[0].prompt_token_ids
        expected = llm.get_tokenizer().encode("x!", add_special_tokens=False)
        assert list(answer.prompt_token_ids) == (expected if template else list(own))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"chat_template": "{{ bad"}, ConfigError, "chat_template is not a Jinja template"),
        ({"chat_template": "/nowhere.jinja"}, ConfigError, "is neither a file nor a Jinja template"),
        ({"chat_template": 3}, InvalidPromptError, "chat_template=3 is not allowed; give None, a file or"),
        ({"chat_template_content_format": "parts"}, InvalidPromptError, "give auto or string or openai"),
        ({"chat_template_content_format": "openai"}, ConfigError, "shows content in the form 'string' alone"),
        (
            {"chat_template": STYLES["parts"], "chat_template_content_format": "string"},
            ConfigError,
            "shows content in the form 'openai' alone; give that, or leave the option out",
        ),
    ],
)
def test_wrong_templates_of_a_call_are_named(llm: LLM, options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        llm.chat([{"role": "user", "content": "x"}], SHORT, use_tqdm=False, **options)


def test_messages_and_tools_may_be_arrays_and_iterators(llm: LLM) -> None:
    message, tool = {"role": "user", "content": "x"}, {"type": "function", "function": {"name": "f"}}
    options: dict[str, Any] = {"tools": [tool], "use_tqdm": False}
    want = llm.chat([[message]] * 2, SHORT, **options)
    found = llm.chat(np.asarray([[message]] * 2), SHORT, **{**options, "tools": iter([tool])})  # type: ignore[arg-type]
    found += llm.chat([iter([message])], SHORT, **{**options, "tools": np.asarray([tool])})  # type: ignore[list-item]
    assert [list(output.prompt_token_ids) for output in found] == [list(want[0].prompt_token_ids)] * 3
    with pytest.raises(InvalidPromptError, match="the conversation is empty"):
        llm.chat([np.asarray([])], SHORT, use_tqdm=False)  # type: ignore[list-item]
    assert llm.chat([], SHORT, use_tqdm=False) == llm.generate([], SHORT, use_tqdm=False) == []


def test_ids_that_all_end_and_a_least_length_contradict_each_other(llm: LLM) -> None:
    every = list(range(llm._engine.inputs.vocab_size))
    params = SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=every)
    with pytest.raises(InvalidParamsError, match="stop_token_ids"):
        llm.generate("a", params, use_tqdm=False)
    almost = SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=every[:-1], ignore_eos=True)
    (output,) = llm.generate("a", almost, use_tqdm=False)
    assert output.outputs[0].token_ids[:2] == [every[-1], every[-1]]


def test_a_stream_refuses_as_generate_does(llm: LLM) -> None:
    for prompt, params in ((5, None), ("a", "greedy"), ("a", [SHORT, SHORT])):
        with pytest.raises(ForkpointError):
            list(llm.stream(prompt, params))  # type: ignore[arg-type]
