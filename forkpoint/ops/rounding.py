"""Whole numbers for the host side of launches. Triton's functions of these names take 6 us a call there."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """Return `number / divisor`, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`; 1 for numbers below 1."""
    return 1 << max(0, number - 1).bit_length()
