"""Gives freed memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Return memory to the system that the C library keeps for later. Other libraries than glibc keep theirs."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
