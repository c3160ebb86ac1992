"""The small trained model that comes with forkpoint."""

from __future__ import annotations

from pathlib import Path

from forkpoint.errors import ConfigError

FOLDER = Path(__file__).parent / "checkpoint"
SHIPPED_NAME = "forkpoint-small"  # in the API
TOKENIZER = FOLDER / "tokenizer.json"


def is_complete() -> bool:
    return not _missing()


def default_model() -> str:
    """Folder of the model that serves where none is named. Raises ConfigError if its weights are not there."""
    missing = _missing()
    if missing:
        raise ConfigError(
            f"no model was named (--model), and the one that comes with forkpoint lacks "
            f"{', '.join(missing)} in {FOLDER}; "
            "name a model folder, install a complete forkpoint, or make the files with train/"
        )
    return str(FOLDER)


def _missing() -> list[str]:
    missing = [name for name in ("config.json", "tokenizer.json") if not (FOLDER / name).is_file()]
    return missing if any(FOLDER.glob("*.safetensors")) else [*missing, "*.safetensors"]
