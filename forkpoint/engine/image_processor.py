"""Pictures to the pixels that a vision tower reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from forkpoint.checks import shown
from forkpoint.config import EngineConfig
from forkpoint.engine.resized_pictures import Parts, PictureFile, ResizedPictures
from forkpoint.errors import ConfigError, InvalidPromptError
from forkpoint.image_families.media_io import with_media_io
from forkpoint.image_families.settings import ImageSettings, View, check_aspect
from forkpoint.images import ImageSpan, PixelArray
from forkpoint.media_limits import MAX_IMAGES, MediaKind
from forkpoint.obs.logs import LOGGER

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SOURCE_PIXELS: Final = 1 << 26  # pixels of a picture as it is given; decoding takes four bytes a pixel
MAX_REQUEST_PIXELS: Final = 1 << 28  # pixels of all pictures of a prompt together
LOW_DETAIL: Final = "low"
FULL_DETAIL: Final = (None, "auto", "high", "original")
GREY_16: Final = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # modes that hold 16-bit grey


def why_no_images() -> str:
    """Return the reason why a model without an image processor refuses images."""
    if not _has_pillow():
        return "images are refused: Pillow is not installed (pip install pillow)"
    return (
        "this model reads no images, because it has no vision tower that forkpoint runs or was started with "
        "--language-model-only, or without images in --limit-mm-per-prompt; remove them"
    )


def _has_pillow() -> bool:
    return find_spec("PIL") is not None


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Resizes pictures as the model's own processor does, for at most `max_images` and `max_videos` in a prompt."""

    settings: ImageSettings
    max_images: int
    max_videos: int = MAX_IMAGES
    kept: ResizedPictures = field(default_factory=ResizedPictures, repr=False, compare=False)

    @classmethod
    def load(cls, config: EngineConfig) -> ImageProcessor | None:
        """Return the processor of a model; None if it reads no images, or Pillow is missing (a warning).

        Raises ModelFolderError and ConfigError.
        """
        settings = config.read_image_settings()
        if settings is None:
            return None
        if not _has_pillow():
            LOGGER.warning(why_no_images())
            return None
        return cls(settings, config.max_images, config.max_videos)

    @property
    def modalities(self) -> tuple[MediaKind, ...]:
        """The kinds of media that a prompt may have."""
        found: list[MediaKind] = []
        if self.max_images:
            found.append("image")
        if self.max_videos and self.settings.video is not None:
            found.append("video")
        return tuple(found)

    def check_count(self, num_images: int, num_videos: int = 0) -> None:
        """Raise InvalidPromptError for more images or videos than a prompt may have."""
        for kind, count, most in (("images", num_images, self.max_images), ("videos", num_videos, self.max_videos)):
            if count > most:
                raise InvalidPromptError(
                    f"the prompt has {count} {kind}; at most {most} are allowed (--limit-mm-per-prompt)"
                )

    def with_kwargs(self, given: Mapping[str, Any] | None, media_io: Mapping[str, Any] | None = None) -> ImageProcessor:
        """Return a processor with a request's own settings of images and of reading files; itself without any.

        Raises InvalidPromptError for wrong ones, and for images larger than those that the engine has room for.
        """
        if not given and not media_io:
            return self
        try:
            settings = with_media_io(self.settings.with_kwargs(given or {}), media_io or {})
        except ConfigError as error:
            raise InvalidPromptError(str(error)) from None
        if settings.max_pixels > self.settings.max_pixels:
            raise InvalidPromptError(
                f"mm_processor_kwargs={shown(given)} allows images of {settings.max_pixels} pixels; at most "
                f"{self.settings.max_pixels} are allowed, as the engine was started with --mm-processor-kwargs"
            )
        return replace(self, settings=settings)

    def with_detail(self, detail: object) -> ImageProcessor:
        """Return a processor for an image's `detail`: itself, or for `low` one of small images.

        Raises InvalidPromptError for an unknown one.
        """
        if detail in FULL_DETAIL:
            return self
        if detail != LOW_DETAIL:
            names = ", ".join(repr(name) for name in (LOW_DETAIL, *FULL_DETAIL) if name)
            raise InvalidPromptError(f"an image has detail={shown(detail)}; give one of {names}")
        return replace(self, settings=self.settings.low_detail())

    def parts_of(self, pictures: Sequence[Any], details: Sequence[object] = ()) -> list[Parts]:
        """Return for each picture, a PIL image or a PictureFile, the tokens and spans of pixels it becomes.

        `details` are the images' own `detail`; without them each image gets the full one. Raises InvalidPromptError for
        too many or too large ones, and for a picture that cannot be decoded.
        """
        self.check_count(len(pictures))
        total = sum(map(check_picture, pictures))
        if total > MAX_REQUEST_PIXELS:
            raise InvalidPromptError(
                f"the images of the prompt have {total} pixels; at most {MAX_REQUEST_PIXELS} are read"
            )
        own = [self.with_detail(detail) for detail in details] or [self] * len(pictures)
        return [processor._parts(picture) for processor, picture in zip(own, pictures, strict=True)]

    def _parts(self, picture: Image | PictureFile) -> Parts:
        """Return the parts of a picture, which is turned upright, put on white and resized.

        Parts of a PictureFile are kept for the next request. Raises InvalidPromptError if it cannot be decoded.
        """
        if isinstance(picture, PictureFile):
            return self.kept.get(picture.digest, self.settings, partial(self._parts, picture.image))
        upright = decoded_rgb(picture, self.settings.background)
        resized: dict[tuple[int, int], PixelArray] = {}
        parts = list[ImageSpan | int]()
        check_aspect(upright.height, upright.width)
        for part in self.settings.layout(upright.height, upright.width):
            if isinstance(part, View):
                size = (part.width, part.height)
                if size not in resized:
                    resized[size] = _resized(upright, size, self.settings)
                left, top, right, bottom = part.box
                pixels = np.ascontiguousarray(resized[size][top:bottom, left:right])
                parts.append(ImageSpan.of(0, pixels, self.settings.token_side))
            else:
                parts.append(part)
        return parts


