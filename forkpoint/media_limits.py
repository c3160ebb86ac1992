"""How many images and videos a prompt may have: `--limit-mm-per-prompt`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

from forkpoint.checks import Checker, shown
from forkpoint.errors import ConfigError
from forkpoint.json_options import json_object

MediaKind: TypeAlias = Literal["image", "video"]
MAX_IMAGES: Final = 32  # images of a prompt where no limit is given
MOST_IMAGES: Final = 1024  # the highest limit
_CHECK: Final = Checker(ConfigError)


def read_media_limits(name: str, given: Any) -> dict[str, int]:
    """Return the limits for images and videos that option `name` gives. Limits of sound change nothing.

    `given` is a mapping, its JSON text, or vLLM's short form `image=4,video=2`. Raises ConfigError.
    """
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        if not re.fullmatch(r"\w+=\d{1,9}(,\w+=\d{1,9})*", given):
            raise ConfigError(f'{name}={shown(given)} is not allowed; give image=4,video=1, or JSON: {{"image": 4}}')
        given = {kind: int(count) for kind, _, count in (pair.partition("=") for pair in given.split(","))}
    given, limits = json_object(name, given), {}
    for kind in get_args(MediaKind):
        if kind in given:
            limit = given[kind]
            if isinstance(limit, Mapping):  # vLLM also takes the sizes with which it measures memory
                limit = limit.get("count", MAX_IMAGES)
            limits[kind] = _CHECK.integer(f"{name}: {kind}", limit, 0, MOST_IMAGES)
    return limits
