"""Reads sizes in bytes and numbers of tokens that are written with units."""

from __future__ import annotations

import re
from fractions import Fraction

from forkpoint.errors import ConfigError


def num_bytes(text: str) -> int:
    """Read a size in bytes such as 1000000, 512MiB, 1.5GiB or 4GB. As in vLLM, 4G is 4 GiB and 4g is 4 GB.

    Raises ConfigError for other texts.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgtKMGT])(i?B)?)?", text.strip())
    if found is None:
        raise ConfigError(
            f"{text!r} is not a size; give a number of bytes, or a number with a unit such as 512MiB or 4GiB"
        )
    number, unit, ending = found.groups()
    if unit is None:
        return int(Fraction(number))
    base = 1024
    if ending == "B" or (ending is None and unit.islower()):
        base = 1000
    return int(Fraction(number) * base ** ("kmgt".index(unit.lower()) + 1))


def num_tokens(text: str) -> int | None:
    """Read a number of tokens such as 32768, 32k (32,000) or 32K (32,768). None for "auto" and "-1", as in vLLM.

    Raises ConfigError for other texts.
    """
    if text in ("auto", "-1"):
        return None
    try:
        return num_bytes(text)
    except ConfigError as error:
        raise ConfigError(
            f"{text!r} is not a number of tokens; give an integer, one with a unit such as 32k or 32K, or auto"
        ) from error
