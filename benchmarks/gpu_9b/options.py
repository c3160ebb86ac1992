"""The flags of all measurements."""

from __future__ import annotations

from typing import Any


def engine_options(
    device: str, enforce_eager: bool, max_num_batched_tokens: int | None = None, quantization: str | None = None
) -> dict[str, Any]:
    """Return the default options, except for random weights, token ids instead of text, and a quiet log."""
    given = {"max_num_batched_tokens": max_num_batched_tokens, "quantization": quantization}
    return {
        **{name: value for name, value in given.items() if value is not None},
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": device,
        "enforce_eager": enforce_eager,
        "mamba_ssm_cache_dtype": "float32",
        "log_level": "warning",
    }
