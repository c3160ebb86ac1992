"""The vision tower of Ling-3.0 VL: Qwen3.5's layers, and a projector of its own behind the merger's norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forkpoint.errors import UnsupportedModelError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.config import ModelConfig
from forkpoint.models.fields import Fields
from forkpoint.models.qwen3_5_vision import Qwen35Tower, Qwen35VisionConfig
from forkpoint.models.rotary import alternating_axes
from forkpoint.models.vision import WITHOUT_TOWER, Operator, TowerReader, VisionFields, VisionTower
from forkpoint.models.weights import WeightSource
from forkpoint.ops.table import OpTable

PROJECTORS: Final = ("linear_proj.", "model.linear_proj.")
# Has the published defaults, and no deepstack.
DEFAULTS: Final = "qwen3_5.Qwen3_5VisionConfig"
MERGER: Final = "disable_merger_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LingVisionConfig(Qwen35VisionConfig):
    """Sizes of the tower. Rows and columns of an image count from its middle, as in VideoRoPE."""

    @classmethod
    def read_ling(cls, fields: Fields, text: ModelConfig, settings: ImageSettings) -> LingVisionConfig:
        """Read `vision_config` and the sections of positions. Raises ModelFolderError and UnsupportedModelError."""
        vision = VisionFields(fields, DEFAULTS)
        if not vision.flag(MERGER, False):
            raise UnsupportedModelError(
                f"{vision.where} has no {MERGER}=true; forkpoint runs the tower with its projector alone; "
                f"{WITHOUT_TOWER}"
            )
        sizes, _ = cls._sizes(vision)
        return cls(settings=settings, out_size=text.hidden_size, axes=_axes(fields, text), centred=True, **sizes)

    def build(self, weights: WeightSource, ops: OpTable) -> VisionTower:
        return LingTower(weights, self, ops)


def _axes(fields: Fields, text: ModelConfig) -> tuple[int, ...]:
    """Return which position rotates each pair: see `alternating_axes`. Raises UnsupportedModelError."""
    sections, num_pairs = fields.indices("mrope_section") or [], len(text.rotary.frequencies)
    if len(sections) != 3 or sections[1] != sections[2] or sum(sections) != num_pairs:
        raise UnsupportedModelError(
            f"{fields.where} has mrope_section={sections}; forkpoint runs three sections, {num_pairs} pairs in all, "
            f"with as many for rows as for columns; {WITHOUT_TOWER}"
        )
    return alternating_axes(sections)


class LingTower(Qwen35Tower):
    """Qwen3.5's tower with other weights in its last two products."""

    def _projector(self, reader: TowerReader) -> tuple[Operator, Operator]:
        merged, out = self.config.joined_size, self.config.out_size
        projector = TowerReader.find(reader.weights, reader.ops, PROJECTORS, "0.weight")
        return projector.linear("0", out, merged), projector.linear("2", out, out)
