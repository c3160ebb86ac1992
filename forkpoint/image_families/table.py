"""The families whose images forkpoint reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forkpoint.checks import read_config
from forkpoint.image_families.lfm2_vl import Lfm2VlImages
from forkpoint.image_families.ling_vl import LingVlImages
from forkpoint.image_families.media_io import with_media_io
from forkpoint.image_families.nemotron_omni import NemotronOmniImages
from forkpoint.image_families.qwen3_5 import Qwen35Images
from forkpoint.image_families.settings import ImageSettings, Values, read_processor

FAMILIES: Final[tuple[type[ImageSettings], ...]] = (Qwen35Images, Lfm2VlImages, NemotronOmniImages, LingVlImages)
PROCESSOR_KWARGS: Final = tuple(dict.fromkeys(name for family in FAMILIES for name in family.kwargs))


def read_image_settings(
    folder: str | Path,
    processor_kwargs: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    media_io: Mapping[str, Any] | None = None,
) -> ImageSettings | None:
    """Read how a model folder wants images read; None if it has no vision tower that forkpoint runs.

    `processor_kwargs` and `media_io` change the settings, `overrides` fields of config.json.
    Raises ModelFolderError and ConfigError.
    """
    folder = Path(folder)
    config = read_config(folder, overrides)
    vision, names = config.get("vision_config"), config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = next((each for each in FAMILIES if name in each.architectures), None)
    if family is None or not isinstance(vision, dict):
        return None
    settings = family.read(folder, Values(config, str(folder / "config.json")), read_processor(folder))
    return with_media_io(settings.with_kwargs(processor_kwargs or {}), media_io or {})
