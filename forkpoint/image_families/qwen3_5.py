"""Images of Qwen3.5 and 3.6: one view, of about the picture's own size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self

from forkpoint.errors import InvalidPromptError
from forkpoint.image_families.settings import MAX_PIXELS, MAX_SIDE, ImageSettings, Values, View

DEFAULT_MAX_PIXELS: Final = 1 << 22  # 4,096 tokens; the tower's attention grows with the square
MAX_ASPECT: Final = 200  # of the longer side to the shorter one, as in the model's own processor
# What the processors of published folders say. The names of the two areas speak of edges.
DEFAULT_SIZE: Final[Mapping[str, int]] = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Images(ImageSettings):
    """Without `mm_processor_kwargs` an image has at most DEFAULT_MAX_PIXELS pixels, or as many as the folder allows if
    that is less."""

    architectures: ClassVar = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
    kwargs: ClassVar = ("min_pixels", "max_pixels")
    resampling: ClassVar = "BICUBIC"

    @classmethod
    def read(cls, folder: Path, config: Values, processor: Values) -> Self:
        vision, size = config.inner("vision_config"), processor.inner("size", DEFAULT_SIZE)
        return cls(
            image_token_id=config.integer("image_token_id", None, 2**31 - 1, 0),
            patch_size=vision.integer("patch_size", 16, MAX_SIDE),
            merge_size=vision.integer("spatial_merge_size", 2, MAX_SIDE),
            min_pixels=size.integer("shortest_edge", None, MAX_PIXELS),
            max_pixels=min(size.integer("longest_edge", None, 2**62), MAX_PIXELS, DEFAULT_MAX_PIXELS),
            mean=processor.channels("image_mean"),
            std=processor.channels("image_std", above=0.0),
        )

    def layout(self, height: int, width: int) -> list[View | int]:
        return [View.whole(*self.resized(height, width))]

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to: multiples of a token's side, of about the same shape
        and with an area within the bounds. Raises InvalidPromptError for an image that is too narrow."""
        side, longer, shorter = self.token_side, max(height, width), min(height, width)
        if longer > MAX_ASPECT * shorter:
            raise InvalidPromptError(
                f"an image has {width}x{height} pixels; its longer side may be at most {MAX_ASPECT} times the "
                "shorter one"
            )
        new_height, new_width = round(height / side) * side, round(width / side) * side
        if new_height * new_width > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            new_height = max(side, math.floor(height / scale / side) * side)
            new_width = max(side, math.floor(width / scale / side) * side)
        elif new_height * new_width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * scale / side) * side
            new_width = math.ceil(width * scale / side) * side
        return new_height, new_width
