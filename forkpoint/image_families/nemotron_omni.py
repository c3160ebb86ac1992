"""Images of Nemotron 3 Omni: one view of about the picture's own size, resized without rounding its pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from forkpoint.errors import ModelFolderError
from forkpoint.image_families.settings import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_PIXELS,
    MAX_SIDE,
    Channels,
    ImageSettings,
    Values,
    View,
    added_tokens,
)

START, END = "<img>", "</img>"
MARGIN: Final = 4  # tokens of `max_model_len` that the model's processor keeps free of images


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronOmniImages(ImageSettings):
    """Nemotron 3 Omni's settings: an image is one view between two special tokens.

    Each image has the budget that the model's processor gives a single image. In one call with several images, the
    processor may raise that of all for very many of them, which would change an image with its neighbours.
    """

    architectures: ClassVar = (
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    )
    kwargs: ClassVar = ("min_num_patches", "max_num_patches")
    resampling: ClassVar = "BICUBIC"
    pixel_type: ClassVar = "float32"
    start_id: int
    end_id: int

    @classmethod
    def read(cls, folder: Path, config: Values, processor: Values) -> Self:
        vision = config.inner("vision_config")
        patch = vision.integer("patch_size", 16, MAX_SIDE)
        merge = round(1 / config.number("downsample_ratio", 0.5))
        least, most = (
            _first(name, (processor, vision, vision.inner("args")), default, MAX_PIXELS // patch**2)
            for name, default in (("min_num_patches", 1024), ("max_num_patches", 13312))
        )
        length = processor.integer("max_model_len", 16384, 2**31 - 1, MARGIN + 1)
        budget = max(least, min(most, (length - MARGIN) * merge**2))
        ids = added_tokens(folder, (START, END))
        # Published folders have the longer name.
        token = "image_token_id" if config.values.get("image_token_id") is not None else "img_context_token_id"
        found = cls(
            image_token_id=config.token_id(token),
            patch_size=patch,
            merge_size=merge,
            min_pixels=least * patch**2,
            max_pixels=budget * patch**2,
            mean=_channels(processor, "mean", CLIP_MEAN),
            std=_channels(processor, "std", CLIP_STD, above=0.0),
            start_id=ids[START],
            end_id=ids[END],
        )
        if not found.token_side**2 <= found.max_pixels:
            raise ModelFolderError(
                f"{processor.where} has max_num_patches={most}; a token has {merge**2} patches, and more are needed"
            )
        return found

    def _replaced(self, given: Mapping[str, Any]) -> Self:
        names = {"min_num_patches": "min_pixels", "max_num_patches": "max_pixels"}
        return replace(self, **{names[name]: count * self.patch_size**2 for name, count in given.items()})

    def layout(self, height: int, width: int) -> list[View | int]:
        rows, columns = self._patches(height, width)
        return [self.start_id, View.whole(rows * self.patch_size, columns * self.patch_size), self.end_id]

    def _patches(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches that a picture is resized to, multiples of `merge_size`."""
        least, most = (pixels // self.patch_size**2 for pixels in (self.min_pixels, self.max_pixels))
        # The model's processor rounds in this way: up, but an even number of patches stays.
        rows, columns = (round(length / self.patch_size + 0.5) for length in (height, width))
        scale = min(math.sqrt(most / (rows * columns)), 1.0)
        rows, columns = (max(1, math.floor(scale * count)) for count in (rows, columns))
        if rows * columns < least < most:
            scale = math.sqrt(least / (rows * columns))
            rows, columns = (math.ceil(scale * count) for count in (rows, columns))
        rows = self._merged(rows, columns, most)
        columns = self._merged(columns, rows, most)
        if rows * columns <= most:
            return rows, columns
        # The processor exceeds its budget here: a narrow picture with a small budget.
        shorter = min(rows, columns)
        longer = max(self.merge_size, most // shorter // self.merge_size * self.merge_size)
        return (shorter, longer) if rows < columns else (longer, shorter)

    def _merged(self, count: int, other: int, most: int) -> int:
        """Return `count` rounded to a multiple of `merge_size`: up, or down if `most` patches are exceeded."""
        up = -(-count // self.merge_size) * self.merge_size
        if up * other <= most:
            return up
        return max(self.merge_size, count // self.merge_size * self.merge_size)


def _first(name: str, places: Sequence[Values], default: int, high: int) -> int:
    """Return the integer in the first of the places that has it. Raises ModelFolderError for a wrong one."""
    place = next((place for place in places if place.values.get(name) is not None), places[0])
    return place.integer(name, default, high)


def _channels(processor: Values, name: str, default: Channels, above: float = -1e6) -> Channels:
    """Return the values of three channels, called `image_{name}` in newer files and `norm_{name}` in older ones."""
    older = processor.channels(f"norm_{name}", above, default)
    return processor.channels(f"image_{name}", above, older)
