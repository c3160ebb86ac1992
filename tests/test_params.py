from __future__ import annotations

from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from forkpoint.errors import InvalidParamsError
from forkpoint.params import RequestOutputKind, SamplingParams, StructuredOutputsParams


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


def test_a_pydantic_class_is_no_schema_but_has_one() -> None:
    class Answer(BaseModel):
        ok: bool

    with pytest.raises(InvalidParamsError, match="give a JSON schema as a dict, such as Model"):
        StructuredOutputsParams(json=Answer)  # type: ignore[arg-type]
    assert StructuredOutputsParams(json=Answer.model_json_schema()).json


def test_structured_outputs_may_be_a_mapping() -> None:
    given: Any = {"json": {"type": "object"}, "disable_any_whitespace": True}
    assert SamplingParams(structured_outputs=given).structured_outputs == StructuredOutputsParams(**given)
    wrong: Any
    for wrong in ("regex", {}, {"regex": "a", "choice": ["b"]}, {3: "a"}, {"regexp": "a"}):
        with pytest.raises(InvalidParamsError, match=r"structured_outputs|no field"):
            SamplingParams(structured_outputs=wrong)


def test_stop_may_be_a_text() -> None:
    with pytest.raises(InvalidParamsError, match="stop with 65 members is not allowed; give a text or"):
        SamplingParams(stop=["a"] * 65)
    with pytest.raises(InvalidParamsError, match="stop=5 is not allowed; give a text or a list of at most 64"):
        SamplingParams(stop=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["stop", "cache_salt"])
def test_texts_that_have_no_bytes_are_refused(name: str) -> None:
    with pytest.raises(InvalidParamsError, match=rf"{name}=.*valid Unicode"):
        SamplingParams(**{name: "\ud800"})


NUMBERS = st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([10**400, -(2**63), 2**31])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(st.characters(), max_size=5),
    st.binary(max_size=3),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(True), np.asarray(3), Fraction(1, 2), Decimal(1), 1j]),
    st.sampled_from([object(), int, range(10**12), "x" * 10**5, float("nan"), np.float64("inf")]),
)
WILD = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(SCALARS.filter(lambda v: getattr(type(v), "__hash__", None) is not None), inner, max_size=3),
        st.lists(st.integers(0, 9), max_size=4).map(np.asarray),
    ),
    max_leaves=6,
)
SAMPLING_FIELDS = [f.name for f in fields(SamplingParams)]
STRUCTURED_FIELDS = [f.name for f in fields(StructuredOutputsParams)]


def all_plain(value: object) -> bool:
    """Whether it is made of what msgpack and JSON know, of at most 64 bits."""
    if isinstance(value, tuple | list):
        return all(map(all_plain, value))
    if isinstance(value, dict):
        return all(all_plain(key) and all_plain(item) for key, item in value.items())
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return value is None or type(value) in (float, bool, str, StructuredOutputsParams, RequestOutputKind)


@given(st.dictionaries(st.sampled_from(SAMPLING_FIELDS), WILD, max_size=3))
@example({"kv_transfer_params": {None: [1]}})
@example({"kv_transfer_params": {"remote_port": 2**64}})
@example({"kv_transfer_params": {"remote_block_ids": [float("nan")]}})
@settings(max_examples=200, deadline=None)
def test_any_value_of_any_field_is_taken_or_refused_by_name(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except InvalidParamsError as error:
        assert any(name in str(error) for name in values) and len(str(error)) < 2000
        return
    assert all(all_plain(getattr(params, name)) for name in SAMPLING_FIELDS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@given(st.dictionaries(st.sampled_from(STRUCTURED_FIELDS), WILD, max_size=2))
@example({"choice": np.array(1.0)})
@settings(max_examples=100, deadline=None)
def test_any_value_of_structured_outputs_is_taken_or_refused(values: dict[str, Any]) -> None:
    try:
        StructuredOutputsParams(**values)
    except InvalidParamsError as error:
        assert "structured_outputs" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**31),
        ("top_k", 2**64),
        ("max_tokens", 10**20),
        ("min_tokens", 2**31),
        ("seed", 2**63),
        ("n", 257),
        ("stop_token_ids", range(5000)),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", "123"),
        ("cache_breakpoints", [10**30]),
        ("logit_bias", dict.fromkeys(range(2000), 1.0)),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", [1]),
        ("stop", ["x"] * 65),
        ("stop", ["x" * 3000, "y" * 3000]),
        ("stop", [1]),
        ("ignore_eos", "false"),
        ("skip_special_tokens", 1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 10**400),
        ("logprobs", 21),
    ],
)
def test_bounds_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidParamsError, match=rf"sampling parameter {name}.* is not allowed; give "):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_what_is_none_is_empty_and_numbers_of_numpy_are_numbers() -> None:
    none: Any = None
    empty = SamplingParams(stop=none, stop_token_ids=none, logit_bias=none, cache_breakpoints=none, cache_salt=none)
    assert empty == SamplingParams()
    number: Any = np.float64(0.5)
    params = SamplingParams(
        n=np.int64(2), temperature=number, stop_token_ids=np.arange(3), logit_bias={np.int32(4): np.float32(1.5)}
    )
    assert params == SamplingParams(n=2, temperature=0.5, stop_token_ids=[0, 1, 2], logit_bias={4: 1.5})
    assert type(params.n) is int and type(params.temperature) is float


class Awkward:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("not for show")


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
@pytest.mark.parametrize("value", [Awkward(), 10**5000], ids=["awkward", "huge"])
def test_what_cannot_be_shown_is_refused_as_well(name: str, value: object) -> None:
    with pytest.raises(InvalidParamsError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
