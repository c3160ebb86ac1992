"""`forkpoint serve`."""

from __future__ import annotations

import argparse
import os

from forkpoint.cli.model import announce, with_model
from forkpoint.cli.options import engine_options, option_values
from forkpoint.cli.vllm_flags import told_lines
from forkpoint.config import EngineConfig
from forkpoint.demo.model import MODEL_NAME
from forkpoint.obs.logs import LOGGER
from forkpoint.server.config import ServerConfig

KEY_VARIABLE = "FORKPOINT_API_KEY"


def serve(options: argparse.Namespace) -> int:
    """Serve the model over HTTP until Ctrl-C; 1 if the engine died."""
    engine = engine_options(options)
    server = server_config(options, options.model_tag or engine.get("model") or MODEL_NAME)
    config = EngineConfig.from_flat(**with_model(engine, options.model_tag))
    announce(config.model, config.log_level)
    for line in told_lines(options):
        LOGGER.info(line)
    from forkpoint.server.run import serve as run_server

    return run_server(config, server)


def server_config(options: argparse.Namespace, model_name: str) -> ServerConfig:
    """The server's options, with those that the command or the environment decides."""
    given = option_values(options, ServerConfig)
    given.setdefault("served_model_name", (model_name,))
    if "api_key" not in given and os.environ.get(KEY_VARIABLE):
        given["api_key"] = (os.environ[KEY_VARIABLE],)
    return ServerConfig(**given)
