from __future__ import annotations

from typing import Any

import pytest

from forkpoint.errors import InvalidParamsError
from forkpoint.params import SamplingParams, StructuredOutputsParams


def test_a_schema_given_as_a_mapping_becomes_its_text() -> None:
    assert StructuredOutputsParams(json={"type": "object"}).json == '{"type": "object"}'
    assert StructuredOutputsParams(choice=["a", "b"], json_object=False).choice == ("a", "b")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json_object": False},
        {"regex": "a", "json_object": True},
        {"regex": ""},
        {"regex": "\ud800"},
        {"choice": ["a", "\ud800"]},
        {"json": 3},
        {"json": {"default": object()}},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [1]},
        {"choice": ["", ""]},
        {"json_object": 1},
    ],
)
def test_structured_outputs_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match="structured_outputs"):
        StructuredOutputsParams(**given)


def test_structured_outputs_are_of_their_own_type() -> None:
    with pytest.raises(InvalidParamsError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["stop", "cache_salt"])
def test_texts_that_have_no_bytes_are_refused(name: str) -> None:
    with pytest.raises(InvalidParamsError, match=rf"{name}=.*valid Unicode"):
        SamplingParams(**{name: "\ud800"})
