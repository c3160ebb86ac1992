"""A tiny Nemotron 3 Omni, and transformers' own logits for prompts with images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.checkpoints import FAMILIES, make_state_sensitive
from tests.image_models import END, IMAGE, START, Part

VISION = {
    "model_type": "radio",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mlp_ratio": 1.5,
    "max_img_size": 256,
    "video_temporal_patch_size": 2,
}
MEAN, STD = [0.5, 0.4, 0.5], [0.3, 0.25, 0.28]
PROCESSOR = {"min_num_patches": 16, "norm_mean": MEAN, "norm_std": STD}  # the published names


def write_nemotron_omni(folder: Path, *, architecture: str = "NemotronH_Nano_Omni_Reasoning_V3", **text: Any) -> Any:
    """Save a model whose images matter, under the published names, and return transformers' own instance of it."""
    torch.manual_seed(0)
    inner = FAMILIES["nemotron_h"](**{"max_position_embeddings": 4096, "eos_token_id": 1, **text}).config.to_dict()
    sizes = {"projector_hidden_size": 48, "vision_hidden_size": 32, "image_token_id": IMAGE}
    config = transformers.AutoConfig.for_model(
        "nemotron_h_omni", text_config=inner, vision_config=dict(VISION), **sizes
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    make_state_sensitive(model.eval(), 0)
    model.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values |= {"llm_config": values.pop("text_config"), "img_context_token_id": values.pop("image_token_id")}
    values |= {"vit_hidden_size": values.pop("vision_hidden_size"), "ps_version": "v2", "architectures": [architecture]}
    path.write_text(json.dumps(values))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    added = [{"content": token, "id": number} for token, number in {"<img>": START, "</img>": END}.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return model


def resized(image: Any, rows: int, columns: int) -> Tensor:
    """The patches `[rows * columns, 768]` of a picture, resized by torch and normalised.

    Transformers' processor resizes in fp32 with the same operator. Its weights are then rounded by up to 1e-4.
    """
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].double()
    pixels = F.interpolate(pixels, (rows * 16, columns * 16), mode="bicubic", align_corners=False, antialias=True)[
        0
    ].float()
    pixels = (pixels / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return pixels.view(3, rows, 16, columns, 16).permute(1, 3, 0, 2, 4).reshape(rows * columns, 768)


def grid_of(height: int, width: int) -> tuple[int, int]:
    """The rows and columns of patches of a picture between the two bounds, as transformers' processor has them."""
    rows, columns = (round(length / 16 + 0.5) for length in (height, width))
    return rows + rows % 2, columns + columns % 2


@torch.no_grad()
def nemotron_omni_oracle(model: Any, parts: Sequence[Part], outputs: Sequence[int] = ()) -> tuple[list[int], Tensor]:
    """Return all token ids of the prompt and the outputs, and transformers' logits for them in one pass."""
    ids: list[int] = []
    patches, grids = list[Tensor](), list[tuple[int, int]]()
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        rows, columns = grid_of(part.height, part.width)
        patches.append(resized(part, rows, columns))
        grids.append((rows, columns))
        ids += [START, *[IMAGE] * (rows * columns // 4), END]
    x = torch.tensor([[*ids, *outputs]])
    images = {"pixel_values": torch.cat(patches), "image_grid_hw": torch.tensor(grids)} if grids else {}
    return x[0].tolist(), model(input_ids=x, use_cache=False, **images).logits[0].float()
