"""`forkpoint compile`."""

from __future__ import annotations

import argparse

from forkpoint.cli.model import announce, with_model
from forkpoint.cli.options import engine_options
from forkpoint.config import EngineConfig


def compile_kernels(options: argparse.Namespace) -> int:
    """Start an engine as `forkpoint serve` does with these options, and close it. Its kernels stay on disk."""
    engine = {**with_model(engine_options(options), options.model_tag), "skip_tokenizer_init": True}
    config = EngineConfig.from_flat(**engine)
    announce(config.model, config.log_level)
    from forkpoint.engine.llm import LLM

    LLM(**engine).close()
    print(f"the kernels for {config.model} with these options are compiled")
    return 0
