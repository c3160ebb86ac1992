"""Whole numbers for the host side of launches, beside Triton's functions, which are slower there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.ops.rounding import ceil_div, next_power_of_2

triton = pytest.importorskip("triton")


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_both_are_triton_s(number: int, divisor: int) -> None:
    assert ceil_div(number, divisor) == triton.cdiv(number, divisor)
    assert next_power_of_2(1 + number) == triton.next_power_of_2(1 + number)
