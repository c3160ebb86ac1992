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


def with_model(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine options, with the model to load among them. Raises what `choose_model` raises."""
    return {**engine, "model": choose_model(engine)}


def require_no_engine_options(engine: Mapping[str, Any]) -> None:
    """Raise ConfigError if options of an engine are given where a running server answers: it has its own."""
    for name in engine:
        if name != "log_level":
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model loaded here, and --url names a running server; give one of them")
