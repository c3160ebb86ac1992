"""`forkpoint serve`, and `forkpoint deploy` for several replicas."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os

from forkpoint.cli.model import announce, with_model
from forkpoint.cli.options import engine_options, option_values
from forkpoint.cli.vllm_flags import notice_lines
from forkpoint.cli.vllm_variables import API_KEY as VLLM_API_KEY
from forkpoint.cli.vllm_variables import variable_lines
from forkpoint.config import EngineConfig
from forkpoint.demo.model import MODEL_NAME
from forkpoint.errors import ConfigError
from forkpoint.fleet.config import FleetConfig
from forkpoint.fleet.handover import with_role
from forkpoint.json_options import KVEventsConfig
from forkpoint.obs.logs import LOGGER
from forkpoint.quick_imports import collection_paused
from forkpoint.server.config import ServerConfig

API_KEY_VARIABLE = "FORKPOINT_API_KEY"


def serve(options: argparse.Namespace) -> int:
    """Serve the model over HTTP until Ctrl-C. Return 1 if the engine died, otherwise 0."""
    config, server = _configs(options)
    announce(config.model, config.log_level)
    for line in notice_lines(options) + variable_lines(os.environ):
        LOGGER.info(line)
    with collection_paused():
        from forkpoint.server.run import serve as run
    gc.freeze()  # so that no collection of this process or its forks examines what was imported
    return run(config, server)


def deploy(options: argparse.Namespace) -> int:
    """Serve replicas of the model on Ray Serve. Return 0 when they are deployed, or stopped on a cluster of their own.

    Raises ConfigError without ray, and for options that replicas cannot have.
    """
    fleet = FleetConfig(**option_values(options, FleetConfig))
    config, server = _configs(options)
    if config.kv_events_config != KVEventsConfig():
        raise ConfigError(
            "kv_events_config is not allowed, because each replica publishes events at its own address; leave it out"
        )
    if fleet.num_prefill_replicas:
        with_role(config, "kv_producer")  # raises for another connector
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a folder of that name without a module has no origin
        raise ConfigError("replicas run on Ray Serve, which is not installed: pip install 'forkpoint[ray]'")
    if server.uds is not None or server.ssl_certfile is not None:
        raise ConfigError("replicas are served over plain HTTP on a port; leave --uds and --ssl-certfile out")
    announce(config.model, config.log_level)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from forkpoint.fleet.deploy import deploy as run

    return run(config, server, fleet)


def _configs(options: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Return the options of an engine and its server, with the model's folder, served name and API key filled in."""
    engine, given = engine_options(options), option_values(options, ServerConfig)
    given.setdefault("served_model_name", (options.model_tag or engine.get("model") or MODEL_NAME,))
    key = os.environ.get(API_KEY_VARIABLE) or os.environ.get(VLLM_API_KEY)
    if "api_key" not in given and key:
        given["api_key"] = (key,)
    server = ServerConfig(**given)
    return EngineConfig.from_flat(**with_model(engine, options.model_tag)), server
