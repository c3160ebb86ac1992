"""The embeddings of images that the vision tower computed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from forkpoint.images import ImageSpan
from forkpoint.models.image_rows import ImageRows
from forkpoint.models.vision import VisionTower
from forkpoint.platforms.platform import Platform
from forkpoint.runtime.row_images import StepImages


class EncodedImages:
    """Embeddings of images by digest, on the device. The scheduler decides which ones are dropped.

    The tower runs for an image that is not there, whenever a step has one of its tokens.
    """

    def __init__(self, tower: VisionTower, table: ImageRows, platform: Platform) -> None:
        self._tower, self._table, self._platform = tower, table, platform
        self._embeddings: dict[bytes, Tensor] = {}
        self.num_runs = 0  # of the tower

    def get(self, image: ImageSpan) -> Tensor:
        """Return the embeddings `[tokens, H]` of an image. Runs the tower, and keeps them, if they are not there."""
        found = self._embeddings.get(image.digest)
        if found is None:
            found = self._embeddings[image.digest] = self._tower(self._platform.upload(image.pixels))
            self.num_runs += 1
        return found

    def place(self, images: StepImages) -> None:
        """Put the images of a step where the model looks them up. Runs the tower for new ones."""
        if images.parts:
            self._table.fill_ids([self.get(image)[tokens] for image, tokens in images.parts])
        if images.rope.size:
            self._table.fill_lines(self._platform.upload(images.rope))

    def drop(self, digests: Iterable[bytes]) -> None:
        """Free the embeddings of these images, if they are there."""
        for digest in digests:
            self._embeddings.pop(digest, None)
