"""A bounded memo of pictures that were decoded and resized, since every turn of a conversation sends all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias

from forkpoint.image_families.settings import ImageSettings
from forkpoint.images import ImageSpan

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_RESIZED_BYTES: Final = 1 << 26  # 21 images of 1024x1024 pixels; each reader process has a memo of its own
Parts: TypeAlias = Sequence[ImageSpan | int]  # spans that start at 0, and ids of special tokens, in their order


@dataclass(frozen=True, slots=True, eq=False)
class PictureFile:
    """A picture that was opened but not decoded, and the digest of its file."""

    image: Image
    digest: bytes

    @classmethod
    def of(cls, image: Image, data: bytes) -> PictureFile:
        return cls(image, blake2b(data, digest_size=32).digest())


class ResizedPictures:
    """Parts of pictures by the digest of the file and the settings; the least recently used ones are dropped first."""

    def __init__(self, max_bytes: int = MAX_RESIZED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: OrderedDict[tuple[bytes, ImageSettings], Parts] = OrderedDict()
        self._num_bytes = 0

    def get(self, digest: bytes, settings: ImageSettings, resize: Callable[[], Parts]) -> Parts:
        """Return the parts of a picture, by its file's digest and the settings.

        `resize` computes them if they are not kept. They are kept, within `max_bytes` of pixels.
        """
        key = digest, settings
        if key in self._parts:
            self._parts.move_to_end(key)
            return self._parts[key]
        found = resize()
        if (num_bytes := _num_bytes(found)) > self._max_bytes:
            return found
        self._parts[key] = found
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _num_bytes(self._parts.popitem(last=False)[1])
        return found


def _num_bytes(parts: Parts) -> int:
    return sum(part.pixels.nbytes for part in parts if isinstance(part, ImageSpan))
