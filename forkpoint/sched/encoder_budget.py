"""The vision tower's budget: images that a step encodes, and embeddings that the runner keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from forkpoint.config import BLOCK_SIZE
from forkpoint.images import ImageSpan
from forkpoint.sched.stats import EncoderStats


class EncoderBudget:
    """Limits the tokens of images that the vision tower encodes in one step.

    The first chunk of a step that needs the tower may have all images of its first block, whatever their size, so that
    every prompt advances. All other images have to fit in what is left of the budget. Once a request had to wait for
    the tower, no later request of the step gets it, so that small images cannot keep a large one waiting.

    The runner keeps the embeddings that it computed until a plan drops them. At the start of a step they have at most
    `cache_size` tokens; the least recently used ones are dropped first.
    """

    def __init__(self, max_tokens: int, cache_size: int) -> None:
        """`max_tokens` are encoded in a step at most; embeddings of `cache_size` tokens are kept."""
        self._max_tokens, self._cache_size = max_tokens, cache_size
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # number of tokens by digest, least recently used first
        self._num_kept = 0  # tokens
        self._dropped: list[bytes] = []  # digests that no plan has named yet
        self._left = max_tokens  # tokens that the step under construction may still encode
        self.stats = EncoderStats()

    def begin_step(self) -> None:
        """Start counting for another step, and drop embeddings beyond the size of the cache."""
        self._left = self._max_tokens
        while self._num_kept > self._cache_size:
            self._drop(next(iter(self._kept)))

    def end(self, images: Sequence[ImageSpan], start: int, end: int) -> int:
        """Return where the chunk `[start, end)` has to end for the images that it needs; `start` if it must wait.

        Then later requests of the step have to wait too.
        """
        left, first_block_end = self._left, (start // BLOCK_SIZE + 1) * BLOCK_SIZE
        is_first = left == self._max_tokens
        for image in self._to_encode(images, start, end).values():
            if image.num_tokens > left and not (is_first and image.start < first_block_end):
                end = max(start, image.start // BLOCK_SIZE * BLOCK_SIZE)
                break
            left -= image.num_tokens
        if end == start:
            self._left = min(self._left, 0)
        return end

    def take(self, images: Sequence[ImageSpan], start: int, end: int) -> None:
        """Deduct the images that a planned chunk `[start, end)` needs and that the runner has to encode.

        Their embeddings count as kept from now on, and those kept already as used. Counts both in `stats`.
        """
        for image in images:
            if image.start < end and start < image.end and image.digest in self._kept:
                self._kept.move_to_end(image.digest)
                self.stats.num_images_kept += 1
                self.stats.num_image_tokens_kept += image.num_tokens
        for image in self._to_encode(images, start, end).values():
            self._left -= image.num_tokens
            self._kept[image.digest] = image.num_tokens
            self._num_kept += image.num_tokens
            self.stats.num_images_encoded += 1
            self.stats.num_image_tokens_encoded += image.num_tokens

    def _to_encode(self, images: Sequence[ImageSpan], start: int, end: int) -> dict[bytes, ImageSpan]:
        """Return the images of a chunk whose embeddings are not kept, by digest and in their order."""
        found: dict[bytes, ImageSpan] = {}
        for image in images:
            if image.start < end and start < image.end and image.digest not in self._kept:
                found.setdefault(image.digest, image)
        return found

    def forget(self, images: Sequence[ImageSpan]) -> None:
        """Drop the embeddings of these images, so that they are computed again when needed."""
        for image in images:
            if image.digest in self._kept:
                self._drop(image.digest)

    def clear(self) -> None:
        """Drop all embeddings."""
        for digest in list(self._kept):
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        self._num_kept -= self._kept.pop(digest)
        self._dropped.append(digest)

    def drain_dropped(self) -> tuple[bytes, ...]:
        """Return the digests dropped since the last call, and forget them.

        The runner drops them before it encodes anything.
        """
        dropped, self._dropped = tuple(self._dropped), []
        return dropped
