"""Chooses the model that a command loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forkpoint.config import EngineConfig
from forkpoint.demo.model import default_model
from forkpoint.engine.hub import with_folders
from forkpoint.errors import ConfigError, ModelFolderError
from forkpoint.obs.logs import LOGGER, set_up_logging
from forkpoint.version import installed_version


def choose_model(engine: Mapping[str, Any], tag: str | None = None) -> str:
    """Return the model in the engine options or in `tag` (the positional argument), otherwise the demo model.

    Raises ConfigError if it is given twice, or not at all outside a checkout, and ModelFolderError for a folder without
    a model.
    """
    chosen: str | None = engine.get("model")
    if tag is not None and chosen is not None:
        raise ConfigError(f"the model is given twice: {tag!r} and --model {chosen!r}; give one")
    if tag is not None:
        chosen = tag
    if chosen is None:  # an empty name comes from an unset variable, and is refused later
        chosen = default_model()
    if Path(chosen).is_dir() and not (Path(chosen) / "config.json").is_file():
        raise ModelFolderError(f"there is no config.json in {chosen!r}; give a model folder as it was downloaded")
    return chosen


def with_model(engine: Mapping[str, Any], tag: str | None = None) -> dict[str, Any]:
    """Return the engine options with the folders to load from. Models that are not on this machine are fetched.

    Raises what `choose_model`, `EngineConfig.from_flat` and `with_folders` raise.
    """
    given = EngineConfig.from_flat(**{**engine, "model": choose_model(engine, tag)})
    config = with_folders(given)  # after all other options were checked
    return {**engine, "model": config.model, "tokenizer": config.tokenizer}


def announce(model: str, log_level: str = "info") -> None:
    """Set up logging and log which folder will be loaded, before slow imports begin. Without a folder do nothing."""
    if Path(model).is_dir():  # otherwise an error follows at once
        set_up_logging(log_level)
        LOGGER.info("forkpoint %s starts with %s", installed_version(), model)


def require_no_engine_options(engine: Mapping[str, Any]) -> None:
    """Raise ConfigError for engine options other than `log_level`: a running server has its own."""
    for name in engine:
        if name != "log_level":
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model loaded here, and --url names a running server; give one of them")
