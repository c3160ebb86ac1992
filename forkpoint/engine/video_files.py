"""Video files, as URLs name them: frames are sampled as the model's own processor samples them.

Files come from strangers. Only the usual containers and codecs are tried, a file cannot name other files, and what is
decoded is bounded. PyAV, the decoder, comes with the extra `forkpoint[video]`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NoReturn

from forkpoint.engine.media_urls import media_bytes, url_of
from forkpoint.engine.resized_pictures import Parts
from forkpoint.engine.videos import MAX_DECODED_PIXELS, frame_parts
from forkpoint.errors import InvalidPromptError
from forkpoint.image_families.settings import VideoSettings

if TYPE_CHECKING:
    from PIL.Image import Image

CONTAINERS: Final = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"  # none of them reads other files
CODECS: Final = "h264,hevc,av1,libdav1d,vp8,vp9,libvpx,libvpx-vp9,mpeg4,mjpeg"
MAX_FRAME_PIXELS: Final = 1 << 25  # pixels of a frame as it is in the file: 7680x4320 fits
MAX_FILE_FRAMES: Final = 1 << 17  # more than an hour at 30 frames a second
DEFAULT_FPS: Final = 24.0  # frames a second of a file that does not say, as in transformers
NO_DECODER: Final = (
    "video files cannot be read, because PyAV is not installed; install forkpoint[video], or send frames as images"
)
SUPPORTED: Final = "MP4, WebM, Matroska and AVI with H.264, HEVC, AV1, VP8, VP9 or MPEG-4"


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video file whose frames are not decoded yet. `indices` are the frames that the model sees.

    `digest` identifies the file's bytes. `num_pixels` are those of the resized frames, `num_decoded_pixels` those of
    all frames up to the last one that the model sees.
    """

    data: bytes = field(repr=False)
    digest: bytes
    fps: float
    indices: Sequence[int]
    num_pixels: int
    num_decoded_pixels: int

    @classmethod
    def open(cls, data: bytes, settings: VideoSettings) -> VideoFile:
        """Read the file's structure and decode nothing.

        Raises InvalidPromptError for a broken file, for one that is too large, and without PyAV.
        """
        with _opened(data) as (container, stream):
            height, width = stream.codec_context.height, stream.codec_context.width
            if not 0 < height * width <= MAX_FRAME_PIXELS:
                raise InvalidPromptError(
                    f"a video has frames of {width}x{height} pixels; from 1 to {MAX_FRAME_PIXELS} are read"
                )
            num_frames = 0
            for packet in container.demux(stream):
                num_frames += packet.size > 0  # headers may lie about the number of frames
                if num_frames > MAX_FILE_FRAMES:
                    raise InvalidPromptError(f"a video has more than {MAX_FILE_FRAMES} frames; send a shorter one")
            fps = float(stream.average_rate or stream.guessed_rate or DEFAULT_FPS)
        if not num_frames or fps <= 0:
            raise InvalidPromptError(f"a video file of {len(data)} bytes has no frames; send another file")
        indices = settings.sampled(num_frames, fps)
        num_pixels = len(indices) * math.prod(settings.resized(len(indices), height, width))
        digest = blake2b(data, digest_size=32).digest()
        return cls(data, digest, fps, indices, num_pixels, (indices[-1] + 1) * height * width)

    @classmethod
    def of_part(cls, part: Mapping[str, Any], settings: VideoSettings, fetched: Mapping[str, bytes]) -> VideoFile:
        """Open the video of a part of the type `video_url`. Raises InvalidPromptError, which never shows the data."""
        url = url_of(part)
        if not isinstance(url, str):
            raise InvalidPromptError("a part of the type 'video_url' needs video_url, a data URL (data:video/mp4;...)")
        return cls.open(media_bytes(url, fetched, "video"), settings)

    @property
    def num_frames(self) -> int:
        return len(self.indices)

    def parts(self, settings: VideoSettings, encode: Callable[[str], Sequence[int]]) -> Parts:
        """Decode the sampled frames, and return their spans as `frame_parts` does. Raises InvalidPromptError."""
        times_s = [index / self.fps for index in self.indices]
        return frame_parts(self._frames(), times_s, settings, encode)

    def _frames(self) -> Iterator[Image]:
        """Yield the sampled frames, turned upright."""
        from PIL.Image import Transpose

        turns = {90: Transpose.ROTATE_90, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_270}
        wanted, num_pixels = set(self.indices), 0
        with _opened(self.data) as (container, stream):
            for index, frame in enumerate(container.decode(stream)):
                num_pixels += frame.width * frame.height
                if frame.width * frame.height > MAX_FRAME_PIXELS or num_pixels > MAX_DECODED_PIXELS:
                    raise InvalidPromptError(
                        "the frames of a video grow beyond the size in its header; encode it again"
                    )
                if index in wanted:
                    wanted.remove(index)
                    image, turn = frame.to_image(), turns.get(frame.rotation % 360)
                    yield image if turn is None else image.transpose(turn)
                if not wanted:
                    return
        raise InvalidPromptError("a video ends before its last frame; send the whole file")


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Yield the container and its first video stream. Raises InvalidPromptError if there is none."""
    if find_spec("av") is None:
        raise InvalidPromptError(NO_DECODER)
    import av

    try:
        options = {"format_whitelist": CONTAINERS, "codec_whitelist": CODECS}
        with av.open(io.BytesIO(data), container_options=options, io_open=_refuse) as container:
            if not container.streams.video or container.streams.video[0].codec_context is None:
                raise InvalidPromptError(f"a file of {len(data)} bytes has no video; {SUPPORTED} are read")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            yield container, stream
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise InvalidPromptError(
            f"a video file of {len(data)} bytes is broken, or of an unknown kind ({type(error).__name__}); {SUPPORTED} "
            "are read"
        ) from None


def _refuse(url: str, flags: int, options: object) -> NoReturn:
    """Refuse the other files that a container names."""
    raise ValueError("a video names another file")
