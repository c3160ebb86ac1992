"""The scripted model says what it is given, in the given tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkpoint import LLM, RequestOutput, SamplingParams
from tests.scripted import write_scripted_model

SCRIPTS = {
    "plain": ["Hello", " there, ", "K\u00f6ln \u6771\u4eac \U0001f642\n", "\x00 <b>", " the end"],
    "again": ["no ", "no ", "no ", "a", "no ", "no "],
}


def test_a_script_is_said_word_for_word(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path, SCRIPTS, after={"?": "again"})
    params = SamplingParams(max_tokens=50)
    plain, again = ("".join(SCRIPTS["plain"]), 6), ("".join(SCRIPTS["again"]), 4)
    with LLM(str(model.folder), log_level="warning") as llm:

        def said(message: str, **chosen: str) -> tuple[str, int]:
            asked = [{"role": "user", "content": message}]
            return text_of(llm.chat(asked, params, use_tqdm=False, chat_template_kwargs=chosen))

        assert said("hello", script="plain") == plain
        assert said("hello", script="again") == again
        assert said("again") == again
        assert text_of(llm.generate("so?", params, use_tqdm=False)) == again


def text_of(outputs: list[RequestOutput]) -> tuple[str, int]:
    """The text of the one answer, which has ended by itself, and its number of tokens."""
    [completion] = outputs[0].outputs
    assert completion.finish_reason == "stop"
    return completion.text, len(completion.token_ids)


def test_pieces_that_are_taken_are_joined(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path, SCRIPTS)
    assert model.tokens["plain"] == tuple(SCRIPTS["plain"])
    assert model.tokens["again"] == ("no ", "no no ", "ano no ")
    with pytest.raises(ValueError, match="'b' is a token"):
        write_scripted_model(tmp_path, {"a": ["x"], "b": ["x"]})
