"""`forkpoint serve`."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields

from forkpoint.cli.options import engine_options
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError
from forkpoint.server.config import ServerConfig
from forkpoint.server.run import serve as run_server

KEY_VARIABLE = "FORKPOINT_API_KEY"


def serve(options: argparse.Namespace) -> int:
    """Serve the model over HTTP until Ctrl-C; 1 if the engine died."""
    return run_server(_engine_config(options), _server_config(options))


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    given = engine_options(options)
    named = given.pop("model", None)
    if options.model_tag is not None and named is not None:
        raise ConfigError(f"the model is named twice: {options.model_tag!r} and --model {named!r}; give one")
    model = options.model_tag or named
    if model is None:
        raise ConfigError("no model; give a model folder: forkpoint serve PATH")
    return EngineConfig.from_flat(model=model, **given)


def _server_config(options: argparse.Namespace) -> ServerConfig:
    names = {field.name for field in fields(ServerConfig)}
    given = {name: value for name, value in vars(options).items() if name in names}
    if "api_key" not in given and os.environ.get(KEY_VARIABLE):
        given["api_key"] = (os.environ[KEY_VARIABLE],)
    return ServerConfig(**given)
