"""A tiny LFM2-VL, and transformers' own logits for prompts with images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.image_families.table import read_image_settings
from tests.checkpoints import COMMON, make_state_sensitive
from tests.image_models import END, IMAGE, START, Part

TEXT: dict[str, Any] = {
    **COMMON,
    "model_type": "lfm2",
    "intermediate_size": 96,
    "block_multiple_of": 32,
    "max_position_embeddings": 4096,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1}
VISION = {
    "model_type": "siglip2_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_patches": 64,
    "vision_use_head": False,
}
# A picture of more than 320 tokens is cut into tiles of 16 tokens.
PROCESSOR = {"min_image_tokens": 4, "max_image_tokens": 160, "tile_size": 128, "image_mean": [0.5, 0.4, 0.5]}
TILES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11) if row * column <= 10]
SPECIAL = {"<|image_start|>": START, "<|image_end|>": END, "<|img_thumbnail|>": 240}
SPECIAL |= {token: 200 + number for number, token in enumerate(TILES)}


def write_lfm2_vl(folder: Path, *, moe: bool = False, **text: Any) -> Any:
    """Save a model whose images matter, and return transformers' own instance of it."""
    torch.manual_seed(0)
    inner = {**TEXT, **EXPERTS, "model_type": "lfm2_moe", **text} if moe else {**TEXT, **text}
    options = {"image_token_id": IMAGE, "projector_hidden_size": 80, "tie_word_embeddings": True}
    config = transformers.Lfm2VlConfig(text_config=inner, vision_config=dict(VISION), **options)
    model = transformers.Lfm2VlForConditionalGeneration(config)
    make_state_sensitive(model.eval(), 0)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    added = [{"content": token, "id": number} for token, number in SPECIAL.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return model


def lfm2_vl_prompt(parts: Sequence[Part]) -> dict[str, Any]:
    """The prompt of token ids and pictures, as `LLM.generate` takes it."""
    ids: list[int] = []
    for part in parts:
        ids += part if isinstance(part, list) else [IMAGE]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [p for p in parts if not isinstance(p, list)]}}


class Lfm2VlOracle:
    """Transformers' logits for pictures that are cut and resized by forkpoint."""

    def __init__(self, folder: Path) -> None:
        settings = read_image_settings(folder)
        assert settings is not None
        self._processor = ImageProcessor(settings, 32)

    @torch.no_grad()
    def __call__(self, model: Any, parts: Sequence[Part], outputs: Sequence[int] = ()) -> tuple[list[int], Tensor]:
        """Return all token ids of the prompt and the outputs, and transformers' logits for them in one pass."""
        ids: list[int] = []
        views: list[Any] = []
        for part in parts:
            if isinstance(part, list):
                ids += part
                continue
            for view in self._processor.parts_of([part])[0]:
                if isinstance(view, int):
                    ids.append(view)
                else:
                    views.append(view.pixels)
                    ids += [IMAGE] * (view.pixels.shape[0] * view.pixels.shape[1] // 1024)
        x = torch.tensor([[*ids, *outputs]])
        logits = model(input_ids=x, use_cache=False, **_inputs(views)).logits[0].float()
        return x[0].tolist(), logits


def _inputs(views: Sequence[Any]) -> dict[str, Tensor]:
    """What transformers' image processor makes of views that need not be resized."""
    if not views:
        return {}
    patches = []
    for view in views:
        x = (torch.from_numpy(np.asarray(view)).float() / 255 - torch.tensor(PROCESSOR["image_mean"])) / 0.5
        height, width, _ = view.shape
        patches.append(x.view(height // 16, 16, width // 16, 16, 3).permute(0, 2, 1, 3, 4).reshape(-1, 768))
    counts = [len(each) for each in patches]
    masks = torch.arange(max(counts)).unsqueeze(0) < torch.tensor(counts).unsqueeze(1)
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(patches, batch_first=True),
        "spatial_shapes": torch.tensor([[view.shape[0] // 16, view.shape[1] // 16] for view in views]),
        "pixel_attention_mask": masks.int(),
    }
