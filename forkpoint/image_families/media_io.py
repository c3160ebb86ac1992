"""How files of images and videos are read: `--media-io-kwargs`, and `media_io_kwargs` of a request, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from forkpoint.checks import shown
from forkpoint.errors import ConfigError
from forkpoint.image_families.settings import MAX_FRAMES, ImageSettings, VideoSettings

EXAMPLE: Final = '{"image": {"rgba_background_color": [255, 255, 255]}, "video": {"num_frames": 32, "fps": 2}}'
MEDIA: Final = ("image", "video", "audio")
# Images are always RGB, and there is one decoder of videos.
KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("rgba_background_color", "image_mode"),
    "video": ("num_frames", "fps", "video_backend"),
}
MAX_FPS: Final = 1000
ALL_FRAMES: Final = -1  # `num_frames`: as many as a prompt may have


def with_media_io(settings: ImageSettings, given: object) -> ImageSettings:
    """Return the settings with the colour behind transparent parts and the sampling of videos that are given.

    Sound changes nothing. Raises ConfigError for what is not understood.
    """
    if not isinstance(given, Mapping):
        raise _not_allowed(given)
    for kind, values in given.items():
        if kind == "audio":
            continue
        if kind not in KNOWN or not isinstance(values, Mapping) or not set(values) <= set(KNOWN[kind]):
            raise _not_allowed(given)
    image, video = given.get("image", {}), given.get("video", {})
    colour, num_frames, fps = image.get("rgba_background_color"), video.get("num_frames"), video.get("fps")
    if not (_is_colour(colour) and _is_count(num_frames) and _is_rate(fps)):
        raise _not_allowed(given)
    if colour is not None:
        red, green, blue = colour
        settings = replace(settings, background=(red, green, blue))
    if settings.video is None:
        return settings
    return replace(settings, video=_sampled(settings.video, num_frames, fps))


def _sampled(video: VideoSettings, num_frames: int | None, fps: float | None) -> VideoSettings:
    """Return the settings with this rate (None: the model's) and at most so many frames (None: the model's limits).

    Without a rate there are `num_frames` frames, or all if the video has fewer.
    """
    if num_frames is not None:
        most = MAX_FRAMES if num_frames == ALL_FRAMES else min(num_frames, MAX_FRAMES)
        least = min(video.min_frames, most) if fps is not None else most
        video = replace(video, min_frames=least, max_frames=most)
    if fps is not None:
        video = replace(video, fps=float(fps))
    return video


def _is_colour(value: object) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(type(each) is int and 0 <= each <= 255 for each in value)
    )


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and (value == ALL_FRAMES or 0 < value < 2**31))


def _is_rate(value: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 < value <= MAX_FPS)  # type: ignore[operator]


def _not_allowed(given: object) -> ConfigError:
    return ConfigError(f"media_io_kwargs={shown(given)} is not allowed; give values such as {EXAMPLE}")