def check_picture(picture: Any) -> int:
    """Return the number of pixels of a PIL image or PictureFile.

    Raises InvalidPromptError for another object, floating-point pixels, and an image too large to be decoded.
    """
    if isinstance(picture, PictureFile):
        picture = picture.image
    size = getattr(picture, "size", None)
    if not hasattr(picture, "convert") or not isinstance(size, tuple):
        raise InvalidPromptError(f"{shown(picture)} is not an image; give PIL images")
    if picture.mode == "F":  # convert("RGB") would clip instead of scale
        raise InvalidPromptError("an image has the mode 'F', floating-point grey; convert it to 'L' first")
    width, height = size
    if not 0 < width * height <= MAX_SOURCE_PIXELS:
        raise InvalidPromptError(f"an image has {width}x{height} pixels; from 1 to {MAX_SOURCE_PIXELS} are read")
    return int(width * height)


def _resized(picture: Image, size: tuple[int, int], settings: ImageSettings) -> PixelArray:
    """Return the pixels `[height, width, 3]` of an RGB picture that is resized to `size`, its width and height."""
    from PIL.Image import Resampling

    filtering = Resampling[settings.resampling]
    if settings.pixel_type == "uint8":
        return np.array(picture.resize(size, filtering))
    # Pillow resizes pictures of floating-point grey without rounding or clipping.
    channels = [channel.convert("F").resize(size, filtering) for channel in picture.split()]
    return np.stack([np.asarray(channel, np.float32) for channel in channels], axis=-1)


def decoded_rgb(picture: Image, background: tuple[int, int, int]) -> Image:
    """Return the first frame as RGB, turned as its EXIF data say, with a colour in the place of transparent parts.

    Raises InvalidPromptError if it cannot be decoded.
    """
    try:
        return _upright_rgb(picture, background)
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise InvalidPromptError(f"an image cannot be decoded: {error}; send it again") from error


def _upright_rgb(picture: Image, background: tuple[int, int, int]) -> Image:
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode in GREY_16:  # convert("RGB") would clip instead of scale
        values = np.asarray(picture).clip(0, 65535).astype(np.int32)
        picture = Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 257 is odd, so there is no half to round
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        behind = Image.new("RGBA", picture.size, (*background, 255))
        picture = Image.alpha_composite(behind, picture.convert("RGBA"))
    return picture.convert("RGB")
