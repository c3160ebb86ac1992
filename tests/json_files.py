"""Files of JSON that tests change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def change_json(path: Path, **fields: Any) -> None:
    """Set fields of the object in a file, or remove those that are None."""
    values = json.loads(path.read_text()) | fields
    for name, value in fields.items():
        if value is None:
            values.pop(name, None)
    path.write_text(json.dumps(values))
