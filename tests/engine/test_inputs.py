"""What is taken for token ids, and what is not; what requests are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.engine.inputs import InputProcessor
from forkpoint.engine.messages import AddSequence, Command
from forkpoint.engine.tokenizer import Tokenizer
from forkpoint.errors import InvalidPromptError
from forkpoint.params import SamplingParams
from forkpoint.worker.codec import decoder, encoder
from tests.engine.tokenizers import byte_level

INPUTS = InputProcessor(None, 1000, 64, frozenset(), 0)
NO_ID = [1.0, 2.5, True, False, np.bool_(True), np.float32(3), np.timedelta64(7, "s"), "7", b"7", None, [7], (7,)]


@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=60),
    st.sampled_from([list, tuple, np.asarray, np.uint16, np.uint64, torch.tensor]),
)
def test_integers_of_any_kind_are_ids(ids: list[int], kind: Any) -> None:
    prompt = INPUTS.prompt(kind(ids))
    assert prompt.token_ids.tolist() == ids and prompt.token_ids.dtype == np.int32
    mixed = [np.int64(token) if token % 2 else np.uint16(token) for token in ids]
    assert INPUTS.prompt(mixed).token_ids.tolist() == ids


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8), st.sampled_from(NO_ID))
def test_anything_else_is_named(before: list[int], after: list[int], bad: object) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        INPUTS.prompt([*before, bad, *after])
    assert str(caught.value).startswith(f"{bad!r} is not a token id")


@given(st.lists(st.integers(0, 999), max_size=8), st.integers().filter(lambda token: not 0 <= token < 1000))
def test_integers_of_any_size_are_checked(before: list[int], beyond: int) -> None:
    with pytest.raises(InvalidPromptError, match="the model has ids 0 to 999"):
        INPUTS.prompt([*before, beyond])


@pytest.mark.parametrize("beyond", [1000, -1, 2**32 + 5, 2**63 - 1])
def test_integers_in_arrays_are_checked_before_they_are_narrowed(beyond: int) -> None:
    with pytest.raises(InvalidPromptError, match="the model has ids 0 to 999"):
        INPUTS.prompt(np.asarray([3, beyond]))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[[5, 6]], [0.5], [True], 5])
def test_tensors_of_anything_else_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidPromptError, match=r"is not a token id|cannot be of type"):
        INPUTS.prompt(torch.tensor(wrong))  # type: ignore[arg-type]


def test_masked_integers_are_refused() -> None:
    """Their bytes are numpy's number for what is missing, which no check of the range sees."""
    assert INPUTS.prompt(np.ma.array([1, 2])).token_ids.tolist() == [1, 2]
    with pytest.raises(InvalidPromptError, match="masked is not a token id"):
        INPUTS.prompt(np.ma.array([1, 2], mask=[False, True]))


def test_values_that_raise_when_asked_for_their_integer_are_refused() -> None:
    with pytest.raises(InvalidPromptError, match="not a token id"):
        INPUTS.prompt([np.asarray([])])  # type: ignore[list-item]


def test_requests_know_what_opens_a_tool_call() -> None:
    """Requests get those openings of models' tool calls that the vocabulary has, also in the engine's own process."""
    plain = byte_level()
    assert plain.tool_call_token_ids == frozenset()
    plain.hf.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    tokenizer = Tokenizer.wrap(plain.hf)
    opening = plain.hf.convert_tokens_to_ids("<tool_call>")
    inputs = InputProcessor(tokenizer, len(plain.hf), 100, frozenset(), seed=0)
    [request] = inputs.requests(
        "a", inputs.prompt("which tool?"), SamplingParams(), priority=0, number=0, arrival_s=0.0
    )
    sent = decoder(Command)(encoder()(AddSequence(request)))
    assert request.tool_call_token_ids == sent.request.tool_call_token_ids == {opening}
    request.output_token_ids += [5, 6]
    assert not request.awaits_tool
    request.output_token_ids += [opening, 7]
    assert request.awaits_tool


def test_members_of_a_prompt_dict_are_honoured_or_refused() -> None:
    prompt = INPUTS.prompt({"prompt_token_ids": torch.tensor([5, 6]), "prompt": "a", "cache_salt": "mine"})
    assert (prompt.token_ids.tolist(), prompt.text, prompt.cache_salt) == ([5, 6], "a", "mine")
    (request,) = INPUTS.requests("r", prompt, SamplingParams(cache_salt="all"), priority=0, number=0, arrival_s=0.0)
    assert request.params.cache_salt == "mine"
    assert INPUTS.prompt({"prompt_token_ids": [5], "multi_modal_uuids": None, "prompt_embeds": None}).cache_salt == ""
    for wrong in ({"prompt_embeds": [0.5]}, {"cache_salt": 5}, {"cache_salt": 0}, {"input_ids": [5]}):
        with pytest.raises(InvalidPromptError, match=f"{next(iter(wrong))}.*; give"):
            INPUTS.prompt({"prompt_token_ids": [5], **wrong})


def test_a_prompt_within_a_dict_keeps_its_salt() -> None:
    salted = {"prompt_token_ids": [5], "cache_salt": "mine"}
    for inner in (salted, INPUTS.prompt(salted)):
        assert INPUTS.prompt({"prompt": inner}).cache_salt == "mine"
        assert INPUTS.prompt({"prompt": inner, "cache_salt": "other"}).cache_salt == "other"


def test_what_a_tokenizer_returns_is_no_prompt_but_has_one() -> None:
    encoded: Any = byte_level().hf("ab")
    for wrong in (encoded, {"prompt_token_ids": encoded}):
        with pytest.raises(InvalidPromptError, match="; give its 'input_ids'"):
            INPUTS.prompt(wrong)
    ids = encoded["input_ids"]
    assert len(ids) == 2 and INPUTS.prompt(ids).token_ids.tolist() == ids
