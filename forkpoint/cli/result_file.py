"""The JSON file that a measurement writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forkpoint.errors import ConfigError


class ResultFile:
    """A result file, checked before the measurement, so that an unwritable path does not cost the result.

    Without a path nothing is checked or written.
    """

    def __init__(self, path: str | Path | None) -> None:
        """Check that the file can be written, without creating it. Raises ConfigError if it cannot."""
        self._path: Path | None = None
        if path is None:
            return
        self._path = path = Path(path)
        folder = path.parent
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; give a file for the result")
        if not folder.is_dir():
            raise ConfigError(
                f"{path} cannot be written, because {folder} is not a folder; create it, or give another file"
            )
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{path} cannot be written: permission denied; give another file")

    def write(self, content: Any) -> None:
        """Replace the file by `content` as JSON. Raises ConfigError if it cannot be written."""
        if self._path is None:
            return
        try:
            self._path.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the result cannot be written to {self._path}: {error.strerror}") from error
