"""Finds the small trained model of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import forkpoint
from forkpoint.errors import ConfigError

FOLDER_NAME: Final = "demo_model"
MODEL_NAME: Final = "forkpoint-small"  # the name in the API
CHECKOUT: Final = Path(forkpoint.__file__).parents[1]  # the folder of the checkout, if the package is run from one


def default_model() -> str:
    """Return the folder `demo_model` of the working directory, or of the checkout that the package is in.

    Raises ConfigError if neither has a model with weights.
    """
    for folder in (Path.cwd() / FOLDER_NAME, CHECKOUT / FOLDER_NAME):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return str(folder)
    raise ConfigError(
        f"no model was given, and there is none in ./{FOLDER_NAME}; "
        "give one with --model, or run this in a checkout of forkpoint"
    )
