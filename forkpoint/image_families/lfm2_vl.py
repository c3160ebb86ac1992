"""Images of LFM2-VL: a large picture is cut into tiles, which a thumbnail of the whole follows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from forkpoint.checks import read_json
from forkpoint.errors import ConfigError, InvalidPromptError, ModelFolderError
from forkpoint.image_families.settings import MAX_SIDE, ImageSettings, Values, View, added_tokens, fitted

MAX_VIEW_TOKENS: Final = 4096
MAX_TILES: Final = 100
START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VlImages(ImageSettings):
    """LFM2-VL's settings: a picture of more than `tolerance * max_pixels` is cut into square tiles.

    These are `min_tiles` to `max_tiles` of `tile_size` pixels. `special_ids` are the ids of the tokens around views, by
    their text; empty if the model was trained without them.
    """

    architectures: ClassVar = ("Lfm2VlForConditionalGeneration",)
    kwargs: ClassVar = ("min_image_tokens", "max_image_tokens", "min_tiles", "max_tiles", "do_image_splitting")
    resampling: ClassVar = "BILINEAR"
    do_image_splitting: bool
    use_thumbnail: bool
    min_tiles: int
    max_tiles: int
    tile_size: int
    tolerance: float
    special_ids: Mapping[str, int] = field(hash=False)

    @property
    def max_tokens(self) -> int:
        return max(self.max_pixels, self.tile_size**2) // self.token_side**2

    @classmethod
    def read(cls, folder: Path, config: Values, processor: Values) -> Self:
        patch = config.inner("vision_config").integer("patch_size", 16, MAX_SIDE)
        merge = config.integer("downsample_factor", 2, MAX_SIDE)
        token = (patch * merge) ** 2
        found = cls(
            image_token_id=config.token_id("image_token_id", 396),
            patch_size=patch,
            merge_size=merge,
            min_pixels=processor.integer("min_image_tokens", 64, MAX_VIEW_TOKENS) * token,
            max_pixels=processor.integer("max_image_tokens", 256, MAX_VIEW_TOKENS) * token,
            mean=processor.channels("image_mean"),
            std=processor.channels("image_std", above=0.0),
            do_image_splitting=processor.flag("do_image_splitting", True),
            use_thumbnail=processor.flag("use_thumbnail", True),
            min_tiles=processor.integer("min_tiles", 2, MAX_TILES),
            max_tiles=processor.integer("max_tiles", 10, MAX_TILES),
            tile_size=processor.integer("tile_size", 512, MAX_SIDE),
            tolerance=processor.number("max_pixels_tolerance", 2.0),
            special_ids=added_tokens(folder, (START, END, THUMBNAIL)) if _uses_special_tokens(folder) else {},
        )
        if found.tile_size % found.token_side or found.min_tiles > found.max_tiles:
            raise ModelFolderError(
                f"{processor.where} has tile_size={found.tile_size}, min_tiles={found.min_tiles} and max_tiles="
                f"{found.max_tiles}; tiles of a multiple of {found.token_side} pixels are needed, and min_tiles of at "
                "most max_tiles"
            )
        return found

    def low_detail(self) -> Self:
        return replace(self, do_image_splitting=False)

    def _replaced(self, given: Mapping[str, Any]) -> Self:
        values = dict(given)
        for tokens, pixels in (("min_image_tokens", "min_pixels"), ("max_image_tokens", "max_pixels")):
            if tokens in values:
                values[pixels] = values.pop(tokens) * self.token_side**2
        found = replace(self, **values)
        if not found.min_tiles <= found.max_tiles <= MAX_TILES:
            raise ConfigError(
                f"min_tiles={found.min_tiles} and max_tiles={found.max_tiles} are not possible; give min_tiles of at "
                f"most max_tiles, and max_tiles of at most {MAX_TILES}"
            )
        return found

    def layout(self, height: int, width: int) -> list[View | int]:
        side = self.token_side
        whole = View.whole(*fitted(height, width, side, self.min_pixels, self.max_pixels, least=side))
        parts: list[View | int] = [whole]
        if self.do_image_splitting and self._is_large(height, width):
            parts = self._tiles(*self._grid(height, width))
            if self.use_thumbnail:
                parts += [*self._special(THUMBNAIL), whole]
        return [*self._special(START), *parts, *self._special(END)]

    def _special(self, token: str) -> list[int]:
        if not self.special_ids:
            return []
        if token not in self.special_ids:
            raise InvalidPromptError(
                f"the model has no token {token!r}, which it needs for an image of this shape; lower max_tiles of "
                "mm_processor_kwargs"
            )
        return [self.special_ids[token]]

    def _tiles(self, num_rows: int, num_columns: int) -> list[View | int]:
        side, parts = self.tile_size, list[View | int]()
        for row in range(num_rows):
            for column in range(num_columns):
                box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
                parts += self._special(f"<|img_row_{row + 1}_col_{column + 1}|>")
                parts.append(View(num_rows * side, num_columns * side, box))
        return parts

    def _is_large(self, height: int, width: int) -> bool:
        """Return whether a picture is too large for one view."""
        side = self.token_side
        sides = (max(self.patch_size, round(length / side) * side) for length in (height, width))
        return math.prod(sides) > self.max_pixels * self.tolerance

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles whose shape is nearest the picture's.

        If several grids have this shape, a larger one is taken if the picture fills more than half of it.
        """
        counts = range(1, self.max_tiles + 1)
        grids = [(c, r) for c in counts for r in counts if self.min_tiles <= c * r <= self.max_tiles]
        best, least = (1, 1), math.inf
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - columns / rows)
            fills = height * width > 0.5 * self.tile_size**2 * columns * rows
            if distance < least or (distance == least and fills):
                best, least = (rows, columns), distance
        return best


def _uses_special_tokens(folder: Path) -> bool:
    """Return whether the model's processor writes special tokens around views (default: yes)."""
    path = folder / "processor_config.json"
    values = Values(read_json(path) if path.is_file() else {}, str(path))
    return values.flag("use_image_special_tokens", True)
