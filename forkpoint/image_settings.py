"""How a model's images are resized, cut into tokens and normalised, from the files of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from forkpoint.checks import read_json, shown
from forkpoint.errors import ConfigError, ModelFolderError

# Architectures whose vision tower forkpoint runs.
VISION_ARCHITECTURES: Final = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
PROCESSOR_KWARGS: Final = ("min_pixels", "max_pixels")
MAX_PIXELS: Final = 1 << 24  # of a resized image: 16,384 tokens, more than a second of a GPU
DEFAULT_MAX_PIXELS: Final = 1 << 22  # 4,096 tokens; the tower's attention grows with the square
MAX_SIDE: Final = 1024  # of a patch; wider ones are a broken file
# What the processors of Qwen3.5's published folders say.
DEFAULT_SIZE: Final[Mapping[str, int]] = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
HALVES: Final = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Sizes in pixels. A token stands for `merge_size` by `merge_size` patches of `patch_size` by `patch_size`.

    `min_pixels` and `max_pixels` bound the area of a resized image. `mean` and `std` normalise channels in [0, 1].
    """

    image_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float] = HALVES
    std: tuple[float, float, float] = HALVES

    @property
    def token_side(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """The most tokens of one image."""
        return self.max_pixels // self.token_side**2

    @classmethod
    def read(cls, folder: str | Path, processor_kwargs: Mapping[str, Any] | None = None) -> ImageSettings | None:
        """Read config.json and preprocessor_config.json (or processor_config.json) of a model folder; None if the model
        has no vision tower that forkpoint runs.

        Without `processor_kwargs` an image has at most DEFAULT_MAX_PIXELS pixels, or as many as the folder allows if
        that is less. Raises ModelFolderError and ConfigError.
        """
        folder = Path(folder)
        config = read_json(folder / "config.json")
        vision, names = config.get("vision_config"), config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if name not in VISION_ARCHITECTURES or not isinstance(vision, dict):
            return None
        processor = _Values(*_processor(folder))
        patches = _Values(vision, f"{folder / 'config.json'}: vision_config")
        size = processor.size()
        settings = cls(
            image_token_id=_Values(config, str(folder / "config.json")).integer("image_token_id", None, 2**31 - 1, 0),
            patch_size=patches.integer("patch_size", 16, MAX_SIDE),
            merge_size=patches.integer("spatial_merge_size", 2, MAX_SIDE),
            min_pixels=size.integer("shortest_edge", None, MAX_PIXELS),
            max_pixels=min(size.integer("longest_edge", None, 2**62), MAX_PIXELS, DEFAULT_MAX_PIXELS),
            mean=processor.channels("image_mean"),
            std=processor.channels("image_std", above=0.0),
        )
        return settings.with_kwargs(processor_kwargs or {})

    def with_kwargs(self, given: Mapping[str, Any]) -> ImageSettings:
        """Return the settings with other bounds. Raises ConfigError."""
        for name, value in given.items():
            if name not in PROCESSOR_KWARGS or type(value) is not int or not 0 < value <= MAX_PIXELS:
                raise ConfigError(
                    f"mm_processor_kwargs={shown(dict(given))} is not allowed; give min_pixels and max_pixels, "
                    f"integers from 1 to {MAX_PIXELS}"
                )
        found = replace(self, **given)
        if found.min_pixels > found.max_pixels or found.max_pixels < found.token_side**2:
            raise ConfigError(
                f"images of {found.min_pixels} to {found.max_pixels} pixels are not possible with tokens of "
                f"{found.token_side}x{found.token_side} pixels; change mm_processor_kwargs"
            )
        return found


def _processor(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return the image processor's settings and the file that they come from; empty without a file."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        if path.is_file():
            found = read_json(path)
            inner = found.get("image_processor")
            return (inner if isinstance(inner, dict) else found), str(path)
    return {}, str(folder / "preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class _Values:
    """A JSON object of the file `where`. All methods raise ModelFolderError."""

    values: Mapping[str, Any]
    where: str

    def integer(self, name: str, default: int | None, high: int, low: int = 1) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise ModelFolderError(f"{self.where} has {name}={shown(value)}; an integer from {low} to {high} is needed")
        return value

    def channels(self, name: str, above: float = -1e6) -> tuple[float, float, float]:
        value = self.values.get(name)
        value = list(HALVES) if value is None else value
        fits = isinstance(value, list) and len(value) == 3
        if not fits or not all(type(each) in (int, float) and above < each < 1e6 for each in value):
            raise ModelFolderError(f"{self.where} has {name}={shown(value)}; a list of 3 numbers is needed")
        first, second, third = map(float, value)
        return first, second, third

    def size(self) -> _Values:
        """The two bounds of an image's area, whose names speak of edges."""
        value = self.values.get("size")
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise ModelFolderError(f"{self.where} has size={shown(value)}; an object is needed")
        given = {name: each for name, each in value.items() if each is not None}
        return _Values({**DEFAULT_SIZE, **given}, f"{self.where}: size")
