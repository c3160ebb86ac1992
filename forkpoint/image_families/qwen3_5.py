"""Images and videos of Qwen3.5 and 3.6: one view, of about the picture's own size, and pairs of frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from forkpoint.image_families.settings import (
    MAX_PIXELS,
    MAX_SIDE,
    ImageSettings,
    Values,
    VideoSettings,
    View,
    fitted,
    read_processor,
)

DEFAULT_MAX_PIXELS: Final = 1 << 22  # 4,096 tokens; the tower's attention grows with the square
# What the processors of published folders say. The names of the two areas speak of edges.
DEFAULT_SIZE: Final[Mapping[str, int]] = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
DEFAULT_VIDEO_SIZE: Final[Mapping[str, int]] = {"shortest_edge": 4096, "longest_edge": 25165824}
TOKEN_IDS: Final = ("video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Images(ImageSettings):
    """Qwen3.5's settings: an image is one view, a video pairs of frames.

    Without `mm_processor_kwargs` an image has at most DEFAULT_MAX_PIXELS pixels, or as many as the folder allows if
    fewer.
    """

    architectures: ClassVar = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
    kwargs: ClassVar = ("min_pixels", "max_pixels")
    resampling: ClassVar = "BICUBIC"

    @classmethod
    def read(cls, folder: Path, config: Values, processor: Values) -> Self:
        vision, size = config.inner("vision_config"), processor.inner("size", DEFAULT_SIZE)
        found = cls(
            image_token_id=config.token_id("image_token_id"),
            patch_size=vision.integer("patch_size", 16, MAX_SIDE),
            merge_size=vision.integer("spatial_merge_size", 2, MAX_SIDE),
            min_pixels=size.integer("shortest_edge", None, MAX_PIXELS),
            max_pixels=min(size.integer("longest_edge", None, 2**62), MAX_PIXELS, DEFAULT_MAX_PIXELS),
            mean=processor.channels("image_mean"),
            std=processor.channels("image_std", above=0.0),
        )
        if any(config.values.get(name) is None for name in TOKEN_IDS):
            return found
        token_id, start_id, end_id = (config.token_id(name) for name in TOKEN_IDS)
        processor = read_processor(folder, "video")
        size = processor.inner("size", DEFAULT_VIDEO_SIZE)
        video = VideoSettings(
            token_id=token_id,
            start_id=start_id,
            end_id=end_id,
            num_frames=vision.integer("temporal_patch_size", 2, 16, 2),
            side=found.token_side,
            min_pixels=size.integer("shortest_edge", None, 2**40),
            max_pixels=size.integer("longest_edge", None, 2**62),
            max_frame_pixels=found.max_pixels,
            fps=processor.number("fps", 2.0),
            min_frames=processor.integer("min_frames", 4, 2**31),
            max_frames=processor.integer("max_frames", 768, 2**31),
        )
        return replace(found, video=video)

    def _replaced(self, given: Mapping[str, Any]) -> Self:
        found = replace(self, **given)
        if self.video is None:
            return found
        return replace(found, video=replace(self.video, max_frame_pixels=found.max_pixels))

    def layout(self, height: int, width: int) -> list[View | int]:
        return [View.whole(*fitted(height, width, self.token_side, self.min_pixels, self.max_pixels))]
