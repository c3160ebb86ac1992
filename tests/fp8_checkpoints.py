"""Folders in FP8 as they are published, and the same folders widened for transformers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import write_checkpoint
from tests.json_files import change_json

Layout = Literal["block", "channel", "tensor", "modelopt", "three"]
SINGLE = "model.safetensors"
# As in Qwen's own models: all matrices of the layers but these, and what is no matrix.
PLAIN = (
    "lm_head",
    "embed",
    "norm",
    "conv1d",
    "conv.conv",
    "A_log",
    ".gate.",
    "router",
    "shared_expert_gate",
    "in_proj_b",
    "in_proj_a",
)
QUANTIZATION: dict[Layout, dict[str, Any]] = {
    "block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    },
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "sparsity_config": {"format": "dense", "sparsity_structure": "unstructured", "global_sparsity": 0.1},
        "transform_config": {},
    },
    "tensor": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            }
        },
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
    # As in nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8. hf_quant_config.json has the same under other names.
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "dynamic": False},
            }
        },
        "ignore": ["lm_head", "backbone.layers.4.mixer.in_proj", "backbone.layers.0.mixer.conv1d", "*.gate"],
    },
}


# Attention with a scale for each matrix, outputs of recurrent layers with one for each row, the rest with blocks.
KINDS = {"self_attn.": "tensor", "out_proj": "channel", "": "block"}
QUANTIZATION["three"] = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        f"group_{i}": {
            "targets": [f"re:.*{part}.*"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [128, 128]},
        }
        for i, (part, strategy) in enumerate(KINDS.items())
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}


def write_fp8(folder: Path, family: str, layout: Layout, *, more_plain: tuple[str, ...] = (), **config: Any) -> Any:
    """Write `folder` in FP8 and return transformers' instance of the same weights, widened, in fp32."""
    plain = folder.parent / f"{folder.name}-widened"
    write_checkpoint(plain, family, **config)
    put_in_fp8(plain, folder, layout, more_plain)
    return transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def put_in_fp8(plain: Path, folder: Path, layout: Layout, more_plain: tuple[str, ...] = ()) -> None:
    """Make `folder` of `plain`, whose weights become those of `folder`, widened."""
    widened, stored = load_file(plain / SINGLE), {}
    for name, weight in widened.items():
        if not weight.is_floating_point():
            stored[name] = weight
            continue
        if weight.dim() < 2 or any(part in name for part in PLAIN + more_plain):
            stored[name] = weight.bfloat16()
            widened[name] = stored[name].float()
            continue
        kind = layout if layout != "three" else next(kind for part, kind in KINDS.items() if part in name)
        scaled = {"block": block_scaled, "channel": row_scaled}.get(kind, matrix_scaled)
        stored[name], scales, widened[name] = scaled(weight.float())
        stored[name + ("_scale_inv" if layout == "block" else "_scale")] = scales
        if layout in ("tensor", "modelopt"):
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
            if name.endswith("k_proj.weight"):
                stored[name.removesuffix("weight") + "k_scale"] = torch.tensor(0.25)
    save_file(widened, plain / SINGLE, {"format": "pt"})
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    change_json(folder / "config.json", dtype="bfloat16", quantization_config=QUANTIZATION[layout])
    save_file(stored, folder / SINGLE, {"format": "pt"})


def block_scaled(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, bf16 scales of 128 x 128 blocks, the product) of `[..., N, K]`."""
    rows, columns = -(-weight.shape[-2] // 128), -(-weight.shape[-1] // 128)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(*weight.shape[:-2], rows, columns, dtype=torch.bfloat16)
    widened = torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            at = (..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = (weight[at].abs().amax((-2, -1)) / 448).bfloat16()
            wide = scale.float()[..., None, None]
            part = (weight[at] / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            codes[at], scales[..., i, j], widened[at] = part, scale, part.float() * wide
    return codes, scales, widened


def row_scaled(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, bf16 scales `[..., N, 1]`, the product)."""
    scales = (weight.abs().amax(-1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * scales.float()


def matrix_scaled(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, one fp32 scale of each matrix `[N, K]` without dimensions, the product)."""
    scales = weight.abs().amax((-2, -1)) / 448
    codes = (weight / scales[..., None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * scales[..., None, None]


def fuse_experts(folder: Path, num_experts: int) -> None:
    """Store the experts of a folder in FP8 as one tensor for each projection, as transformers' modules hold them."""
    stored = load_file(folder / SINGLE)
    for first in [name for name in stored if re.search(r"experts\.0\.gate_proj\.weight$", name)]:
        base = first.removesuffix(".0.gate_proj.weight")
        for end, joined_end in (("weight", ""), ("weight_scale_inv", "_scale_inv"), ("weight_scale", "_scale")):
            if f"{base}.0.gate_proj.{end}" not in stored:
                continue
            kinds = {
                kind: [stored.pop(f"{base}.{e}.{kind}_proj.{end}").view(torch.uint8) for e in range(num_experts)]
                for kind in ("gate", "up", "down")
            }
            kind_of = torch.float8_e4m3fn if end == "weight" else torch.bfloat16
            both = [torch.cat(pair) for pair in zip(kinds["gate"], kinds["up"], strict=True)]
            stored[f"{base}.gate_up_proj{joined_end}"] = torch.stack(both).view(kind_of)
            stored[f"{base}.down_proj{joined_end}"] = torch.stack(kinds["down"]).view(kind_of)
    save_file(stored, folder / SINGLE, {"format": "pt"})
