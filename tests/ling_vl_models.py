"""A tiny Ling-3.0 VL, and reference logits for prompts with images.

transformers has no class for the whole model. The reference is its text model with other rotary positions, its tower of
Qwen3.5 up to the last layer, and the rest in plain torch. Positions are those of VideoRoPE (Wei et al. 2025).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoints import FAMILIES, make_state_sensitive
from tests.image_models import END, IDS, IMAGE, START, VISION, Part, processed

TEXT = {
    "max_position_embeddings": 4096,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "qk_rope_head_dim": 16,
    "eos_token_id": 1,
}
NEWLINE = 10
SECTIONS = [2, 3, 3]  # of the 8 rotated pairs: time, rows, columns
ADDED = {"<|vision_start|>": START, "<|vision_end|>": END}
PROCESSOR = {"min_pixels": 1024, "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5] * 3}


class LingVl(nn.Module):
    """The parts of the model, and its forward pass over one prompt."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

        self.text, hidden = text, text.config.hidden_size
        self.visual = Qwen3_5VisionModel(transformers.Qwen3_5Config(vision_config=dict(VISION)).vision_config)
        merged = 4 * self.visual.config.hidden_size
        self.linear_proj = nn.Sequential(nn.Linear(merged, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.config = text.config
        self.positions: Tensor | None = None  # [3, T], of the prompt that runs
        text.model.rotary_emb.forward = self._rotation

    def _rotation(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[1, T, dim]`: pairs of rows and columns take turns, and the last pairs have the time."""
        positions = position_ids.expand(3, -1) if self.positions is None else self.positions
        turns = self.text.model.rotary_emb.inv_freq
        which = [1, 2] * SECTIONS[1] + [0] * SECTIONS[0]
        angles = torch.stack([positions[axis] * turns[pair] for pair, axis in enumerate(which)], dim=-1)
        whole = torch.cat((angles, angles), dim=-1)[None]
        return whole.cos(), whole.sin()

    def encoded(self, pictures: Sequence[Any]) -> Tensor:
        inputs = processed(pictures)
        x = self.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).last_hidden_state
        found: Tensor = self.linear_proj(self.visual.merger.norm(x).view(-1, self.linear_proj[0].in_features))
        return found

    @torch.no_grad()
    def logits(self, ids: list[int], pictures: Sequence[Any], grids: Sequence[tuple[int, int]]) -> Tensor:
        """Return the logits of a prompt, whose first placeholders are those of pictures of these rows and columns."""
        x = torch.tensor([ids])
        embedded = self.text.model.get_input_embeddings()(x)
        if pictures:
            at = torch.nonzero(x[0] == IMAGE)[:, 0][: sum(rows * columns for rows, columns in grids)]
            embedded[0, at] = self.encoded(pictures)
        self.positions = torch.tensor(_positions(ids, grids)).T
        logits: Tensor = self.text(inputs_embeds=embedded, use_cache=False).logits[0].float()
        self.positions = None
        return logits


def _positions(ids: Sequence[int], grids: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return each token's time, row and column. The middle of an image has its time, and an image takes one step."""
    found = list[tuple[int, int, int]]()
    time, left = 0, list(grids)
    while len(found) < len(ids):
        if ids[len(found)] == IMAGE and left:
            rows, columns = left.pop(0)
            for row in range(rows):
                for column in range(columns):
                    found.append((time, time + row - (rows - 1) // 2, time + column - (columns - 1) // 2))
        else:
            found.append((time, time, time))
        time += 1
    return found


def write_ling_vl(folder: Path, *, ids: Mapping[str, int] = IDS, **text: Any) -> LingVl:
    """Save a model whose images matter, under the published names, and return the reference."""
    torch.manual_seed(0)
    inner = FAMILIES["bailing_hybrid"](**{**TEXT, **text})
    model = LingVl(inner.eval()).eval()
    with torch.no_grad():
        make_state_sensitive(model, 0)
    patches = model.visual.patch_embed.proj.weight  # whose inputs are all of a patch
    patches.data *= (patches.shape[-1] / patches[0].numel()) ** 0.5
    inner.save_pretrained(folder)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights = load_file(path)
    for name, weight in model.visual.state_dict().items():
        if "merger.linear" not in name and "inv_freq" not in name:
            weights[f"model.visual.{name}"] = weight.contiguous()
    weights |= {f"linear_proj.{name}": weight for name, weight in model.linear_proj.state_dict().items()}
    save_file(weights, path, {"format": "pt"})
    config = {
        "architectures": ["BailingMoeV3VLForConditionalGeneration"],
        "model_type": "bailing_moe_v3_vl",
        "mrope_section": SECTIONS,
        "text_config": config,
        "vision_config": {**VISION, "model_type": "qwen3_moe_vit", "disable_merger_proj": True},
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    added = [{"content": token, "id": number} for token, number in ADDED.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"Ċ": NEWLINE}}}))
    return model


def ling_vl_oracle(model: LingVl, parts: Sequence[Part], outputs: Sequence[int] = ()) -> tuple[list[int], Tensor]:
    """Return all token ids of the prompt and the outputs, and the reference's logits for them in one pass."""
    ids: list[int] = []
    pictures, grids = [], list[tuple[int, int]]()
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        _, rows, columns = (processed([part])["image_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()
        pictures.append(part)
        grids.append((rows, columns))
        ids += [START, *[IMAGE] * (rows * columns), END, NEWLINE]
    return [*ids, *outputs], model.logits([*ids, *outputs], pictures, grids)
