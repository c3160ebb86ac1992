"""What is planned and answered is the same in another process, whatever fields it has."""

from __future__ import annotations

import enum
import functools
import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from forkpoint import errors
from forkpoint.errors import QueueFullError
from forkpoint.params import SamplingParams, StructuredOutputsParams
from forkpoint.sched.plan import StepPlan, StepResult
from forkpoint.worker.codec import MAX_ERROR_LENGTH, Failure, decoder, encoder

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=0, stop=["\n", "é"], stop_token_ids=[1, 2**31 - 1]),
    SamplingParams(seed=2**63 - 1, logit_bias={5: -1.5}, allowed_token_ids=[1, 2], cache_breakpoints=[3], n=2),
    SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}), bad_words=["no"]),
]


@functools.cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of any type that a plan or a result declares."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is SamplingParams:
        return st.sampled_from(PARAMS)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind) if field.init})
    if isinstance(kind, type) and issubclass(kind, tuple):  # a named one
        return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})
    if origin is np.ndarray:
        (scalar,) = get_args(inner[1])
        return arrays.arrays(scalar, arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=3))
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if arg is types.NoneType else values(arg) for arg in inner))
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return st.lists(values(inner[0]), max_size=2).map(tuple)
        return st.tuples(*map(values, inner))
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if kind is int:
        return st.integers(-(2**63), 2**64 - 1)
    return {
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        float: st.floats(),
        str: st.text(st.characters(codec="utf-8")),
    }[kind]


def same(first: Any, second: Any) -> bool:
    """Return whether both are equal and of the same types. NaN equals NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second) and second.flags.writeable
    if is_dataclass(first):
        return all(same(getattr(first, field.name), getattr(second, field.name)) for field in fields(first))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second or (first != first and second != second))


@pytest.mark.parametrize("kind", [StepPlan, StepResult])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_values_come_back_as_they_were(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    assert same(decoder(kind)(encoder()(value)), value)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be sent"):
        encoder()([object()])


def test_errors_come_back_as_they_are_known() -> None:
    for given_error, kind, text in (
        (QueueFullError("full"), QueueFullError, "full"),
        (KeyError("key"), errors.EngineStoppedError, "KeyError: 'key'"),
        (ValueError("x" * 5000), errors.EngineStoppedError, "ValueError: " + "x" * MAX_ERROR_LENGTH + "..."),
    ):
        error = decoder(Failure)(encoder()(Failure.of(given_error))).error()
        assert (type(error), str(error)) == (kind, text)
