"""Images of Ling-3.0 VL: one view of about the picture's own size, with a newline behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from forkpoint.checks import read_json
from forkpoint.errors import ModelFolderError
from forkpoint.image_families.qwen3_5 import DEFAULT_MAX_PIXELS
from forkpoint.image_families.settings import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_PIXELS,
    MAX_SIDE,
    ImageSettings,
    Values,
    View,
    added_tokens,
    fitted,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

START, END = "<|vision_start|>", "<|vision_end|>"
NEWLINE: Final = "Ċ"  # how byte-level tokenizers write it
MIN_PIXELS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LingVlImages(ImageSettings):
    """Ling-3.0 VL's settings. Its processor writes the tokens `start_id` and `end_id` around an image, and a newline.

    They take the place of those that the template writes.
    """

    architectures: ClassVar = ("BailingMoeV3VLForConditionalGeneration",)
    kwargs: ClassVar = ("min_pixels", "max_pixels")
    resampling: ClassVar = "BICUBIC"
    start_id: int
    end_id: int
    newline_id: int

    @classmethod
    def read(cls, folder: Path, config: Values, processor: Values) -> Self:
        vision, size = config.inner("vision_config"), processor.inner("size")
        least = processor.integer("min_pixels", size.integer("shortest_edge", MIN_PIXELS, MAX_PIXELS), MAX_PIXELS)
        most = processor.integer("max_pixels", size.integer("longest_edge", DEFAULT_MAX_PIXELS, 2**62), 2**62)
        ids = added_tokens(folder, (START, END))
        return cls(
            image_token_id=config.token_id("image_token_id"),
            patch_size=vision.integer("patch_size", 16, MAX_SIDE),
            merge_size=vision.integer("spatial_merge_size", 2, MAX_SIDE),
            min_pixels=least,
            max_pixels=min(most, DEFAULT_MAX_PIXELS),
            mean=processor.channels("image_mean", default=CLIP_MEAN),
            std=processor.channels("image_std", above=0.0, default=CLIP_STD),
            start_id=ids[START],
            end_id=ids[END],
            newline_id=_newline_id(folder),
        )

    def layout(self, height: int, width: int) -> list[View | int]:
        view = View.whole(*fitted(height, width, self.token_side, self.min_pixels, self.max_pixels))
        return [self.start_id, view, self.end_id, self.newline_id]

    def covered(self, token_ids: npt.NDArray[np.int32], place: int) -> tuple[int, int]:
        start, end = place, place + 1
        if start > 0 and token_ids[start - 1] == self.start_id:
            start -= 1
        for token_id in (self.end_id, self.newline_id):
            if end < len(token_ids) and token_ids[end] == token_id:
                end += 1
        return start, end


def _newline_id(folder: Path) -> int:
    """Return the id of a newline. Raises ModelFolderError for a tokenizer that is not byte-level."""
    path = folder / "tokenizer.json"
    model = read_json(path).get("model")
    vocab: Any = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(NEWLINE) if isinstance(vocab, dict) else None
    if type(found) is not int:
        raise ModelFolderError(
            f"{path} has no token for a newline, which stands behind images; copy the tokenizer of the model's folder"
        )
    return found
