"""The vision tower of Qwen3.5: from an image's pixels to the embeddings of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.field_rules import ROTARY
from forkpoint.models.fields import Fields
from forkpoint.models.rotary import Rotary, frequencies, interleaved_axes
from forkpoint.models.vision import (
    WITHOUT_TOWER,
    Operator,
    TowerLayer,
    TowerReader,
    VisionConfig,
    VisionFields,
    VisionTower,
    run_layers,
)
from forkpoint.models.weights import WeightSource
from forkpoint.ops.table import OpTable

PREFIXES: Final = ("model.visual.", "visual.")  # of the tower's weights; the second in older folders
PATCHES: Final = "patch_embed.proj"
EPS: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35VisionConfig(VisionConfig):
    """Sizes of the tower."""

    num_frames: int  # that a patch covers; a still image is repeated
    grid_side: int  # of the square of learned positions
    theta: float

    @classmethod
    def read(cls, fields: Fields, rotary: Rotary, config_class: str, settings: ImageSettings) -> Qwen35VisionConfig:
        """Read `vision_config`, with the defaults of transformers' `config_class`.

        `rotary` is the text model's. Raises ModelFolderError and UnsupportedModelError.
        """
        sizes, out_size = cls._sizes(VisionFields(fields, config_class))
        if out_size != fields.integer("hidden_size"):
            raise ModelFolderError(
                f"{fields.where}: vision_config has out_hidden_size={out_size}; forkpoint needs the hidden size of the "
                f"text model; {WITHOUT_TOWER}"
            )
        return cls(settings=settings, out_size=out_size, axes=_axes(fields, rotary), **sizes)

    @staticmethod
    def _sizes(vision: VisionFields) -> tuple[dict[str, Any], int]:
        """Return the sizes, and `out_hidden_size`. Raises ModelFolderError and UnsupportedModelError."""
        vision.require("hidden_act", "gelu_pytorch_tanh")
        if vision.indices("deepstack_visual_indexes") or vision.integer("in_channels") != 3:
            raise UnsupportedModelError(
                f"{vision.where} has deepstack_visual_indexes or in_channels other than 3, which forkpoint does not "
                f"run; {WITHOUT_TOWER}"
            )
        table, width = vision.integer("num_position_embeddings"), vision.integer("hidden_size")
        heads = vision.integer("num_heads")
        side = round(table**0.5)
        if side * side != table or width % heads or (width // heads) % 4:
            raise ModelFolderError(
                f"{vision.where} has num_position_embeddings={table}, hidden_size={width} and num_heads={heads}; "
                f"forkpoint needs a square, and heads of a multiple of 4 dims; {WITHOUT_TOWER}"
            )
        rope = vision.replaced(vision.inner("rope_parameters"))
        rope.require("rope_type", "axial", "default")
        sizes = {
            "num_layers": vision.integer("depth"),
            "hidden_size": width,
            "num_heads": heads,
            "intermediate_size": vision.integer("intermediate_size"),
            "num_frames": vision.integer("temporal_patch_size"),
            "grid_side": side,
            "theta": rope.real("rope_theta", 10000.0),
        }
        out_size = vision.integer("out_hidden_size")
        vision.refuse_unknown("patch_size", "spatial_merge_size", *ROTARY)
        return sizes, out_size

    def build(self, weights: WeightSource, ops: OpTable) -> VisionTower:
        return Qwen35Tower(weights, self, ops)


def _axes(fields: Fields, rotary: Rotary) -> tuple[int, ...]:
    """Return which position rotates each pair of `rotary`: 0 the time, 1 the row, 2 the column.

    The sections are `mrope_section` of the config, by default 11, 11 and 10 pairs. Raises UnsupportedModelError for
    sections that are not three, or not interleaved.
    """
    rope = fields.rope()
    sections = rope.indices("mrope_section") or [11, 11, 10]
    if not rope.flag("mrope_interleaved", True) or len(sections) != 3:
        raise UnsupportedModelError(
            f"{fields.where} has mrope_section={sections} and mrope_interleaved={rope.values.get('mrope_interleaved')}"
            f"; forkpoint runs three interleaved sections; {WITHOUT_TOWER}"
        )
    return interleaved_axes(sections, len(rotary.frequencies))


def _layer(reader: TowerReader, name: str, config: VisionConfig) -> TowerLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return TowerLayer(
        num_heads=config.num_heads,
        attention=reader.ops.image_attention,
        before_attention=reader.sum_norm(f"{name}.norm1", hidden, EPS),
        qkv=(reader.linear(f"{name}.attn.qkv", 3 * hidden, hidden),),
        out=reader.linear(f"{name}.attn.proj", hidden, hidden),
        before_mlp=reader.sum_norm(f"{name}.norm2", hidden, EPS),
        up=reader.linear(f"{name}.mlp.linear_fc1", inner, hidden),
        down=reader.linear(f"{name}.mlp.linear_fc2", hidden, inner),
    )


class Qwen35Tower(VisionTower):
    """The tower of Qwen3.5: attention with rotary positions, then a merger of the patches of a token (2x2)."""

    config: Qwen35VisionConfig

    def __init__(self, weights: WeightSource, config: Qwen35VisionConfig, ops: OpTable) -> None:
        """Read the weights. Raises ModelFolderError for ones that are missing or of a wrong shape."""
        super().__init__(weights, config)
        reader = TowerReader.find(weights, ops, PREFIXES, f"{PATCHES}.weight")
        settings, hidden = config.settings, config.hidden_size
        shape = (hidden, 3, config.num_frames, settings.patch_size, settings.patch_size)
        # A convolution whose kernels do not overlap is one matrix product.
        self._patches = reader.get(f"{PATCHES}.weight", *shape).flatten(1)
        self._patch_bias = reader.get(f"{PATCHES}.bias", hidden)
        self._positions = reader.get("pos_embed.weight", config.grid_side**2, hidden)
        self._layers = [_layer(reader, f"blocks.{layer}", config) for layer in range(config.num_layers)]
        self._norm = reader.sum_norm("merger.norm", hidden, EPS)
        self._join, self._out = self._projector(reader)

    def _projector(self, reader: TowerReader) -> tuple[Operator, Operator]:
        """Read the two products that follow the merger's norm."""
        merged = self.config.joined_size
        join = reader.linear("merger.linear_fc1", merged, merged)
        return join, reader.linear("merger.linear_fc2", self.config.out_size, merged)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        settings, merge = self.config.settings, self.config.settings.merge_size
        *_, height, width, _ = pixels.shape
        num_rows, num_columns = height // settings.patch_size, width // settings.patch_size
        # The patches of a token are neighbours in the sequence.
        places = torch.cartesian_prod(torch.arange(num_rows), torch.arange(num_columns)).view(
            num_rows // merge, merge, num_columns // merge, merge, 2
        )
        row, column = places.transpose(1, 2).reshape(-1, 2).to(self.device).unbind(1)
        x = F.linear(self._cut(pixels, num_rows, num_columns), self._patches, self._patch_bias)
        x = x + self._learned(row, num_rows, column, num_columns)
        normed = run_layers(self._layers, x, self._norm, self._rotation(row, column))
        joined = normed.view(-1, self.config.joined_size)
        return self._out(F.gelu(self._join(joined)))

    def _cut(self, pixels: Tensor, num_rows: int, num_columns: int) -> Tensor:
        """Return the normalised patches `[patches, channels * frames * side * side]`, a token's side by side."""
        patch, merge = self.config.settings.patch_size, self.config.settings.merge_size
        x = self.normalised(pixels).view(-1, num_rows // merge, merge, patch, num_columns // merge, merge, patch, 3)
        x = x.permute(1, 4, 2, 5, 7, 0, 3, 6)  # token row, token column, row, column, channel, frame, ..
        x = x.expand(*x.shape[:5], self.config.num_frames, patch, patch)  # a picture is its own second frame
        return x.reshape(num_rows * num_columns, -1).to(self.dtype)

    def _learned(self, row: Tensor, num_rows: int, column: Tensor, num_columns: int) -> Tensor:
        """Return the learned positions `[patches, hidden]`, resampled bilinearly so that corners fall on corners.

        `row` and `column` `[patches]` are the patches' places in the image.
        """
        side = self.config.grid_side

        def neighbours(place: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
            at = place.float() * ((side - 1) / max(count - 1, 1))
            below = at.floor().clamp(max=side - 1)
            return below.long(), (below.long() + 1).clamp(max=side - 1), (at - below).unsqueeze(1)

        top, bottom, down = neighbours(row, num_rows)
        left, right, along = neighbours(column, num_columns)
        table = self._positions.float()
        upper = table[top * side + left] * (1 - along) + table[top * side + right] * along
        lower = table[bottom * side + left] * (1 - along) + table[bottom * side + right] * along
        return (upper * (1 - down) + lower * down).to(self.dtype)

    def _rotation(self, row: Tensor, column: Tensor) -> Tensor:
        """Return cos and sin `[patches, head_dim]` fp32 of these places `[patches]`.

        The first half of the pairs turns by rows, the other by columns.
        """
        head_dim = self.config.hidden_size // self.config.num_heads
        turns = frequencies(head_dim // 2, self.config.theta).to(self.device)
        angles = torch.cat((row.unsqueeze(1) * turns, column.unsqueeze(1) * turns), dim=1)
        return torch.cat((angles.cos(), angles.sin()), dim=1)
