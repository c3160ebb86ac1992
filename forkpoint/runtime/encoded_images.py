"""A bounded cache of what the vision tower made of images."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from torch import Tensor

from forkpoint.images import ImageSpan
from forkpoint.models.vision import VisionTower
from forkpoint.platforms.platform import Platform

MAX_ENCODED_BYTES: Final = 1 << 28  # 32 images of 1024x1024 pixels at a hidden size of 4096 in bfloat16


class EncodedImages:
    """Embeddings of images by digest, on the device; the least recently used ones are dropped first.

    The tower runs for an image that is not there, whenever a step has one of its tokens.
    """

    def __init__(self, tower: VisionTower, platform: Platform, max_bytes: int = MAX_ENCODED_BYTES) -> None:
        self._tower, self._platform, self._max_bytes = tower, platform, max_bytes
        self._embeddings: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_bytes = 0
        self.num_runs = 0  # of the tower

    def get(self, image: ImageSpan) -> Tensor:
        """Return the embeddings `[tokens, H]` of an image, at all of its tokens: they depend on all of its pixels."""
        found = self._embeddings.pop(image.digest, None)
        if found is None:
            found = self._tower(self._platform.upload(image.pixels))
            self.num_runs += 1
        else:
            self._num_bytes -= found.nbytes
        if found.nbytes <= self._max_bytes:
            self._embeddings[image.digest] = found
            self._num_bytes += found.nbytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._embeddings.popitem(last=False)[1].nbytes
        return found

    def clear(self) -> None:
        """Drop all embeddings."""
        self._embeddings.clear()
        self._num_bytes = 0
