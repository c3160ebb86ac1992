"""What is taken for token ids, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.engine.inputs import InputProcessor
from forkpoint.errors import InvalidPromptError

INPUTS = InputProcessor(None, 1000, 64, frozenset(), 0)
NO_ID = [1.0, 2.5, True, False, np.bool_(True), np.float32(3), "7", b"7", None, [7], (7,)]


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.sampled_from([list, tuple, np.asarray]))
def test_integers_of_any_kind_are_ids(ids: list[int], kind: Any) -> None:
    prompt = INPUTS.prompt(kind(ids))
    assert prompt.token_ids.tolist() == ids and prompt.token_ids.dtype == np.int32
    mixed = [np.int64(token) if token % 2 else np.uint16(token) for token in ids]
    assert INPUTS.prompt(mixed).token_ids.tolist() == ids


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8), st.sampled_from(NO_ID))
def test_anything_else_is_named(before: list[int], after: list[int], bad: object) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        INPUTS.prompt([*before, bad, *after])
    assert str(caught.value).startswith(f"{bad!r} is no token id")


@given(st.lists(st.integers(0, 999), max_size=8), st.integers().filter(lambda token: not 0 <= token < 1000))
def test_integers_of_any_size_are_checked(before: list[int], beyond: int) -> None:
    with pytest.raises(InvalidPromptError, match="the model has ids 0 to 999"):
        INPUTS.prompt([*before, beyond])
