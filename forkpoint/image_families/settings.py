"""What every family that sees says of its images: sizes, normalisation, and how a picture becomes tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeAlias

from forkpoint.checks import read_json, shown
from forkpoint.errors import ConfigError, InvalidPromptError, ModelFolderError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_PIXELS: Final = 1 << 24  # of a resized image: 16,384 tokens, more than a second of a GPU
MAX_SIDE: Final = 1024  # of a patch; wider ones are a broken file
LOW_DETAIL_TOKENS: Final = 256  # the most tokens of an image with low detail
MAX_ASPECT: Final = 200  # of the longer side to the shorter one, as in Qwen's own processor
MAX_FRAMES: Final = 768  # of all videos of a prompt
WHITE: Final = (255, 255, 255)
Channels: TypeAlias = tuple[float, float, float]
HALVES: Final[Channels] = (0.5, 0.5, 0.5)
CLIP_MEAN: Final[Channels] = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final[Channels] = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class View:
    """A part of a picture that the vision tower reads by itself.

    The whole picture is resized to `height` by `width` pixels. The view is `box` of that: left, top, right, bottom.
    """

    height: int
    width: int
    box: tuple[int, int, int, int]

    @classmethod
    def whole(cls, height: int, width: int) -> View:
        return cls(height, width, (0, 0, width, height))


def fitted(
    height: int,
    width: int,
    side: int,
    min_pixels: int,
    max_pixels: int,
    *,
    least: int = 0,
    count: int = 1,
    padded: int = 1,
) -> tuple[int, int]:
    """Return the height and width that a picture, or each of `count` frames, is resized to.

    They are the multiples of `side` nearest to the picture's size, or `least` if that is more. If `padded` of them have
    more or fewer pixels than the bounds allow, the picture is scaled until `count` of them fit.
    """
    new_height, new_width = (max(least, round(length / side) * side) for length in (height, width))
    if padded * new_height * new_width > max_pixels:
        scale = math.sqrt(count * height * width / max_pixels)
        new_height, new_width = (max(side, math.floor(n / scale / side) * side) for n in (height, width))
    elif padded * new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (count * height * width))
        new_height, new_width = (math.ceil(n * scale / side) * side for n in (height, width))
    return new_height, new_width


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """How a family's videos become tokens: `num_frames` frames at a time, as one image of `token_id`s.

    `start_id` and `end_id` are the tokens around each image, after the time as text. Frames are resized to multiples of
    `side` pixels. `min_pixels` and `max_pixels` bound the pixels of all frames, `max_frame_pixels` those of one.
    """

    token_id: int
    start_id: int
    end_id: int
    num_frames: int
    side: int
    min_pixels: int
    max_pixels: int
    max_frame_pixels: int
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def sampled(self, num_frames: int, fps: float) -> list[int]:
        """Return the indices of the frames that are sampled from a file of `num_frames` frames, `fps` a second."""
        count = min(max(int(num_frames / fps * self.fps), self.min_frames), self.max_frames, num_frames)
        step = (num_frames - 1) / max(count - 1, 1)
        return [round(index * step) for index in range(count)]

    def resized(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that each of `count` frames is resized to, within the bounds.

        Raises InvalidPromptError for frames that are too narrow.
        """
        side = self.side
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        check_aspect(height, width)
        count = max(count, self.num_frames)
        padded = round(count / self.num_frames) * self.num_frames
        most = min(self.max_pixels, self.max_frame_pixels * count)
        return fitted(height, width, side, self.min_pixels, most, count=count, padded=padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings(ABC):
    """How a family's images become tokens. Sizes are in pixels.

    A token stands for `merge_size` by `merge_size` patches of `patch_size` by `patch_size`. `min_pixels` and
    `max_pixels` bound the area of a picture that is resized as a whole. `mean` and `std` normalise channels in [0, 1].
    """

    architectures: ClassVar[Sequence[str]]  # of config.json
    kwargs: ClassVar[Sequence[str]]  # the names of `mm_processor_kwargs`
    resampling: ClassVar[str]  # the name of Pillow's filter
    pixel_type: ClassVar[Literal["uint8", "float32"]] = "uint8"  # of resized pixels; float32 ones are not rounded
    image_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: Channels = HALVES
    std: Channels = HALVES
    background: tuple[int, int, int] = WHITE  # takes the place of transparent parts
    video: VideoSettings | None = None  # None: the model reads no videos

    @property
    def token_side(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """The most tokens that the vision tower reads at once, for one view."""
        return self.max_pixels // self.token_side**2

    @classmethod
    @abstractmethod
    def read(cls, folder: Path, config: Values, processor: Values) -> Self:
        """Read the values of config.json and of the image processor. Raises ModelFolderError for wrong ones."""

    @abstractmethod
    def layout(self, height: int, width: int) -> list[View | int]:
        """Return the views of a picture of this size, and the ids of special tokens around them, in their order.

        Raises InvalidPromptError for a picture that cannot be shown to the model.
        """

    def covered(self, token_ids: npt.NDArray[np.int32], place: int) -> tuple[int, int]:
        """Return the range of a prompt's tokens that `layout` takes the place of, for the placeholder at `place`."""
        return place, place + 1

    def low_detail(self) -> Self:
        """Return the settings for an image that is given with low detail, which becomes fewer tokens."""
        limit = min(self.max_pixels, LOW_DETAIL_TOKENS * self.token_side**2)
        return replace(self, max_pixels=limit, min_pixels=min(self.min_pixels, limit))

    def with_kwargs(self, given: Mapping[str, Any]) -> Self:
        """Return the settings with values of `mm_processor_kwargs`. Raises ConfigError for others than `kwargs`."""
        own = {item.name for item in fields(self)}
        for name, value in given.items():
            fits = type(value) is int and 0 < value <= MAX_PIXELS
            if name in own and type(getattr(self, name)) is bool:
                fits = type(value) is bool
            if name not in self.kwargs or not fits:
                raise ConfigError(
                    f"mm_processor_kwargs={shown(dict(given))} is not allowed; give {' and '.join(self.kwargs)}, "
                    f"integers from 1 to {MAX_PIXELS}, or true and false for a flag"
                )
        found = self._replaced(given)
        if found.min_pixels > found.max_pixels or not found.token_side**2 <= found.max_pixels <= MAX_PIXELS:
            raise ConfigError(
                f"images of {found.min_pixels} to {found.max_pixels} pixels are not possible with tokens of "
                f"{found.token_side}x{found.token_side} pixels and at most {MAX_PIXELS} pixels; change "
                "mm_processor_kwargs"
            )
        return found

    def _replaced(self, given: Mapping[str, Any]) -> Self:
        return replace(self, **given)


@dataclass(frozen=True, slots=True)
class Values:
    """A JSON object of the file `where`. Methods return defaults for absent values.

    They raise ModelFolderError for wrong values, and for absent ones whose default is None.
    """

    values: Mapping[str, Any]
    where: str

    def _checked(self, name: str, default: object, fits: Callable[[Any], bool], needed: str) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if not fits(value):
            raise ModelFolderError(f"{self.where} has {name}={shown(value)}; {needed} is needed")
        return value

    def integer(self, name: str, default: int | None, high: int, low: int = 1) -> int:
        needed = f"an integer from {low} to {high}"
        return int(self._checked(name, default, lambda value: type(value) is int and low <= value <= high, needed))

    def token_id(self, name: str, default: int | None = None) -> int:
        return self.integer(name, default, 2**31 - 1, 0)

    def number(self, name: str, default: float) -> float:
        return float(self._checked(name, default, lambda value: _is_between(value, 0, 1e9), "a positive number"))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._checked(name, default, lambda value: type(value) is bool, "true or false"))

    def channels(self, name: str, above: float = -1e6, default: Channels = HALVES) -> Channels:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == 3 and all(_is_between(each, above, 1e6) for each in value)

        first, second, third = map(float, self._checked(name, list(default), fits, "a list of 3 numbers"))
        return first, second, third

    def inner(self, name: str, defaults: Mapping[str, Any] | None = None) -> Values:
        """Return the object of this name (absent: an empty one), with `defaults` for its absent values."""
        value = self._checked(name, {}, lambda value: isinstance(value, dict), "an object")
        given = {key: each for key, each in value.items() if each is not None}
        return Values({**(defaults or {}), **given}, f"{self.where}: {name}")


def _is_between(value: object, low: float, high: float) -> bool:
    return type(value) in (int, float) and low < value < high  # type: ignore[operator]


def added_tokens(folder: Path, needed: Collection[str]) -> dict[str, int]:
    """Return the ids of the tokenizer's added tokens, by text. Raises ModelFolderError if one of `needed` is absent."""
    found: dict[str, int] = {}
    path = folder / "tokenizer.json"
    if path.is_file():
        found = {token["content"]: token["id"] for token in read_json(path).get("added_tokens", [])}
    missing = [token for token in needed if token not in found]
    if missing:
        raise ModelFolderError(
            f"{path} has no token {missing[0]!r}, which stands next to images; copy the tokenizer of the model's folder"
        )
    return found


def check_aspect(height: int, width: int) -> None:
    """Raise InvalidPromptError for an image whose sides differ by more than MAX_ASPECT times."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidPromptError(
            f"an image has {width}x{height} pixels; its longer side may be at most {MAX_ASPECT} times the shorter one"
        )


def read_processor(folder: Path, kind: str = "image") -> Values:
    """Return the settings of the `kind` ("image" or "video") of processor; empty without a file.

    Raises ModelFolderError for a broken file.
    """
    own = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}[kind]
    for name in (own, "processor_config.json"):
        path = folder / name
        if path.is_file():
            found = read_json(path)
            inner = found.get(f"{kind}_processor")
            if isinstance(inner, dict):
                return Values(inner, str(path))
            if name == own:
                return Values(found, str(path))
    return Values({}, str(folder / own))
