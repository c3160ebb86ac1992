"""The JSON file that a measurement writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError


class ResultFile:
    """A result file, checked before the measurement, so that an unwritable path does not cost the result."""

    def __init__(self, path: str | Path) -> None:
        """Check the path. Raises ConfigError if the file could not be written."""
        self.path = Path(path)
        folder = self.path.parent
        if self.path.is_dir():
            raise ConfigError(f"{self.path} is a folder; give a file for the result")
        if not folder.is_dir():
            raise ConfigError(
                f"{self.path} cannot be written, because {folder} is not a folder; create it, or give another file"
            )
        if not os.access(self.path if self.path.exists() else folder, os.W_OK):
            raise ConfigError(f"{self.path} cannot be written: permission denied; give another file")

    def write(self, content: Any) -> None:
        """Write the content as JSON. Raises ConfigError if the disk is full."""
        try:
            self.path.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the result cannot be written to {self.path}: {error.strerror}") from error
