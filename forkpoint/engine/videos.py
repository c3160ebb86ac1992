"""Frames of videos, as vLLM's `multi_modal_data` has them, to the pixels that a vision tower reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from forkpoint.checks import shown
from forkpoint.engine.image_processor import MAX_REQUEST_PIXELS
from forkpoint.engine.resized_pictures import Parts
from forkpoint.errors import InvalidPromptError
from forkpoint.image_families.settings import MAX_FRAMES, VideoSettings
from forkpoint.images import ImageSpan, PixelArray

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_DECODED_PIXELS: Final = 1 << 32  # pixels of all frames of a prompt's files: about 10 s of one core
DEFAULT_FPS: Final = 2.0  # frames a second that the model's own processor samples
MAX_SHOWN_NAME: Final = 64  # characters of a text in an error message; a longer one may be the data of a file
EXAMPLE: Final = "an array [frames, height, width, 3] of uint8, a list of frames, or (frames, {'fps': 2.0})"


@dataclass(frozen=True, slots=True)
class Video:
    """Frames `[frames, height, width, 3]` and the time of each in seconds."""

    frames: PixelArray
    times_s: Sequence[float]

    @classmethod
    def read(cls, given: object) -> Video:
        """Read frames, or a pair of frames and vLLM's metadata (`fps`, `frames_indices`). Raises InvalidPromptError."""
        metadata: object = {}
        if isinstance(given, tuple) and len(given) == 2 and not hasattr(given[1], "shape"):
            given, metadata = given
        frames = _frames(given)
        return cls(frames, _times(metadata, len(frames)))

    @property
    def digest(self) -> None:
        return None

    @property
    def num_frames(self) -> int:
        return len(self.frames)

    @property
    def num_pixels(self) -> int:
        return self.frames.size // 3

    @property
    def num_decoded_pixels(self) -> int:
        return 0

    def parts(self, settings: VideoSettings, encode: Callable[[str], Sequence[int]]) -> Parts:
        """Return the spans of the video as `frame_parts` does. Raises InvalidPromptError for narrow frames."""
        from PIL import Image

        return frame_parts(map(Image.fromarray, self.frames), self.times_s, settings, encode)


class SizedVideo(Protocol):
    """A video whose size is known before its frames are resized.

    `digest` identifies a file (None: the frames came without one), of which `num_decoded_pixels` have to be decoded.
    `num_pixels` are held at once.
    """

    @property
    def digest(self) -> bytes | None: ...

    @property
    def num_frames(self) -> int: ...

    @property
    def num_pixels(self) -> int: ...

    @property
    def num_decoded_pixels(self) -> int: ...

    def parts(self, settings: VideoSettings, encode: Callable[[str], Sequence[int]]) -> Parts: ...


def frame_parts(
    frames: Iterable[Image], times_s: Sequence[float], settings: VideoSettings, encode: Callable[[str], Sequence[int]]
) -> Parts:
    """Return the parts of a video: for each group of frames, its time as text and its span between two tokens.

    `times_s` has the time of each frame. `encode` returns a text's ids. All frames are resized to one size, which
    follows from the first frame, and the last one fills up the last group. Raises InvalidPromptError for frames that
    are too narrow.
    """
    from PIL.Image import Resampling

    count, num_missing = len(times_s), -len(times_s) % settings.num_frames
    size: tuple[int, int] | None = None
    resized = list[PixelArray]()
    for frame in frames:
        if size is None:
            height, width = settings.resized(count, frame.height, frame.width)
            size = width, height
        resized.append(np.asarray(frame.resize(size, Resampling.BICUBIC)))
    resized += resized[-1:] * num_missing
    times = [*times_s, *[times_s[-1]] * num_missing]
    parts = list[ImageSpan | int]()
    for start in range(0, len(resized), settings.num_frames):
        group = slice(start, start + settings.num_frames)
        first, *_, last = times[group]
        parts += encode(f"<{(first + last) / 2:.1f} seconds>")
        parts += [settings.start_id, ImageSpan.of(0, np.stack(resized[group]), settings.side), settings.end_id]
    return parts


def read_videos(given: object) -> list[Video]:
    """Return the videos of `multi_modal_data`: none, one, or a list of them. Raises InvalidPromptError."""
    if given is None:
        return []
    several = [given]
    if isinstance(given, list) and given and (isinstance(given[0], list | tuple) or getattr(given[0], "ndim", 0) == 4):
        several = given
    videos = [Video.read(each) for each in several]
    check_videos(videos)
    return videos


def check_videos(videos: Sequence[SizedVideo]) -> None:
    """Raise InvalidPromptError if a prompt has too many frames or pixels."""
    num_frames = sum(video.num_frames for video in videos)
    num_pixels = sum(video.num_pixels for video in videos)
    if num_frames > MAX_FRAMES or num_pixels > MAX_REQUEST_PIXELS:
        raise InvalidPromptError(
            f"the videos of the prompt have {num_frames} frames with {num_pixels} pixels; at most {MAX_FRAMES} frames "
            f"and {MAX_REQUEST_PIXELS} pixels are read"
        )
    num_decoded = sum(video.num_decoded_pixels for video in videos)
    if num_decoded > MAX_DECODED_PIXELS:
        raise InvalidPromptError(
            f"the video files of the prompt have {num_decoded} pixels in all frames; at most {MAX_DECODED_PIXELS} are "
            "decoded: send shorter or smaller videos"
        )


def _described(given: object) -> str:
    """Return what was given as a video for an error message, which never shows the data of files or frames."""
    if isinstance(given, np.ndarray):
        return f"an array of shape {list(given.shape)} and dtype {given.dtype}"
    if isinstance(given, list | tuple):
        return f"a {type(given).__name__} of {len(given)} items"
    if isinstance(given, str) and len(given) > MAX_SHOWN_NAME:
        return f"a text of {len(given)} characters"
    return shown(given)


def _frames(given: object) -> PixelArray:
    if isinstance(given, list | tuple) and given and all(hasattr(frame, "convert") for frame in given):
        given = [np.asarray(frame.convert("RGB")) for frame in given[: MAX_FRAMES + 1]]
    try:
        frames = np.asarray(given)
    except ValueError:
        raise InvalidPromptError(f"the frames of a video differ in size; give {EXAMPLE}") from None
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise InvalidPromptError(f"{_described(given)} is not a video; give {EXAMPLE}")
    return frames


def _times(metadata: object, count: int) -> list[float]:
    """Return the times of frames in seconds: index by rate. By default, frames follow each other at DEFAULT_FPS.

    Raises InvalidPromptError.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidPromptError(f"the metadata of a video are {shown(metadata)}; give {EXAMPLE}")
    fps: Any = metadata.get("fps")
    indices: Any = metadata.get("frames_indices")
    if fps is None:
        fps = DEFAULT_FPS
    if indices is None:
        indices = range(count)
    if not _is_number(fps) or fps <= 0:
        raise InvalidPromptError(f"the metadata of a video have fps={shown(fps)}; a positive number is needed")
    if not isinstance(indices, Sequence | np.ndarray) or len(indices) != count or not all(map(_is_number, indices)):
        raise InvalidPromptError(
            f"the metadata of a video have frames_indices={shown(indices)}; a number for each of the {count} frames is "
            "needed"
        )
    return [float(index) / float(fps) for index in indices]


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_real and abs(float(value)) < 1e9
