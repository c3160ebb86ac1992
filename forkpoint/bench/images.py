"""Requests with random images: vLLM's dataset `random-mm`."""

from __future__ import annotations

import ast
import base64
import io
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from forkpoint.errors import ConfigError

Bucket = tuple[int, int]  # height and width in pixels
MAX_SIDE: Final = 1 << 14
MAX_CHANCE: Final = 1e9  # of one size, before all are normalised
JPEG_QUALITY: Final = 85
EXAMPLE: Final = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"


def read_buckets(given: str) -> dict[Bucket, float]:
    """Read a dict literal of (height, width, frames) to probability, as in vLLM, and return the sizes' probabilities.

    Probabilities of 0 are dropped and the others normalised. Raises ConfigError for other texts, sizes and videos.
    """
    try:
        found = ast.literal_eval(given)
        chances = {bucket: float(chance) for bucket, chance in found.items() if chance}
        sizes = {tuple(map(int, bucket)): chance for bucket, chance in chances.items()}
    except (ValueError, OverflowError, SyntaxError, TypeError, AttributeError, RecursionError, MemoryError):
        sizes = {}
    if not sizes or not all(len(size) == 3 and min(size) > 0 and max(size) <= MAX_SIDE for size in sizes):
        raise ConfigError(
            f"random_mm_bucket_config={given[:200]!r} is not understood; give probabilities of (height, width, frames) "
            f"as in {EXAMPLE}"
        )
    if not all(0 < chance <= MAX_CHANCE for chance in sizes.values()):
        raise ConfigError(f"random_mm_bucket_config={given[:200]!r} has a probability that is not from 0 to 1e9")
    if any(frames > 1 for _, _, frames in sizes):
        raise ConfigError(
            f"random_mm_bucket_config={given[:200]!r} has videos, of more than 1 frame; give them the probability 0"
        )
    total = sum(sizes.values())
    return {(height, width): chance / total for (height, width, _), chance in sizes.items()}


def image_limit(given: Mapping[str, Any]) -> int:
    """Return `given["image"]`, the most images of a request (default: 0). Raises ConfigError if it is not a count."""
    limit = given.get("image", 0)
    if type(limit) is not int or limit < 0:
        raise ConfigError(f"random_mm_limit_mm_per_prompt has image={limit!r}; give an integer of 0 or more")
    return limit


class RandomImages:
    """A generator of noise images as data URLs of JPEGs; the same random generator gives the same images."""

    def __init__(self, buckets: Mapping[Bucket, float], num_images: int, range_ratio: float, limit: int) -> None:
        """Prepare to draw requests of `num_images` images, give or take the share `range_ratio`.

        No request has more than `limit` images. `buckets` are the probabilities of sizes. Raises ConfigError without
        Pillow.
        """
        if find_spec("PIL") is None:
            raise ConfigError("dataset_name=random-mm needs Pillow; pip install pillow")
        self._sizes, self._chances = list(buckets), list(buckets.values())
        self._fewest = min(limit, math.floor(num_images * (1 - range_ratio)))
        self._most = min(limit, math.ceil(num_images * (1 + range_ratio)))

    def draw(self, rng: np.random.Generator) -> Iterator[str]:
        """Yield the images of one request, possibly none."""
        for _ in range(int(rng.integers(self._fewest, self._most + 1))):
            height, width = self._sizes[int(rng.choice(len(self._sizes), p=self._chances))]
            yield _data_url(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def _data_url(pixels: Any) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
