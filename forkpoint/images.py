"""Images in a prompt: which tokens stand for them, what identifies them, and their rotary positions."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

PixelArray: TypeAlias = npt.NDArray[np.uint8 | np.float32]
PositionArray: TypeAlias = npt.NDArray[np.int64]

DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class ImageSpan:
    """The placeholder tokens of one image: `[start, end)` of a prompt, `num_rows` rows of `num_columns` tokens.

    The vision tower reads `pixels` at once: `[height, width, 3]` of a picture or a part of one, or `[frames, height,
    width, 3]` of consecutive frames of a video. All images of a model have one dtype. `digest` identifies the pixels
    and their shape.
    """

    start: int
    num_rows: int
    num_columns: int
    digest: bytes
    pixels: PixelArray = field(repr=False)

    @classmethod
    def of(cls, start: int, pixels: PixelArray, token_side: int) -> ImageSpan:
        """Return the span from token `start` of an image whose tokens stand for squares of `token_side` pixels."""
        *_, height, width, _ = pixels.shape
        content = struct.pack(f"<{pixels.ndim}I", pixels.ndim, *pixels.shape[:-1]) + pixels.tobytes()
        digest = blake2b(content, digest_size=DIGEST_BYTES, person=b"forkpoint-image").digest()
        return cls(start, height // token_side, width // token_side, digest, pixels)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_columns

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def block_marks(images: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """Return the bytes that a block of tokens `[start, end)` is hashed with besides its token ids.

    These are, for each image in the block, its digest, and where it starts relative to the block. None: empty.
    """
    touching = (image for image in images if image.start < end and start < image.end)
    return b"".join(image.digest + struct.pack("<i", image.start - start) for image in touching)


def rope_positions(images: Sequence[ImageSpan], centred: bool = False) -> PositionArray:
    """Return `[3, end of the last image]`: the time, row and column by which the first tokens of a prompt are rotated.

    The three are equal for text, which counts up. All tokens of an image have the image's time. Rows and columns count
    from there, and the text after the image continues behind its longer side. If `centred`, the middle row and column
    have the image's time instead, so that others may be negative, and the text continues one behind it.
    """
    found = np.empty((3, images[-1].end if images else 0), np.int64)
    token = position = 0
    for image in images:
        count = image.start - token
        found[:, token : image.start] = position + np.arange(count)
        position += count
        first_row, first_column = position, position
        if centred:
            first_row, first_column = position - (image.num_rows - 1) // 2, position - (image.num_columns - 1) // 2
        own = found[:, image.start : image.end]
        own[0] = position
        own[1] = first_row + np.repeat(np.arange(image.num_rows), image.num_columns)
        own[2] = first_column + np.tile(np.arange(image.num_columns), image.num_rows)
        position += _length(image, centred)
        token = image.end
    return found


def rope_shift(images: Sequence[ImageSpan], centred: bool = False) -> int:
    """Return what is added to the positions of tokens after the last image, before rotation: 0 or less."""
    return sum(_length(image, centred) - image.num_tokens for image in images)


def _length(image: ImageSpan, centred: bool) -> int:
    """Return how far an image moves the rotary positions of the text behind it."""
    return 1 if centred else max(image.num_rows, image.num_columns)
