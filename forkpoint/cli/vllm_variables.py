"""vLLM's environment variables, which scripts set next to its flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forkpoint.transfer_options import HOST_VARIABLE, PORT_VARIABLE

PREFIX: Final = "VLLM_"
API_KEY: Final = "VLLM_API_KEY"
READ: Final = frozenset({API_KEY, HOST_VARIABLE, PORT_VARIABLE})
# What to use instead of variables that are not read.
INSTEAD: Final = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "--hf-overrides with the model's max_position_embeddings",
    "VLLM_BATCH_INVARIANT": "--deterministic",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes",
    "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_LOG_STATS_INTERVAL": "--log-interval-s",
    "VLLM_SERVER_DEV_MODE": "--enable-dev-endpoints",
    "VLLM_USE_MODELSCOPE": "the path of a downloaded model; ids are those of the Hugging Face hub",
}


def variable_lines(environment: Mapping[str, str]) -> list[str]:
    """Return the log lines about vLLM's variables that are set and that forkpoint does not read."""
    given = sorted(name for name in environment if name.startswith(PREFIX) and name not in READ)
    lines = [f"{name} is not read here; give {INSTEAD[name]}" for name in given if name in INSTEAD]
    others = [name for name in given if name not in INSTEAD]
    if others:
        lines.append(f"vLLM's variables {', '.join(others)} change nothing here")
    return lines
