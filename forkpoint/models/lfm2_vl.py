"""LFM2-VL: LFM2 that reads images, and its vision tower, a SigLIP2 of any shape of image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.config import ModelConfig
from forkpoint.models.fields import Fields
from forkpoint.models.lfm2 import Lfm2, Lfm2Moe
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

PREFIXES: Final = ("model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower.vision_model.")
PROJECTORS: Final = ("model.multi_modal_projector.", "multi_modal_projector.")
PATCHES: Final = "embeddings.patch_embedding"
PROJECTOR_EPS: Final = 1e-5
# Fields of the image processor, and of the projector where no tower is loaded.
UNNEEDED: Final = """
do_image_splitting downsample_factor encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance
max_thumbnail_size max_tiles min_image_tokens min_tiles projector_bias projector_hidden_act projector_hidden_size
projector_use_layernorm tile_size use_image_special_tokens use_thumbnail
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VisionConfig(VisionConfig):
    """Sizes of the tower and of the projector that follows it."""

    eps: float
    grid_side: int  # of the square of learned positions
    projector_size: int
    projector_bias: bool
    projector_norm: bool

    @classmethod
    def read(cls, fields: Fields, settings: ImageSettings) -> Lfm2VisionConfig:
        """Read `vision_config` and the projector's fields. Raises ModelFolderError and UnsupportedModelError."""
        vision = VisionFields(fields, "siglip2.Siglip2VisionConfig")
        vision.require("model_type", "siglip2_vision_model")
        vision.require("hidden_act", "gelu_pytorch_tanh")
        fields.require("projector_hidden_act", "gelu")
        places, width, heads = (vision.integer(name) for name in ("num_patches", "hidden_size", "num_attention_heads"))
        side = round(places**0.5)
        if side * side != places or width % heads or vision.integer("num_channels") != 3:
            raise ModelFolderError(
                f"{vision.where} has num_patches={places}, hidden_size={width} and num_attention_heads={heads}; "
                f"forkpoint needs a square of patches, equal heads and 3 channels; {WITHOUT_TOWER}"
            )
        config = cls(
            settings=settings,
            num_layers=vision.integer("num_hidden_layers"),
            hidden_size=width,
            num_heads=heads,
            intermediate_size=vision.integer("intermediate_size"),
            out_size=fields.integer("hidden_size"),
            eps=vision.real("layer_norm_eps"),
            grid_side=side,
            projector_size=fields.integer("projector_hidden_size", 2560),
            projector_bias=fields.flag("projector_bias", True),
            projector_norm=fields.flag("projector_use_layernorm", True),
        )
        vision.refuse_unknown("patch_size", "vision_use_head")
        return config

    def build(self, weights: WeightSource, ops: OpTable) -> VisionTower:
        return Lfm2Tower(weights, self, ops)


class Lfm2Vl(Lfm2):
    """The family of `Lfm2VlForConditionalGeneration`, with a dense or sparse text model."""

    architectures: ClassVar = ("Lfm2VlForConditionalGeneration",)
    unneeded_fields: ClassVar = (*Lfm2.unneeded_fields, *UNNEEDED.split())

    @classmethod
    def read(cls, fields: Fields) -> ModelConfig:
        # Newer configs name the text model's type here, older ones that of the whole model.
        fields.require("model_type", "lfm2", "lfm2_vl", "lfm2_moe")
        if fields.values.get("model_type") == "lfm2_moe":
            return SparseText.read(fields)
        return super().read(fields)

    @classmethod
    def read_vision(cls, fields: Fields, config: ModelConfig, settings: ImageSettings) -> VisionConfig:
        return Lfm2VisionConfig.read(fields, settings)


class SparseText(Lfm2Moe):
    """Reads the text part of an LFM2-VL with experts. Lfm2Vl builds it."""

    architectures: ClassVar = ()
    unneeded_fields: ClassVar = (*Lfm2Moe.unneeded_fields, *UNNEEDED.split())


def _layer(reader: TowerReader, name: str, config: Lfm2VisionConfig) -> TowerLayer:
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.eps
    return TowerLayer(
        num_heads=config.num_heads,
        attention=reader.ops.image_attention,
        before_attention=reader.sum_norm(f"{name}.layer_norm1", hidden, eps),
        qkv=[reader.linear(f"{name}.self_attn.{part}_proj", hidden, hidden) for part in "qkv"],
        out=reader.linear(f"{name}.self_attn.o_proj", hidden, hidden),  # stored as out_proj
        before_mlp=reader.sum_norm(f"{name}.layer_norm2", hidden, eps),
        up=reader.linear(f"{name}.mlp.fc1", inner, hidden),
        down=reader.linear(f"{name}.mlp.fc2", hidden, inner),
    )


class Lfm2Tower(VisionTower):
    """SigLIP2, then a projector that joins the patches of a token (2x2)."""

    config: Lfm2VisionConfig

    def __init__(self, weights: WeightSource, config: Lfm2VisionConfig, ops: OpTable) -> None:
        """Read the weights. Raises ModelFolderError for ones that are missing or of a wrong shape."""
        super().__init__(weights, config)
        settings, hidden, bias = config.settings, config.hidden_size, config.projector_bias
        reader = TowerReader.find(weights, ops, PREFIXES, f"{PATCHES}.weight")
        self._patches = reader.linear(PATCHES, hidden, 3 * settings.patch_size**2)
        self._positions = reader.get("embeddings.position_embedding.weight", config.grid_side**2, hidden)
        self._layers = [_layer(reader, f"encoder.layers.{layer}", config) for layer in range(config.num_layers)]
        self._norm = reader.sum_norm("post_layernorm", hidden, config.eps)
        projector = TowerReader.find(weights, ops, PROJECTORS, "linear_1.weight")
        self._before_join: Operator | None = None
        if config.projector_norm:
            self._before_join = projector.layer_norm("layer_norm", config.joined_size, PROJECTOR_EPS)
        self._join = projector.linear("linear_1", config.projector_size, config.joined_size, bias=bias)
        self._out = projector.linear("linear_2", config.out_size, config.projector_size, bias=bias)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        cut = self.patches(pixels)
        num_rows, num_columns = cut.shape[:2]
        x = self._patches(cut.reshape(num_rows * num_columns, -1).to(self.dtype))
        x = x + self._resampled_positions(num_rows, num_columns)
        joined = self.joined(run_layers(self._layers, x, self._norm), num_rows, num_columns)
        if self._before_join is not None:
            joined = self._before_join(joined)
        return self._out(F.gelu(self._join(joined)))

    def _resampled_positions(self, num_rows: int, num_columns: int) -> Tensor:
        """Return the learned positions `[patches, hidden]`, resampled as by F.interpolate with antialiasing."""
        side = self.config.grid_side
        table = self._positions.float().view(side, side, -1)
        rows, columns = (_bilinear(side, count, self.device) for count in (num_rows, num_columns))
        return torch.einsum("rg,ch,ghd->rcd", rows, columns, table).flatten(0, 1).to(self.dtype)


def _bilinear(side: int, count: int, device: torch.device) -> Tensor:
    """Return the weights `[count, side]` of `side` values for `count` of them, which span the same range."""
    scale = side / count
    centres = (torch.arange(count, device=device) + 0.5) * scale - 0.5
    distances = (torch.arange(side, device=device) - centres.unsqueeze(1)).abs() / max(scale, 1.0)
    weights = (1 - distances).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)
