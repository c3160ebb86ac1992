"""The fields of vLLM's SamplingParams that this engine honours, those that ask for nothing, and those it refuses."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from forkpoint import (
    LLM,
    FinishReason,
    InvalidParamsError,
    MissReason,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)

PROMPT = list(range(40, 240))
# The fields of vLLM 0.33, and older ones that scripts still give, with values that ask for nothing.
NEUTRAL: dict[str, Any] = {
    "watermarking": False,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "flat_logprobs": True,
    "detokenize": True,
    "spaces_between_special_tokens": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "stream_interval": 4,
    "skip_clone": True,
    "output_text_buffer_length": 0,
    "extra_args": {},
    "skip_reading_prefix_cache": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.5,
    "early_stopping": True,
    "guided_decoding": None,
    "logits_processors": None,
}


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=6, **fields)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    assert greedy(**NEUTRAL) == greedy()
    assert greedy(seed=-1, logprobs=True, prompt_logprobs=True) == greedy(logprobs=1, prompt_logprobs=1)
    schema = StructuredOutputsParams(regex="a", whitespace_pattern=None, disable_additional_properties=False)
    assert schema == StructuredOutputsParams(regex="a")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"logprob_token_ids": [5]}, r"logprob_token_ids=\[5\] is not supported; give logprobs"),
        ({"trace_decode_token_ids": [5]}, "trace_decode_token_ids=.* is not supported"),
        ({"repetition_detection": object()}, "repetition_detection=.* is not supported; give repetition_penalty"),
        ({"guided_decoding": object()}, "guided_decoding=.* is not supported; give structured_outputs"),
        ({"extra_args": {"x": 1}}, "extra_args=.* is not supported; "),
        ({"best_of": 4}, "best_of=4 is not supported; give n"),
        ({"top_pp": 0.5}, "there is no field 'top_pp'; did you mean 'top_p'"),
        ({"output_kind": "last"}, "output_kind='last' is not allowed; give a member of RequestOutputKind"),
        ({"detokenize": False, "stop": "x"}, "detokenize=False is not allowed; give True with stop"),
    ],
)
def test_fields_that_ask_for_more_are_refused_by_name(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParamsError, match=text):
        SamplingParams(**fields)


def test_fields_of_structured_outputs_are_refused_by_name() -> None:
    with pytest.raises(
        InvalidParamsError, match="whitespace_pattern=' ' is not supported; give disable_any_whitespace"
    ):
        StructuredOutputsParams(json_object=True, whitespace_pattern=" ")


def test_from_optional_takes_none_for_a_default() -> None:
    given = SamplingParams.from_optional(n=None, temperature=0.5, top_p=None, stop=None)
    assert given == SamplingParams(temperature=0.5)


def test_without_detokenizing_there_are_ids_and_no_text(llm: LLM) -> None:
    kinds = greedy(logprobs=1), greedy(logprobs=1, detokenize=False)
    whole, bare = (llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0] for params in kinds)
    assert whole.text and not bare.text
    assert bare.token_ids == whole.token_ids and bare.finish_reason is FinishReason.LENGTH
    assert bare.cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-4)


def test_a_request_may_leave_the_cache_unread(llm: LLM) -> None:
    kinds = greedy(), greedy(), greedy(skip_reading_prefix_cache=True), greedy(skip_reading_prefix_cache=False)
    outputs = [llm.generate(PROMPT, params, use_tqdm=False)[0] for params in kinds]
    assert [output.cache.num_cached_tokens for output in outputs] == [0, 192, 0, 192]
    assert outputs[2].cache.miss is MissReason.BYPASSED
    assert all(output.outputs == outputs[0].outputs for output in outputs)


def test_streams_are_of_the_kind_that_is_asked_for(llm: LLM) -> None:
    class Foreign(Enum):  # vLLM's own enumeration, where both packages are installed
        DELTA = 1

    (whole,) = llm.generate(PROMPT, greedy(output_kind=RequestOutputKind.DELTA), use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    grown = list(llm.stream(PROMPT, greedy()))
    assert len(grown) > 1 and all(text.startswith(output.outputs[0].text) for output in grown)
    deltas = list(llm.stream(PROMPT, greedy(output_kind=Foreign.DELTA)))
    assert "".join(output.outputs[0].text for output in deltas) == text and len(deltas) > 1
    assert [token for output in deltas for token in output.outputs[0].token_ids] == ids
    (last,) = llm.stream(PROMPT, greedy(output_kind=RequestOutputKind.FINAL_ONLY))
    assert last.outputs == whole.outputs and last.finished


def test_outputs_have_lists_that_belong_to_the_caller(llm: LLM) -> None:
    params = greedy(logprobs=0, prompt_logprobs=0)
    (whole,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert whole.prompt_token_ids + whole.outputs[0].token_ids == [*PROMPT, *whole.outputs[0].token_ids]
    for output in llm.stream(PROMPT, params):
        (completion,) = output.outputs
        assert output.prompt_token_ids == PROMPT and output.prompt_logprobs == whole.prompt_logprobs
        size = len(completion.token_ids)
        assert (completion.token_ids, completion.logprobs) == (
            whole.outputs[0].token_ids[:size],
            (whole.outputs[0].logprobs or [])[:size],
        )
        for changed in (output.prompt_logprobs, completion.token_ids, completion.logprobs):
            assert isinstance(changed, list)
            changed.clear()
        output.outputs.clear()
    assert size == 6


def test_parameters_may_be_changed_and_are_checked_when_used(llm: LLM) -> None:
    """vLLM's examples set fields of `get_default_sampling_params()`."""
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0, 3
    ids = [*PROMPT]
    outputs = llm.stream(ids, params)
    params.max_tokens = 1  # concerns later calls alone, although no output was asked for yet
    ids.append(5)
    first = next(outputs)
    params.max_tokens = 2
    (*_, last) = [first, *outputs]
    assert len(last.outputs[0].token_ids) == 3 and last.prompt_token_ids == PROMPT
    copy = params.clone()
    copy.top_p = 2
    for given in (copy, [params, copy]):
        with pytest.raises(InvalidParamsError, match="top_p=2 is not allowed"):
            llm.generate([PROMPT, PROMPT], given, use_tqdm=False)
    copy = SamplingParams(stop="x")
    for name, value in (("stop", "y"), ("stop_token_ids", 5), ("bad_words", "z")):
        getattr(copy, name).append(value)
    assert copy == SamplingParams(stop=["x", "y"], stop_token_ids=[5], bad_words=["z"]) == copy.clone()
    copy.clone().stop_token_ids.append(6)  # type: ignore[attr-defined]
    assert copy.stop_token_ids == [5]
    with pytest.raises(AttributeError):
        params.top_pp = 0.5  # type: ignore[attr-defined]


def test_members_of_vllm_that_are_missing_say_what_to_do(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="LLM has no attribute 'beam_search'; outputs are sampled; give n"):
        llm.beam_search([PROMPT])  # type: ignore[attr-defined]
    assert not hasattr(llm, "sleep") and not hasattr(llm, "generates")


def test_prompts_as_vllm_types_them(llm: LLM) -> None:
    ids = torch.tensor([PROMPT, PROMPT])
    salted = TokensPrompt(prompt_token_ids=PROMPT, cache_salt="another")
    forms: list[Any] = [ids, list(ids), np.asarray(ids), [salted, salted], TextPrompt(prompt="ab")]
    *same, text = (llm.generate(form, greedy(), use_tqdm=False) for form in forms)
    assert all(output.outputs == same[0][0].outputs for outputs in same for output in outputs)
    assert [outputs[0].num_cached_tokens for outputs in same] == [0, 192, 192, 0]
    assert llm.generate(ids[0], greedy(), use_tqdm=False)[0].prompt_token_ids == PROMPT
    assert text[0].prompt == "ab"
