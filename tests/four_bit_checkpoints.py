"""Folders in 4 bits, in each packing that is published, and the same folders widened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fp8_checkpoints import PLAIN, SINGLE, matrix_scaled
from tests.json_files import change_json

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
FLOATS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def grouped(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {**INTEGERS, **weights}, "input_activations": None}}


# What config.json says. "dynamic" and the lists name what PLAIN leaves out.
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {**GPTQ, "checkpoint_format": "gptq", "dynamic": {"-:.*shared_expert_gate": {}, "-:.*mlp.gate$": {}}},
    "gptq_v2": {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq_ordered": {**GPTQ, "desc_act": True},
    "gptq_rows": {**GPTQ, "group_size": -1},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "auto_gptq": {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"},
    "auto_awq": {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"},
    "auto_round": {**AUTO_ROUND, "packing_format": "auto_round"},
    "packed": {**PACKED, "config_groups": grouped()},
    "packed_zeros": {**PACKED, "config_groups": grouped(symmetric=False)},
    "packed_ordered": {**PACKED, "config_groups": grouped(actorder="group")},
    "packed_floats": {
        **PACKED,
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOATS, "input_activations": None}},
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.gate"]},
    "mixed": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}},
    },
}
SYMMETRIC = ("gptq", "gptq_rows", "packed", "gptq_ordered", "packed_ordered")
IN_FP8 = ("o_proj", "out_proj", "in_proj")  # of a mixed folder
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def put_in_four_bits(plain: Path, folder: Path, layout: str, more_plain: tuple[str, ...] = ()) -> int:
    """Make `folder` of `plain`, whose weights become those of `folder`, widened. Return the number of matrices in 4
    bits."""
    widened, stored, count = load_file(plain / SINGLE), dict[str, Tensor](), 0
    group = 16 if layout in ("nvfp4", "mixed", "packed_floats") else 32
    orders: dict[str, Tensor] = {}
    for name, weight in widened.items():
        fits = weight.dim() == 2 and weight.shape[1] % group == 0 and weight.shape[0] % 8 == 0
        if not fits or any(part in name for part in PLAIN + more_plain):
            stored[name] = weight.bfloat16()
            widened[name] = stored[name].float()
            continue
        base = name.removesuffix(".weight")
        if layout == "mixed" and base.endswith(IN_FP8):
            stored[name], stored[f"{base}.weight_scale"], widened[name] = matrix_scaled(weight.float())
            stored[f"{base}.input_scale"] = torch.tensor(1.0)
            continue
        count += 1
        if layout in ("nvfp4", "mixed", "packed_floats"):
            made, widened[name] = floats(weight.float(), layout == "packed_floats")
        else:
            # all matrices that read one input have one order
            width, parent = weight.shape[1], base.rpartition(".")[0]
            order = orders.setdefault(f"{parent} {width}", torch.randperm(width)) if "ordered" in layout else None
            size = width if layout == "gptq_rows" else group
            made, widened[name] = integers(weight.float(), size, layout, order)
        stored |= {f"{base}.{end}": tensor.contiguous() for end, tensor in made.items()}
    save_file(widened, plain / SINGLE, {"format": "pt"})
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    change_json(folder / "config.json", dtype="bfloat16", quantization_config=FORMATS[layout])
    save_file(stored, folder / SINGLE, {"format": "pt"})
    return count


def integers(weight: Tensor, group: int, layout: str, order: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors by their ends, the product) of a matrix in integers. `order`: columns in the order of their groups."""
    width = weight.shape[1]
    index = torch.arange(width) // group
    if order is not None:
        index = torch.empty_like(order).index_copy_(0, order, index)
    parts = torch.stack([weight[:, index == g] for g in range(width // group)], 1)  # [N, G, group]
    low, high = parts.amin(-1), parts.amax(-1)
    if layout in SYMMETRIC:
        scales, zeros = (parts.abs().amax(-1) / 7).half(), torch.full_like(low, 8)
    else:
        scales = ((high - low).clamp_min(1e-4) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
    wide, shift = scales.float()[:, index], zeros[:, index]
    codes = (weight / wide + shift).round().clamp(0, 15)
    return _packed(codes.int(), scales, zeros.int(), index.int(), layout), (codes - shift) * wide


def _packed(codes: Tensor, scales: Tensor, zeros: Tensor, index: Tensor, layout: str) -> dict[str, Tensor]:
    if layout.startswith("packed"):
        made = {"weight_packed": words(codes), "weight_scale": scales}
        made["weight_shape"] = torch.tensor(codes.shape)
        if layout == "packed_zeros":
            made["weight_zero_point"] = words(zeros.T).T
        if layout == "packed_ordered":
            made["weight_g_idx"] = index
        return made
    if "awq" in layout:
        swapped = [block * 8 + place for block in range(codes.shape[0] // 8) for place in AWQ_ORDER]
        return {"qweight": words(codes.T[:, swapped]), "qzeros": words(zeros.T[:, swapped]), "scales": scales.T}
    stored = zeros.T if layout in ("gptq_v2", "auto_round") else zeros.T - 1
    made = {"qweight": words(codes).T, "qzeros": words(stored), "scales": scales.T, "g_idx": index}
    return made


def words(codes: Tensor) -> Tensor:
    """Eight codes of the last dimension in each int32, the first in the lowest bits."""
    places = codes.long().reshape(*codes.shape[:-1], -1, 8) << (4 * torch.arange(8))
    found = places.sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).int()


def floats(weight: Tensor, divided: bool) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors by their ends, the product) of a matrix in NVFP4; `divided`: with compressed-tensors' global scale."""
    factor = weight.abs().max() / (6 * 448)
    if divided:
        factor = 1 / (1 / factor)
    parts = weight.view(len(weight), -1, 16)
    scales = (parts.abs().amax(-1) / 6 / factor).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    wide = scales.float()[..., None] * factor
    magnitude = ((parts / wide).abs()[..., None] - LEVELS).abs().argmin(-1)
    values = LEVELS[magnitude].copysign(parts)
    codes = (magnitude + 8 * (parts < 0)).view(weight.shape).to(torch.uint8)
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    product = (values * wide).view(weight.shape)
    if divided:
        return {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": (1 / factor)[None]}, product
    return {
        "weight": pairs,
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(1.0),
    }, product
