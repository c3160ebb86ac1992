"""The vision tower of Nemotron 3 Omni: RADIO, and a projector of the patches of a token (2x2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.config import ModelConfig
from forkpoint.models.fields import Fields
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

RADIO: Final = "vision_model.radio_model."
PATCHES: Final = f"{RADIO}model.patch_generator."
FINAL_NORM: Final = "vision_final_layernorm"
PROJECTOR_EPS: Final = 1e-5
# Fields of published configs that do not change images: for training, other sizes of input, and videos.
UNNEEDED: Final = """
adaptor_configs adaptor_names args image_size max_num_patches max_resolution min_num_patches norm_mean norm_std
patch_dim preferred_resolution separate_video_embedder summary_idxs version video_patch_dim
"""
# Parts of RADIO that change an image's features, if they are present.
REFUSED: Final = ("feature_normalizer_config", "inter_feature_normalizer_config", "vitdet_window_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioVisionConfig(VisionConfig):
    """Sizes of the tower and of the projector that follows it."""

    unused: ClassVar[Mapping[str, str]] = {
        f"{RADIO}input_conditioner.": "the vision tower's copy of the image processor's mean and deviation",
        f"{RADIO}summary_idxs": "the vision tower's summary of an image",
        f"{PATCHES}video_embedder.": "the vision tower's embedding of videos, which forkpoint does not read",
    }
    eps: float
    grid_side: int  # of the square of learned positions
    num_extra: int  # learned tokens before those of the patches
    qkv_bias: bool
    projector_size: int
    final_norm: bool  # between the tower and the projector

    @classmethod
    def read(cls, fields: Fields, text: ModelConfig, settings: ImageSettings) -> RadioVisionConfig:
        """Read `vision_config` and the projector's fields. Raises ModelFolderError and UnsupportedModelError."""
        vision = VisionFields(fields, "radio.RadioConfig")
        vision.require("hidden_act", "gelu")
        vision.refuse("use_swiglu_ffn")
        fields.require("ps_version", "v2")
        for name in REFUSED:
            if vision.values.get(name) is not None:
                raise UnsupportedModelError(
                    f"{vision.where} has {name}; forkpoint runs RADIO without it; {WITHOUT_TOWER}"
                )
        hidden, heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
        named = fields.integer("vision_hidden_size", fields.integer("vit_hidden_size", hidden))
        if hidden % heads or named != hidden or vision.integer("num_channels") != 3:
            raise ModelFolderError(
                f"{vision.where} has hidden_size={hidden} and num_attention_heads={heads}, and the projector reads "
                f"{named} values a patch; forkpoint needs equal heads, as many values and 3 channels; {WITHOUT_TOWER}"
            )
        config = cls(
            settings=settings,
            num_layers=vision.integer("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            intermediate_size=int(hidden * vision.real("mlp_ratio")),
            out_size=text.hidden_size,
            eps=vision.real("layer_norm_eps"),
            grid_side=vision.integer("max_img_size") // settings.patch_size,
            num_extra=vision.integer("num_cls_tokens", low=0) + vision.integer("num_registers", low=0),
            qkv_bias=vision.flag("qkv_bias", True),
            projector_size=fields.integer("projector_hidden_size", 4096),
            final_norm=text.num_draft_layers > 0,
        )
        vision.refuse_unknown("patch_size", "layerscale_value", *UNNEEDED.split())
        return config

    def build(self, weights: WeightSource, ops: OpTable) -> VisionTower:
        return RadioTower(weights, self, ops)


def _scaled_linear(reader: TowerReader, name: str, scale: str, out: int, width: int) -> Operator:
    """Return a linear map whose outputs are multiplied by `scale`, a vector, if the folder has it."""
    weight, bias = reader.get(f"{name}.weight", out, width), reader.get(f"{name}.bias", out)
    if reader.weights.has(reader.prefix + scale):
        factors = reader.get(scale, out)
        weight, bias = weight * factors.unsqueeze(1), bias * factors
    return lambda x: F.linear(x, weight, bias)


def _layer(reader: TowerReader, name: str, config: RadioVisionConfig) -> TowerLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return TowerLayer(
        num_heads=config.num_heads,
        attention=reader.ops.image_attention,
        before_attention=reader.sum_norm(f"{name}.norm1", hidden, config.eps),
        qkv=(reader.linear(f"{name}.attn.qkv", 3 * hidden, hidden, bias=config.qkv_bias),),
        out=_scaled_linear(reader, f"{name}.attn.proj", f"{name}.layer_scale1.lambda1", hidden, hidden),
        before_mlp=reader.sum_norm(f"{name}.norm2", hidden, config.eps),
        up=reader.linear(f"{name}.mlp.fc1", inner, hidden),
        down=_scaled_linear(reader, f"{name}.mlp.fc2", f"{name}.layer_scale2.lambda1", hidden, inner),
        activation=F.gelu,
    )


class RadioTower(VisionTower):
    """RADIO: learned tokens attend with the patches, and are dropped before the projector."""

    config: RadioVisionConfig

    def __init__(self, weights: WeightSource, config: RadioVisionConfig, ops: OpTable) -> None:
        """Read the weights. Raises ModelFolderError for ones that are missing or of a wrong shape."""
        super().__init__(weights, config)
        settings, hidden = config.settings, config.hidden_size
        patches = TowerReader.find(weights, ops, (PATCHES,), "embedder.weight")
        self._patches = patches.linear("embedder", hidden, 3 * settings.patch_size**2, bias=False)
        self._positions = patches.get("pos_embed", 1, config.grid_side**2, hidden)
        self._extra = patches.get("cls_token.token", config.num_extra, hidden)
        layers = TowerReader(weights, ops, f"{RADIO}model.blocks.")
        self._layers = [_layer(layers, str(layer), config) for layer in range(config.num_layers)]
        self._final_norm: Operator | None = None
        if config.final_norm:
            reader = TowerReader.find(weights, ops, ("vision_projector.", ""), f"{FINAL_NORM}.weight")
            self._final_norm = reader.layer_norm(FINAL_NORM, hidden, config.eps)
        projector = TowerReader(weights, ops, "mlp1.")
        self._projector_norm = projector.get("0.weight", config.joined_size)
        self._join = projector.linear("1", config.projector_size, config.joined_size, bias=False)
        self._out = projector.linear("3", config.out_size, config.projector_size, bias=False)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        cut = self.patches(pixels).permute(0, 1, 4, 2, 3)
        num_rows, num_columns = cut.shape[:2]
        x = self._patches(cut.reshape(num_rows * num_columns, -1).to(self.dtype))
        x = torch.cat((self._extra, x + self._resampled_positions(num_rows, num_columns)))
        x = run_layers(self._layers, x, lambda x, added: (x if added is None else x + added, x))
        x = x[self.config.num_extra :]
        if self._final_norm is not None:
            x = self._final_norm(x)
        joined = self.joined(x, num_rows, num_columns)
        normed = F.rms_norm(joined.float(), joined.shape[1:], self._projector_norm.float(), PROJECTOR_EPS)
        return self._out(F.relu(self._join(normed.to(self.dtype))).square())

    def _resampled_positions(self, num_rows: int, num_columns: int) -> Tensor:
        """Return the learned positions `[patches, hidden]`.

        They are resampled bilinearly to a square as wide as the image's longer side, of which the corner is used.
        """
        side, longest = self.config.grid_side, max(num_rows, num_columns)
        table = self._positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        square = F.interpolate(table, size=(longest, longest), mode="bilinear", align_corners=False)
        return square[0, :, :num_rows, :num_columns].flatten(1).T.to(self.dtype)
