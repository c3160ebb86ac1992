"""Reasoning in the fields where OpenAI's and Anthropic's servers put it encrypted. Clients send these fields back."""

from __future__ import annotations

from typing import Any, Final

SEAL: Final = "plain:"  # begins this server's reasoning


def sealed(text: str) -> str:
    """Return the field's value for the reasoning `text`. It is not encrypted: it is the client's to keep."""
    return SEAL + text


def unsealed(value: Any) -> str:
    """Return the reasoning in a field that a client sent back; empty if `value` is not from this server."""
    if isinstance(value, str) and value.startswith(SEAL):
        return value.removeprefix(SEAL)
    return ""
