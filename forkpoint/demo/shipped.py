"""The small trained model that comes with forkpoint."""

from __future__ import annotations

from pathlib import Path

from forkpoint.errors import ConfigError

FOLDER = Path(__file__).parent / "checkpoint"
TOKENIZER = FOLDER / "tokenizer.json"


def default_model() -> str:
    """Folder of the model that serves where none is named. Raises ConfigError if its weights are not there."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (FOLDER / name).is_file()]
    if not any(FOLDER.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"no model was named, and the one that comes with forkpoint lacks {', '.join(missing)} in {FOLDER}; "
            "name a model folder, install forkpoint from a complete wheel or source tree, or make the files with train/"
        )
    return str(FOLDER)
