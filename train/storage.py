"""Writes and reads Hugging Face model folders: bf16 safetensors in shards and config.json, but not the tokenizer's
files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from train.delta_rule import DeltaRule
from train.model import HybridModel
from train.shape import ModelShape

SHARD_BYTES = 8 << 20
INDEX = "model.safetensors.index.json"


def save_model(model: HybridModel, folder: Path, eos_token_id: int, pad_token_id: int) -> None:
    """Write each file next to its final place first, so that a complete folder stays complete."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in model.state_dict().items()}
    shards = _shards(weights)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {}
    for name, shard in zip(names, shards, strict=True):
        temporary = folder / f".{name}"
        save_file({key: weights[key].contiguous() for key in shard}, temporary, metadata={"format": "pt"})
        temporary.replace(folder / name)
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(weight.nbytes for weight in weights.values())
    _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    _write(folder / "config.json", model.shape.hf_config(eos_token_id, pad_token_id))


def load_model(folder: Path, delta_rule: DeltaRule, compute_dtype: torch.dtype, device: torch.device) -> HybridModel:
    """Load the model of a folder that `save_model` wrote, with parameters in fp32."""
    shape = ModelShape.from_hf(json.loads((folder / "config.json").read_text()))
    weights: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        weights.update(load_file(shard))
    model = HybridModel(shape, delta_rule, compute_dtype)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.to(device)


def _shards(weights: dict[str, Tensor]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, weight in weights.items():
        if weight.nbytes > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= weight.nbytes
    return shards


def _write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
