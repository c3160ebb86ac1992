"""Which model a command loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkpoint.demo.shipped import default_model
from forkpoint.errors import ConfigError


def choose_model(engine: Mapping[str, Any], tag: str | None = None) -> str:
    """The model named among the engine options or by `tag`, else the one that comes with forkpoint.

    Raises ConfigError if it is named twice, or not at all and the one that comes with forkpoint is incomplete.
    """
    named: str | None = engine.get("model")
    if tag is not None and named is not None:
        raise ConfigError(f"the model is named twice: {tag!r} and --model {named!r}; give one")
    return tag or named or default_model()
