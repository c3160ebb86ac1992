"""The sampling defaults in a model's generation_config.json, read as vLLM reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forkpoint.checks import read_json
from forkpoint.config import GENERATION_KEYS, EngineConfig
from forkpoint.errors import ConfigError, InvalidParamsError
from forkpoint.obs.logs import LOGGER
from forkpoint.params import SamplingParams

FILE: Final = "generation_config.json"
NEUTRAL: Final = "vllm"  # the value with which vLLM selects its own defaults


def sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Return the values of SamplingParams fields for requests that leave them out, as far as the model has any.

    They come from generation_config.json and `override_generation_config`. `max_new_tokens` becomes `max_tokens`.
    Raises ConfigError for a missing file or a value that is not allowed, and ModelFolderError for a file that is not a
    JSON object.
    """
    source, values = _source(config), dict[str, Any]()
    if source is not None:
        values = read_json(source)
    found = {key: values[key] for key in GENERATION_KEYS if values.get(key) is not None}
    found |= config.override_generation_config or {}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    try:
        SamplingParams(**found)
    except InvalidParamsError as error:
        raise ConfigError(
            f"{error} (in {source or 'override_generation_config'}); correct it, or give --generation-config {NEUTRAL}"
        ) from error
    return found


def log_sampling_defaults(config: EngineConfig, defaults: Mapping[str, Any]) -> None:
    """Log the defaults and their sources in one line. Log nothing if there are none."""
    if not defaults:
        return
    origins = [str(_source(config) or "")] + ["--override-generation-config"] * bool(config.override_generation_config)
    shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
    LOGGER.info("default sampling parameters: %s, from %s", shown, " and ".join(filter(None, origins)))


def _source(config: EngineConfig) -> Path | None:
    """Return the file to read; None if there is none. Raises ConfigError if a named file does not exist."""
    if config.generation_config == NEUTRAL:
        return None
    if config.generation_config == "auto":
        path = Path(config.model) / FILE
        return path if path.is_file() else None
    path = Path(config.generation_config)
    if path.is_dir():
        path /= FILE
    if not path.is_file():
        raise ConfigError(
            f"generation_config={config.generation_config!r} is neither auto nor vllm, and {path} does not exist"
        )
    return path
