"""Videos as files of their frames, joined by commas: vLLM's data URLs of the type `video/jpeg`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Self

from forkpoint.engine.image_processor import decoded_rgb
from forkpoint.engine.media_urls import NONE_FETCHED, media_bytes
from forkpoint.engine.pictures import opened_picture
from forkpoint.engine.resized_pictures import Parts, PictureFile
from forkpoint.engine.videos import frame_parts
from forkpoint.errors import InvalidPromptError
from forkpoint.image_families.settings import MAX_FRAMES, VideoSettings

HEAD: Final = "data:video/jpeg;base64,"


@dataclass(frozen=True, slots=True)
class FrameFiles:
    """The frames of a video, opened and not decoded. They follow each other at `fps` frames a second.

    `background` takes the place of transparent parts.
    """

    frames: Sequence[PictureFile] = field(repr=False)
    fps: float
    background: tuple[int, int, int]

    @classmethod
    def of_url(cls, url: str, fps: float, background: tuple[int, int, int]) -> Self:
        """Open the frames of a data URL that begins with HEAD. Raises InvalidPromptError, which shows no data."""
        given = url[len(HEAD) :].split(",")
        if len(given) > MAX_FRAMES:
            raise InvalidPromptError(f"a video has {len(given)} frames; at most {MAX_FRAMES} are read")
        frames = [opened_picture(media_bytes(each, NONE_FETCHED, "image")) for each in given]
        sizes = {frame.image.size for frame in frames}
        if len(sizes) > 1:
            raise InvalidPromptError(
                f"the frames of a video differ in size, such as {sorted(sizes)[:2]}; give one size"
            )
        return cls(frames, fps, background)

    @property
    def digest(self) -> bytes:
        return blake2b(b"".join(frame.digest for frame in self.frames), digest_size=32, person=b"frames").digest()

    @property
    def num_frames(self) -> int:
        return len(self.frames)

    @property
    def num_pixels(self) -> int:
        return sum(frame.image.width * frame.image.height for frame in self.frames)

    @property
    def num_decoded_pixels(self) -> int:
        return self.num_pixels

    def parts(self, settings: VideoSettings, encode: Callable[[str], Sequence[int]]) -> Parts:
        """Decode the frames, and return their spans as `frame_parts` does. Raises InvalidPromptError."""
        images = (decoded_rgb(frame.image, self.background) for frame in self.frames)
        return frame_parts(images, [index / self.fps for index in range(len(self.frames))], settings, encode)
