"""A model small enough to train for a few steps in a test."""

from __future__ import annotations

from pathlib import Path

import torch

from evaluation.suite import DEMO_MODEL
from train.delta_rule import torch_delta_rule
from train.model import HybridModel
from train.run import vocabulary
from train.shape import ModelShape

TOKENIZER_FILE: Path = DEMO_MODEL / "tokenizer.json"


def small_shape() -> ModelShape:
    return ModelShape(
        vocab_size=vocabulary(DEMO_MODEL).size,
        hidden_size=48,
        num_layers=4,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        num_k_heads=2,
        num_v_heads=4,
        key_dim=16,
        value_dim=24,
        max_len=512,
    )


def small_model() -> HybridModel:
    """Every parameter is random, norms included."""
    torch.manual_seed(0)
    model = HybridModel(small_shape(), torch_delta_rule, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
